"""The coordinator's side of NVIDIA FLARE: connected hospitals, and jobs that are submitted, watched and ended."""

from __future__ import annotations

import logging
import re
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wsi_fl.federation.documents import NotAgreed
from wsi_fl.hospitals.flare.files import COORDINATOR, HEARTBEAT_S, SAID, Job, job_files, need_flare
from wsi_fl.hospitals.trust.kit import Kit, likely_reason, require_server
from wsi_fl.hospitals.work.said import agreed
from wsi_fl.hospitals.work.taking_part import LAST
from wsi_fl.system.files import read_json
from wsi_fl.types import UsageError, WsiFlError, one_line

if TYPE_CHECKING:
    from nvflare.fuel.flare_api.flare_api import Session

_CONNECT_S, _POLL_S, _LOOK_S = 15.0, 1.0, 10.0
_GO_ON = f"go on with `wsi-fl federation submit --resume {LAST}`, or --without a site that stays away"
_BEGIN_S = 120.0
"""A job that has not begun by then never will; usually it takes some 20 s."""
_AWAY_S = 20.0
"""A hospital, or a job on the server, missing for so long is gone, and not merely about to begin or end."""
_SETTLE_S = 3.0
"""The server may still call a job running for so long after its process has ended."""
_BEGUN = ("RUNNING", "DISPATCHED")
"""The server's states of a job that has begun and not ended, even if the server was restarted and has forgotten it."""
_TRIES, _MOST_ASKED = 4, 5
"""Requests for the responding clients, and failed jobs in one call for whose reason the server is asked."""
_LOST = ("was lost", "took nothing", "did not answer")
"""Phrases of failures after which the others can go on."""
_OTHERS = ("failed", "withdrew", "has a certificate that", "has [^;]+; install the plan's", "is \\S+ h ahead")
_NAMED = re.compile(rf"(?:site|the clock of) (\S+) (?:{'|'.join((*_LOST, *_OTHERS))})")
"""The pattern of such a failure, or another of a single hospital, with its name."""


class JobFailed(WsiFlError):
    """A job did not end well.

    Attributes:
        blamed: the hospitals that timed out or failed.
        can_retry: whether another job may succeed: the reason is temporary, and not part of anything signed.
    """

    def __init__(self, message: str, blamed: Sequence[str] = (), *, again: bool = False) -> None:
        super().__init__(message)
        self.blamed, self.again = tuple(blamed), again


class SiteBack(WsiFlError):
    """Hospitals that a job left out are connected again, and the job was ended so that they can take part."""


def _answering(session: Session) -> list[str]:
    """Return the hospitals whose clients answer now; the server lists a stopped one for half a minute more."""
    from nvflare.fuel.flare_api.api_spec import InvalidTarget, NoClientsAvailable, NoConnection

    for left in reversed(range(_TRIES)):
        try:
            if not (listed := [client.name for client in session.get_connected_client_list()]):
                return []
            told = session.get_client_job_status(listed) or []
            return sorted({str(one["client_name"]) for one in told if one.get("status") != "no_reply"})
        except (InvalidTarget, NoClientsAvailable, NoConnection):  # a client is just going away
            if not left:
                raise
            time.sleep(1.0)
    raise AssertionError


def _at_work(session: Session) -> set[str]:
    """Return the ids of the jobs that have a process on the server."""
    return {str(job.job_id) for job in session.get_system_info().job_info}


@dataclass
class _Watch:
    """Checks now and then which hospitals are connected while a job runs; the arguments are those of `run_job`."""

    session: Session
    job: str
    sites: Sequence[str]
    patience_s: float
    awaited: Mapping[str, float]
    withdrawn: Callable[[], Sequence[str]]

    def __post_init__(self) -> None:
        self._free = self._looked = time.monotonic()
        self._missed: dict[str, float] = {}
        self._back: dict[str, float] = {}

    def look(self, status: str) -> None:
        """Check the hospitals when it is due; end a job that cannot finish, or that another one should replace."""
        now, begun = time.monotonic(), status in _BEGUN
        if now - self._looked < _LOOK_S:
            return
        self._looked = now
        if gone := self.withdrawn():
            self._give_up(f"site {gone[0]} has a certificate that was withdrawn; {_GO_ON}", gone)
        try:
            here, at_work = _answering(self.session), _at_work(self.session)
        except Exception:  # the next request for the status fails with the reason
            return
        self._back = {site: self._back.get(site, now) for site in self.awaited if site in here}
        there_s = {site: now - since for site, since in self._back.items() if begun}
        if back := [site for site in there_s if there_s[site] >= max(_AWAY_S, self.awaited[site])]:
            self._end(SiteBack(f"{', '.join(back)} is there again; the job was ended"))
        away = {site for site in self.sites if site not in here}
        away |= {self.job} if begun and self.job not in at_work else set()
        self._missed = {one: self._missed.get(one, now) for one in away}
        if at_work - {self.job}:  # the server does one at a time
            self._free = now
        if now - self._missed.get(self.job, now) >= _AWAY_S:
            self._give_up(f"the server was stopped while job {self.job} ran; {_GO_ON}")
        patience_s = max(_AWAY_S, self.patience_s) if begun else _AWAY_S
        gone = [site for site in self.sites if now - self._missed.get(site, now) >= patience_s]
        if gone and begun:
            self._give_up(f"site {gone[0]} was lost: its client does not answer; {_GO_ON}", gone)
        if gone:
            self._give_up(
                f"{', '.join(gone)} not connected any more; nothing was begun: submit again later", gone
            )
        if not begun and now - self._free >= _BEGIN_S:
            self._give_up(
                f"job {self.job} has not begun within {_BEGIN_S:.0f} s, so it was withdrawn; see the server's log, "
                "and submit again"
            )

    def _give_up(self, why: str, blamed: Sequence[str] = ()) -> None:
        self._end(JobFailed(why, blamed, again=True))

    def _end(self, why: WsiFlError) -> None:
        with suppress(Exception):  # it may have ended by itself, or be forgotten
            self.session.abort_job(self.job)
        raise why


@contextmanager
def _session(kit: Kit) -> Iterator[Session]:
    """Connect to the server as coordinator; the output and logs of FLARE are hidden."""
    need_flare()
    from nvflare.fuel.flare_api.api_spec import NoConnection
    from nvflare.fuel.flare_api.flare_api import new_secure_session

    from wsi_fl.hospitals.flare.processes import find_the_way

    if kit.role != "coordinator":
        raise UsageError(f"{kit.path} is the kit of a {kit.role}; this is for the coordinator's")
    require_server(kit)
    find_the_way()
    said, engine = StringIO(), logging.getLogger("nvflare")
    engine.propagate = False
    engine.addHandler(logging.NullHandler())
    try:
        with redirect_stdout(said):
            session = new_secure_session(COORDINATOR, str(kit.path), timeout=_CONNECT_S)
    except Exception as error:
        raise WsiFlError(
            likely_reason(kit)
            or f"the server {kit.document['server']} does not let the coordinator in: {one_line(error)}; "
            f"`wsi-fl federation check {kit.path}` looks for the reason"
        ) from None
    try:
        with redirect_stdout(said):
            yield session
    except NoConnection:
        raise JobFailed(
            f"the server {kit.document['server']} is gone; start it again. Rounds that were finished are kept: "
            "`submit --resume RUN` goes on with them",
            again=True,
        ) from None
    finally:
        with suppress(Exception):
            session.close()


def connected(kit: Kit) -> list[str]:
    """Return the hospitals whose clients are connected to the server and answer."""
    with _session(kit) as session:
        return _answering(session)


def jobs(kit: Kit, known: Collection[str] = ()) -> list[dict[str, Any]]:
    """Return the jobs on the server: {"id", "name", "status", "submitted", "reason"}, newest first.

    The status of a job that the server calls running, without a process for it, is "DEAD". The reason is why a job
    failed, in one line, or None.

    Args:
        known_ids: ids of jobs whose reason is not needed.
    """
    with _session(kit) as session:
        found = _listed(session)
        if {one["id"] for one in found if one["status"] in _BEGUN} - _at_work(session):
            time.sleep(_SETTLE_S)
            found, working = _listed(session), _at_work(session)
            for one in found:
                if one["status"] in _BEGUN and one["id"] not in working:
                    one |= {"status": "DEAD", "reason": f"the server was stopped while it ran; {_GO_ON}"}
        failed = [one for one in found if one["reason"] is None and _failed(str(one["status"]))]
        for one in [one for one in failed if one["id"] not in known][:_MOST_ASKED]:
            one["reason"] = _reason_of(session, str(one["id"]), str(one["status"]))
    return found


def _listed(session: Session) -> list[dict[str, Any]]:
    return [
        {
            "id": one.get("job_id"),
            "name": one.get("job_name", one.get("name")),
            "status": one.get("status"),
            "submitted": one.get("submit_time"),
            "reason": None,
        }
        for one in session.list_jobs(limit=20, detailed=True, reverse=True)
    ]


def _failed(status: str) -> bool:
    return status.startswith("FINISHED") and status != "FINISHED:COMPLETED"


def _reason_of(session: Session, job: str, status: str) -> str:
    """Return why a job failed, by the hospitals' or the server's replies."""
    with tempfile.TemporaryDirectory() as place, suppress(NotAgreed):
        told = _result(session, job, Path(place))
        if isinstance(told, Mapping) and any(
            isinstance(one, Mapping) and "error" in one for one in told.values()
        ):
            return _first_reason([one["error"] for one in agreed(told, list(told), "work").values()])
    return _without_a_word(job, status)


def abort(kit: Kit, job: str) -> None:
    """End a job at all hospitals; WsiFlError if the server has no such job, or it has ended."""
    with _session(kit) as session:
        try:
            session.abort_job(job)
        except Exception as error:
            raise WsiFlError(f"job {job} was not ended: {one_line(error)}") from None


def run_job(
    kit: Kit,
    sites: list[str],
    job: Job,
    *,
    told: Callable[[str], None],
    waiting: Callable[[float], None],
    patience_s: float = HEARTBEAT_S,
    awaited: Mapping[str, float] | None = None,
    withdrawn: Callable[[], Sequence[str]] = list,
) -> dict[str, Any]:
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
        SiteBack: when an awaited hospital is connected again.
    """
    with tempfile.TemporaryDirectory() as place, _session(kit) as session:
        folder = Path(place) / "job"
        job_files(folder, sites, job)
        number = session.submit_job(str(folder))
        told(number)
        began, watch = time.monotonic(), _Watch(session, number, sites, patience_s, awaited or {}, withdrawn)
        while not (status := _status(session, number)).startswith("FINISHED"):
            waiting(time.monotonic() - began)
            watch.look(status)
            time.sleep(_POLL_S)
        said = agreed(_result(session, number, Path(place)), sites, job["what"])
    errors = [one["error"] for one in said.values() if "error" in one]
    if errors:
        reason = _first_reason(errors)
        blamed = _NAMED.findall(reason)
        raise JobFailed(reason, blamed, again=bool(blamed))
    if _failed(status):
        raise JobFailed(_without_a_word(number, status), again=status != "FINISHED:ABORTED")
    if silent := [site for site in sites if site not in said]:
        why = f"job {number} ended, and the server has no answer of {', '.join(silent)}; {_GO_ON}"
        raise JobFailed(why, silent, again=True)
    return said


def _status(session: Session, job: str) -> str:
    try:
        return str(session.get_job_status(job))
    except Exception as error:
        why = f"the server was lost while job {job} ran ({one_line(error)}); {_GO_ON}"
        raise JobFailed(why, again=True) from None


def _without_a_word(job: str, status: str) -> str:
    """Return why a job failed if no hospital gave a reason."""
    if status == "FINISHED:ABORTED":
        return (
            f"job {job} was ended by the coordinator (`federation abort`); rounds that were finished are kept: "
            "`submit --resume RUN` goes on with them"
        )
    ended = status.removeprefix("FINISHED:").lower()
    return f"job {job} ended ({ended}), and no hospital said why; see the server's log, then {_GO_ON}"


def _first_reason(errors: list[str]) -> str:
    """Return the reason of the first hospital that failed; the others only noticed it."""
    own = [text for text in errors if "ended the run" not in text and "was ended by" not in text]
    reason = (own or errors)[0]
    return f"{reason}; {_GO_ON}" if any(words in reason for words in _LOST) else reason


def _result(session: Session, job: str, place: Path) -> Any:
    """Return the hospitals' replies from the job's folder on the server, not yet validated."""
    with suppress(Exception):
        folder = Path(session.download_job_result(job, str(place)))
        file = next(folder.rglob(SAID), None)
        return read_json(file) if file else {}
    return {}
