"""Starting one MPI rank per site, and knowing when somebody else already did."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from threading import Thread
from typing import IO, Any

from wsi_fl.stages.console import Watcher
from wsi_fl.types import UsageError, WsiFlError

_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MPI_LOCALNRANKS", "SLURM_STEP_NUM_TASKS")
_INSTALL = "install one with `pip install 'wsi-fl[mpi]'`, or use --backend local"


class RankDied(WsiFlError):
    """A rank ended without giving a reason."""


def launched_ranks() -> int | None:
    """How many ranks mpiexec or srun started with this one; None when nobody did."""
    for name in _SIZE_VARIABLES:
        if os.environ.get(name, "").isdigit():
            size = int(os.environ[name])
            return size if size > 1 or name.startswith("OMPI") else None
    return None


def find_mpiexec() -> str:
    """mpiexec beside this Python, else on PATH.

    Raises:
        WsiFlError: when there is none, saying how to get one.
    """
    beside = Path(sys.executable).parent / "mpiexec"
    found = str(beside) if beside.is_file() else shutil.which("mpiexec")
    if found is None:
        raise WsiFlError(f"no MPI: mpiexec was not found; {_INSTALL}")
    return found


def rank_environment(n_ranks: int) -> dict[str, str]:
    """The environment of the ranks: the machine's threads divided among them."""
    environment = dict(os.environ)
    threads = max(1, len(os.sched_getaffinity(0)) // n_ranks)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    if hasattr(os, "geteuid") and os.geteuid() == 0:  # containers; Open MPI wants to be told twice
        environment["OMPI_ALLOW_RUN_AS_ROOT"] = environment["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return environment


def run_ranks(n_ranks: int, arguments: list[str], *, log: Path, watcher: Watcher, resume: str) -> None:
    """Runs `wsi-fl ARGUMENTS` on n ranks of this machine until all are done.

    Args:
        log: where what MPI itself says is kept.
        resume: the command that continues the job, for messages.

    Raises:
        WsiFlError: with the failing rank's own reason, or that a rank died without one.
        UsageError: likewise, for wrong usage.
    """
    command = [find_mpiexec(), "-n", str(n_ranks), "--oversubscribe", "--bind-to", "none"]
    command += [sys.executable, "-m", "wsi_fl", *arguments]
    log.parent.mkdir(parents=True, exist_ok=True)
    with (
        log.open("wb") as log_file,
        subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=log_file,
            stdin=subprocess.DEVNULL,
            env=rank_environment(n_ranks),
            start_new_session=True,
        ) as process,
    ):
        failures: list[dict[str, Any]] = []
        assert process.stdout is not None
        reader = Thread(target=_follow, args=(process.stdout, watcher, failures), daemon=True)
        reader.start()
        try:
            code = process.wait()
        except KeyboardInterrupt:
            _end(process)
            raise WsiFlError(f"interrupted; continue with `{resume}`") from None
        except BaseException:
            _end(process)
            raise
        reader.join(timeout=5)
    if failures:
        kind = UsageError if failures[0].get("usage") else WsiFlError
        raise kind(failures[0]["error"])
    if code != 0:
        raise RankDied(
            f"a site's process died (mpiexec exit code {code}, see {log}); continue with `{resume}`"
        )


def _follow(stream: IO[bytes], watcher: Watcher, failures: list[dict[str, Any]]) -> None:
    for line in stream:
        try:
            event = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "error" in event:
            failures.append(event)
        elif "part" in event:
            watcher.update(event["part"], event["done"], event["total"], event["note"])


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends mpiexec and the ranks it started, politely first."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, sign)
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                continue
