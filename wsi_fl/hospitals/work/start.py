"""Starting what a kit is for, in the foreground: FLARE's process, or a hospital's part over a folder.

What runs for years must not grow for ever: older logs and older folders of jobs go.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import date, datetime
from functools import lru_cache
from logging.handlers import RotatingFileHandler
from pathlib import Path

from wsi_fl.hospitals.flare.files import KIT, PROCESSES, STARTED_BY, STUDY, need_flare, write_flare_files
from wsi_fl.hospitals.lines.folder_line import FolderLine
from wsi_fl.hospitals.lines.relayed import Attendance, SiteReturned, SitesGone
from wsi_fl.hospitals.lines.share import Share
from wsi_fl.hospitals.plans.admitting import admit
from wsi_fl.hospitals.plans.frames import frame_path, open_frame
from wsi_fl.hospitals.plans.signed import Plan, approved_plan
from wsi_fl.hospitals.trust.certificates import Identity
from wsi_fl.hospitals.trust.kit import Kit, likely_reason, server_of
from wsi_fl.hospitals.trust.root import exchange_list
from wsi_fl.hospitals.work.taking_part import LAST, take_part
from wsi_fl.stages.training.going_on import finished_summary
from wsi_fl.stages.training.summary import Summary
from wsi_fl.stages.work.console import say
from wsi_fl.study.folder import Study
from wsi_fl.system.files import alone
from wsi_fl.types import Interrupted, KnownToAll, UsageError, WsiFlError, one_line

_REGISTER_S, _POLL_S, _END_S, _TIDY_S = 30.0, 0.2, 10.0, 3600.0
_REGISTERED = "Successfully registered client"
_LOGS, _JOBS = 5, 20
"""How many older ones are kept."""
_JOB = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""FLARE calls the folder of a job after its id."""
_LAID, _MOST_PLAN = "plan.json", 1 << 20
"""A plan that lies in the shared folder, and its longest length in bytes."""
_LEAVING_S = 10.0
"""How long a site that has the last letter of a run may take to write its summary and to leave."""


def start(kit: Kit, study: Study | None, *, told: Callable[[str], None]) -> None:
    """Run a kit's process until it is interrupted (Ctrl-C, SIGTERM), which is its usual end.

    Args:
        study: of the hospital, the only folder that its jobs read and write; None for a server.
        told: called with what people should know: that it is registered, what it allows, and that it was stopped.

    Raises:
        UsageError: when the kit cannot be started so.
        WsiFlError: when another process has the kit, it is not registered within 30 s, or it ends by itself.
    """
    need_flare()
    if kit.role == "coordinator":
        raise UsageError(f"{kit.path}: a coordinator has nothing to start; use submit, status and abort")
    if (study is None) != (kit.role == "server"):
        raise UsageError("a hospital's kit needs --study DIR; a server's kit takes no --study")
    if reminder := kit.reminder():
        told(reminder)
    with kit.alone():
        try:
            _run(kit, study, told)
        except KeyboardInterrupt:
            told(f"{kit.name} stopped")


def _run(kit: Kit, study: Study | None, told: Callable[[str], None]) -> None:
    host, port = server_of(kit)
    federation, log = str(kit.document["federation"]), kit.path / "log.txt"
    write_flare_files(kit.path, name=kit.name, role=kit.role, federation=federation, host=host, port=port)
    if study is None:
        _require_port(port)
    else:
        _rotate(study.runs / f"{kit.name}.log")
    _rotate(kit.path / "audit.log")
    _rotate(kit.path / "console.txt", 0)
    seen = log.stat().st_size if log.exists() else 0
    with _process(kit, study) as process:
        if study is None:
            _until(lambda: _listens(port), process, kit)
            told(f"the server of {federation} listens on port {port}; Ctrl-C ends it")
        else:
            _until(lambda: _REGISTERED in _since(log, seen), process, kit)
            told(f"{kit.name} is registered with {host}:{port}; Ctrl-C ends it")
            _say_what_it_allows(kit, study, told)
        code = _followed(process, kit, None if study is None else frame_path(study).with_suffix(".log"), told)
    raise WsiFlError(f"the process of {kit.name} ended (exit code {code}); see {log}")


def _rotate(log: Path, most_bytes: int = 20 << 20) -> None:
    """Call a log that is longer, and that nobody writes now, `….1`, that one `….2`, and so on to five."""
    if log.is_file() and log.stat().st_size > most_bytes:
        RotatingFileHandler(log, backupCount=_LOGS, delay=True).doRollover()


def _forget_jobs(kit: Path) -> None:
    """Delete the folders of all but the newest 20 jobs; only call it while no job runs."""
    folders = [path for path in kit.iterdir() if _JOB.fullmatch(path.name) and path.is_dir()]
    folders.sort(key=lambda path: path.stat().st_mtime)
    for folder in folders[:-_JOBS]:
        shutil.rmtree(folder, ignore_errors=True)


def _say_what_it_allows(kit: Kit, study: Study, told: Callable[[str], None]) -> None:
    """Tell what a hospital lets happen: which plan it has signed, and what may leave."""
    site, frame = study.site(kit.name), open_frame(study, kit.identity())
    allowed = ", ".join(site.allow) or "nothing without differential privacy"
    budget = f"ε up to {site.max_epsilon:g}" if site.max_epsilon else "no budget of ε"
    try:
        plan = approved_plan(study, kit.identity())
        signed = f"plan {plan.digest[:8]}, {plan.method} with {', '.join(plan.sites)}"
    except UsageError as error:
        signed = f"no plan that holds, so no job is taken ({error})"
    framed = f"; a frame until {frame['until']}" if frame else ""
    told(f"  runs one class of wsi-fl and no code of others; signed: {signed}{framed}")
    told(f"  lets go: {allowed}; {budget}; reads and writes {study.root} alone")


def _followed(
    process: subprocess.Popen[bytes], kit: Kit, log: Path | None, told: Callable[[str], None]
) -> int:
    """Wait for the end of a process, remove old jobs, and tell what a log says of plans; return its exit code."""
    seen = log.stat().st_size if log and log.exists() else 0
    tidied = -_TIDY_S
    while (code := process.poll()) is None:
        if time.monotonic() - tidied >= _TIDY_S and not _started_by(process.pid):
            _forget_jobs(kit.path)
            tidied = time.monotonic()
        if log is not None and (new := _since(log, seen)):
            seen += len(new.encode())
            told(new.rstrip())
        time.sleep(_POLL_S)
    return code


@contextmanager
def _process(kit: Kit, study: Study | None) -> Iterator[subprocess.Popen[bytes]]:
    """FLARE's process and all that it starts; they end with this one."""
    role = "server" if study is None else "client"
    own = [] if study is None else [f"uid={kit.name}"]
    command = [sys.executable, "-m", PROCESSES, role, "-m", str(kit.path), "-s", f"fed_{role}.json"]
    command += ["--set", "secure_train=true", *own, f"org={kit.document['organization']}"]
    command += ["config_folder=config"]
    place = {} if study is None else {STUDY: str(study.root), KIT: str(kit.path)}
    environment = {"MALLOC_ARENA_MAX": "4", **os.environ, **place, STARTED_BY: str(os.getpid())}
    with (kit.path / "console.txt").open("ab") as console:
        process = subprocess.Popen(
            command,
            cwd=kit.path,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=console,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield process
    finally:
        signal.signal(signal.SIGTERM, before)
        _end(process)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def _end(process: subprocess.Popen[bytes]) -> None:
    """End the process and its jobs, which FLARE gives process groups of their own, politely first."""
    groups = [process.pid, *_started_by(process.pid)]
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for group in groups:
            with suppress(ProcessLookupError):
                os.killpg(group, sign)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
            if sign == signal.SIGTERM:
                time.sleep(_POLL_S)


def _started_by(pid: int) -> list[int]:
    """The processes that a process started and that lead a group of their own."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            _, _, after = (entry / "stat").read_text().rpartition(")")
            parent, group = (int(word) for word in after.split()[1:3])
            if parent == pid and group == int(entry.name):
                found.append(group)
    return found


def _until(done: Callable[[], bool], process: subprocess.Popen[bytes], kit: Kit) -> None:
    """Wait for 30 s until a process is where it should be; an error names the likely reason."""
    deadline = time.monotonic() + _REGISTER_S
    while not done():
        if (ended := process.poll() is not None) or time.monotonic() > deadline:
            what = "its process ended" if ended else f"it is not registered after {_REGISTER_S:.0f} s"
            why = likely_reason(kit) if kit.role == "hospital" else ""
            known = why or f"no reason was found; the end of {kit.path / 'console.txt'} may say more"
            raise WsiFlError(f"{kit.name}: {what}: {known}")
        time.sleep(_POLL_S)


def _require_port(port: int) -> None:
    """Refuse to start a server that cannot open its port."""
    with socket.socket() as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            place.bind(("", port))
        except OSError as error:
            raise WsiFlError(
                f"port {port} cannot be opened ({one_line(error)}): end what has it, or let the user open it as "
                "deploy/wsi-fl-server.service does"
            ) from None


def _listens(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), _POLL_S):
        return True
    return False


def _since(log: Path, start: int) -> str:
    """What a log says since it was so long."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")
    return ""


class _NobodyWaits(Interrupted):
    """A run that has finished here has finished for everybody."""


def take_part_by_folder(
    study: Study, kit: Kit, *, folder: str | None = None, without: Sequence[str] = ()
) -> Summary:
    """Do a hospital's part of the plan that it has signed, over a folder, and return the run's summary.

    A `plan.json` that lies in the folder is taken first where the hospital's frame allows it; see `plans.admitting`.

    To call it again is always right, also from cron. It begins the plan's run, or goes on with the one that all
    sites have, from their checkpoints; what was sent is sent again, and nothing is charged twice but a sum that was
    spoilt. When the run has finished, the summary is returned at once, unless a peer that was stopped before its own
    end says hello: then this site helps it to finish, as far as that costs nothing. The processes of all sites must be
    alive at the same time, as one that was stopped has forgotten the key that letters to it were sealed with.

    Args:
        study: of this hospital, the only other folder that is read or written.
        folder: the address of the folder, an fsspec URL or a path. By default that of the kit.
        without: sites that were lost, to go on without; all others must leave out the same ones.

    Raises:
        UsageError: when no folder is known, no plan was signed, or wsi-fl is another than the plan's.
        WsiFlError: when a site did not answer within `comm.timeout_s`, another process of this study takes part
            already, or the sites' runs do not fit together.
    """
    address = folder or kit.folder
    if address is None:
        raise UsageError(f"{kit.path}: this kit names no folder; give its address")
    for said in (exchange_list(kit, address), kit.reminder()):
        if said:
            say(f"  {said}", "yellow")
    identity = kit.identity()
    _take_laid(study, identity, address)
    plan = approved_plan(study, identity)
    beat_s = min(15.0, plan.pipeline().comm.timeout_s / 4)
    line = FolderLine(address, identity.name, plan.digest, most_bytes=plan.most_bytes, beat_s=beat_s)
    busy = f"site {identity.name}: another process of this study takes part already; wait for it"
    with alone(study.root / "federation" / f".{identity.name}.lock", busy), kit.alone():
        _rotate(study.runs / f"{identity.name}.log")
        return _until_done(study, kit, plan, line, address, without)


def _take_laid(study: Study, identity: Identity, address: str) -> None:
    """Approve `plan.json` of the shared folder where the hospital's frame allows it; without a frame it is not read."""
    if open_frame(study, identity) is None:
        return
    try:
        text = Share(address).read(_MOST_PLAN, _LAID).decode()
    except WsiFlError as error:
        say(f"  {error}", "yellow")
        return
    except Exception:  # nothing lies there, or the share is not reached now
        return
    admit(study, identity, Plan.of(text, f"{_LAID} of the shared folder"))


def _until_done(
    study: Study, kit: Kit, plan: Plan, line: FolderLine, address: str, without: Sequence[str]
) -> Summary:
    """Take part, and begin again whenever a peer does."""
    identity, train = kit.identity(), plan.pipeline().train
    few, peers = train.min_sites is not None, set(plan.sites) - {identity.name, *without}
    attendance = Attendance(identity, plan.sites, None if without else train.min_sites)
    finished = finished_summary(study, plan.digest, plan.sites, without, goes_on=few)
    told = {""}

    def notice() -> None:
        if train.deadline and date.today().isoformat() > train.deadline:
            raise KnownToAll(
                f"this plan was good until {train.deadline} (train.deadline); nothing more is sent"
            )
        if (trouble := line.trouble) not in told:
            told.add(trouble)
            say(f"  {trouble}; it is tried again", "yellow")
        if finished is not None and not peers & line.waiting():
            raise _NobodyWaits

    @lru_cache(1)
    def withdrawn(_beat: int) -> Mapping[str, datetime]:
        exchange_list(kit, address)
        return kit.withdrawn().keys

    if finished is not None and not _still_wait(line, peers):
        return finished
    say(f"  {identity.name} takes part in plan {plan.digest[:8]}, as soon as all others do")
    while True:
        try:
            return take_part(
                study,
                kit.identity(),
                line,
                resume=LAST,
                without=without,
                waiting=notice,
                attendance=attendance,
                withdrawn=lambda: withdrawn(int(time.monotonic() / line.beat_s)),
            )
        except SiteReturned as returned:
            say(f"  {returned}; all begin again from their checkpoints")
        except SitesGone as news:
            attendance.note_gone(news.sites, str(news))
            lacking = ", ".join(attendance.lacking())
            say(f"  {news}; {f'waiting for {lacking}' if lacking else 'those who are there go on'}", "yellow")
        except KnownToAll as refusal:
            if finished is None:
                raise
            if not isinstance(refusal, _NobodyWaits):
                say(f"  {refusal}; the run has finished here", "yellow")
            return finished
        finally:
            line.close()
        exchange_list(kit, address)


def _still_wait(line: FolderLine, peers: set[str]) -> bool:
    """Whether a peer's process waits for a run that has finished here, and is not just about to leave it too."""
    began, seen = time.monotonic(), line.signs()
    while waiting := peers & line.waiting():
        signs, passed_s = line.signs(), time.monotonic() - began
        if passed_s > _LEAVING_S and any(signs.get(one) != seen.get(one) for one in waiting):
            return True
        if passed_s > max(_LEAVING_S, 2 * line.beat_s):
            return False  # what said hello is gone; its next process gives signs again
        time.sleep(_LEAVING_S / 50)
    return False
