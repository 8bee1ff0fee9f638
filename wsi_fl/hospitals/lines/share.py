"""Adapter to fsspec: files of a folder anywhere, complete or absent."""

from __future__ import annotations

import errno
import os
import stat
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from secrets import token_hex
from typing import Any, BinaryIO

import fsspec

from wsi_fl.types import UsageError, WsiFlError, one_line

_WHOLE_AT_ONCE = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "memory"})
"""Protocols that show an object once it is complete; elsewhere a file is renamed when it is complete."""


@dataclass(frozen=True)
class Entry:
    """A file of an inbox; `time` is when it was written, in seconds since 1970, if the share knows."""

    name: str
    size: int
    time: float | None = None


@dataclass
class Share:
    """A shared folder, for one thread at a time; reconnected after a failure.

    A failure is an `Exception` of any class: each backend of fsspec has its own.
    """

    address: str
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _connected: tuple[Any, str] | None = None

    def do(self, action: Callable[[Any, str], Any]) -> Any:
        """Run an action on the file system and the root's path in it."""
        with self._lock:
            try:
                if self._connected is None:
                    self._connected = fsspec.core.url_to_fs(self.address, skip_instance_cache=True)
                fs, root = self._connected
                return action(fs, root.rstrip("/"))
            except Exception as error:
                if _is_gone(error):  # some have no class of their own for it
                    raise FileNotFoundError(str(error)) from error
                if not isinstance(error, FileNotFoundError):
                    self._connected = None
                raise

    def check(self) -> None:
        """Refuse an invalid address, or a missing folder of this machine."""
        try:
            self.do(_require_root)
        except (ValueError, ImportError) as error:
            raise UsageError(f"{self.address}: not the address of a folder: {one_line(error)}") from None
        except FileNotFoundError:
            raise UsageError(
                f"{self.address}: no such folder; mount the share, or correct the address"
            ) from None
        except Exception:  # not reached now, perhaps later
            return

    def probe(self) -> None:
        """Write a small file, find it, read it and delete it; fail if one of these is impossible."""
        name = f"check-{token_hex(8)}"
        self.write(name.encode(), name)
        try:
            if name not in self.entries() or self.read(len(name), name) != name.encode():
                raise OSError("a written file is not found")
        finally:
            self.remove(name)

    def entries(self, *parts: str) -> dict[str, Entry]:
        """Return the files of a folder by name; none if it is missing."""
        found = [one for one in self._listed(*parts) if one.get("type") == "file" and not one.get("islink")]
        return {one["name"]: Entry(one["name"], int(one.get("size") or 0), _written(one)) for one in found}

    def folders(self, *parts: str) -> list[str]:
        """Return the names of the folders in a folder; none if it is missing."""
        return [one["name"] for one in self._listed(*parts) if one["type"] == "directory"]

    def _listed(self, *parts: str) -> list[dict[str, Any]]:
        """Return fsspec's description of each entry of a folder, its name without the path."""

        def look(fs: Any, root: str) -> Any:
            fs.invalidate_cache()
            return fs.ls("/".join([root, *parts]), detail=True)

        try:
            return [one | {"name": str(one["name"]).rstrip("/").rsplit("/", 1)[-1]} for one in self.do(look)]
        except FileNotFoundError:
            return []

    def read(self, most_bytes: int, *parts: str) -> bytes:
        """Return the content of a file, at most one byte beyond the limit.

        A pipe or device in its place is a WsiFlError: reading one may never end.
        """

        def read(fs: Any, root: str) -> bytes:
            path = "/".join([root, *parts])
            with _opened(path) if "file" in _protocols(fs) else fs.open(path, "rb") as file:
                return bytes(file.read(most_bytes + 1))

        return bytes(self._fresh(read))

    def _fresh(self, action: Callable[[Any, str], Any]) -> Any:
        """Run an action on one file, which NFS may still show after its sender removed it ("stale file handle").

        It is retried once, since another file of its name may have replaced it.

        Raises:
            FileNotFoundError: when it is missing.
            OSError: of the share.
        """
        try:
            return self.do(action)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
        try:
            return self.do(action)
        except OSError as error:
            if error.errno != errno.ESTALE:
                raise
            raise FileNotFoundError(str(error)) from error

    def write(self, content: bytes, *parts: str) -> None:
        """Write a file, which appears complete or not at all."""

        def write(fs: Any, root: str) -> None:
            _require_root(fs, root)
            path = "/".join([root, *parts])
            for depth in range(1, len(parts)):
                _make_folder(fs, root, "/".join([root, *parts[:depth]]))
            if not _protocols(fs).isdisjoint(_WHOLE_AT_ONCE):
                fs.pipe_file(path, content)
                return
            temporary = "/".join([root, *parts[:-1], f".{parts[-1]}.{token_hex(8)}.partial"])
            try:
                with _made(fs, temporary) as file:
                    file.write(content)
                _open_up(fs, root, temporary)
                fs.mv(temporary, path)
            except Exception:
                with suppress(Exception):  # the share itself has failed
                    fs.rm_file(temporary)
                raise

        self.do(write)

    def remove(self, *parts: str) -> None:
        """Delete a file that may be missing already."""
        self._fresh(lambda fs, root: fs.rm_file("/".join([root, *parts])))


def _is_gone(error: Exception) -> bool:
    """Return whether a file system, or an HTTP server by its answer, reports a missing file."""
    answer = getattr(error, "response", None)
    return getattr(error, "errno", None) == errno.ENOENT or getattr(answer, "status_code", None) == 404


def _written(one: Mapping[str, Any]) -> float | None:
    """Return when a file was written; backends of fsspec name it differently."""
    said = next((one[key] for key in ("mtime", "LastModified", "modified", "created") if one.get(key)), None)
    return said.timestamp() if isinstance(said, datetime) else said if isinstance(said, float) else None


def _protocols(fs: Any) -> set[str]:
    said = fs.protocol
    return {said} if isinstance(said, str) else set(said)


def _require_root(fs: Any, root: str) -> None:
    """Require a folder of this machine, never make it: without its mount, messages would be written beneath it."""
    if "file" in _protocols(fs) and not fs.isdir(root):
        raise FileNotFoundError(root)


def _opened(path: str) -> BinaryIO:
    """Open a regular file of this machine to read: anybody with write access may have replaced it."""
    file = os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise WsiFlError(f"{path}: is no ordinary file (a pipe, a device or a folder), and was not read")
    return file


def _made(fs: Any, path: str) -> Any:
    """Open a new file to write, never an existing one: anybody with write access could have made a link."""
    if "file" not in _protocols(fs):
        return fs.open(path, "wb")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    return os.fdopen(os.open(path, flags, 0o600), "wb")


def _make_folder(fs: Any, root: str, path: str) -> None:
    if "file" in _protocols(fs) and Path(path).is_symlink():
        raise PermissionError(f"{path} is a link, which a shared folder must not hold")
    if not fs.isdir(path):
        fs.makedirs(path, exist_ok=True)
        _open_up(fs, root, path)


def _open_up(fs: Any, root: str, path: str) -> None:
    """Give the root's users access to this too: files of wsi-fl are its owner's alone elsewhere."""
    if "file" in _protocols(fs):
        mode = stat.S_IMODE(Path(root).stat().st_mode) & 0o3777
        Path(path).chmod(mode if Path(path).is_dir() else mode & 0o666)
