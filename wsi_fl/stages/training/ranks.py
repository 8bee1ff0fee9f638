"""The work of a rank in a training job: preflight, the loop, and its part of the summary."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from wsi_fl.federation import loop, preflight
from wsi_fl.federation.comm import Comm, MpiComm
from wsi_fl.federation.cross_site_evaluation import CrossSiteScoring
from wsi_fl.federation.site import Site
from wsi_fl.report.words import SCORES
from wsi_fl.runs.run import RunFolder
from wsi_fl.runs.site import hold_alone, note
from wsi_fl.stages.site.account import group_of
from wsi_fl.stages.site.party import RunContext
from wsi_fl.stages.training import launch
from wsi_fl.stages.training.carrying import carry
from wsi_fl.stages.training.checks import check_budgets
from wsi_fl.stages.training.going_on import Asked, which_run
from wsi_fl.stages.training.launch import naming_resume
from wsi_fl.stages.training.summary import Summary, SummaryRow, row_of, summary_of
from wsi_fl.stages.training.workshop import (
    brought,
    build_site,
    leaving_words,
    remember,
    require_signed_model,
    schedule_of,
)
from wsi_fl.stages.work.console import Discreet, Events, Quiet, Silent, Watcher, emit, reason_of
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.toml import dump_toml
from wsi_fl.types import Interrupted, KnownToAll, NoCommonPlan, UsageError, WsiFlError


def work_as_rank(study: Study, run: RunFolder, comm: Comm, watcher: Watcher) -> Summary:
    """Run the part of a run for the sites of `comm`; all ranks return the same summary."""
    began = time.perf_counter()
    run.refuse_changed_settings()
    names = RunContext.of_run(study.as_of(run.path), run).names
    for index in comm.sites:
        run.site(names[index]).remember_site(dump_toml(study.site(names[index])))
    with RunContext.of_run(study.as_of(run.path), run) as asked:
        party = carry(asked, comm)
        rows = _train(party, comm, watcher)
    summary = summary_of(party, rows, time.perf_counter() - began)
    if comm.running[0] in comm.sites or not (run.path / "summary.json").exists():
        run.write("summary", summary)
    return summary


def _train(party: RunContext, comm: Comm, watcher: Watcher) -> list[SummaryRow]:
    """Run preflight and loop; return the rows of all sites."""
    sites = [build_site(party, index) for index in comm.sites]
    for site in sites:
        data = party.data(site.name)
        site.folder.remember_store(data.digest(), data.facts())
        require_signed_model(site, party)
    bringing = [brought(site, party) for site in sites]
    for site, document in zip(sites, bringing, strict=True):
        _note_preflight(party, site.name, document)
    documents = comm.gather(bringing, preflight.Brought)
    preflight.compare(documents)  # after the statistics were synchronised
    digests = {name: one.digest for name, one in party.releases.items()}
    for site in sites if digests else ():
        site.folder.remember_released(digests)
    limits = {site.name: site.ledger.terms.max_epsilon for site in sites}
    warning = check_budgets(documents, limits, party.pipeline.train.rounds)
    if warning and comm.running[0] in comm.sites:
        watcher.say(f"  {warning}", public=True)
    method = party.method
    with ExitStack() as stack:
        for site in sites:  # one job per run: two would send two noisy versions of a round
            stack.enter_context(hold_alone(site.folder.path))
        for site in sites:
            told = zip(comm.running, documents, strict=True)
            site.announced = {index: (one["units"], one["sigma"]) for index, one in told}
            remember(site)
            if said := leaving_words(site, method):
                watcher.say(f"  {said}")
                site.folder.log(said)
        for share in method.shares_at("before"):
            share.stage().bring_generated(party, sites, comm, watcher)
        report, schedule = _reporter(sites, party.pipeline, watcher), schedule_of(party)
        rounds = schedule.rounds
        loop.run(sites, method, schedule, comm, report)
        CrossSiteScoring(  # of exchanged models, where test sets stay at their hospitals
            sites,
            method,
            comm,
            party.names,
            classes=tuple(party.data(sites[0].name).classes),
            rounds=rounds,
            masked=schedule.colluding is not None,
            apart=not party.may_merge,
            reporting_sites=[site.index for site in sites if party.tells_scores(site.name)],
            alive=lambda site: report({"site": site.name, "round": rounds, "step": 1, "steps": 1}),
        ).run()
        for share in method.shares_at("after"):
            share.stage().hand_over_models(party, sites, comm)
    rows = comm.gather([row_of(site) for site in sites], SummaryRow, patient=True)
    for site in sites:
        site.folder.write_account(site.ledger.summary() | {"group": group_of(site)})
    return rows


def _note_preflight(party: RunContext, name: str, document: preflight.Brought) -> None:
    """Log the preflight document that a real hospital will disclose, with its receivers, run and plan."""
    if not party.site(name).real:
        return
    others = ", ".join(other for other in party.names if other != name) or "nobody"
    plan = f" of plan {party.run.agreement}" if party.run.agreement else ""
    told = json.dumps(document, ensure_ascii=False, sort_keys=True)
    note(
        party.study.runs / f"{name}.log",
        f"preflight of {party.run.identity}{plan}: disclosed to {others}: {told}",
    )


def rank_main(run_path: Path) -> None:
    """Run the process of a rank: errors become a single event, and end all ranks."""
    run = RunFolder(run_path)
    study = Study(run_path.parent.parent)
    party = RunContext.of_run(study.as_of(run.path), run)
    names, pipeline = party.names, party.pipeline
    owner = int(os.environ[launch.LAUNCHER]) if launch.LAUNCHER in os.environ else None

    def speak_up() -> None:
        events.check_owner()
        emit({"site": me})

    comm = MpiComm(
        pipeline.comm.timeout_s,
        party.running_here,
        len(names),
        tuple(names),
        waiting=speak_up,
        late=lambda sites: emit({"site": me, "late": [names[k] for k in sites]}),
    )
    me = names[comm.sites[0]]
    events = Discreet(run.site(me).log, owner) if study.site(me).real else Events(owner)
    emit({"site": me, "pid": os.getpid(), "host": socket.gethostname()})

    def tell(text: str, usage: bool) -> None:
        emit({"error": text, "usage": usage})
        if not study.site(me).real:
            traceback.print_exc()  # into mpi.log

    def work(run: RunFolder) -> Summary:
        with naming_resume(study, run):
            return work_as_rank(study, run, comm, events)

    _guarded(comm, study, me, lambda: run, work, tell)


def _guarded(
    comm: Comm,
    study: Study,
    me: str,
    run_of: Callable[[], RunFolder],
    work: Callable[[RunFolder], Summary],
    tell: Callable[[str, bool], None],
) -> Summary:
    """Do the work of a rank; a failure is reported in one line and ends all ranks, which would wait in vain.

    A real hospital discloses no reason, as it may name slides, and they patients.
    """
    run, real = None, study.site(me).real
    try:
        with warnings.catch_warnings():
            if real:  # warnings name local files, and others see standard error
                warnings.showwarning = partial(_note_warning, study.runs / f"{me}.log")
            run = run_of()
            return work(run)
    except Interrupted:  # no failure here: the caller begins again
        raise
    except BaseException as error:
        told = not real or isinstance(error, KnownToAll)  # otherwise not even the kind of failure
        kind = UsageError if told and isinstance(error, UsageError) else WsiFlError
        text = reason_of(error, study.runs)
        if real:
            begun = run is not None and run.site(me).checkpoints()  # otherwise its folder will be removed
            log = run.site(me).log_path if run and begun else study.runs / f"{me}.log"
            with suppress(OSError):
                note(log, f"{text}\n{traceback.format_exc()}")
            if not told:
                text = f"site {me} failed; its own log says why ({study.relative(log)})"
        with suppress(OSError):  # the reader has ended
            tell(text, kind is UsageError)
            sys.stderr.flush()
        comm.abort(2 if kind is UsageError else 1)
        if real:  # its text is for others
            kind = NoCommonPlan if kind is UsageError else KnownToAll
        raise kind(text) from None


def _note_warning(log: Path, message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    with suppress(OSError):  # a warning ends no run
        note(log, f"{category.__name__}: {message}")


def join(party: RunContext, asked: Asked) -> Summary:
    """Run as one of the ranks that mpiexec or srun started; all return the summary."""
    running, names = party.running, party.names
    launch.share_threads()
    comm = MpiComm(party.pipeline.comm.timeout_s, running, len(names), tuple(names))
    return take_part(party, comm, asked)


def take_part(party: RunContext, comm: Comm, asked: Asked) -> Summary:
    """Run as the process of a site, over any transport; return the summary.

    The sites agree on the run (`which_run`). A failure is reported in one line and ends the job everywhere.
    """
    study, me = party.study, party.names[comm.sites[0]]

    def tell(text: str, _: bool) -> None:
        print(f"wsi-fl: error: {text}", file=sys.stderr)

    def work(run: RunFolder) -> Summary:
        watcher = Quiet(run.site(me).log) if study.site(me).real else Silent()
        return work_as_rank(study, run, comm, watcher)

    return _guarded(comm, study, me, lambda: which_run(party, asked, comm), work, tell)


def _reporter(sites: Sequence[Site], pipeline: Pipeline, watcher: Watcher) -> loop._Report:
    folders = {site.name: site.folder for site in sites}
    rounds, task = pipeline.train.rounds, sites[0].train.task

    def report(event: dict[str, Any]) -> None:
        done = event.get("done")
        if done is None:
            part = event["step"] / max(1, event["steps"])
            watcher.update(event["site"], event["round"] - 1 + part, rounds, f"round {event['round']}")
            return
        scores = done.get("merged") or done.get("own") or {}
        reached = next(((name, scores[name]) for name in task.scores if scores.get(name) is not None), None)
        note = f"{SCORES[reached[0]].lower()} {reached[1]:.3f}" if reached else ""
        if done["epsilon"] is not None:
            note += f" ε {done['epsilon']:.2f}"
        watcher.update(event["site"], event["round"], rounds, note.strip())
        losses = ", ".join(f"{role} {value:.4f}" for role, value in done["loss"].items() if value is not None)
        folders[event["site"]].log(f"round {event['round']}/{rounds}: loss {losses}; {note}")

    return report
