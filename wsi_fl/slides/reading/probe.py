"""A child process for the first opening of each slide: a damaged file can abort the process that reads it.

OpenSlide aborts for a file that states a tile of 2⁴⁰ bytes, and no handler catches that. So a child process with little
memory opens each slide first. One child serves many slides; it is restarted when a slide has ended it.
"""

from __future__ import annotations

import atexit
import json
import os
import re
import signal
import stat
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from wsi_fl.types import WsiFlError

if TYPE_CHECKING:
    from wsi_fl.slides.reading.reader import Reader

_MAX_SECONDS, _MAX_BYTES = 60, 2 << 30
"""Limits for opening a slide."""
_READY = "ready\n"
_DAMAGED_REASON = "the file is damaged"
_ENDLESS_REASON = (
    "it is a Ventana slide with a single row or column of tiles, which OpenSlide does not finish reading; export it "
    "anew with a larger area, or as a tiled TIFF"
)
_READ_PX = 64
_MAX_TILE_PX = 1 << 28


def check_opens_safely(path: Path, mpp_override: float | None = None, reader: Reader = "auto") -> None:
    """Open a slide in the child process and read a little of each level, once per process and slide.

    Raises:
        WsiFlError: when opening it ends the child, takes too long or too much memory, when the file states impossible
            tiles, or no child can be started. `Slide` raises all other errors.
    """
    try:
        status = path.stat()
    except OSError:
        return
    if not (stat.S_ISREG(status.st_mode) or stat.S_ISDIR(status.st_mode)):
        return
    key = (str(path), status.st_size, status.st_mtime_ns, reader)
    with _LOCK:
        if key not in _FINE:
            if reason := _CHILD.check_slide(path, mpp_override, reader):
                raise WsiFlError(f"{path.name}: {reason}")
            _FINE.add(key)


def start_ahead() -> None:
    """Start the child before the first slide: it takes half a second, while this process still imports its modules."""
    with _LOCK, suppress(OSError):  # `check_opens_safely` reports it
        _CHILD.start_process()


class _ProbeProcess:
    """The child process for opening slides; it starts with the first slide."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._owner, self._is_ready = 0, False

    def check_slide(self, path: Path, mpp_override: float | None, reader: str) -> str:
        """Return the reason why a slide must not be opened; "" if there is none."""
        request = json.dumps([str(path.absolute()), mpp_override, reader]) + "\n"
        outcome = self._send_request(request)
        if outcome == -signal.SIGKILL:  # from outside: perhaps not because of the slide
            outcome = self._send_request(request)
        if isinstance(outcome, str):
            return outcome
        if outcome == -signal.SIGALRM:
            reason = "is its disk slow?" if not _is_one_row(path) else _ENDLESS_REASON
            return f"opening it takes more than {_MAX_SECONDS} s; {reason}"
        if outcome == -signal.SIGKILL:
            return "the process that opens it was killed twice (SIGKILL); is there too little memory?"
        return f"opening it ended the reader ({_exit_status_name(outcome)}); {_DAMAGED_REASON}"

    def _send_request(self, request: str) -> str | int:
        """Return the reply of the child, or its exit status if it ended."""
        process = self._require_ready()
        assert process.stdin is not None and process.stdout is not None
        reply = ""
        try:
            with suppress(BrokenPipeError):
                process.stdin.write(request)
                process.stdin.flush()
                reply = process.stdout.readline()
        except BaseException:  # Ctrl-C: this reply must not be read as that to the next request
            self.close()
            raise
        return str(json.loads(reply)) if reply.endswith("\n") else self._wait_for_end()

    def start_process(self) -> subprocess.Popen[str]:
        """Start the child unless it runs, without waiting until it is ready."""
        if self._owner != os.getpid():  # a forked process has a child of its own
            self._process = None
        if self._process is not None and self._process.poll() is not None:
            self._wait_for_end()
        if self._process is None:
            self._process, self._owner, self._is_ready = _start_child(), os.getpid(), False
        return self._process

    def _require_ready(self) -> subprocess.Popen[str]:
        process = self.start_process()
        assert process.stdout is not None
        if not self._is_ready and process.stdout.readline() != _READY:
            raise WsiFlError(
                f"the process that opens slides first did not start ({_exit_status_name(self._wait_for_end())})"
            )
        self._is_ready = True
        return process

    def _wait_for_end(self) -> int:
        """Wait for the end of the child and return its exit status."""
        assert self._process is not None
        process, self._process = self._process, None
        for pipe in (process.stdin, process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
        return process.wait()

    def close(self) -> None:
        """End the child of this process."""
        if self._process is not None and self._owner == os.getpid():
            self._process.kill()  # it may be busy with a slide
            self._wait_for_end()


def _start_child() -> subprocess.Popen[str]:
    """Start a child that imports nothing from the current folder: a study may hold files of any name."""
    foreign = {Path.cwd()} - {Path(__file__).resolve().parents[3]}
    folders = [name for name in sys.path if name and Path(name).resolve() not in foreign]
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "wsi_fl.slides.reading.probe"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(folders)},
    )


def _exit_status_name(code: int) -> str:
    with suppress(ValueError):
        return signal.Signals(-code).name
    return f"exit status {code}"


_CHILD, _LOCK = _ProbeProcess(), threading.Lock()
_FINE: set[tuple[str, int, int, str]] = set()
atexit.register(_CHILD.close)


def _probe_slide(path: Path, mpp_override: float | None, reader: Reader) -> str:
    """Open a slide in the child and read the middle of each level; return the reason against opening it, or ""."""
    from wsi_fl.slides.reading.reader import Slide

    try:
        with Slide(path, mpp_override, reader) as slide:
            if false_size := _find_false_size(path, is_native=slide.reader == "native"):
                return f"{false_size}; {_DAMAGED_REASON}"
            slide.disable_native_tiles()
            x, y = (extent / 2 for extent in slide.size_l0)
            for downsample in slide.level_downsamples:
                slide.read_area((x, y), downsample, np.empty((_READ_PX, _READ_PX, 3), np.uint8), overlapping=False)
    except MemoryError:
        return f"opening it needs more than {_MAX_BYTES / 1e9:.0f} GB"
    except Exception:  # raised again where the slide is used
        return ""
    return ""


def _find_false_size(path: Path, *, is_native: bool) -> str:
    """Return the impossible tile size that a TIFF states; "" if there is none.

    The length of tiles that are read natively is checked when they are read.
    """
    from tifffile import TiffFile

    from wsi_fl.slides.reading.formats.tiff_pages import list_pages
    from wsi_fl.slides.reading.tile_codecs import find_codec

    n_bytes = path.stat().st_size
    try:
        with TiffFile(path) as tif:
            pages = list_pages(tif)
            judged = [page for page in pages if not (is_native and find_codec(page))]
            max_bytes = max((int(max(page.databytecounts, default=0)) for page in judged), default=0)
            tile_px = max((page.tilewidth * page.tilelength for page in pages if page.is_tiled), default=0)
    except MemoryError:
        raise
    except Exception:  # no TIFF, or one that only OpenSlide understands
        return ""
    if max_bytes > n_bytes:
        return f"it states a tile of {max_bytes} bytes, more than the file has"
    if tile_px > _MAX_TILE_PX:
        return f"it states tiles of {tile_px} pixels"
    return ""


def _is_one_row(path: Path) -> bool:
    """Return whether a Ventana slide has an area of one row or column of tiles, by its XML."""
    from tifffile import TiffFile

    from wsi_fl.slides.reading.formats.tiff_pages import list_pages

    try:
        with TiffFile(path) as tif:
            packets = [page.tags["XMP"].value for page in list_pages(tif) if "XMP" in page.tags]
    except Exception:  # no TIFF, or a damaged one
        return False
    areas = [area for xml in packets for area in re.findall(rb"<AoiInfo[^>]*>", bytes(xml))]
    return any(re.search(rb'Num(Rows|Cols)="1"', area) for area in areas)


def _main() -> None:
    """Check a slide per line of stdin until it is closed; a slide that takes too long ends the process."""
    import resource

    import wsi_fl.slides.reading.reader  # noqa: F401 before the first slide's time begins

    replies = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # libraries print too
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    max_bytes = pages * resource.getpagesize() + _MAX_BYTES
    with suppress(ValueError, OSError):  # a stricter limit is there already
        resource.setrlimit(resource.RLIMIT_AS, (max_bytes, resource.getrlimit(resource.RLIMIT_AS)[1]))
    print(_READY, end="", file=replies, flush=True)
    for line in sys.stdin:
        path, mpp_override, reader = json.loads(line)
        signal.alarm(_MAX_SECONDS)
        reason = _probe_slide(Path(path), mpp_override, reader)
        signal.alarm(0)
        print(json.dumps(reason), file=replies, flush=True)


if __name__ == "__main__":
    _main()
