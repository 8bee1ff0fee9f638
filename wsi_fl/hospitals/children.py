"""Commands of wsi-fl as child processes of this one, each in the folder of whoever gives it; none outlives this one."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from wsi_fl.stages.work.console import say
from wsi_fl.types import WsiFlError

T = TypeVar("T")

_READY = "Ctrl-C ends it"
_READY_S, _END_S, _POLL_S = 90.0, 45.0, 0.2
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass(frozen=True)
class Place:
    """A machine of the demo: a folder that nobody else's commands read or write.

    Attributes:
        name: of whoever sits there.
        folder: all that it has, its user's state and what its commands said too.
        here: where its commands are given, in `folder`.
    """

    name: str
    folder: Path
    here: Path

    @property
    def log(self) -> Path:
        """What the commands said."""
        return self.folder / "commands.txt"

    def environment(self) -> dict[str, str]:
        """The variables of this machine's user; one core for each process unless somebody says otherwise."""
        return {"OMP_NUM_THREADS": "1", **os.environ, "XDG_STATE_HOME": str(self.folder / "state")}


class Children:
    """The processes that run now; `children()` ends them all."""

    def __init__(self) -> None:
        self._running: dict[int, subprocess.Popen[bytes]] = {}
        self._lock = threading.Lock()
        self._over = False

    def run(self, place: Place, *arguments: str | Path) -> dict[str, Any]:
        """Give a command, wait for it, and return its `--json` document.

        Raises:
            WsiFlError: when it fails, with the last line that it said.
        """
        said = _words(arguments)
        say(f"  {place.name}$ {said}")
        with place.log.open("a+b") as log:
            process = self._start(place, [*arguments, "--json"], stdout=subprocess.PIPE, stderr=log)
            output, _ = process.communicate()
        self._forget(process)
        if process.returncode:
            raise WsiFlError(f"{place.name}: {said}: {_last_line(place.log)}")
        return dict(json.loads(output))

    def start(self, place: Place, *arguments: str | Path) -> None:
        """Give a command that goes on, and wait until it says that it is ready.

        Raises:
            WsiFlError: when it ends instead, or says nothing.
        """
        said = _words(arguments)
        say(f"  {place.name}$ {said} &")
        file = place.folder / "start.txt"
        with file.open("wb") as log:
            process = self._start(place, arguments, stdout=log, stderr=log)
        deadline = time.monotonic() + _READY_S
        while _READY not in file.read_text(errors="replace"):
            if process.poll() is not None or time.monotonic() > deadline:
                raise WsiFlError(f"{place.name}: {said}: {_last_line(file)}")
            time.sleep(_POLL_S)

    def each(self, work: Callable[[T], object], things: Sequence[T]) -> None:
        """Do the work for each, several at the same time; when one fails, all end."""
        with ThreadPoolExecutor(max(1, min(len(things), os.cpu_count() or 1))) as pool:
            jobs = [pool.submit(work, thing) for thing in things]
            try:
                for job in wait(jobs, return_when=FIRST_EXCEPTION).done:
                    job.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                self.end()
                raise

    def end(self) -> None:
        """End what runs, politely first, and start nothing any more."""
        with self._lock:
            self._over, running = True, list(self._running.values())
            self._running = {}
        for process in running:
            _signal(process, signal.SIGTERM)
        deadline = time.monotonic() + _END_S
        for process in running:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))
            _signal(process, signal.SIGKILL)

    def _start(
        self, place: Place, arguments: Sequence[str | Path], *, stdout: Any, stderr: Any
    ) -> subprocess.Popen[bytes]:
        """A process in a group of its own, so that Ctrl-C reaches this process alone, which ends the others."""
        with self._lock:
            if self._over:
                raise WsiFlError("the demo has ended")
            process = subprocess.Popen(
                [sys.executable, "-m", "wsi_fl", *map(str, arguments)],
                cwd=place.here,
                env=place.environment(),
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
            self._running[process.pid] = process
        return process

    def _forget(self, process: subprocess.Popen[bytes]) -> None:
        with self._lock:
            self._running.pop(process.pid, None)


@contextmanager
def children() -> Iterator[Children]:
    """Give commands within; whatever still runs afterwards is ended, also by Ctrl-C, a failure or a closed terminal."""
    found = Children()
    ends = [sign for sign in _ENDS if signal.getsignal(sign) is not signal.SIG_IGN]  # as of nohup
    before = {sign: signal.signal(sign, _interrupt) for sign in ends}
    try:
        yield found
    finally:
        for sign in before:
            signal.signal(sign, signal.SIG_IGN)  # what ends is not interrupted a second time
        found.end()
        for sign, handler in before.items():
            signal.signal(sign, handler)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _signal(process: subprocess.Popen[bytes], sign: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, sign)


def _words(arguments: Sequence[str | Path]) -> str:
    return shlex.join(["wsi-fl", *map(str, arguments)])


def _last_line(log: Path) -> str:
    lines = log.read_text(errors="replace").strip().splitlines()
    return lines[-1].removeprefix("wsi-fl: error: ") if lines else f"it said nothing; see {log}"
