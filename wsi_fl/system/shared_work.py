"""Work that processes share through a folder, on one machine or on many, without locks.

A process joins the work of a folder (`join_work`), claims items that nobody has, and records the outcome of each. The
claims of a process that ended, or gave no heartbeat for two minutes, are free again. The file system must do this:

- creating a file with O_EXCL succeeds for one of several processes;
- `rename` replaces a file as a whole, moves a folder with its content, and fails where the folder is gone;
- whoever opens a file after it was closed reads what was written.

Local disks do, and so do NFS, SMB, Lustre, GPFS and CephFS. Locks are not needed. Clocks need not agree: a
heartbeat is a write to a file, and its age is the difference to a write of the reader on the same file system.

Claims are cooperative. A process that is wrongly taken for dead goes on, and its items are done twice, which costs time
alone: files are written in the folder of the work and renamed to their places (`SharedWork.stage_file`), so none of
them appears after the work has ended. Whoever writes in place or deletes gives a sign of life first
(`SharedWork.require_presence`); only a process that is suspended for two minutes after that sign, within the write
itself, writes beside others.

    FOLDER/.jobs/WORK/work.json        the command and its settings; all who join must agree
    FOLDER/.jobs/WORK/kept             other work must not replace it unfinished; the reason
    FOLDER/.jobs/WORK/jobs/JOB         the heartbeat of a process, and who it is
    FOLDER/.jobs/WORK/staging/JOB/     files that it is writing
    FOLDER/.jobs/WORK/PHASE/ITEM.1     the claim of an item; .2 of the next owner, when the first one died
    FOLDER/.jobs/WORK/PHASE/ITEM.done  its outcome
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import count
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from wsi_fl.system.files import JOBS_FOLDER, create_file, move_file, raise_if_full
from wsi_fl.system.machine import ProcessIdentity, identify_process, is_running
from wsi_fl.types import WsiFlError

_T = TypeVar("_T")
_BEAT_S, SILENT_S = 10.0, 120.0
"""Seconds between heartbeats, and without one until a process is dead; network disks may show one a minute late."""
_RETRY_S, _CACHE_S = 0.2, 1.0
_DONE, _KEEP_MARK, _LISTING = "done", "kept", ".listing"
_MISSING_ERRORS = (errno.ENOENT, errno.ESTALE)
"""Errors for a file or folder that another process removed."""


class WorkEnded(WsiFlError):
    """The work ended without this process, which had been taken for dead."""


class Worker(NamedTuple):
    """Another process at the work: who it is, the group of its command, and the seconds since its heartbeat."""

    identity: ProcessIdentity | None
    group: str
    silent_s: float

    @property
    def is_active(self) -> bool:
        """Whether its claims hold."""
        return self.silent_s < SILENT_S and is_running(self.identity) is not False

    @property
    def is_present(self) -> bool:
        """Whether it may still write: it is active, or runs on this machine."""
        return self.is_active or is_running(self.identity) is True

    def __str__(self) -> str:
        return f"process {self.identity['pid']} on {self.identity['host']}" if self.identity else "a process"


class WorkKey(NamedTuple):
    """The command of a work and the digest of its settings."""

    command: str
    digest: str


NO_KEY = WorkKey("", "")


class SharedWork:
    """The work on a folder, as one of its processes sees it; made by `join_work`.

    Attributes:
        path: the folder of the work.
        group: the command that this process belongs to; its MPI ranks have the same.
        is_resumed: whether it was left unfinished, and no other command is at work.
        is_complete: whether this process lacks nothing, so that the work ends with it unless others are there.
        n_taken_over: the number of items that this process claimed after their owners had died.
    """

    def __init__(self, path: Path, group: str) -> None:
        self.path, self.group, self.is_resumed, self.is_complete = path, group, False, False
        self.n_taken_over = 0
        self._job = secrets.token_hex(6)
        self._staging = path / "staging" / self._job
        self._heartbeat = path / "jobs" / self._job
        self._document = json.dumps({"identity": identify_process(), "group": group})
        self._claims: dict[tuple[str, str], Path] = {}
        self._workers: dict[str, tuple[float, Worker | None]] = {}
        self._beat_time, self._trusted_since = float("-inf"), float("-inf")
        self._end_event = threading.Event()

    def read_key(self) -> WorkKey:
        """Return the key of the work; one that nobody has where it is damaged."""
        content = _read_file(self.path / "work.json")
        try:
            return WorkKey(*json.loads(content[0])) if content else NO_KEY
        except (TypeError, ValueError):
            return NO_KEY

    # items

    def claim_item(self, phase: str, item: str) -> bool:
        """Claim an item; return whether this process is to do it: nobody did or does."""
        folder = self.path / phase
        with self._require_work():
            folder.mkdir(exist_ok=True)
            for number in count(1):
                claim = folder / f"{item}.{number}"
                is_created = create_file(claim, self._job)
                if (not is_created and self._is_held(claim)) or (folder / f"{item}.{_DONE}").exists():
                    return False
                if is_created:
                    self._claims[phase, item] = claim
                    self.n_taken_over += number > 1
                    return True
        raise AssertionError

    def _is_held(self, claim: Path) -> bool:
        """Return whether the owner of a claim is active."""
        if (content := _read_file(claim)) is None:  # released this moment; the next look finds it free
            return True
        owner, write_time = content
        if not owner:  # it is being written, or its owner was killed in between
            return self._measure_silence(write_time) < SILENT_S
        worker = self._find_worker(owner)
        return owner == self._job or (worker is not None and worker.is_active)

    def record_outcome(self, phase: str, item: str, document: Any) -> None:
        """Record the outcome (JSON) of an item, which is done then."""
        temporary = self._staging / f"outcome.{_DONE}"
        with self._require_work():
            temporary.write_text(json.dumps([self.group, document]))
            move_file(temporary, self.path / phase / f"{item}.{_DONE}")
        self._claims.pop((phase, item), None)

    @contextmanager
    def hold_item(self, phase: str, item: str) -> Iterator[None]:
        """Claim an item when it is free, and free it again: one process after the other does what is in the block."""
        while not self.claim_item(phase, item):
            time.sleep(_RETRY_S)
        try:
            yield
        finally:
            self._claims.pop((phase, item)).unlink(missing_ok=True)

    def release_claims(self) -> None:
        """Let others do the claimed items that have no outcome."""
        while self._claims:
            self._claims.popitem()[1].unlink(missing_ok=True)

    def read_outcome(self, phase: str, item: str) -> tuple[str, Any]:
        """Return the group of the process that did an item, and its outcome."""
        with self._require_work():
            group, document = json.loads((self.path / phase / f"{item}.{_DONE}").read_text())
        return group, document

    def list_items(self, phase: str) -> tuple[set[str], set[str]]:
        """Return the names of the done items of a phase, and those of all claimed ones."""
        names: list[tuple[str, str, str]] = []
        try:
            names = [path.name.rpartition(".") for path in (self.path / phase).iterdir()]
        except OSError as error:
            require_missing(error)
        return {item for item, _, kind in names if kind == _DONE}, {item for item, _, _ in names}

    def forget_outcomes(self, phase: str, is_wrong: Callable[[str, Any], bool]) -> None:
        """Let items with wrong outcomes be done again. Requires that nobody else is at work."""
        done, claimed = self.list_items(phase)
        wrong_items = {item for item in done if is_wrong(item, self.read_outcome(phase, item)[1])}
        for path in (self.path / phase).iterdir() if claimed else ():
            if path.name.rpartition(".")[0] in wrong_items:
                path.unlink()

    @contextmanager
    def stage_file(self, path: Path) -> Iterator[Path]:
        """Yield the path for writing a file, which is moved to its place when the block succeeds.

        Raises:
            WorkEnded: when the work ended meanwhile; the file is not written then.
        """
        with _name_place(self._staging / path.name, path) as staged:
            yield staged
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._require_work():
            move_file(staged, path)

    @contextmanager
    def stage_folder(self, path: Path) -> Iterator[Path]:
        """Yield a folder for writing files, which are moved one by one to another folder when the block succeeds.

        Raises:
            WorkEnded: as for `stage_file`.
        """
        with self._require_work():
            (self._staging / path.name).mkdir(exist_ok=True)
        with _name_place(self._staging / path.name, path) as staged:
            yield staged
        path.mkdir(parents=True, exist_ok=True)
        with self._require_work():
            for file in staged.iterdir():
                move_file(file, path / file.name)

    # processes

    def list_workers(self) -> list[Worker]:
        """Return the other processes that may still write here; of finished work the active ones, as all is written."""
        with self._require_work():
            # after a change of its own a network file system lists a folder anew
            (marker := self._heartbeat.with_name(f"{self._job}{_LISTING}")).touch()
            names = {path.name for path in self._heartbeat.parent.iterdir() if path.suffix != _LISTING} - {self._job}
            marker.unlink()
        workers = [self._find_worker(name) for name in sorted(names)]
        is_finished = self.is_finished
        return [worker for worker in workers if worker and (worker.is_active if is_finished else worker.is_present)]

    def _find_worker(self, job: str) -> Worker | None:
        """Return a process by its name; None when it has left."""
        read_time, worker = self._workers.get(job, (float("-inf"), None))
        if time.monotonic() - read_time > _CACHE_S:
            worker = self._read_worker(self._heartbeat.with_name(job))
            self._workers[job] = time.monotonic(), worker
        return worker

    def _read_worker(self, heartbeat: Path) -> Worker | None:
        if (content := _read_file(heartbeat)) is None:
            return None
        text, write_time = content
        try:
            document = json.loads(text)
        except ValueError:  # not yet written whole
            document = {"identity": None, "group": ""}
        return Worker(document["identity"], document["group"], self._measure_silence(write_time))

    def _measure_silence(self, write_time: float) -> float:
        """Return the seconds since a time of the file system, by its own clock."""
        with self._require_work():
            clock = self._staging / "clock"
            clock.write_text(self._job)
            return clock.stat().st_mtime - max(write_time, self._trusted_since)

    def _write_heartbeat(self) -> None:
        """Write a heartbeat. After a pause of the disk or of this machine all others have time to do so too."""
        with self._heartbeat.open("r+") as file:
            file.write(self._document)
            file.flush()
            beat_time = os.fstat(file.fileno()).st_mtime
        if beat_time - self._beat_time > SILENT_S / 2 and self._beat_time > 0:
            self._trusted_since = beat_time
        self._beat_time = beat_time

    def require_presence(self) -> None:
        """Write a heartbeat before an action that nothing else can stop.

        Raises:
            WorkEnded: when the work ended without this process.
        """
        with self._require_work():
            self._write_heartbeat()

    def delete_file(self, path: Path) -> None:
        """Delete a file, if it is there.

        Raises:
            WorkEnded: when the work ended without this process; the file may be another's then, and stays.
        """
        self.require_presence()
        path.unlink(missing_ok=True)

    def guard_items(self, items: Iterable[_T]) -> Iterator[_T]:
        """Yield items, and require the presence of this process before each and after the last."""
        for item in items:
            self.require_presence()
            yield item
        self.require_presence()

    def _beat_regularly(self) -> None:
        while not self._end_event.wait(_BEAT_S):
            with suppress(OSError):
                self._write_heartbeat()

    # beginning and end

    @property
    def is_finished(self) -> bool:
        return (self.path / "finished").exists()

    @property
    def is_kept(self) -> bool:
        """Whether other work must not replace this one before it is finished."""
        return (self.path / _KEEP_MARK).exists() and self.read_key() != NO_KEY

    def finish_work(self) -> None:
        """Mark the work as finished; the last process to leave removes it."""
        with self._require_work():
            (self.path / "finished").touch()

    def keep_unfinished(self, reason: str) -> str:
        """Let no other work replace this one before it is finished; return the reason that was given first."""
        with self._require_work():
            create_file(self.path / _KEEP_MARK, reason)
            return (self.path / _KEEP_MARK).read_text()

    def make_staging(self) -> None:
        """Make this process's folder for files; an OSError where the work has ended."""
        self._staging.mkdir()

    def start_beating(self) -> bool:
        """Write the first heartbeat, from which on this process counts; return False for finished work.

        Who finishes work looks for others afterwards, so no process is overlooked that is not told of the end here.
        """
        with self._require_work():
            self._heartbeat.write_text(self._document)
            is_finished = self.is_finished
            self._heartbeat.stat()  # it is elsewhere if the work was removed meanwhile
        if is_finished:
            return False
        self.is_resumed = all(worker.group == self.group for worker in self.list_workers())
        if self.is_resumed:
            self._drop_damaged_outcomes()
        threading.Thread(target=self._beat_regularly, daemon=True).start()
        return True

    def _drop_damaged_outcomes(self) -> None:
        """Let items be done again whose outcomes were lost with a machine's power. Requires that nobody is at work."""
        for path in self.path.glob(f"*/*.{_DONE}"):
            try:
                json.loads(content[0] if (content := _read_file(path)) else "0")
            except ValueError:
                path.unlink(missing_ok=True)

    def leave_work(self) -> None:
        """Release the claims and end the heartbeat; remove work that is finished and that nobody else is at."""
        self._end_event.set()
        with suppress(OSError, WorkEnded):
            self.release_claims()
            self._heartbeat.unlink(missing_ok=True)
            if self.is_complete and not self.list_workers():
                self.finish_work()
            is_last = self.is_finished and not self.list_workers()
            shutil.rmtree(self._staging, ignore_errors=True)
            if is_last:
                self.remove_work()

    def remove_work(self) -> None:
        """Remove the work, which ends it for whoever is still at it."""
        removed = temporary_folder(self.path)
        with suppress(FileNotFoundError):
            self.path.rename(removed)
        for _ in range(3):  # others may have been entering it this moment
            shutil.rmtree(removed, ignore_errors=True)
        with suppress(OSError):
            self.path.parent.rmdir()

    @contextmanager
    def _require_work(self) -> Iterator[None]:
        """Raise WorkEnded for a file that is missing because the work has ended."""
        try:
            yield
        except OSError as error:
            if error.errno in _MISSING_ERRORS and not self.path.exists():
                raise WorkEnded(
                    f"{self.path.parents[1]}: others ended this work without this process, which gave no sign of life "
                    f"for {SILENT_S:.0f} s; start it again"
                ) from None
            raise_if_full(error, self.path)
            raise


@contextmanager
def _name_place(staged: Path, path: Path) -> Iterator[Path]:
    """Yield a path; errors name another one in its stead."""
    try:
        yield staged
    except WsiFlError as error:
        error.args = (str(error).replace(str(staged), str(path)),)
        raise
    except OSError as error:
        raise_if_full(error, path)
        raise


def temporary_folder(path: Path) -> Path:
    """Return the place of a work before it begins and after it has ended."""
    return path.parents[1] / f"{JOBS_FOLDER}.{path.name}"


def require_missing(error: OSError) -> None:
    """Raise the error again unless a file or folder is gone."""
    if error.errno not in _MISSING_ERRORS:
        raise error


def _read_file(path: Path) -> tuple[str, float] | None:
    """Return a file's text and the time of its last write; None where it is gone."""
    try:
        with path.open(errors="replace") as file:  # opening asks a network disk for the present state
            return file.read(), os.fstat(file.fileno()).st_mtime
    except OSError as error:
        require_missing(error)
    return None
