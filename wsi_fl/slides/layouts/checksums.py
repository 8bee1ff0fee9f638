"""MD5 digests of slides, remembered, since reading terabytes again tells nothing new."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from wsi_fl.system.files import append_line, read_lines
from wsi_fl.system.locks import alone

_MAX_THREADS = 4

_Stamp = tuple[str, int, int]
"""Path, size and time of change: a file with the same three is taken to be unchanged."""


def digests(
    paths: Sequence[Path], remembered: Path | None, progress: Callable[[int, int], None] | None = None
) -> dict[Path, str | None]:
    """The MD5 of each file, None where it cannot be read.

    Args:
        remembered: JSON lines of digests, grown as files are read. Of several processes with the same one, the first
            reads and the others wait for what it found.
        progress: told how many of the files that are read now are done, and of how many.
    """
    stamps = {path: stamp for path in paths if (stamp := _stamp(path))}
    known = _known(remembered)
    if remembered is None or all(stamp in known for stamp in stamps.values()):
        return _completed(paths, stamps, known, None, progress)
    with alone(remembered):
        return _completed(paths, stamps, _known(remembered), remembered, progress)


def _completed(
    paths: Sequence[Path],
    stamps: dict[Path, _Stamp],
    known: dict[_Stamp, str],
    remembered: Path | None,
    progress: Callable[[int, int], None] | None,
) -> dict[Path, str | None]:
    found: dict[Path, str | None] = {
        path: known.get(stamps[path]) if path in stamps else None for path in paths
    }
    unread = [path for path in paths if path in stamps and found[path] is None]
    with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
        for done, (path, md5) in enumerate(zip(unread, pool.map(_md5, unread), strict=True), 1):
            found[path] = md5
            if remembered is not None and md5 is not None:
                name, size, changed = stamps[path]
                append_line(remembered, {"path": name, "size": size, "mtime_ns": changed, "md5": md5})
            if progress is not None:
                progress(done, len(unread))
    return found


def _md5(path: Path) -> str | None:
    """Read in small pieces: memory does not depend on the slide."""
    try:
        with path.open("rb") as handle:
            return hashlib.file_digest(handle, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except OSError:
        return None


def _stamp(path: Path) -> _Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return str(path), status.st_size, status.st_mtime_ns


def _known(remembered: Path | None) -> dict[_Stamp, str]:
    lines = read_lines(remembered) if remembered is not None else []
    return {(line["path"], line["size"], line["mtime_ns"]): line["md5"] for line in lines}
