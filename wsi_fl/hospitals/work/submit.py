"""The coordinator's side: starting a plan at all hospitals, and its results, releases and tallies alone.

A plan that can do without a hospital continues, job after job, until it is done. A job is for the hospitals that are
connected. When one times out or fails, the next job is for the others, from their checkpoints; when it is back, the
running job ends and the next one is for all of them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, date, datetime
from itertools import count
from pathlib import Path
from typing import Any, TypedDict

from wsi_fl.data.cross_site_counts import CrossSiteCounts
from wsi_fl.hospitals.flare import jobs
from wsi_fl.hospitals.flare.flare_files import HEARTBEAT_S, JobRequest
from wsi_fl.hospitals.plans.signed_plan import FederationPlan, check_revoked
from wsi_fl.hospitals.transports.fsspec_adapter import SharedFolder
from wsi_fl.hospitals.trust.certificates import parse_revocation_list
from wsi_fl.hospitals.trust.kit import CheckStep, Kit, check_connection
from wsi_fl.hospitals.trust.root_ca import sync_revocation_list
from wsi_fl.hospitals.work.client import LAST
from wsi_fl.report.cross_site_section import render_coordinator
from wsi_fl.report.formatting import describe_absences
from wsi_fl.stages.runtime.console import Lines, SilentProgress, TextLine, TextTable, Watcher
from wsi_fl.stages.site.privacy_account import describe_spending
from wsi_fl.stages.training.summary import Summary
from wsi_fl.system.files import append_line, read_lines, read_object, write_json, write_text
from wsi_fl.types import UsageError, WsiFlError, single_line

_SUMMARY_FILE = "summary.json"
_JOB_LOG = "jobs.jsonl"
"""The kit's log: a line for each submitted job, and one for its outcome."""
_JOB_FIELDS = ("what", "plan", "method", "sites", "resume", "without", "asked", "run", "reason")
"""What is known of a job; "reason" is why it failed, "run" its result, and None stands for neither yet."""
_LOOK_S = 5.0
_MAX_FAILURES = 3
"""Failures after which a connected hospital is left out until it was disconnected, or for its patience."""
_MAX_FAILED_JOBS = 10
"""Consecutive failures without a blamed hospital after which people have to look."""


class _SubmittedRun(Summary):
    """The summary of a run, its folder, and its page."""

    out: str
    report: str


def submit_plan(
    kit: Kit,
    plan: FederationPlan,
    *,
    out: Path | None = None,
    parent_folder: Path = Path(),
    resume: str | None = None,
    without: Sequence[str] = (),
    watcher: Watcher | None = None,
) -> _SubmittedRun:
    """Run a plan at its hospitals, and store the summary that all of them have.

    Args:
        kit: the coordinator's.
        out: a folder for `summary.json`, `report.html` and, if hospitals disclose counts, `scores.json`; default: a new
            one in `parent_folder`, named after the run.
        parent_folder: the folder of the plan.
        resume: the run to resume, as the summary or the hospitals' folders name it.
        without: hospitals that dropped out.

    Raises:
        UsageError: when hospitals of the plan are not connected, or `out` holds a result already.
        WsiFlError: with the reason of the first hospital that failed, or when two hospitals hold different scores.
    """
    if out is not None and (summary_file := out / _SUMMARY_FILE).exists():
        earlier_run = read_object(summary_file, "give another folder").get("run")
        raise UsageError(f"{out} holds the result of {earlier_run}; give another folder")
    if unknown := sorted(set(without) - set(plan.sites)):
        raise UsageError(f"unknown site {unknown[0]!r}; the plan has {', '.join(plan.sites)}")
    sites = [site for site in plan.sites if site not in without]
    watcher = watcher or SilentProgress()
    if plan.pipeline().train.min_sites is None:
        replies = _run_job(kit, plan, sites, _work_request(plan, resume, without), watcher)
    else:
        replies = _run_until_done(kit, plan, sites, resume, watcher)
    scores = _require_same_scores({site: reply.pop("scores", None) for site, reply in replies.items()})
    summary: Summary = next(iter(replies.values()))
    if out is None:  # the hospitals named the run
        name = "result-" + re.sub(r"[^\w.-]", "_", Path(summary["run"]).name)
        candidates = (parent_folder / f"{name}{'' if n == 1 else f'-{n}'}" for n in count(1))
        out = next(folder for folder in candidates if not folder.exists())
    page = out / "report.html"
    write_json(out / _SUMMARY_FILE, summary)
    if scores is not None:
        write_json(out / "scores.json", scores)
    write_text(page, render_coordinator(summary, scores))
    return {**summary, "out": str(out), "report": str(page)}


def _require_same_scores(scores_by_site: Mapping[str, CrossSiteCounts | None]) -> CrossSiteCounts | None:
    """Return the scores of all hospitals; WsiFlError if they differ."""
    first = next(iter(scores_by_site))
    if other := [site for site, scores in scores_by_site.items() if scores != scores_by_site[first]]:
        raise WsiFlError(
            f"{first} and {other[0]} hold different scores of this run, so no page was made; each hospital's "
            "scores.json lies in its own run"
        )
    return scores_by_site[first]


@dataclass
class _SiteAvailability:
    """The hospitals that a job may be for, from when each was connected or failed last, in seconds of one clock.

    Args:
        names: of the hospitals, without those that people exclude.
        patience_s: how long a disconnected one is waited for.
    """

    names: Sequence[str]
    patience_s: float
    missing_since: dict[str, float] = field(default_factory=dict)
    """Hospital → when it was first disconnected."""
    failures: dict[str, list[float]] = field(default_factory=dict)
    """Hospital → its failures since it was disconnected or forgiven last."""

    def update_connected(self, connected: Sequence[str], now_s: float) -> None:
        """Record the connected hospitals; forgive failures of one that was away, or left out for the patience."""
        self.missing_since = {name: self.missing_since.get(name, now_s) for name in self.names if name not in connected}
        for name, failed in list(self.failures.items()):
            if len(failed) >= _MAX_FAILURES and (name in self.missing_since or now_s - failed[-1] >= self.patience_s):
                del self.failures[name]

    def record_failures(self, names: Sequence[str], now_s: float) -> None:
        """Record the hospitals that made a job fail; one that does so repeatedly is left out for a while."""
        for name in names:
            self.failures.setdefault(name, []).append(now_s)

    def available_sites(self) -> list[str]:
        """Return the hospitals that a job can be for."""
        given_up = {name for name, failed in self.failures.items() if len(failed) >= _MAX_FAILURES}
        return [name for name in self.names if name not in self.missing_since and name not in given_up]

    def return_delays(self) -> dict[str, float]:
        """Return, by hospital left out, how long it must be back before a job ends so that it can take part."""
        available = self.available_sites()
        return {
            name: 0.0 if name in self.missing_since else self.patience_s for name in self.names if name not in available
        }

    def is_waiting(self, now_s: float) -> bool:
        """Return whether any is disconnected, and not yet for as long as the plan's patience."""
        return any(now_s - absent_since_s < self.patience_s for absent_since_s in self.missing_since.values())


def _run_until_done(
    kit: Kit, plan: FederationPlan, sites: list[str], resume: str | None, watcher: Watcher
) -> dict[str, Any]:
    """Submit a plan's job until one succeeds, and return each hospital's reply.

    Args:
        sites: of the plan, without those that people exclude.
        resume: the run to resume at first; afterwards it is the last one.

    Raises:
        WsiFlError: when the plan's day is over, or a job failed for a reason that no other job resolves.
    """
    settings = plan.pipeline()
    min_sites, deadline = settings.train.min_sites or len(plan.sites), settings.train.deadline
    availability, last_message, n_failed_jobs = _SiteAvailability(sites, settings.comm.timeout_s), "", 0
    if any(job["plan"] == plan.digest and job["what"] == "work" for job in load_job_log(kit).values()):
        resume = resume or LAST

    def report_change(text: str) -> None:
        nonlocal last_message
        if text != last_message:
            watcher.print_message(f"  {text}", public=True)
        last_message = text

    while True:
        if deadline and date.today().isoformat() > deadline:
            raise WsiFlError(f"the plan was good until {deadline} (train.deadline); what was finished is kept")
        try:
            connected, trusted = jobs.list_connected(kit), kit.load_identity().root
        except WsiFlError as error:
            report_change(f"{error}; it is tried again")
            time.sleep(_LOOK_S)
            continue
        now_s = time.monotonic()
        availability.names = [
            site for site in sites if plan.keys.get(site, "") not in parse_revocation_list(trusted).keys
        ]
        if len(availability.names) < min_sites:
            check_revoked(plan, trusted, sites)
        availability.update_connected(connected, now_s)
        available = availability.available_sites()
        left_out = [name for name in plan.sites if name not in available]
        awaited = availability.return_delays()
        if availability.is_waiting(now_s) or len(available) < min_sites:
            report_change(f"waiting for {', '.join(awaited)}; {len(available)} of {len(plan.sites)} are there")
            time.sleep(_LOOK_S)
            continue
        report_change(f"{', '.join(left_out)} left out of this job" if left_out else f"all {len(available)} are there")
        try:
            return _run_job(kit, plan, available, _work_request(plan, resume, left_out), watcher, awaited=awaited)
        except jobs.SiteReconnected as reconnection:
            report_change(str(reconnection))
            n_failed_jobs = 0
        except jobs.JobFailed as failure:
            n_failed_jobs = 0 if failure.blamed else n_failed_jobs + 1
            if not failure.can_retry or n_failed_jobs >= _MAX_FAILED_JOBS:
                raise
            report_change(str(failure))
            availability.record_failures([name for name in failure.blamed if name in available], time.monotonic())
            if " withdrew " in str(failure):  # such a hospital is not asked again
                sites = [name for name in sites if name not in failure.blamed]
                if len(sites) < min_sites:
                    raise
            time.sleep(_LOOK_S)
        resume = LAST


class _KitCheck(TypedDict):
    """Each step of the check as JSON, the connected sites, the peers that each site reached, and the verdict."""

    steps: list[dict[str, object]]
    connected: list[str] | None
    peers: dict[str, dict[str, Any]] | None
    ok: bool


def check_kit(kit: Kit, plan: FederationPlan | None = None, *, folder: str | None = None) -> _KitCheck:
    """Check the connection of a kit; with the coordinator's and a plan, also between all hospitals.

    Over a folder its revocation list is taken first.

    Args:
        plan: the signed one; without it hospitals are not checked.
        folder: another address of the folder than the kit's.
    """
    steps = [vars(step) for step in _run_check_steps(kit, folder or kit.folder)]
    ok = all(step["ok"] for step in steps)
    document: _KitCheck = {"steps": steps, "connected": None, "peers": None, "ok": ok}
    if kit.role != "coordinator" or kit.folder is not None or not document["ok"]:
        return document
    document["connected"] = jobs.list_connected(kit)
    if plan is None:
        return document
    try:
        job: JobRequest = {"what": "check", "plan": plan.digest}
        replies = _run_job(kit, plan, plan.sites, job, SilentProgress())
        document["peers"] = {name: {key: reply[key] for key in ("peers", "seconds")} for name, reply in replies.items()}
        outcome = f"all {len(replies)} hospitals have this plan, version, code and time, and reach each other"
    except WsiFlError as error:
        outcome, document["ok"] = str(error), False
    steps.append({"what": "round trip", "ok": document["ok"], "said": outcome})
    return document


def _run_check_steps(kit: Kit, address: str | None) -> Iterator[CheckStep]:
    """Yield the steps of the connection check, and whether the folder of an address can be used, whose list counts."""
    news = sync_revocation_list(kit, address) if address else ""
    steps = list(check_connection(kit))
    yield from steps
    if address and all(step.ok for step in steps):
        yield _check_folder(SharedFolder(address), news)


def _check_folder(share: SharedFolder, news: str) -> CheckStep:
    try:
        share.check_address()
        share.probe_access()
    except UsageError as error:
        return CheckStep("folder", False, str(error))
    except Exception as error:  # each backend of fsspec has others
        return CheckStep("folder", False, f"the folder cannot be used: {share.address}: {single_line(error)}")
    message = f"{share.address} can be listed, written, read and deleted in"
    return CheckStep("folder", True, f"{message}{news and f'; {news}'}")


def load_status(kit: Kit) -> dict[str, Any]:
    """Return the hospitals that are connected and answer, and the newest jobs: {"connected": […], "jobs": […]}.

    A job is {"id", "name", "status", "submitted"}, and the kit's own fields of it, see `_JOB_FIELDS`. A "reason" is why
    it failed, also if the server still calls it running.
    """
    connected, job_log = jobs.list_connected(kit), load_job_log(kit)
    rows = jobs.list_jobs(kit, [number for number, entry in job_log.items() if entry["reason"]])
    for row in rows:
        number, job_fields = str(row["id"]), job_log.get(str(row["id"]), dict.fromkeys(_JOB_FIELDS))
        if row["reason"] and number in job_log and row["status"] != "DEAD":
            _log_end(kit, number, reason=row["reason"])
        row.update(job_fields | {"reason": row["reason"] or job_fields["reason"]})
    return {"connected": connected, "jobs": rows}


def _work_request(plan: FederationPlan, resume: str | None, without: Sequence[str]) -> JobRequest:
    return {"what": "work", "plan": plan.digest, "resume": resume, "without": list(without)}


def _run_job(
    kit: Kit,
    plan: FederationPlan,
    sites: list[str],
    job: JobRequest,
    watcher: Watcher,
    *,
    awaited: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Run a job at hospitals, record its outcome in the kit, and return each hospital's reply."""
    check_revoked(plan, kit.load_identity().root, sites)
    if reminder := kit.renewal_reminder():
        watcher.print_message(f"  {reminder}", public=True)
    # so that every hospital has the plan, for its standing approval, and the newest list
    job = job | {"text": plan.text, "withdrawn": kit.load_revocation_list().text}
    settings, connected = plan.pipeline(), jobs.list_connected(kit)
    if missing := [site for site in sites if site not in connected]:
        reason = (
            f"{', '.join(missing)} not connected; there: `wsi-fl federation start KIT --study DIR` "
            f"(connected: {', '.join(connected) or 'nobody'})"
        )
        raise (
            UsageError(reason) if settings.train.min_sites is None else jobs.JobFailed(reason, missing, can_retry=True)
        )
    numbers = []

    def note_submission(number: str) -> None:
        numbers.append(number)
        _log_submission(kit, number, plan, job, sites)
        watcher.print_message(f"  job {number}", public=True)

    try:
        replies = jobs.run_job(
            kit,
            sites,
            job,
            on_submit=note_submission,
            on_wait=lambda seconds: watcher.update("job", 0, 1, f"{seconds:.0f} s"),
            patience_s=settings.comm.timeout_s + HEARTBEAT_S,  # others wait so long for a letter
            awaited=awaited,
            list_revoked=lambda: [site for site in sites if plan.keys.get(site, "") in kit.load_revocation_list().keys],
        )
    except WsiFlError as error:
        for number in numbers:
            _log_end(kit, number, reason=str(error))
        raise
    _log_end(kit, numbers[0], run=replies[sites[0]].get("run"))
    return replies


def submission_lines(document: _SubmittedRun) -> Lines:
    """Report what each hospital spent, and where the result is."""
    for row in document["sites"]:
        yield TextLine(f"  {row['site']}: {row['rounds']} rounds, {describe_spending(row)}")
    for loss in document["losses"]:
        yield TextLine(f"  {loss['site']} was lost in round {loss['round']}: {loss['reason']}", "yellow")
    yield from (TextLine(f"  {note}", "yellow") for note in describe_absences(document["sites"]))
    yield TextLine(f"{document['run']} done in {document['seconds']:.0f} s; next: open {document['report']}")


def check_lines(document: _KitCheck) -> Lines:
    """Yield a line per step, and per site the peers that it reached."""
    for step in document["steps"]:
        yield TextLine(
            f"  {'ok    ' if step['ok'] else 'FAILED'}  {step['what']}: {step['said']}", "" if step["ok"] else "red"
        )
    if document["connected"] is not None:
        yield TextLine(f"  connected: {', '.join(document['connected']) or 'nobody'}")
    for site, reply in (document["peers"] or {}).items():
        yield TextLine(f"  {site} reached {', '.join(reply['peers'])} in {reply['seconds']:.1f} s")


def _format_time(submitted: Any) -> str:
    """Return the time at which the server took a job, in UTC, from its seconds."""
    try:
        return datetime.fromtimestamp(float(submitted), UTC).strftime("%Y-%m-%d %H:%M")
    except (TypeError, ValueError, OverflowError, OSError):
        return ""


def status_lines(document: dict[str, Any]) -> Lines:
    """Report the connected hospitals, and the newest jobs."""
    yield TextLine(f"connected: {', '.join(document['connected']) or 'nobody'}")
    rows: list[list[str] | None] = [
        [
            *(str(job["id"]), _format_time(job["submitted"]), str(job["what"] or job["name"])),
            *((job["plan"] or "")[:8], job["method"] or "", Path(job["run"] or "").name),
            str(job["status"]).lower(),
        ]
        for job in document["jobs"]
    ]
    yield TextTable("jobs", ["id", "submitted", "what", "plan", "method", "run", "status"], rows)
    for job in document["jobs"]:
        if job["reason"]:
            yield TextLine(f"  {str(job['id'])[:8]}: {job['reason']}", "yellow")


def _log_submission(kit: Kit, number: str, plan: FederationPlan, job: JobRequest, sites: list[str]) -> None:
    """Record by FLARE's id that a job was submitted."""
    line = {"id": number, "what": job["what"], "plan": plan.digest, "method": plan.method, "sites": sites}
    details = {"resume": job.get("resume"), "without": job.get("without", []), "asked": _current_time()}
    append_line(kit.path / _JOB_LOG, line | details)


def _log_end(kit: Kit, number: str, *, run: str | None = None, reason: str | None = None) -> None:
    """Record a job's outcome: its run, or the reason why it failed."""
    append_line(kit.path / _JOB_LOG, {"id": number, "run": run, "reason": reason, "ended": _current_time()})


def load_job_log(kit: Kit) -> dict[str, dict[str, Any]]:
    """Return the fields of each job in a kit's log by its id, oldest first, with all keys of `_JOB_FIELDS`."""
    job_log: dict[str, dict[str, Any]] = {}
    for line in read_lines(kit.path / _JOB_LOG, {"id": str}):
        job_fields = job_log.setdefault(line["id"], dict.fromkeys(_JOB_FIELDS))
        job_fields |= {key: line[key] for key in _JOB_FIELDS if key in line}
    return job_log


def _current_time() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
