"""Start of an MPI rank per site, detection of dropouts, and hints how to resume."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from subprocess import DEVNULL, PIPE
from threading import Thread
from typing import IO

from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.runtime.console import Watcher, print_message
from wsi_fl.stages.runtime.rank_job import take_threads
from wsi_fl.study.folder import Study
from wsi_fl.system.extras import describe_install
from wsi_fl.system.files import raise_if_full
from wsi_fl.system.machine import (
    is_first_rank,
    launcher_reason,
    local_environment,
    n_cores,
    read_thread_setting,
    threads_per_rank,
)
from wsi_fl.types import DiskFull, UsageError, WsiFlError

_POLL_S = 0.05
_STALE_S = 5.0
"""Age from which reports of a late site are ignored; waiting ranks repeat them each second."""
_DEADLOCK_TIMEOUTS = 20
LAUNCHER = "WSI_FL_LAUNCHER"
"""Environment variable with the launcher's process id, without which ranks would outlive it."""
_NO_FABRIC = "^ofi"
"""Open MPI's transports without libfabric, whose search for network cards takes a second; ranks here share memory."""
_SIGNAL_REPORT = re.compile(rb"\bPID (\d+)\b(?:[^\n]*\n?[^\n]*\bexited on\s+signal |[^\n]*\n[^\n]*\bEXIT CODE: )(\d+)")
"""Text of Open MPI's and MPICH's launchers about a rank that a signal ended."""


def resume_command(study: Study, run: RunFolder) -> str:
    """Return the command that resumes a run."""
    return f"wsi-fl train --resume {shlex.quote(study.relative_path(run.path))}"


def hint_resume(study: Study, run: RunFolder) -> AbstractContextManager[None]:
    """Name the command that resumes a run after Ctrl-C or on a full disk."""
    return hint_way_on(run.path, f"continue with `{resume_command(study, run)}`")


@contextmanager
def hint_way_on(path: Path, way_on: str) -> Iterator[None]:
    """Add to the error of Ctrl-C or a full disk at `path` how to continue."""
    try:
        yield
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted; {way_on}") from None
    except Exception as error:
        try:
            raise_if_full(error, path)
        except DiskFull:
            raise DiskFull(f"{path}: the disk is full; free some space and {way_on}") from error
        raise


class SitesLost(Exception):
    """Ranks were killed or hang; the job was ended so that the others can start again."""

    def __init__(self, reasons: dict[str, str]) -> None:
        super().__init__(reasons)
        self.reasons = reasons
        """Site → reason."""


def locate_mpiexec() -> str | None:
    """Return mpiexec beside this Python, or on PATH; None where there is none."""
    sibling = Path(sys.executable).parent / "mpiexec"
    return str(sibling) if sibling.is_file() else shutil.which("mpiexec")


def find_mpiexec() -> str:
    """Return mpiexec as `locate_mpiexec` does; WsiFlError, with a hint to install it, when there is none."""
    path = locate_mpiexec()
    if path is None:
        raise WsiFlError(f"no MPI: mpiexec was not found; {describe_install('mpi')}; or train with --backend local")
    return path


def rank_environment(n_ranks: int) -> dict[str, str]:
    """Return the environment of ranks on this machine, with its cores divided among them."""
    environment = local_environment()
    n_threads = _count_threads(n_ranks)
    if not environment.get("OMP_NUM_THREADS") or describe_threads(n_ranks):
        environment["OMP_NUM_THREADS"] = str(n_threads)
    if os.geteuid() == 0:  # containers; Open MPI needs both
        environment["OMPI_ALLOW_RUN_AS_ROOT"] = environment["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    environment.setdefault("OMPI_MCA_btl", _NO_FABRIC)
    return environment


def describe_threads(n_ranks: int) -> str:
    """Describe that OMP_NUM_THREADS exceeds the machine's cores; "" where it does not."""
    n_requested = read_thread_setting()
    if n_requested is None or n_requested <= _count_threads(n_ranks):
        return ""
    cores = n_cores()
    share = f"each takes {_count_threads(n_ranks)}"
    return f"OMP_NUM_THREADS = {n_requested} in {n_ranks} ranks is more than {cores} cores: {share}"


def share_threads() -> None:
    """Take this rank's share of the machine's cores, and report once where more threads were requested."""
    share, n_requested = threads_per_rank(), read_thread_setting()
    take_threads(share)
    if n_requested and n_requested > share and is_first_rank():
        print_message(
            f"  OMP_NUM_THREADS = {n_requested} in every rank is more than there are cores: each takes {share}"
        )


def _count_threads(n_ranks: int) -> int:
    return max(1, n_cores() // n_ranks)


def run_ranks(
    sites: Sequence[str], arguments: list[str], *, log: Path, timeout_s: float, watcher: Watcher, resume: str
) -> None:
    """Run `wsi-fl ARGUMENTS` on one rank per site of this machine until all are done.

    Args:
        sites: of ranks 0, 1, ….
        log: file of MPI's output.
        timeout_s: longest wait of a rank for another.
        resume: the command that resumes the job, for messages.

    Raises:
        SitesLost: when ranks were killed, or hang.
        WsiFlError, UsageError: with the failing rank's reason, or that a rank died without one.
    """
    command = [find_mpiexec(), "-n", str(len(sites)), "--oversubscribe", "--bind-to", "none"]
    command += [sys.executable, "-m", "wsi_fl", *arguments]
    log.parent.mkdir(parents=True, exist_ok=True)
    log_start = log.stat().st_size if log.exists() else 0
    if note := describe_threads(len(sites)):
        watcher.print_message(f"  {note}")
    environment = rank_environment(len(sites)) | {LAUNCHER: str(os.getpid())}
    with (
        log.open("ab") as log_file,
        _defer_interrupts() as raise_interrupts,
        subprocess.Popen(
            command, stdin=DEVNULL, stdout=PIPE, stderr=log_file, env=environment, start_new_session=True
        ) as process,
    ):
        assert process.stdout is not None
        ranks = _Ranks(watcher, timeout_s)
        reader = Thread(target=ranks.follow_events, args=(process.stdout,), daemon=True)
        reader.start()
        hanging = _wait_for_ranks(process, ranks, resume, raise_interrupts)
        reader.join(timeout=5)
    output = log.read_bytes()[log_start:]
    if lost := hanging or (ranks.find_killed(output) if process.returncode else {}):
        raise SitesLost(lost)
    if ranks.failure is not None:
        raise ranks.failure
    if process.returncode:
        raise WsiFlError(_describe_exit(process.returncode, output, log, resume, has_begun=ranks.has_begun))


def _wait_for_ranks(
    process: subprocess.Popen[bytes], ranks: _Ranks, resume: str, raise_interrupts: Callable[[], None]
) -> dict[str, str]:
    """Wait until a job has ended; return the sites that hung, for which it was ended, with reasons."""
    hanging: dict[str, str] = {}
    try:
        raise_interrupts()
        while process.poll() is None and not hanging:
            time.sleep(_POLL_S)
            hanging = ranks.find_hanging()
            if ranks.is_deadlocked():
                raise WsiFlError(f"the sites wait for each other; continue with `{resume}`")
        if hanging:
            ranks.kill(hanging)  # MPI can end the others only after these
    except KeyboardInterrupt:
        raise WsiFlError(f"interrupted; continue with `{resume}`") from None
    finally:
        _end_process(process)
    return hanging


def _describe_exit(code: int, output: bytes, log: Path, resume: str, *, has_begun: bool) -> str:
    """Describe the end of a job without a reason from its ranks, given the output of MPI's launcher."""
    if has_begun:
        return f"a site's process died (mpiexec exit code {code}, see {log}); continue with `{resume}`"
    return (
        f"no site's process began: {launcher_reason(output.decode(errors='replace'))} (mpiexec exit code {code}, see "
        f"{log}); `wsi-fl doctor` tries MPI by itself, and --backend local trains without it"
    )


class _Ranks:
    """Events and timeouts of the ranks of a job."""

    def __init__(self, watcher: Watcher, timeout_s: float) -> None:
        self.failure: WsiFlError | None = None
        """The first that a rank reported."""
        self._watcher, self._timeout_s = watcher, timeout_s
        self._pids: dict[str, int] = {}
        self._last_heard: dict[str, float] = {}
        self._hosts: dict[str, str] = {}
        self._late: dict[str, tuple[float, float]] = {}
        """Site → first and last report of others that it is late, without a break."""

    @property
    def has_begun(self) -> bool:
        """Whether a rank has reported."""
        return bool(self._pids)

    def follow_events(self, stream: IO[bytes]) -> None:
        """Read events until the last rank has ended."""
        for line in stream:
            try:
                event = json.loads(line)
            except json.JSONDecodeError:
                continue
            if not isinstance(event, dict):
                continue
            if (site := event.get("site", event.get("part"))) is not None:
                self._last_heard[site] = time.monotonic()
            if "pid" in event:
                self._pids[event["site"]] = event["pid"]
                self._hosts[event["site"]] = event.get("host", "")
            if "late" in event:
                current = time.monotonic()
                for name in event["late"]:
                    first, last = self._late.get(name, (current, current))
                    self._late[name] = (current if current - last > _STALE_S else first, current)
            if "error" in event and self.failure is None:
                self.failure = (UsageError if event.get("usage") else WsiFlError)(event["error"])
            if "say" in event:
                self._watcher.print_message(event["say"])
            if "part" in event:
                self._watcher.update(event["part"], event["done"], event["total"], event["note"])

    def find_hanging(self) -> dict[str, str]:
        """Return the sites later than the timeout and without a sign of life for half of it, with reasons."""
        current = time.monotonic()
        return {
            site: f"no sign of life for {current - self._last_heard[site]:.0f} s"
            for site, (_, last) in sorted(self._late.copy().items())
            if current - last < _STALE_S and current - self._last_heard.get(site, current) > self._timeout_s / 2
        }

    def is_deadlocked(self) -> bool:
        """Return whether others wait for a site, though alive, for many times the timeout."""
        return any(last - first > _DEADLOCK_TIMEOUTS * self._timeout_s for first, last in self._late.copy().values())

    def find_killed(self, log: bytes) -> dict[str, str]:
        """Return the sites whose processes a signal ended, from the log of MPI's launcher."""
        site_of_pid = {pid: site for site, pid in self._pids.items()}
        return {
            site_of_pid[int(pid)]: f"its process was killed by {_signal_name(int(sign))}"
            for pid, sign in _SIGNAL_REPORT.findall(log)
            if int(pid) in site_of_pid
        }

    def kill(self, sites: dict[str, str]) -> None:
        for site in sites:
            with suppress(ProcessLookupError, PermissionError, KeyError):
                if self._hosts[site] in ("", socket.gethostname()):
                    os.kill(self._pids[site], signal.SIGKILL)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


@contextmanager
def _defer_interrupts() -> Iterator[Callable[[], None]]:
    """Let Ctrl-C, SIGTERM and SIGHUP raise KeyboardInterrupt, but only once the yielded function was called.

    A job outlives an exception that is raised while it starts, so an interrupt that comes before is raised by that
    function. What is ignored stays ignored, so `nohup` keeps a job alive.
    """
    if threading.current_thread() is not threading.main_thread():
        yield lambda: None
        return
    is_deferred, has_signal = True, False

    def handle_interrupt(*_: object) -> None:
        nonlocal has_signal
        has_signal = True
        if not is_deferred:
            raise KeyboardInterrupt

    def raise_interrupts() -> None:
        nonlocal is_deferred
        is_deferred = False
        if has_signal:
            raise KeyboardInterrupt

    signals = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
    heeded = [sign for sign in signals if signal.getsignal(sign) is not signal.SIG_IGN]
    handlers = {sign: signal.signal(sign, handle_interrupt) for sign in heeded}
    try:
        yield raise_interrupts
    finally:
        for sign, handler in handlers.items():
            signal.signal(sign, handler)


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """End mpiexec and its ranks, by SIGTERM first."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, sign)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                continue
