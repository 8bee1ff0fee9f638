"""MD5 digests of slides, remembered, since reading terabytes again tells nothing new."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

from wsi_fl.system.files import append_line, ordinary, read_lines
from wsi_fl.system.locks import alone
from wsi_fl.types import WsiFlError

_MAX_THREADS = 4

_Stamp = tuple[str, int, int]
_LINE = {"path": str, "size": int, "mtime_ns": int, "md5": str}
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
    all_known = all(stamp in known for stamp in stamps.values())
    with nullcontext() if remembered is None or all_known else alone(remembered):
        known = _known(remembered)
        unread = [path for path, stamp in stamps.items() if stamp not in known]
        with ThreadPoolExecutor(min(_MAX_THREADS, os.cpu_count() or 1)) as pool:
            for done, (path, md5) in enumerate(zip(unread, pool.map(_md5, unread), strict=True), 1):
                name, size, changed = stamps[path]
                if md5 is not None:
                    known[stamps[path]] = md5
                    if remembered is not None:
                        line = {"path": name, "size": size, "mtime_ns": changed, "md5": md5}
                        append_line(remembered, line)
                if progress is not None:
                    progress(done, len(unread))
    return {path: known.get(stamps[path]) if path in stamps else None for path in paths}


def _md5(path: Path) -> str | None:
    """Read in small pieces: memory does not depend on the slide."""
    try:
        with ordinary(path).open("rb") as handle:
            return hashlib.file_digest(handle, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    except (OSError, WsiFlError):
        return None


def _stamp(path: Path) -> _Stamp | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return str(path), status.st_size, status.st_mtime_ns


def _known(remembered: Path | None) -> dict[_Stamp, str]:
    lines = read_lines(remembered, _LINE) if remembered is not None else []
    return {(line["path"], line["size"], line["mtime_ns"]): line["md5"] for line in lines}
