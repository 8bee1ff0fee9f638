"""The coordinator's side of NVIDIA FLARE: connected hospitals, and jobs that are submitted, watched and ended."""

from __future__ import annotations

import logging
import shlex
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from wsi_fl.federation.documents import ProtocolError
from wsi_fl.hospitals.faults import RETRYABLE, Fault, FaultCode, find_fault, mark_fault
from wsi_fl.hospitals.flare.flare_files import (
    COORDINATOR,
    HEARTBEAT_S,
    REPLIES_FILE,
    JobRequest,
    require_flare,
    write_job_files,
)
from wsi_fl.hospitals.trust.kit import Kit, find_failed_step, require_server
from wsi_fl.hospitals.work.client import LAST
from wsi_fl.hospitals.work.job_replies import Reply, validate_replies
from wsi_fl.system.files import read_json
from wsi_fl.types import UsageError, WsiFlError, single_line

if TYPE_CHECKING:
    from nvflare.fuel.flare_api.flare_api import Session

_CONNECT_S, _POLL_S, _LOOK_S = 15.0, 1.0, 10.0
_RESUME_HINT = f"go on with `wsi-fl federation submit --resume {LAST}`, or --without a site that stays away"
_BEGIN_S = 120.0
"""A job that has not begun by then never will; usually it takes some 20 s."""
_AWAY_S = 20.0
"""A hospital, or a job on the server, missing for so long is gone, and not merely about to begin or end."""
_SETTLE_S = 3.0
"""The server may still call a job running for so long after its process has ended."""
_STARTED_STATES = ("RUNNING", "DISPATCHED")
"""The server's states of a job that has begun and not ended, even if the server was restarted and has forgotten it."""
_MAX_TRIES, _MAX_REASONS = 4, 5
"""Requests for the responding clients, and failed jobs in one call for whose reason the server is asked."""


class JobFailed(WsiFlError):
    """A job did not end well.

    Attributes:
        blamed: the hospitals that timed out or failed.
        can_retry: whether another job may succeed: the reason is temporary, and not part of anything signed.
    """

    def __init__(
        self, message: str, blamed: Sequence[str] = (), *, code: FaultCode = "", can_retry: bool = False
    ) -> None:
        super().__init__(message)
        self.blamed, self.can_retry = tuple(blamed), can_retry
        mark_fault(self, code, next(iter(blamed), ""))


class SiteReconnected(WsiFlError):
    """Hospitals that a job left out are connected again, and the job was ended so that they can take part."""


def _list_responding(session: Session) -> list[str]:
    """Return the hospitals whose clients answer now; the server lists a stopped one for half a minute more."""
    from nvflare.fuel.flare_api.api_spec import InvalidTarget, NoClientsAvailable, NoConnection

    for tries_left in reversed(range(_MAX_TRIES)):
        try:
            if not (client_names := [client.name for client in session.get_connected_client_list()]):
                return []
            statuses = session.get_client_job_status(client_names) or []
            return sorted(
                {
                    str(client_status["client_name"])
                    for client_status in statuses
                    if client_status.get("status") != "no_reply"
                }
            )
        except (InvalidTarget, NoClientsAvailable, NoConnection):  # a client is just going away
            if not tries_left:
                raise
            time.sleep(1.0)
    raise AssertionError


def _running_job_ids(session: Session) -> set[str]:
    """Return the ids of the jobs that have a process on the server."""
    return {str(job.job_id) for job in session.get_system_info().job_info}


@dataclass
class _JobWatch:
    """Checks now and then which hospitals are connected while a job runs; the arguments are those of `run_job`."""

    session: Session
    job: str
    sites: Sequence[str]
    patience_s: float
    awaited: Mapping[str, float]
    list_revoked: Callable[[], Sequence[str]]

    def __post_init__(self) -> None:
        self._server_idle_since = self._checked_s = time.monotonic()
        self._missing_since: dict[str, float] = {}
        self._back_since: dict[str, float] = {}

    def check_job(self, status: str) -> None:
        """Check the hospitals when it is due; end a job that cannot finish, or that another one should replace."""
        now_s, has_started = time.monotonic(), status in _STARTED_STATES
        if now_s - self._checked_s < _LOOK_S:
            return
        self._checked_s = now_s
        if affected := self.list_revoked():
            text = f"site {affected[0]} has a certificate that was withdrawn; {_RESUME_HINT}"
            self._give_up(text, "revoked", affected)
        try:
            responding, running_jobs = _list_responding(self.session), _running_job_ids(self.session)
        except Exception:  # the next request for the status fails with the reason
            return
        self._back_since = {site: self._back_since.get(site, now_s) for site in self.awaited if site in responding}
        present_s = {site: now_s - since for site, since in self._back_since.items() if has_started}
        if back := [site for site in present_s if present_s[site] >= max(_AWAY_S, self.awaited[site])]:
            self._end_job(SiteReconnected(f"{', '.join(back)} is there again; the job was ended"))
        missing = {site for site in self.sites if site not in responding}
        missing |= {self.job} if has_started and self.job not in running_jobs else set()
        self._missing_since = {name: self._missing_since.get(name, now_s) for name in missing}
        if running_jobs - {self.job}:  # the server does one at a time
            self._server_idle_since = now_s
        if now_s - self._missing_since.get(self.job, now_s) >= _AWAY_S:
            self._give_up(f"the server was stopped while job {self.job} ran; {_RESUME_HINT}", "server_stopped")
        patience_s = max(_AWAY_S, self.patience_s) if has_started else _AWAY_S
        affected = [site for site in self.sites if now_s - self._missing_since.get(site, now_s) >= patience_s]
        if affected and has_started:
            self._give_up(f"site {affected[0]} was lost: its client does not answer; {_RESUME_HINT}", "lost", affected)
        if affected:
            text = f"{', '.join(affected)} not connected any more; nothing was begun: submit again later"
            self._give_up(text, "not_begun", affected)
        if not has_started and now_s - self._server_idle_since >= _BEGIN_S:
            text = (
                f"job {self.job} has not begun within {_BEGIN_S:.0f} s, so it was withdrawn; see the server's log, "
                "and submit again"
            )
            self._give_up(text, "not_begun")

    def _give_up(self, reason: str, code: FaultCode, blamed: Sequence[str] = ()) -> None:
        self._end_job(JobFailed(reason, blamed, code=code, can_retry=True))

    def _end_job(self, error: WsiFlError) -> None:
        with suppress(Exception):  # it may have ended by itself, or be forgotten
            self.session.abort_job(self.job)
        raise error


@contextmanager
def _open_session(kit: Kit) -> Iterator[Session]:
    """Connect to the server as coordinator; the output and logs of FLARE are hidden."""
    require_flare()
    from nvflare.fuel.flare_api.api_spec import NoConnection
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    from wsi_fl.hospitals.flare.processes import patch_connections

    if kit.role != "coordinator":
        raise UsageError(f"{kit.path} is the kit of a {kit.role}; this is for the coordinator's")
    require_server(kit)
    patch_connections()
    output, engine = StringIO(), logging.getLogger("nvflare")
    engine.propagate = False
    engine.addHandler(logging.NullHandler())
    try:
        with redirect_stdout(output):
            session = new_secure_session(COORDINATOR, str(kit.path), timeout=_CONNECT_S)
    except Exception as error:
        if step := find_failed_step(kit):
            raise mark_fault(WsiFlError(step.said), step.fault) from None
        raise WsiFlError(
            f"the server {kit.document['server']} does not let the coordinator in: {single_line(error)}; "
            f"`wsi-fl federation check {shlex.quote(str(kit.path))}` looks for the reason"
        ) from None
    try:
        with redirect_stdout(output):
            yield session
    except NoConnection:
        raise JobFailed(
            f"the server {kit.document['server']} is gone; start it again. Rounds that were finished are kept: "
            "`submit --resume RUN` goes on with them",
            code="server_lost",
            can_retry=True,
        ) from None
    finally:
        with suppress(Exception):
            session.close()


def list_connected(kit: Kit) -> list[str]:
    """Return the hospitals whose clients are connected to the server and answer."""
    with _open_session(kit) as session:
        return _list_responding(session)


class _ServerJob(TypedDict):
    """A job on the server.

    Attributes:
        status: FLARE's; "DEAD" for one that the server calls running, without a process for it.
        reason, code, site: why it failed, in words and as a `Fault`; None, "" and "" if it did not.
    """

    id: str
    name: str | None
    status: str
    submitted: float | str | None
    reason: str | None
    code: FaultCode
    site: str


def list_jobs(kit: Kit, known_ids: Collection[str] = ()) -> list[_ServerJob]:
    """Return the jobs on the server, newest first, and why those failed that are not among known ids."""
    with _open_session(kit) as session:
        rows = _list_recent(session)
        if {row["id"] for row in rows if row["status"] in _STARTED_STATES} - _running_job_ids(session):
            time.sleep(_SETTLE_S)
            rows, working = _list_recent(session), _running_job_ids(session)
            for row in rows:
                if row["status"] in _STARTED_STATES and row["id"] not in working:
                    row["status"], row["code"] = "DEAD", "server_stopped"
                    row["reason"] = f"the server was stopped while it ran; {_RESUME_HINT}"
        failed = [row for row in rows if row["reason"] is None and _has_failed(row["status"])]
        for row in [row for row in failed if row["id"] not in known_ids][:_MAX_REASONS]:
            failure = _find_failure(session, row["id"], row["status"])
            row["reason"], (row["code"], row["site"]) = str(failure), find_fault(failure)
    return rows


def _list_recent(session: Session) -> list[_ServerJob]:
    return [
        _ServerJob(
            id=str(job.get("job_id")),
            name=job.get("job_name", job.get("name")),
            status=str(job.get("status")),
            submitted=job.get("submit_time"),
            reason=None,
            code="",
            site="",
        )
        for job in session.list_jobs(limit=20, detailed=True, reverse=True)
    ]


def _has_failed(status: str) -> bool:
    return status.startswith("FINISHED") and status != "FINISHED:COMPLETED"


def _find_failure(session: Session, job: str, status: str) -> JobFailed:
    """Return why a job failed, by the hospitals' or the server's replies."""
    with tempfile.TemporaryDirectory() as place, suppress(ProtocolError):
        replies = _download_replies(session, job, Path(place))
        if isinstance(replies, Mapping):
            valid_replies = validate_replies(replies, list(replies), "work")
            if failures := [reply for reply in valid_replies.values() if "error" in reply]:
                return _first_failure(failures)
    return _silent_failure(job, status)


def abort_job(kit: Kit, job: str) -> None:
    """End a job at all hospitals; WsiFlError if the server has no such job, or it has ended."""
    with _open_session(kit) as session:
        try:
            session.abort_job(job)
        except Exception as error:
            raise WsiFlError(f"job {job} was not ended: {single_line(error)}") from None


def run_job(
    kit: Kit,
    sites: list[str],
    job: JobRequest,
    *,
    on_submit: Callable[[str], None],
    on_wait: Callable[[float], None],
    patience_s: float = HEARTBEAT_S,
    awaited: Mapping[str, float] | None = None,
    list_revoked: Callable[[], Sequence[str]] = list,
) -> dict[str, Reply]:
    """Submit a job, wait for its end, and return each hospital's reply.

    A job that has not begun within two minutes, while the server has no other, is withdrawn. One whose hospitals or
    server dropped out ends.

    Args:
        patience_s: how long a hospital may be disconnected from a job that has begun.
        awaited: hospitals that the job leaves out; when one of them is connected for its number of seconds, it ends.
        list_revoked: returns now and then the hospitals with a revoked certificate, which end the job.
        on_submit: called with FLARE's id of the job.
        on_wait: called now and then with the seconds that the job has taken.

    Raises:
        JobFailed: with the reason of the first hospital that failed, or of the server.
        SiteReconnected: when an awaited hospital is connected again.
    """
    with tempfile.TemporaryDirectory() as place, _open_session(kit) as session:
        folder = Path(place) / "job"
        write_job_files(folder, sites, job)
        number = session.submit_job(str(folder))
        on_submit(number)
        started_s = time.monotonic()
        watch = _JobWatch(session, number, sites, patience_s, awaited or {}, list_revoked)
        while not (status := _job_status(session, number)).startswith("FINISHED"):
            on_wait(time.monotonic() - started_s)
            watch.check_job(status)
            time.sleep(_POLL_S)
        replies = validate_replies(_download_replies(session, number, Path(place)), sites, job["what"])
    if failures := [reply for reply in replies.values() if "error" in reply]:
        raise _first_failure(failures)
    if _has_failed(status):
        raise _silent_failure(number, status)
    if silent := [site for site in sites if site not in replies]:
        explanation = f"job {number} ended, and the server has no answer of {', '.join(silent)}; {_RESUME_HINT}"
        raise JobFailed(explanation, silent, code="no_answer", can_retry=True)
    return replies


def _job_status(session: Session, job: str) -> str:
    try:
        return str(session.get_job_status(job))
    except Exception as error:
        reason = f"the server was lost while job {job} ran ({single_line(error)}); {_RESUME_HINT}"
        raise JobFailed(reason, code="server_stopped", can_retry=True) from None


def _silent_failure(job: str, status: str) -> JobFailed:
    """Return the failure of a job for which no hospital gave a reason."""
    if status == "FINISHED:ABORTED":
        text = (
            f"job {job} was ended by the coordinator (`federation abort`); rounds that were finished are kept: "
            "`submit --resume RUN` goes on with them"
        )
        return JobFailed(text, code="aborted")
    outcome = status.removeprefix("FINISHED:").lower()
    text = f"job {job} ended ({outcome}), and no hospital said why; see the server's log, then {_RESUME_HINT}"
    return JobFailed(text, code="no_answer", can_retry=True)


def _first_failure(failures: Sequence[Reply]) -> JobFailed:
    """Return the failure of the first hospital that failed; the others only noticed it."""
    root_causes = [failure for failure in failures if failure["code"] not in ("site_ended", "aborted")]
    first = (root_causes or failures)[0]
    text, fault = first["error"], Fault(first["code"], first["site"])
    blamed = [fault.site] if fault.site and fault.code in RETRYABLE else []
    text = f"{text}; {_RESUME_HINT}" if fault.code == "lost" else text
    return mark_fault(JobFailed(text, blamed, can_retry=bool(blamed)), *fault)


def _download_replies(session: Session, job: str, place: Path) -> Any:
    """Return the hospitals' replies from the job's folder on the server, not yet validated."""
    with suppress(Exception):
        folder = Path(session.download_job_result(job, str(place)))
        file = next(folder.rglob(REPLIES_FILE), None)
        return read_json(file) if file else {}
    return {}
