"""Starting a kit's process in the foreground: FLARE's process, or a hospital's part over a folder.

A process may run for years, so older logs and older job folders are deleted.
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
from datetime import datetime
from logging.handlers import RotatingFileHandler
from math import inf
from pathlib import Path

from wsi_fl.hospitals.flare.flare_files import (
    KIT_VARIABLE,
    PARENT_VARIABLE,
    PROCESS_MODULE,
    STUDY_VARIABLE,
    require_flare,
    write_flare_files,
)
from wsi_fl.hospitals.plans.preapproval import load_preapproval, preapproval_path
from wsi_fl.hospitals.plans.preapproval_check import admit_plan
from wsi_fl.hospitals.plans.signed_plan import FederationPlan, load_approved_plan
from wsi_fl.hospitals.transports.folder_transport import FolderTransport
from wsi_fl.hospitals.transports.fsspec_adapter import SharedFolder
from wsi_fl.hospitals.transports.presence import SitePresence, SiteReturned, SitesDroppedOut
from wsi_fl.hospitals.trust.certificates import Identity
from wsi_fl.hospitals.trust.kit import Kit, find_failed_step, server_address
from wsi_fl.hospitals.trust.root_ca import sync_revocation_list
from wsi_fl.hospitals.work.client import LAST, take_part
from wsi_fl.hospitals.work.repeat import refuse_after, repeat_until_done
from wsi_fl.stages.runtime.console import print_message
from wsi_fl.stages.training.resume import find_summary
from wsi_fl.stages.training.summary import Summary
from wsi_fl.study.folder import Study
from wsi_fl.system.files import file_lock
from wsi_fl.types import Interrupted, ReportableError, UsageError, WsiFlError, single_line

_REGISTER_S, _POLL_S, _END_S, _TIDY_S = 30.0, 0.2, 10.0, 3600.0
_REGISTERED = "Successfully registered client"
_MAX_LOGS, _MAX_JOBS = 5, 20
"""Older ones that are kept."""
_JOB_FOLDER = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
"""The folder of a job: FLARE names it by the job's id."""
_SHARED_PLAN, _MAX_PLAN_BYTES = "plan.json", 1 << 20
"""A plan in the shared folder, and its longest length in bytes."""
_LEAVING_S = 10.0
"""Time for a site to write its summary and to leave after the last message of a run."""


def start_kit(kit: Kit, study: Study | None, *, report: Callable[[str], None]) -> None:
    """Run a kit's process until it is interrupted (Ctrl-C, SIGTERM), its usual end.

    Args:
        study: of the hospital, the only folder that its jobs read and write; None for a server.
        report: called with lines for people: its registration, its permissions, and its end.

    Raises:
        UsageError: when the kit cannot be started so.
        WsiFlError: when another process has the kit, it is not registered within 30 s, or it ends by itself.
    """
    require_flare()
    if kit.role == "coordinator":
        raise UsageError(f"{kit.path}: a coordinator has nothing to start; use submit, status and abort")
    if (study is None) != (kit.role == "server"):
        raise UsageError("a hospital's kit needs --study DIR; a server's kit takes no --study")
    if reminder := kit.renewal_reminder():
        report(reminder)
    with kit.lock_kit():
        try:
            _run_process(kit, study, report)
        except KeyboardInterrupt:
            report(f"{kit.name} stopped")


def _run_process(kit: Kit, study: Study | None, report: Callable[[str], None]) -> None:
    host, port = server_address(kit)
    federation, log = str(kit.document["federation"]), kit.path / "log.txt"
    write_flare_files(kit.path, name=kit.name, role=kit.role, federation=federation, host=host, port=port)
    if study is None:
        _require_port(port)
    else:
        _rotate_log(study.runs_path / f"{kit.name}.log")
    _rotate_log(kit.path / "audit.log")
    _rotate_log(kit.path / "console.txt", 0)
    log_size = log.stat().st_size if log.exists() else 0
    with _flare_process(kit, study) as process:
        if study is None:
            _wait_until(lambda: _is_listening(port), process, kit)
            report(f"the server of {federation} listens on port {port}; Ctrl-C ends it")
        else:
            _wait_until(lambda: _REGISTERED in _read_since(log, log_size), process, kit)
            report(f"{kit.name} is registered with {host}:{port}; Ctrl-C ends it")
            _report_permissions(kit, study, report)
        code = _follow_process(
            process, kit, None if study is None else preapproval_path(study).with_suffix(".log"), report
        )
    raise WsiFlError(f"the process of {kit.name} ended (exit code {code}); see {log}")


def _rotate_log(log: Path, max_bytes: int = 20 << 20) -> None:
    """Rename a log that is longer, and that no process writes now, to `….1`, that one to `….2`, and so on to five."""
    if log.is_file() and log.stat().st_size > max_bytes:
        RotatingFileHandler(log, backupCount=_MAX_LOGS, delay=True).doRollover()


def _delete_old_jobs(kit: Path) -> None:
    """Delete the folders of all but the newest 20 jobs; only call it while no job runs."""
    folders = [path for path in kit.iterdir() if _JOB_FOLDER.fullmatch(path.name) and path.is_dir()]
    folders.sort(key=lambda path: path.stat().st_mtime)
    for folder in folders[:-_MAX_JOBS]:
        shutil.rmtree(folder, ignore_errors=True)


def _report_permissions(kit: Kit, study: Study, report: Callable[[str], None]) -> None:
    """Report a hospital's permissions: its signed plan, and what may leave."""
    site, approval = study.load_site(kit.name), load_preapproval(study, kit.load_identity())
    disclosures = ", ".join(site.allow) or "nothing without differential privacy"
    budget = f"ε up to {site.max_epsilon:g}" if site.max_epsilon else "no budget of ε"
    try:
        plan = load_approved_plan(study, kit.load_identity())
        plan_note = f"plan {plan.digest[:8]}, {plan.method} with {', '.join(plan.sites)}"
    except UsageError as error:
        plan_note = f"no valid plan, so no job is taken ({error})"
    approval_note = f"; a standing approval until {approval['until']}" if approval else ""
    report(f"  runs one class of wsi-fl and no code of others; signed: {plan_note}{approval_note}")
    report(f"  may leave: {disclosures}; {budget}; reads and writes {study.root} alone")


def _follow_process(process: subprocess.Popen[bytes], kit: Kit, log: Path | None, report: Callable[[str], None]) -> int:
    """Wait for the end of a process, remove old jobs, and report a log's lines on plans; return its exit code."""
    log_size = log.stat().st_size if log and log.exists() else 0
    tidied_at = -_TIDY_S
    while (code := process.poll()) is None:
        if time.monotonic() - tidied_at >= _TIDY_S and not _child_groups(process.pid):
            _delete_old_jobs(kit.path)
            tidied_at = time.monotonic()
        if log is not None and (new := _read_since(log, log_size)):
            log_size += len(new.encode())
            report(new.rstrip())
        time.sleep(_POLL_S)
    return code


@contextmanager
def _flare_process(kit: Kit, study: Study | None) -> Iterator[subprocess.Popen[bytes]]:
    """Run FLARE's process with its descendants; they end with this one."""
    role = "server" if study is None else "client"
    site_arguments = [] if study is None else [f"uid={kit.name}"]
    command = [sys.executable, "-m", PROCESS_MODULE, role, "-m", str(kit.path), "-s", f"fed_{role}.json"]
    command += ["--set", "secure_train=true", *site_arguments, f"org={kit.document['organization']}"]
    command += ["config_folder=config"]
    place = {} if study is None else {STUDY_VARIABLE: str(study.root), KIT_VARIABLE: str(kit.path)}
    environment = {"MALLOC_ARENA_MAX": "4", **os.environ, **place, PARENT_VARIABLE: str(os.getpid())}
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
    previous_handler = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield process
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
        _end_process(process)


def _end_process(process: subprocess.Popen[bytes]) -> None:
    """End the process and its jobs, which FLARE gives process groups of their own, first by SIGTERM."""
    groups = [process.pid, *_child_groups(process.pid)]
    for sign in (signal.SIGTERM, signal.SIGKILL):
        for group in groups:
            with suppress(ProcessLookupError):
                os.killpg(group, sign)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_END_S)
            if sign == signal.SIGTERM:
                time.sleep(_POLL_S)


def _child_groups(pid: int) -> list[int]:
    """Return the processes that a process started and that lead a group of their own."""
    groups = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            _, _, stat_fields = (entry / "stat").read_text().rpartition(")")
            parent, group = (int(word) for word in stat_fields.split()[1:3])
            if parent == pid and group == int(entry.name):
                groups.append(group)
    return groups


def _wait_until(is_done: Callable[[], bool], process: subprocess.Popen[bytes], kit: Kit) -> None:
    """Wait up to 30 s until a process is ready; an error names the likely reason."""
    deadline = time.monotonic() + _REGISTER_S
    while not is_done():
        if (has_ended := process.poll() is not None) or time.monotonic() > deadline:
            problem = "its process ended" if has_ended else f"it is not registered after {_REGISTER_S:.0f} s"
            step = find_failed_step(kit) if kit.role == "hospital" else None
            explanation = f"no reason was found; the end of {kit.path / 'console.txt'} may say more"
            raise WsiFlError(f"{kit.name}: {problem}: {step.said if step else explanation}")
        time.sleep(_POLL_S)


def _require_port(port: int) -> None:
    """Refuse to start a server that cannot open its port."""
    with socket.socket() as place:
        place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            place.bind(("", port))
        except OSError as error:
            raise WsiFlError(
                f"port {port} cannot be opened ({single_line(error)}): end what has it, or let the user open it as "
                "deploy/wsi-fl-server.service does"
            ) from None


def _is_listening(port: int) -> bool:
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), _POLL_S):
        return True
    return False


def _read_since(log: Path, start: int) -> str:
    """Return the text of a log from a position on."""
    with suppress(OSError), log.open("rb") as file:
        file.seek(start)
        return file.read().decode(errors="replace")
    return ""


class _NoPeerWaits(Interrupted):
    """A finished run that no peer waits for."""


def take_part_by_folder(study: Study, kit: Kit, *, folder: str | None = None, without: Sequence[str] = ()) -> Summary:
    """Do a hospital's part of its signed plan, over a folder, and return the run's summary.

    A `plan.json` in the folder is approved first if the hospital's standing approval covers it.

    Calling it again is always safe, also from cron. It begins the plan's run, or resumes the one that all sites have,
    from their checkpoints; releases are sent again, and nothing is charged twice except a spoilt sum. When the run has
    finished, the summary is returned at once, unless a peer that was stopped before its own end sends a handshake: then
    this site helps it to finish, as far as that costs nothing. The processes of all sites must be alive at the same
    time, as a stopped one has lost the key that its messages were sealed with.

    Args:
        study: of this hospital, the only other folder that is read or written.
        folder: the address of the folder, an fsspec URL or a path. By default that of the kit.
        without: sites that dropped out, to go on without; all others must leave out the same ones.

    Raises:
        UsageError: when the folder is unknown, no plan was signed, or wsi-fl differs from the plan's.
        WsiFlError: when a site did not answer within `comm.timeout_s`, another process of this study takes part
            already, or the sites' runs do not fit together.
    """
    address = folder or kit.folder
    if address is None:
        raise UsageError(f"{kit.path}: this kit names no folder; give its address")
    for notice in (sync_revocation_list(kit, address), kit.renewal_reminder()):
        if notice:
            print_message(f"  {notice}", "yellow")
    identity = kit.load_identity()
    _admit_shared_plan(study, identity, address)
    plan = load_approved_plan(study, identity)
    beat_s = min(15.0, plan.pipeline().comm.timeout_s / 4)
    transport = FolderTransport(address, identity.name, plan.digest, most_bytes=plan.most_bytes, beat_s=beat_s)
    busy = f"site {identity.name}: another process of this study takes part already; wait for it"
    with file_lock(study.root / "federation" / f".{identity.name}.lock", busy), kit.lock_kit():
        _rotate_log(study.runs_path / f"{identity.name}.log")
        return _FolderWork(study, kit, plan, transport, address, without).run_to_end()


def _admit_shared_plan(study: Study, identity: Identity, address: str) -> None:
    """Approve `plan.json` of the shared folder by the hospital's standing approval; without one it is not read."""
    if load_preapproval(study, identity) is None:
        return
    try:
        text = SharedFolder(address).read(_MAX_PLAN_BYTES, _SHARED_PLAN).decode()
    except WsiFlError as error:
        print_message(f"  {error}", "yellow")
        return
    except Exception:  # no plan is there, or the share is not reached now
        return
    admit_plan(study, identity, FederationPlan.parse_text(text, f"{_SHARED_PLAN} of the shared folder"))


class _FolderWork:
    """A hospital's part in a plan over a folder; it resumes whenever a peer does."""

    def __init__(
        self,
        study: Study,
        kit: Kit,
        plan: FederationPlan,
        transport: FolderTransport,
        address: str,
        without: Sequence[str],
    ) -> None:
        train = plan.pipeline().train
        self._study, self._kit, self._plan, self._without = study, kit, plan, without
        self._transport, self._address, self._deadline = transport, address, train.deadline
        self._peers = set(plan.remaining_sites(without)) - {kit.name}
        self._presence = SitePresence(kit.load_identity(), plan.sites, None if without else train.min_sites)
        tolerates_dropout = train.min_sites is not None
        self._finished = find_summary(study, plan.digest, plan.sites, without, skip_lost=tolerates_dropout)
        self._reported = {""}
        self._revoked_keys: Mapping[str, datetime] = {}
        self._synced_s = -inf

    def run_to_end(self) -> Summary:
        """Return the summary of the plan's run, at once if it has finished here and no peer waits."""
        if self._finished is not None and not _has_waiting_peer(self._transport, self._peers):
            return self._finished
        print_message(f"  {self._kit.name} takes part in plan {self._plan.digest[:8]} as soon as all others do")
        return repeat_until_done(self._take_part, self._recover_job)

    def _take_part(self) -> Summary:
        try:
            return take_part(
                self._study,
                self._kit.load_identity(),
                self._transport,
                resume=LAST,
                without=self._without,
                on_wait=self._handle_wait,
                presence=self._presence,
                load_revoked=self._load_revoked,
            )
        except (SiteReturned, SitesDroppedOut):
            raise
        except ReportableError as refusal:
            if self._finished is None:
                raise
            if not isinstance(refusal, _NoPeerWaits):
                print_message(f"  {refusal}; the run has finished here", "yellow")
            return self._finished
        finally:
            self._transport.close()

    def _recover_job(self, error: WsiFlError) -> None:
        if isinstance(error, SitesDroppedOut):
            self._presence.mark_dropped_out(error.sites, str(error))
            missing = ", ".join(self._presence.missing_sites())
            print_message(f"  {error}; {f'waiting for {missing}' if missing else 'the others go on'}", "yellow")
        elif isinstance(error, SiteReturned):
            print_message(f"  {error}; all resume from their checkpoints")
        else:
            raise error
        sync_revocation_list(self._kit, self._address)

    def _handle_wait(self) -> None:
        refuse_after(self._deadline)
        if (trouble := self._transport.trouble) not in self._reported:
            self._reported.add(trouble)
            print_message(f"  {trouble}; it is tried again", "yellow")
        if self._finished is not None and not self._peers & self._transport.waiting():
            raise _NoPeerWaits

    def _load_revoked(self) -> Mapping[str, datetime]:
        """Return the revoked keys; the folder is asked once in the time between two signs of life."""
        if (now_s := time.monotonic()) - self._synced_s >= self._transport.beat_s:
            sync_revocation_list(self._kit, self._address)
            self._revoked_keys, self._synced_s = self._kit.load_revocation_list().keys, now_s
        return self._revoked_keys


def _has_waiting_peer(transport: FolderTransport, peers: set[str]) -> bool:
    """Return whether a peer's process waits for a run that has finished here, and is not about to leave it too."""
    started_s, earlier_signs = time.monotonic(), transport.list_signs()
    while waiting := peers & transport.waiting():
        signs, passed_s = transport.list_signs(), time.monotonic() - started_s
        if passed_s > _LEAVING_S and any(signs.get(peer) != earlier_signs.get(peer) for peer in waiting):
            return True
        if passed_s > max(_LEAVING_S, 2 * transport.beat_s):
            return False  # the handshake is stale; the site's next process gives signs again
        time.sleep(_LEAVING_S / 50)
    return False
