"""The coordinator's side: starting a plan at all hospitals, and its results, releases and tallies alone.

A plan that can do without a hospital continues, job after job, until it is done. A job is for the hospitals that are
connected. When one times out or fails, the next job is for the others, from their checkpoints; when it is back, the
running job ends and the next one is for all of them.
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import cast

from wsi_fl.data.cross_site_counts import CrossSiteCounts
from wsi_fl.hospitals.faults import find_fault, mark_fault
from wsi_fl.hospitals.flare import jobs
from wsi_fl.hospitals.flare.flare_files import HEARTBEAT_S, JobRequest
from wsi_fl.hospitals.plans.signed_plan import FederationPlan, check_revoked
from wsi_fl.hospitals.trust.certificates import parse_revocation_list
from wsi_fl.hospitals.trust.kit import Kit
from wsi_fl.hospitals.work.client import LAST
from wsi_fl.hospitals.work.job_log import load_job_log, log_end, log_submission
from wsi_fl.hospitals.work.job_replies import Reply
from wsi_fl.hospitals.work.repeat import refuse_after, repeat_until_done
from wsi_fl.report.cross_site_section import render_coordinator
from wsi_fl.report.formatting import describe_absences
from wsi_fl.stages.runtime.console import Lines, SilentProgress, TextLine, Watcher
from wsi_fl.stages.site.privacy_account import describe_spending
from wsi_fl.stages.training.summary import Summary
from wsi_fl.system.files import read_object, write_json, write_text
from wsi_fl.types import UsageError, WsiFlError

_SUMMARY_FILE = "summary.json"
_LOOK_S = 5.0
_MAX_FAILURES = 3
"""Failures after which a connected hospital is left out until it was disconnected, or for its patience."""
_MAX_FAILED_JOBS = 10
"""Consecutive failures without a blamed hospital after which people have to look."""


class SubmittedRun(Summary):
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
) -> SubmittedRun:
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
    sites = plan.remaining_sites(without)
    watcher = watcher or SilentProgress()
    if plan.pipeline().train.min_sites is None:
        replies = run_plan_job(kit, plan, sites, _work_request(plan, resume, without), watcher)
    else:
        series = _PlanJobs(kit, plan, sites, resume, watcher)
        replies = repeat_until_done(series.submit_jobs, series.record_failure)
    scores = _require_same_scores({site: reply["scores"] for site, reply in replies.items()})
    summary = cast(Summary, {key: value for key, value in replies[next(iter(replies))].items() if key != "scores"})
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


class _PlanJobs:
    """The jobs of a plan that can do without a hospital, one after another.

    Args:
        sites: of the plan, without those that people exclude.
        resume: the run to resume at first; afterwards it is the last one.
    """

    def __init__(self, kit: Kit, plan: FederationPlan, sites: list[str], resume: str | None, watcher: Watcher) -> None:
        settings = plan.pipeline()
        self._kit, self._plan, self._sites, self._watcher = kit, plan, sites, watcher
        self._min_sites, self._deadline = settings.train.min_sites or len(plan.sites), settings.train.deadline
        self._availability = _SiteAvailability(sites, settings.comm.timeout_s)
        has_begun = any(job["plan"] == plan.digest and job["what"] == "work" for job in load_job_log(kit).values())
        self._resume = resume or LAST if has_begun else resume
        self._last_message, self._n_failed_jobs = "", 0

    def submit_jobs(self) -> dict[str, Reply] | None:
        """Run a job for the hospitals that are there, and return each one's reply; None if too few are there."""
        refuse_after(self._deadline)
        plan, availability = self._plan, self._availability
        try:
            connected, trusted = jobs.list_connected(self._kit), self._kit.load_identity().root
        except WsiFlError as error:
            self._report_change(f"{error}; it is tried again")
            time.sleep(_LOOK_S)
            return None
        now_s = time.monotonic()
        revoked_keys = parse_revocation_list(trusted).keys
        availability.names = [site for site in self._sites if plan.keys.get(site, "") not in revoked_keys]
        if len(availability.names) < self._min_sites:
            check_revoked(plan, trusted, self._sites)
        availability.update_connected(connected, now_s)
        available, awaited = availability.available_sites(), availability.return_delays()
        if availability.is_waiting(now_s) or len(available) < self._min_sites:
            n_there = f"{len(available)} of {len(plan.sites)} are there"
            self._report_change(f"waiting for {', '.join(awaited)}; {n_there}")
            time.sleep(_LOOK_S)
            return None
        left_out = [name for name in plan.sites if name not in available]
        news = f"{', '.join(left_out)} left out of this job" if left_out else f"all {len(available)} are there"
        self._report_change(news)
        job, self._resume = _work_request(plan, self._resume, left_out), LAST
        return run_plan_job(self._kit, plan, available, job, self._watcher, awaited=awaited)

    def record_failure(self, error: WsiFlError) -> None:
        """Record who made a job fail; raise the error if no further job can succeed."""
        self._n_failed_jobs += 1
        if isinstance(error, jobs.SiteReconnected):
            self._n_failed_jobs = 0
            self._report_change(str(error))
            return
        if not isinstance(error, jobs.JobFailed) or not error.can_retry:
            raise error
        if error.blamed:
            self._n_failed_jobs = 0
        if self._n_failed_jobs >= _MAX_FAILED_JOBS:
            raise error
        self._report_change(str(error))
        self._availability.record_failures(error.blamed, time.monotonic())
        if find_fault(error).code == "withdrew":  # such a hospital is not asked again
            self._sites = [name for name in self._sites if name not in error.blamed]
            if len(self._sites) < self._min_sites:
                raise error
        time.sleep(_LOOK_S)

    def _report_change(self, text: str) -> None:
        if text != self._last_message:
            self._watcher.print_message(f"  {text}", public=True)
        self._last_message = text


def _work_request(plan: FederationPlan, resume: str | None, without: Sequence[str]) -> JobRequest:
    return {"what": "work", "plan": plan.digest, "resume": resume, "without": list(without)}


def run_plan_job(
    kit: Kit,
    plan: FederationPlan,
    sites: list[str],
    job: JobRequest,
    watcher: Watcher,
    *,
    awaited: Mapping[str, float] | None = None,
) -> dict[str, Reply]:
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
        if settings.train.min_sites is None:
            raise mark_fault(UsageError(reason), "not_connected", missing[0])
        raise jobs.JobFailed(reason, missing, code="not_connected", can_retry=True)
    numbers = []

    def note_submission(number: str) -> None:
        numbers.append(number)
        log_submission(kit, number, plan, job, sites)
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
    except KeyboardInterrupt:
        raise _explain_interruption(numbers) from None
    except WsiFlError as error:
        for number in numbers:
            log_end(kit, number, reason=str(error), fault=find_fault(error))
        raise
    log_end(kit, numbers[0], run=replies[sites[0]].get("run"))
    return replies


def _explain_interruption(numbers: Sequence[str]) -> BaseException:
    """Return the error of Ctrl-C: a submitted job goes on at the hospitals."""
    if not numbers:
        return KeyboardInterrupt()
    return WsiFlError(
        f"interrupted; job {numbers[0]} goes on at the hospitals: `wsi-fl federation status` shows it, `wsi-fl "
        f"federation abort {numbers[0]}` ends it, and then `wsi-fl federation submit --resume last` goes on"
    )


def submission_lines(document: SubmittedRun) -> Lines:
    """Report what each hospital spent, and where the result is."""
    for row in document["sites"]:
        yield TextLine(f"  {row['site']}: {row['rounds']} rounds, {describe_spending(row)}")
    for loss in document["losses"]:
        yield TextLine(f"  {loss['site']} was lost in round {loss['round']}: {loss['reason']}", "yellow")
    yield from (TextLine(f"  {note}", "yellow") for note in describe_absences(document["sites"]))
    yield TextLine(f"{document['run']} done in {document['seconds']:.0f} s; next: open {document['report']}")
