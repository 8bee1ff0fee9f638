"""The log of a coordinator's kit: a line for each submitted job, and one for its outcome."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TypedDict, cast

from wsi_fl.hospitals.faults import NO_FAULT, Fault, FaultCode
from wsi_fl.hospitals.flare.flare_files import JobRequest
from wsi_fl.hospitals.plans.signed_plan import FederationPlan
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.system.files import append_line, read_lines

_FILE = "jobs.jsonl"


class LoggedJob(TypedDict):
    """What the kit knows of a job; None for what is not known, or not yet.

    Attributes:
        run: its result.
        reason, code, site: why it failed, in words and as a `Fault`.
    """

    what: str | None
    plan: str | None
    method: str | None
    sites: list[str] | None
    resume: str | None
    without: list[str] | None
    run: str | None
    reason: str | None
    code: FaultCode | None
    site: str | None


def empty_entry() -> LoggedJob:
    """Return the entry of a job that the kit knows nothing of."""
    return cast(LoggedJob, dict.fromkeys(LoggedJob.__annotations__))


def log_submission(kit: Kit, number: str, plan: FederationPlan, job: JobRequest, sites: list[str]) -> None:
    """Record by FLARE's id that a job was submitted."""
    line = {"id": number, "what": job["what"], "plan": plan.digest, "method": plan.method, "sites": sites}
    details = {"resume": job.get("resume"), "without": job.get("without", []), "asked": _current_time()}
    append_line(kit.path / _FILE, line | details)


def log_end(
    kit: Kit, number: str, *, run: str | None = None, reason: str | None = None, fault: Fault = NO_FAULT
) -> None:
    """Record a job's outcome: its run, or the reason why it failed."""
    outcome = {"id": number, "run": run, "reason": reason, "code": fault.code, "site": fault.site}
    append_line(kit.path / _FILE, outcome | {"ended": _current_time()})


def load_job_log(kit: Kit) -> dict[str, LoggedJob]:
    """Return the entry of each job in a kit's log by its id, oldest first."""
    job_log: dict[str, LoggedJob] = {}
    for line in read_lines(kit.path / _FILE, {"id": str}):
        entry = job_log.setdefault(line["id"], empty_entry())
        entry |= cast(LoggedJob, {key: value for key, value in line.items() if key != "id"})
    return job_log


def _current_time() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
