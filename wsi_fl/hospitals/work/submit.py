"""The coordinator's side: asking all hospitals to begin, and what comes back, releases and tallies alone.

A plan that can do without a hospital goes on by itself, job after job, until it is done. A job is for the hospitals
that are there. When one falls silent or fails, the next job is for the others, from their checkpoints; when it is there
again, the job under way ends and the next one is for all of them.
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

from wsi_fl.hospitals.flare import jobs
from wsi_fl.hospitals.flare.files import HEARTBEAT_S, Job
from wsi_fl.hospitals.lines.share import Share
from wsi_fl.hospitals.plans.signed import Plan, check_withdrawn
from wsi_fl.hospitals.trust.certificates import withdrawn
from wsi_fl.hospitals.trust.kit import Kit, Step, look
from wsi_fl.hospitals.trust.root import exchange_list
from wsi_fl.hospitals.work.taking_part import LAST
from wsi_fl.learning.counts import Scores
from wsi_fl.report.between import render_coordinator
from wsi_fl.report.words import absences
from wsi_fl.stages.site.account import spent_words
from wsi_fl.stages.training.summary import Summary
from wsi_fl.stages.work.console import Line, Lines, Silent, Table, Watcher
from wsi_fl.system.files import append_line, read_lines, read_object, write_json, write_text
from wsi_fl.types import UsageError, WsiFlError, one_line

_SUMMARY = "summary.json"
_JOBS = "jobs.jsonl"
"""A line for what the coordinator asked the hospitals for, and one for what became of it, in the kit."""
_KNOWN = ("what", "plan", "method", "sites", "resume", "without", "asked", "run", "reason")
"""What is known of a job; "reason" is why it failed, "run" what came of it, and None stands for neither yet."""
_LOOK_S = 5.0
_TRIES = 3
"""Times that a hospital which is connected may fail before it is left out until it was away, or for its patience."""
_IN_VAIN = 10
"""Jobs in a row that fail and name nobody, before people have to look."""


class _Submitted(Summary):
    """The summary of a run, where it lies, and the page."""

    out: str
    report: str


def submit(
    kit: Kit,
    plan: Plan,
    *,
    out: Path | None = None,
    beside: Path = Path(),
    resume: str | None = None,
    without: Sequence[str] = (),
    watcher: Watcher | None = None,
) -> _Submitted:
    """Let the hospitals of a plan do it together, and keep the summary that all of them know.

    Args:
        kit: the coordinator's.
        out: a folder for `summary.json`, `report.html` and, where hospitals let counts go, `scores.json`; default: a
            new one in `beside` that is called after the run.
        beside: the folder of the plan.
        resume: the run to go on with, as the summary or the hospitals' folders name it.
        without: hospitals that were lost.

    Raises:
        UsageError: when hospitals of the plan are not connected, or `out` holds a result already.
        WsiFlError: with the reason of the first hospital that failed, or when two hospitals hold different scores.
    """
    if out is not None and (there := out / _SUMMARY).exists():
        before = read_object(there, "give another folder").get("run")
        raise UsageError(f"{out} holds the result of {before}; give another folder")
    if unknown := sorted(set(without) - set(plan.sites)):
        raise UsageError(f"unknown site {unknown[0]!r}; the plan has {', '.join(plan.sites)}")
    sites = [site for site in plan.sites if site not in without]
    watcher = watcher or Silent()
    if plan.pipeline().train.min_sites is None:
        said = _run(kit, plan, sites, _work(plan, resume, without), watcher)
    else:
        said = _until_done(kit, plan, sites, resume, watcher)
    scores = _same_scores({site: one.pop("scores", None) for site, one in said.items()})
    summary: Summary = next(iter(said.values()))
    if out is None:  # hospitals gave the run its name
        name = "result-" + re.sub(r"[^\w.-]", "_", Path(summary["run"]).name)
        tried = (beside / f"{name}{'' if n == 1 else f'-{n}'}" for n in count(1))
        out = next(folder for folder in tried if not folder.exists())
    page = out / "report.html"
    write_json(out / _SUMMARY, summary)
    if scores is not None:
        write_json(out / "scores.json", scores)
    write_text(page, render_coordinator(summary, scores))
    return {**summary, "out": str(out), "report": str(page)}


def _same_scores(held: Mapping[str, Scores | None]) -> Scores | None:
    """The counts that all hospitals hold alike."""
    first = next(iter(held))
    if other := [site for site, scores in held.items() if scores != held[first]]:
        raise WsiFlError(
            f"{first} and {other[0]} hold different scores of this run, so no page was made; each hospital's "
            "scores.json lies in its own run"
        )
    return held[first]


@dataclass
class _Absences:
    """Which hospitals a job may be for, from when each was seen or failed last, in seconds of one clock.

    Args:
        names: of the hospitals, those left out by people aside.
        patience_s: how long one that is not there is waited for.
    """

    names: Sequence[str]
    patience_s: float
    since: dict[str, float] = field(default_factory=dict)
    """Hospital → when it was first missed."""
    failures: dict[str, list[float]] = field(default_factory=dict)
    """Hospital → when it failed, since it was away or forgiven last."""

    def see(self, here: Sequence[str], now: float) -> None:
        """Note who is connected now; who was away, or given up for as long as the patience, begins afresh."""
        self.since = {name: self.since.get(name, now) for name in self.names if name not in here}
        for name, failed in list(self.failures.items()):
            if len(failed) >= _TRIES and (name in self.since or now - failed[-1] >= self.patience_s):
                del self.failures[name]

    def blame(self, names: Sequence[str], now: float) -> None:
        """Note who made a job fail; who does so again and again is left out for a while."""
        for name in names:
            self.failures.setdefault(name, []).append(now)

    def there(self) -> list[str]:
        """Return the hospitals that a job can be for."""
        given_up = {name for name, failed in self.failures.items() if len(failed) >= _TRIES}
        return [name for name in self.names if name not in self.since and name not in given_up]

    def wanted(self) -> dict[str, float]:
        """Return each of the others, and how long it is to be there before a job ends so that it can take part."""
        there = self.there()
        return {
            name: 0.0 if name in self.since else self.patience_s for name in self.names if name not in there
        }

    def awaited(self, now: float) -> bool:
        """Return whether any is missed, and not yet for as long as the plan's patience."""
        return any(now - since < self.patience_s for since in self.since.values())


def _until_done(
    kit: Kit, plan: Plan, sites: list[str], resume: str | None, watcher: Watcher
) -> dict[str, Any]:
    """Ask hospitals for a plan's job until one ends well, and return what each of them said.

    Args:
        sites: of the plan, without those that people leave out.
        resume: the run to go on with at first; afterwards it is the last one.

    Raises:
        WsiFlError: when the plan's day is over, or a job failed for a reason that no other job mends.
    """
    settings = plan.pipeline()
    least, until = settings.train.min_sites or len(plan.sites), settings.train.deadline
    missing, said, in_vain = _Absences(sites, settings.comm.timeout_s), "", 0
    if any(one["plan"] == plan.digest and one["what"] == "work" for one in asked_for(kit).values()):
        resume = resume or LAST

    def tell(text: str) -> None:
        nonlocal said
        if text != said:
            watcher.say(f"  {text}", public=True)
        said = text

    while True:
        if until and date.today().isoformat() > until:
            raise WsiFlError(f"the plan was good until {until} (train.deadline); what was finished is kept")
        try:
            here, trusted = jobs.connected(kit), kit.identity().root
        except WsiFlError as error:
            tell(f"{error}; it is tried again")
            time.sleep(_LOOK_S)
            continue
        now = time.monotonic()
        missing.names = [site for site in sites if plan.keys.get(site, "") not in withdrawn(trusted).keys]
        if len(missing.names) < least:
            check_withdrawn(plan, trusted, sites)
        missing.see(here, now)
        there = missing.there()
        left_out = [name for name in plan.sites if name not in there]
        awaited = missing.wanted()
        if missing.awaited(now) or len(there) < least:
            tell(f"waiting for {', '.join(awaited)}; {len(there)} of {len(plan.sites)} are there")
            time.sleep(_LOOK_S)
            continue
        tell(f"{', '.join(left_out)} left out of this job" if left_out else f"all {len(there)} are there")
        try:
            return _run(kit, plan, there, _work(plan, resume, left_out), watcher, awaited=awaited)
        except jobs.SiteBack as back:
            tell(str(back))
            in_vain = 0
        except jobs.JobFailed as failed:
            in_vain = 0 if failed.blamed else in_vain + 1
            if not failed.again or in_vain >= _IN_VAIN:
                raise
            tell(str(failed))
            missing.blame([name for name in failed.blamed if name in there], time.monotonic())
            if " withdrew " in str(failed):  # who does so is asked no more
                sites = [name for name in sites if name not in failed.blamed]
                if len(sites) < least:
                    raise
            time.sleep(_LOOK_S)
        resume = LAST


class _Checked(TypedDict):
    """Each `Step` as JSON, who is connected, whom each site reached, and whether all is well."""

    steps: list[dict[str, object]]
    connected: list[str] | None
    peers: dict[str, dict[str, Any]] | None
    ok: bool


def check(kit: Kit, plan: Plan | None = None, *, folder: str | None = None) -> _Checked:
    """Look whether a kit gets through; the coordinator's lets all hospitals of a plan go to see each other as well.

    Over a folder the list of withdrawn certificates is taken from it first.

    Args:
        plan: the signed one; without it nobody is sent anywhere.
        folder: another address of the folder than the kit's.
    """
    steps = [vars(step) for step in _looked(kit, folder or kit.folder)]
    ok = all(step["ok"] for step in steps)
    document: _Checked = {"steps": steps, "connected": None, "peers": None, "ok": ok}
    if kit.role != "coordinator" or kit.folder is not None or not document["ok"]:
        return document
    document["connected"] = jobs.connected(kit)
    if plan is None:
        return document
    try:
        job: Job = {"what": "check", "plan": plan.digest}
        said = _run(kit, plan, plan.sites, job, Silent())
        document["peers"] = {
            name: {key: one[key] for key in ("peers", "seconds")} for name, one in said.items()
        }
        found = f"all {len(said)} hospitals have this plan, version, code and time, and reach each other"
    except WsiFlError as error:
        found, document["ok"] = str(error), False
    steps.append({"what": "round trip", "ok": document["ok"], "said": found})
    return document


def _looked(kit: Kit, address: str | None) -> Iterator[Step]:
    """What `look` finds, and whether the folder of an address can be used, whose list counts."""
    news = exchange_list(kit, address) if address else ""
    found = list(look(kit))
    yield from found
    if address and all(step.ok for step in found):
        yield _folder_step(Share(address), news)


def _folder_step(share: Share, news: str) -> Step:
    try:
        share.check()
        share.probe()
    except UsageError as error:
        return Step("folder", False, str(error))
    except Exception as error:  # each backend of fsspec has others
        return Step("folder", False, f"the folder cannot be used: {share.address}: {one_line(error)}")
    said = f"{share.address} can be listed, written, read and deleted in"
    return Step("folder", True, f"{said}{news and f'; {news}'}")


def status(kit: Kit) -> dict[str, Any]:
    """Return who is connected to the server and answers, and the newest jobs: {"connected": […], "jobs": […]}.

    A job is {"id", "name", "status", "submitted"}, and what is known of it here, see `_KNOWN`. A "reason" is why it
    failed, also where the server still calls it running.
    """
    here, known = jobs.connected(kit), asked_for(kit)
    rows = jobs.jobs(kit, [number for number, one in known.items() if one["reason"]])
    for row in rows:
        number, of_job = str(row["id"]), known.get(str(row["id"]), dict.fromkeys(_KNOWN))
        if row["reason"] and number in known and row["status"] != "DEAD":
            _note_ended(kit, number, reason=row["reason"])
        row.update(of_job | {"reason": row["reason"] or of_job["reason"]})
    return {"connected": here, "jobs": rows}


def _work(plan: Plan, resume: str | None, without: Sequence[str]) -> Job:
    return {"what": "work", "plan": plan.digest, "resume": resume, "without": list(without)}


def _run(
    kit: Kit,
    plan: Plan,
    sites: list[str],
    job: Job,
    watcher: Watcher,
    *,
    awaited: Mapping[str, float] | None = None,
) -> dict[str, Any]:
    """Let hospitals do a job, note in the kit what becomes of it, and return what each of them said."""
    check_withdrawn(plan, kit.identity().root, sites)
    if reminder := kit.reminder():
        watcher.say(f"  {reminder}", public=True)
    # so that every hospital has the plan, which may lie in its frame, and the newest list
    job = job | {"text": plan.text, "withdrawn": kit.withdrawn().text}
    settings, here = plan.pipeline(), jobs.connected(kit)
    if missing := [site for site in sites if site not in here]:
        why = (
            f"{', '.join(missing)} not connected; there: `wsi-fl federation start KIT --study DIR` "
            f"(connected: {', '.join(here) or 'nobody'})"
        )
        raise (
            UsageError(why) if settings.train.min_sites is None else jobs.JobFailed(why, missing, again=True)
        )
    numbers = []

    def told(number: str) -> None:
        numbers.append(number)
        _note_asked(kit, number, plan, job, sites)
        watcher.say(f"  job {number}", public=True)

    try:
        said = jobs.run_job(
            kit,
            sites,
            job,
            told=told,
            waiting=lambda seconds: watcher.update("job", 0, 1, f"{seconds:.0f} s"),
            patience_s=settings.comm.timeout_s + HEARTBEAT_S,  # others wait so long for a letter
            awaited=awaited,
            withdrawn=lambda: [site for site in sites if plan.keys.get(site, "") in kit.withdrawn().keys],
        )
    except WsiFlError as error:
        for number in numbers:
            _note_ended(kit, number, reason=str(error))
        raise
    _note_ended(kit, numbers[0], run=said[sites[0]].get("run"))
    return said


def submitted_lines(document: _Submitted) -> Lines:
    """Say what each hospital spent, and where the result lies."""
    for row in document["sites"]:
        yield Line(f"  {row['site']}: {row['rounds']} rounds, {spent_words(row)}")
    for loss in document["losses"]:
        yield Line(f"  {loss['site']} was lost in round {loss['round']}: {loss['reason']}", "yellow")
    yield from (Line(f"  {said}", "yellow") for said in absences(document["sites"]))
    yield Line(f"{document['run']} done in {document['seconds']:.0f} s; next: open {document['report']}")


def check_lines(document: _Checked) -> Lines:
    """Yield a line per step, and who reaches whom."""
    for step in document["steps"]:
        yield Line(
            f"  {'ok    ' if step['ok'] else 'FAILED'}  {step['what']}: {step['said']}",
            "" if step["ok"] else "red",
        )
    if document["connected"] is not None:
        yield Line(f"  connected: {', '.join(document['connected']) or 'nobody'}")
    for site, one in (document["peers"] or {}).items():
        yield Line(f"  {site} reached {', '.join(one['peers'])} in {one['seconds']:.1f} s")


def _when(submitted: Any) -> str:
    """The time at which the server took a job, in UTC; it tells seconds."""
    try:
        return datetime.fromtimestamp(float(submitted), UTC).strftime("%Y-%m-%d %H:%M")
    except (TypeError, ValueError, OverflowError, OSError):
        return ""


def status_lines(document: dict[str, Any]) -> Lines:
    """Say who is connected, and the newest jobs."""
    yield Line(f"connected: {', '.join(document['connected']) or 'nobody'}")
    rows: list[list[str] | None] = [
        [
            *(str(job["id"]), _when(job["submitted"]), str(job["what"] or job["name"])),
            *((job["plan"] or "")[:8], job["method"] or "", Path(job["run"] or "").name),
            str(job["status"]).lower(),
        ]
        for job in document["jobs"]
    ]
    yield Table("jobs", ["id", "submitted", "what", "plan", "method", "run", "status"], rows)
    for job in document["jobs"]:
        if job["reason"]:
            yield Line(f"  {str(job['id'])[:8]}: {job['reason']}", "yellow")


def _note_asked(kit: Kit, number: str, plan: Plan, job: Job, sites: list[str]) -> None:
    """Note by FLARE's number of it that hospitals were asked for a job."""
    line = {"id": number, "what": job["what"], "plan": plan.digest, "method": plan.method, "sites": sites}
    rest = {"resume": job.get("resume"), "without": job.get("without", []), "asked": _now()}
    append_line(kit.path / _JOBS, line | rest)


def _note_ended(kit: Kit, number: str, *, run: str | None = None, reason: str | None = None) -> None:
    """Note what became of a job: its run, or the reason why it failed."""
    append_line(kit.path / _JOBS, {"id": number, "run": run, "reason": reason, "ended": _now()})


def asked_for(kit: Kit) -> dict[str, dict[str, Any]]:
    """Return what a kit knows of each job by its id, oldest first, with all keys of `_KNOWN`."""
    found: dict[str, dict[str, Any]] = {}
    for line in read_lines(kit.path / _JOBS, {"id": str}):
        of_job = found.setdefault(line["id"], dict.fromkeys(_KNOWN))
        of_job |= {key: line[key] for key in _KNOWN if key in line}
    return found


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
