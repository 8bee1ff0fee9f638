"""Joining the work on a folder, beside others (`join_work`) or alone (`site_lock`)."""

from __future__ import annotations

import json
import secrets
import shutil
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

from wsi_fl.system.file_names import drop_companions, is_companion
from wsi_fl.system.files import JOBS_FOLDER, LocksUnavailable, file_lock, raise_if_full, remove_leftovers, write_text
from wsi_fl.system.shared_work import (
    SILENT_S,
    SharedWork,
    WorkEnded,
    Worker,
    WorkKey,
    require_missing,
    temporary_folder,
)
from wsi_fl.types import WsiFlError

_LOCK = ".lock"
WORK_NAMES = (JOBS_FOLDER, _LOCK)
"""Names in a folder that belong to the work on it; whoever empties the folder during the work leaves them."""
_RETRY_S = 0.2
_MAX_ATTEMPTS = 100
"""To begin a work while other processes begin and end theirs."""


@contextmanager
def join_work(folder: Path, key: WorkKey, label: str, *, group: str = "", wait: bool = False) -> Iterator[SharedWork]:
    """Take part in the work on a folder, which begins with its first process.

    Unfinished work with the same key is continued, whoever began it. Other work that nobody is at is dropped, unless it
    is kept (`SharedWork.keep_unfinished`).

    Args:
        label: of the folder, in messages.
        group: the command of this process, equal for its MPI ranks. Default: its own.
        wait: wait until other work has ended.

    Raises:
        WsiFlError: when other work is being done or kept there.
    """
    folder.mkdir(parents=True, exist_ok=True)
    errors: list[OSError] = []
    while True:
        work = _find_work(folder, group or secrets.token_hex(6))
        if work is None:
            if error := _create_work(folder, key):
                errors.append(error)
            if len(errors) > _MAX_ATTEMPTS:
                raise errors[-1]
            continue
        with suppress(WorkEnded):
            work_key, workers = work.read_key(), work.list_workers()
            if work_key == key and work.start_beating():
                break
            is_finished = work.is_finished
            is_kept = work.is_kept and work_key != key and not is_finished
            is_busy = bool(workers) and not wait and not is_finished
            work.is_complete = not workers and not is_kept
            work.leave_work()
            if is_kept and not workers:
                raise WsiFlError(
                    f"{label}: {work.path.parent} keeps finished parts of unfinished work ({work_key.command}); do "
                    "its missing parts first, with the same settings and version, or delete that folder"
                )
            if is_busy:
                raise WsiFlError(_describe_busy(folder, label, workers[0], work_key.command == key.command != ""))
            if workers:
                time.sleep(_RETRY_S)
    try:
        yield work
    finally:
        work.leave_work()


def _find_work(folder: Path, group: str) -> SharedWork | None:
    """Return the present work on a folder; None where there is none."""
    try:
        for path in filter(Path.is_dir, drop_companions((folder / JOBS_FOLDER).iterdir())):
            work = SharedWork(path, group)
            work.make_staging()
            return work
    except OSError as error:
        require_missing(error)
    return None


def _create_work(folder: Path, key: WorkKey) -> OSError | None:
    """Begin a work on a folder; return an error where another process was faster, or the folder cannot be written."""
    path = folder / JOBS_FOLDER / secrets.token_hex(6)
    prepared = temporary_folder(path)
    try:
        remove_leftovers(folder)
        for name in ("jobs", "staging"):
            (prepared / path.name / name).mkdir(parents=True)
        write_text(prepared / path.name / "work.json", json.dumps(key))
        for other in folder.glob(f"{JOBS_FOLDER}.*"):  # begun or ended by a process that was killed
            if prepared.stat().st_mtime - other.stat().st_mtime > SILENT_S:
                shutil.rmtree(other, ignore_errors=True)
        with suppress(OSError):  # left by a killed process, or a stray such as .DS_Store or @eaDir
            for stray in path.parent.iterdir():  # unlink fails for another process's new work
                shutil.rmtree(stray) if is_companion(stray) and stray.is_dir() else stray.unlink()
            path.parent.rmdir()
        prepared.rename(path.parent)  # fails where there is one, with an error by file system
    except OSError as error:
        shutil.rmtree(prepared, ignore_errors=True)
        raise_if_full(error, folder)
        return error
    return None


def _describe_busy(folder: Path, label: str, worker: Worker, is_same_command: bool) -> str:
    settings = " with other settings, slides or version" if is_same_command else ""
    return f"{label}: another wsi-fl command is writing {folder}{settings} ({worker}); wait for it"


@contextmanager
def site_lock(folder: Path, site: str, *, wait: bool = False) -> Iterator[SharedWork]:
    """Work on a site's folder alone, without leftovers of a killed command in it.

    Where the file system has locks, nobody else works there alone before this process has ended. For jobs that share
    slides, and on other file systems, it counts as dead after two minutes without a heartbeat: it must call
    `SharedWork.require_presence` before it writes in place.

    With `wait` another command is waited for, else it is a WsiFlError.
    """
    with ExitStack() as stack:
        with suppress(LocksUnavailable):
            busy = f"site {site}: another wsi-fl command is writing {folder}; wait for it, or end it"
            stack.enter_context(file_lock(folder / _LOCK, None if wait else busy))
        key = WorkKey("", secrets.token_hex(6))
        work = stack.enter_context(join_work(folder, key, f"site {site}", wait=wait))
        try:
            yield work
        finally:
            work.finish_work()
