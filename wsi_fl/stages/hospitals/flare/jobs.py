"""The coordinator's side of NVIDIA FLARE: who is connected, and jobs that are submitted, watched and ended."""

from __future__ import annotations

import logging
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from typing import Any

from nvflare.fuel.flare_api.api_spec import NoConnection
from nvflare.fuel.flare_api.flare_api import Session, new_secure_session

from wsi_fl.stages.hospitals.flare.files import COORDINATOR, SAID, job_files
from wsi_fl.stages.hospitals.flare.names import check_names
from wsi_fl.stages.hospitals.kits.kit import Kit
from wsi_fl.stages.hospitals.kits.reach import server_of
from wsi_fl.stages.hospitals.said import agreed
from wsi_fl.stages.hospitals.taking_part import LAST
from wsi_fl.system.files import read_json
from wsi_fl.types import UsageError, WsiFlError, one_line

_CONNECT_S = 15.0
_GO_ON = f"go on with `wsi-fl federation submit --resume {LAST}`, or --without a site that stays away"
_LOST = ("was lost", "took nothing", "did not answer")
"""Words of failures after which the others can go on."""
Outcome = Mapping[str, Any]


@contextmanager
def _session(kit: Kit) -> Iterator[Session]:
    """A connection to the server as coordinator; what FLARE prints and logs meanwhile is nobody's business.

    Raises:
        UsageError: when the kit is not the coordinator's, or the federation has no server.
        WsiFlError: when the server does not let the coordinator in, or goes away meanwhile.
    """
    if kit.role != "coordinator":
        raise UsageError(f"{kit.path} is the kit of a {kit.role}; this is for the coordinator's")
    server_of(kit)
    check_names()
    said, engine = StringIO(), logging.getLogger("nvflare")
    engine.propagate = False
    engine.addHandler(logging.NullHandler())
    try:
        with redirect_stdout(said):
            session = new_secure_session(COORDINATOR, str(kit.path), timeout=_CONNECT_S)
    except Exception as error:
        raise WsiFlError(
            f"the server {kit.document['server']} does not let the coordinator in: {one_line(error)}; "
            f"`wsi-fl federation check {kit.path}` looks for the reason"
        ) from None
    try:
        with redirect_stdout(said):
            yield session
    except NoConnection:
        raise WsiFlError(
            f"the server {kit.document['server']} is gone; start it again. Rounds that were finished are kept: "
            "`submit --resume RUN` goes on with them"
        ) from None
    finally:
        with suppress(Exception):
            session.close()


def connected(kit: Kit) -> list[str]:
    """Return the hospitals whose clients are connected to the server."""
    with _session(kit) as session:
        return sorted(client.name for client in session.get_connected_client_list())


def jobs(kit: Kit) -> list[dict[str, Any]]:
    """Return the jobs that the server knows: {"id", "name", "status", "submitted"}, newest first."""
    with _session(kit) as session:
        found = session.list_jobs(limit=20, detailed=True, reverse=True)
    return [
        {
            "id": one.get("job_id"),
            "name": one.get("job_name", one.get("name")),
            "status": one.get("status"),
            "submitted": one.get("submit_time"),
        }
        for one in found
    ]


def abort(kit: Kit, job: str) -> None:
    """End a job at all hospitals.

    Raises:
        WsiFlError: when the server knows no such job, or it has ended.
    """
    with _session(kit) as session:
        try:
            session.abort_job(job)
        except Exception as error:
            raise WsiFlError(f"job {job} was not ended: {one_line(error)}") from None


def run_job(
    kit: Kit,
    sites: list[str],
    job: dict[str, Any],
    *,
    told: Callable[[str], None],
    waiting: Callable[[float], None],
) -> Outcome:
    """Submit a job, wait for its end, and return what each hospital said.

    Args:
        told: called with FLARE's id of the job.
        waiting: called now and then with the seconds that the job has taken.

    Raises:
        WsiFlError: with the reason of the first hospital that failed, or that the server gave.
    """
    with tempfile.TemporaryDirectory() as place, _session(kit) as session:
        folder = Path(place) / "job"
        job_files(folder, sites, job)
        number = session.submit_job(str(folder))
        told(number)
        began = time.monotonic()
        try:
            while not (status := str(session.get_job_status(number))).startswith("FINISHED"):
                waiting(time.monotonic() - began)
                time.sleep(1.0)
        except Exception as error:
            raise WsiFlError(
                f"the server was lost while job {number} ran ({one_line(error)}); {_GO_ON}"
            ) from None
        said = agreed(_result(session, number, Path(place)), sites, str(job["what"]))
    errors = [one["error"] for one in said.values() if "error" in one]
    if errors:
        raise WsiFlError(_first_reason(errors))
    if status == "FINISHED:ABORTED":
        raise WsiFlError(
            f"job {number} was ended by the coordinator (`federation abort`); rounds that were finished are kept: "
            "`submit --resume RUN` goes on with them"
        )
    if status != "FINISHED:COMPLETED":
        ended = status.removeprefix("FINISHED:").lower()
        raise WsiFlError(
            f"job {number} ended ({ended}), and no hospital said why; see the server's log, then {_GO_ON}"
        )
    if silent := [site for site in sites if site not in said]:
        raise WsiFlError(f"job {number} ended, and the server has no answer of {', '.join(silent)}; {_GO_ON}")
    return said


def _first_reason(errors: list[str]) -> str:
    """Who failed first says why; the others only noticed that it did."""
    own = [text for text in errors if "ended the run" not in text and "was ended by" not in text]
    reason = (own or errors)[0]
    return f"{reason}; {_GO_ON}" if any(words in reason for words in _LOST) else reason


def _result(session: Session, job: str, place: Path) -> Any:
    """What the hospitals said as the server has it, from the job's folder there; nobody has looked at it yet."""
    with suppress(Exception):
        folder = Path(session.download_job_result(job, str(place)))
        file = next(folder.rglob(SAID), None)
        return read_json(file) if file else {}
    return {}
