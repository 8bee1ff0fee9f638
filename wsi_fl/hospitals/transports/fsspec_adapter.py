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

from wsi_fl.types import UsageError, WsiFlError, single_line

_ATOMIC_PROTOCOLS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "adl", "oss", "memory"})
"""Protocols that show an object once it is complete; elsewhere a file is renamed when it is complete."""


@dataclass(frozen=True)
class FolderEntry:
    """A file or folder in a folder; `time` is when it was written, in seconds since 1970, if the share knows."""

    kind: str
    name: str
    size: int
    time: float | None


@dataclass
class SharedFolder:
    """A shared folder, for one thread at a time; reconnected after a failure.

    A failure is an `Exception` of any class: each backend of fsspec has its own.
    """

    address: str
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _connection: tuple[Any, str] | None = None

    def run_action(self, action: Callable[[Any, str], Any]) -> Any:
        """Run an action on the file system and the root's path in it."""
        with self._lock:
            try:
                if self._connection is None:
                    self._connection = fsspec.core.url_to_fs(self.address, skip_instance_cache=True)
                fs, root = self._connection
                return action(fs, root.rstrip("/"))
            except Exception as error:
                if _is_missing(error):  # some have no class of their own for it
                    raise FileNotFoundError(str(error)) from error
                if not isinstance(error, FileNotFoundError):
                    self._connection = None
                raise

    def check_address(self) -> None:
        """Refuse an invalid address, or a missing folder of this machine."""
        try:
            self.run_action(_require_root)
        except (ValueError, ImportError) as error:
            raise UsageError(f"{self.address}: not the address of a folder: {single_line(error)}") from None
        except FileNotFoundError:
            raise UsageError(f"{self.address}: no such folder; mount the share, or correct the address") from None
        except Exception:  # not reached now, perhaps later
            return

    def probe_access(self) -> None:
        """Write a small file, find it, read it and delete it; fail if one of these is impossible."""
        name = f"check-{token_hex(8)}"
        self.write(name.encode(), name)
        try:
            if name not in self.list_entries() or self.read(len(name), name) != name.encode():
                raise OSError("a written file is not found")
        finally:
            self.remove_file(name)

    def list_entries(self, *parts: str) -> dict[str, FolderEntry]:
        """Return the files of a folder by name; none if it is missing."""
        return {entry.name: entry for entry in self._list_folder(*parts) if entry.kind == "file"}

    def list_folders(self, *parts: str) -> list[str]:
        """Return the names of the folders in a folder; none if it is missing."""
        return [entry.name for entry in self._list_folder(*parts) if entry.kind == "directory"]

    def _list_folder(self, *parts: str) -> list[FolderEntry]:
        def list_children(fs: Any, root: str) -> Any:
            fs.invalidate_cache()
            return fs.ls("/".join([root, *parts]), detail=True)

        with suppress(FileNotFoundError):
            return [_parse_entry(info) for info in self.run_action(list_children)]
        return []

    def read(self, max_bytes: int, *parts: str) -> bytes:
        """Return the content of a file, at most one byte beyond the limit.

        A pipe or device in its place is a WsiFlError: reading one may never end.
        """

        def read_file(fs: Any, root: str) -> bytes:
            path = "/".join([root, *parts])
            with _open_regular_file(path) if "file" in _file_protocols(fs) else fs.open(path, "rb") as file:
                return bytes(file.read(max_bytes + 1))

        return bytes(self._retry_stale(read_file))

    def _retry_stale(self, action: Callable[[Any, str], Any]) -> Any:
        """Run an action on one file, which NFS may still show after its sender removed it ("stale file handle").

        It is retried once, since another file of its name may have replaced it.

        Raises:
            FileNotFoundError: when it is missing.
            OSError: of the share.
        """
        for is_last in (False, True):
            try:
                return self.run_action(action)
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
                if is_last:
                    raise FileNotFoundError(str(error)) from error
        raise AssertionError

    def write(self, content: bytes, *parts: str) -> None:
        """Write a file, which appears complete or not at all."""

        def write_file(fs: Any, root: str) -> None:
            _require_root(fs, root)
            path = "/".join([root, *parts])
            for depth in range(1, len(parts)):
                _make_folder(fs, root, "/".join([root, *parts[:depth]]))
            if not _file_protocols(fs).isdisjoint(_ATOMIC_PROTOCOLS):
                fs.pipe_file(path, content)
                return
            temporary = "/".join([root, *parts[:-1], f".{parts[-1]}.{token_hex(8)}.partial"])
            try:
                with _create_file(fs, temporary) as file:
                    file.write(content)
                _copy_root_mode(fs, root, temporary)
                fs.mv(temporary, path)
            except Exception:
                with suppress(Exception):  # the share itself has failed
                    fs.rm_file(temporary)
                raise

        self.run_action(write_file)

    def remove_file(self, *parts: str) -> None:
        """Delete a file that may be missing already."""
        self._retry_stale(lambda fs, root: fs.rm_file("/".join([root, *parts])))


def _is_missing(error: Exception) -> bool:
    """Return whether a file system, or an HTTP server by its answer, reports a missing file."""
    answer = getattr(error, "response", None)
    return getattr(error, "errno", None) == errno.ENOENT or getattr(answer, "status_code", None) == 404


def _parse_entry(info: Mapping[str, Any]) -> FolderEntry:
    """Return an entry from its description; backends of fsspec name its time differently."""
    time = next((info[key] for key in ("mtime", "LastModified", "modified", "created") if info.get(key)), None)
    time = time.timestamp() if isinstance(time, datetime) else time if isinstance(time, float) else None
    kind, name = str(info.get("type")), str(info["name"]).rstrip("/").rsplit("/", 1)[-1]
    return FolderEntry(
        "link" if kind == "file" and info.get("islink") else kind, name, int(info.get("size") or 0), time
    )


def _file_protocols(fs: Any) -> set[str]:
    protocol = fs.protocol
    return {protocol} if isinstance(protocol, str) else set(protocol)


def _require_root(fs: Any, root: str) -> None:
    """Require a folder of this machine, never make it: without its mount, messages would be written beneath it."""
    if "file" in _file_protocols(fs) and not fs.isdir(root):
        raise FileNotFoundError(root)


def _open_regular_file(path: str) -> BinaryIO:
    """Open a regular file of this machine to read: anybody with write access may have replaced it."""
    file = os.fdopen(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), "rb")
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise WsiFlError(f"{path}: is no ordinary file (a pipe, a device or a folder), and was not read")
    return file


def _create_file(fs: Any, path: str) -> Any:
    """Open a new file to write, never an existing one: anybody with write access could have made a link."""
    if "file" not in _file_protocols(fs):
        return fs.open(path, "wb")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    return os.fdopen(os.open(path, flags, 0o600), "wb")


def _make_folder(fs: Any, root: str, path: str) -> None:
    if "file" in _file_protocols(fs) and Path(path).is_symlink():
        raise PermissionError(f"{path} is a link, which a shared folder must not hold")
    if not fs.isdir(path):
        fs.makedirs(path, exist_ok=True)
        _copy_root_mode(fs, root, path)


def _copy_root_mode(fs: Any, root: str, path: str) -> None:
    """Give the root's users access to this too: files of wsi-fl are its owner's alone elsewhere."""
    if "file" in _file_protocols(fs):
        mode = stat.S_IMODE(Path(root).stat().st_mode) & 0o3777
        Path(path).chmod(mode if Path(path).is_dir() else mode & 0o666)
