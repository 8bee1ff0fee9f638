"""Atomic files and locks on them, used for every write of the toolkit."""

from __future__ import annotations

import csv
import errno
import fcntl
import hashlib
import json
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from glob import escape
from pathlib import Path
from types import UnionType
from typing import Any, BinaryIO

from wsi_fl.system.machine import allocate_file
from wsi_fl.types import DiskFull, WsiFlError

JOBS_FOLDER = ".jobs"
"""Name of the folder in which processes share the work on the folder that it is in (`shared_work`)."""
_TEMPORARY = ".partial"
_SAFETENSORS_TEMPORARY = ".tmp??????"
"""Temporary names of that library."""
_DIGEST_KEY = "digest"
_RETRY_S = 0.05
_PIECE_BYTES, _PIECES = 1 << 14, 64
_UNAVAILABLE = {
    errno.EAGAIN: "it is in use by another program, which may write it; close it there (a notebook?) and start again",
    errno.ENOLCK: "its disk has no file locks; set HDF5_USE_FILE_LOCKING=FALSE in the environment",
    errno.EACCES: "this user may not read it; change its permissions",
    errno.EPERM: "this user may not read it; change its permissions",
    errno.ESTALE: "its network disk has lost it; mount that disk again",
    errno.ENOTCONN: "its network disk is not connected; mount that disk again",
    errno.EHOSTDOWN: "its network disk does not answer; try again later",
    errno.ETIMEDOUT: "its network disk does not answer; try again later",
    errno.EMFILE: "this program has too many files open; raise the limit with `ulimit -n`",
    errno.ENFILE: "this machine has too many files open; close other programs",
    errno.EIO: "its disk fails to read it; look after the disk, not the file",
}
"""Error number of the system → reason why an intact file cannot be read now, and what to do."""
_ERRNO = re.compile(r"errno = (\d+)")
StageFile = Callable[[Path], AbstractContextManager[Path]]
"""Yields a temporary path for a file, which is moved to its place when the block succeeds, as `atomic_path` does."""
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class LocksUnavailable(WsiFlError):
    """A file system that locks no files."""


class FileUnavailable(WsiFlError):
    """A file that cannot be read now for an external reason: nothing needs to be made again."""


def explain_unavailable(error: BaseException) -> str:
    """Return the reason why a file cannot be read now, and what to do; "" where the file itself is at fault."""
    if not isinstance(error, OSError):
        return ""
    match = _ERRNO.search(str(error))  # HDF5 has it in its message
    return _UNAVAILABLE.get(error.errno or (int(match[1]) if match else 0), "")


def refuse_unavailable(error: BaseException, path: object) -> None:
    """Raise another error for a file that is unavailable instead of damaged.

    Raises:
        FileUnavailable: for such an error.
    """
    if reason := explain_unavailable(error):
        raise FileUnavailable(f"{path}: {reason}") from None


def require_regular_file(path: Path) -> Path:
    """Return a path to be read; WsiFlError for a pipe or device, which may never end."""
    try:
        mode = path.stat().st_mode
    except (OSError, ValueError):
        return path
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        kind = "a pipe" if stat.S_ISFIFO(mode) else "a socket" if stat.S_ISSOCK(mode) else "a device"
        raise WsiFlError(f"{path}: is {kind}; put an ordinary file in its place")
    return path


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file of any size."""
    with require_regular_file(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def duplicate_marks(paths: Iterable[Path]) -> dict[Path, str]:
    """Return a digest of each regular file with the size of another of these files, equal for equal files.

    Of large files spread pieces are read. Folders and unreadable files have no digest.
    """
    sizes: dict[int, list[Path]] = {}
    for path in paths:
        with suppress(OSError):
            if path.is_file():
                sizes.setdefault(path.stat().st_size, []).append(path)
    marks: dict[Path, str] = {}
    for size, same_size in sizes.items():
        for path in same_size if len(same_size) > 1 and size else ():
            with suppress(OSError), path.open("rb") as file:
                digest = hashlib.sha256(str(size).encode())
                for start in range(0, size, max(_PIECE_BYTES, size // _PIECES)):
                    file.seek(start)
                    digest.update(file.read(_PIECE_BYTES))
                marks[path] = f"file {digest.hexdigest()}"
    return marks


@contextmanager
def atomic_path(path: Path) -> Iterator[Path]:
    """Yield a temporary path beside `path`, renamed to `path` when the block succeeds, and deleted else.

    The content is on disk before the rename, so a reader sees the old file or the whole new one.
    """
    _make_folder(path.parent)
    temporary = path.with_name(f".{path.stem}.{os.getpid()}{_TEMPORARY}{path.suffix}")
    try:
        yield temporary
        move_file(temporary, path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        raise_if_full(error, path)
        raise


def _make_folder(folder: Path) -> None:
    """Make a folder and its parents, except one of shared work, whose absence tells that the work has ended."""
    if JOBS_FOLDER not in folder.parts:
        folder.mkdir(parents=True, exist_ok=True)


def move_file(temporary: Path, path: Path) -> None:
    """Put a written file in its place; it is on disk before."""
    with temporary.open("rb") as handle:
        os.fsync(handle.fileno())
    temporary.replace(path)
    _sync_folder(path.parent)


def _sync_folder(folder: Path) -> None:
    """Write the names in a folder to disk, which completes a rename."""
    with suppress(PermissionError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def reserve_space(path: Path, n_bytes: int) -> None:
    """Fail now if the disk cannot hold `count_bytes`: a full disk in HDF5 may crash the process."""
    with path.open("wb+") as handle:
        allocate_file(handle.fileno(), n_bytes)


def raise_if_full(error: BaseException, path: Path) -> None:
    """Turn 'no space left' of any library, wrapped in any error, into one line."""
    if isinstance(error, DiskFull):
        raise error
    cause: BaseException | None = error
    while cause is not None:
        full = isinstance(cause, OSError) and cause.errno in _NO_SPACE
        words = str(cause).lower()
        if full or "no space left" in words or "file too large" in words or "quota exceeded" in words:
            raise DiskFull(f"{path}: the disk is full; free some space and start again") from error
        cause = cause.__cause__ or cause.__context__


def remove_leftovers(folder: Path) -> None:
    """Delete leftovers of a killed writer in a folder and its subfolders. Requires that nobody writes there."""
    for pattern in (f".*{_TEMPORARY}*", _SAFETENSORS_TEMPORARY):
        for path in [*folder.glob(pattern), *folder.glob(f"*/{pattern}")]:
            path.unlink(missing_ok=True)


def remove_abandoned(path: Path) -> None:
    """Delete leftovers of killed writers beside a file, except those still locked by HDF5."""
    for leftover in path.parent.glob(f".{escape(path.stem)}.*{_TEMPORARY}{escape(path.suffix)}"):
        with suppress(OSError, WsiFlError), require_regular_file(leftover).open("rb") as handle:
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            leftover.unlink()


def list_strays(folders: Iterable[Path], slides: Collection[str]) -> Iterator[Path]:
    """Yield misleading shards, pictures and plans (`.h5`, `.png`, `.npz`) of slides that no longer belong here."""
    for folder in folders:
        for path in folder.glob("*"):
            if path.suffix in {".h5", ".png", ".npz"} and path.stem not in slides:
                yield path


def create_file(path: Path, text: str) -> bool:
    """Create a file with a text; return False where there is one, for which file systems have different errors."""
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except OSError:
        if path.exists():
            return False
        raise
    return True


def write_text(path: Path, text: str) -> None:
    """Write text atomically."""
    with atomic_path(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_bytes(path: Path, data: bytes) -> None:
    """Write bytes atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(data)


def write_csv(path: Path, rows: Iterable[Iterable[object]]) -> None:
    """Write a table atomically, row by row; the first row has the headings."""
    with atomic_path(path) as temporary, temporary.open("w", encoding="utf-8", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def write_json(path: Path, document: Any) -> None:
    """Write one JSON document atomically; NaN and infinities are refused, as JSON has none."""
    write_text(path, json.dumps(document, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def write_sealed(path: Path, document: Mapping[str, Any]) -> None:
    """Write one JSON object atomically, with a digest of the rest of it in `digest`."""
    write_json(path, {**document, _DIGEST_KEY: _document_digest(document)})


def read_sealed(path: Path, keys: Iterable[str], advice: str) -> dict[str, Any]:
    """Return a sealed JSON object without its digest; WsiFlError, with advice, where it is damaged."""
    document = read_object(path, advice, keys)
    if document.pop(_DIGEST_KEY, None) != _document_digest(document):
        raise WsiFlError(f"{path}: damaged; {advice}")
    return document


def read_object(path: Path, advice: str, keys: Iterable[str] = ()) -> dict[str, Any]:
    """Return the JSON object in a file; WsiFlError, with advice, when it is missing, damaged, or lacks a key."""
    try:
        document = read_json(path)
    except WsiFlError as error:
        raise WsiFlError(f"{error}; {advice}") from None
    if not isinstance(document, dict) or not all(key in document for key in keys):
        raise WsiFlError(f"{path}: damaged; {advice}")
    return document


def read_maybe_sealed(path: Path, keys: Iterable[str], advice: str) -> dict[str, Any]:
    """Return a sealed JSON object, or one of an older version without a digest."""
    document = read_object(path, advice, keys)
    return read_sealed(path, keys, advice) if _DIGEST_KEY in document else document


def _document_digest(document: Mapping[str, Any]) -> str:
    """Return the SHA-256 of a document as JSON without its digest."""
    content = {key: value for key, value in document.items() if key != _DIGEST_KEY}
    return hashlib.sha256(json.dumps(content, sort_keys=True, ensure_ascii=False).encode()).hexdigest()


def read_json(path: Path) -> Any:
    """Return the JSON document in `path`; WsiFlError when it is missing, damaged or nested too deeply to be read."""
    try:
        return json.loads(require_regular_file(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise WsiFlError(f"{path}: no such file") from None
    except ValueError as error:  # not JSON, not UTF-8, or a number of thousands of digits
        raise WsiFlError(f"{path}: not valid JSON ({error})") from None
    except RecursionError:
        raise WsiFlError(f"{path}: nested too deeply; it is no file of this program") from None


def append_line(path: Path, document: Any) -> None:
    """Append one JSON line and wait until it is on disk; a line cut short by a crash is removed first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    line = json.dumps(document, ensure_ascii=False, allow_nan=False) + "\n"
    try:
        with require_regular_file(path).open("ab+") as handle:
            _mend_tail(handle)
            handle.write(line.encode())
            handle.flush()
            os.fsync(handle.fileno())
    except OSError as error:
        raise_if_full(error, path)
        raise


def _mend_tail(handle: BinaryIO) -> None:
    """End the last line where only its newline is missing, and cut it off where it is unfinished."""
    if not handle.seek(0, os.SEEK_END):
        return
    handle.seek(-1, os.SEEK_END)
    if handle.read() == b"\n":
        return
    handle.seek(0)
    content = handle.read()
    tail = content[content.rfind(b"\n") + 1 :]
    try:
        json.loads(tail)
        handle.write(b"\n")
    except (ValueError, RecursionError):
        handle.truncate(len(content) - len(tail))


def read_lines(path: Path, needs: Mapping[str, type | UnionType] | None = None) -> list[Any]:
    """Return the JSON objects in the lines of `path`; a last line cut short by a crash is dropped.

    WsiFlError where another line is damaged, or lacks a key of `needs`, key → type.
    """
    if not path.exists():
        return []
    lines = require_regular_file(path).read_bytes().split(b"\n")  # a cut may lie within a character
    documents: list[Any] = []
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            document = json.loads(line)
        except (ValueError, RecursionError):  # not JSON, not UTF-8, or nested beyond all reason
            if number == len(lines):  # no newline after it: never finished
                break
            document = None
        requirements = (needs or {}).items()
        if not isinstance(document, dict) or not all(isinstance(document.get(k), kind) for k, kind in requirements):
            raise WsiFlError(f"{path}: line {number} is damaged")
        documents.append(document)
    return documents


@contextmanager
def file_lock(path: Path, busy: str | None = None, *, patience_s: float = 0.0) -> Iterator[None]:
    """Hold the lock on a file, which is created if missing and not changed otherwise.

    Args:
        busy: message of the WsiFlError when another process holds the lock; None to wait for it.
        patience_s: seconds of retries before that error: the lock of a killed process is released a moment later.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    deadline = time.monotonic() + patience_s
    with require_regular_file(path).open("ab") as handle:  # its lock goes when its holder ends, however it ends
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise WsiFlError(busy or "") from None
                time.sleep(_RETRY_S)
            except OSError as error:
                raise LocksUnavailable(
                    f"{path}: this file system locks no files ({error.strerror}), so two commands could write at "
                    "once; mount it with flock, or keep the study on another disk"
                ) from None
        yield
