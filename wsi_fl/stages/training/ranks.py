"""The work of a rank in a training job: preflight, the loop, and its part of the summary."""

from __future__ import annotations

import json
import os
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

from wsi_fl.federation import loop, preflight
from wsi_fl.federation.comm import Comm, MpiComm
from wsi_fl.federation.cross_site_evaluation import CrossSiteScoring
from wsi_fl.federation.site_state import Site
from wsi_fl.report.formatting import score_in_sentence
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.runs.site_folder import append_note, hold_site_lock
from wsi_fl.stages.runtime.console import JsonEvents, SilentProgress, Watcher, describe_failure, emit_event
from wsi_fl.stages.site.privacy_account import compute_group
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.training import launch
from wsi_fl.stages.training.build_sites import build_recipe, build_site
from wsi_fl.stages.training.checks import check_budgets
from wsi_fl.stages.training.launch import hint_resume
from wsi_fl.stages.training.resume import RunRequest, record_site_files, select_run
from wsi_fl.stages.training.site_preflight import (
    build_preflight,
    describe_disclosures,
    require_signed_model,
    store_decisions,
)
from wsi_fl.stages.training.summary import Summary, SummaryRow, build_row, build_summary
from wsi_fl.stages.training.unfinished_runs import claim_common_run
from wsi_fl.study.folder import Study, load_run_pipeline
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site_file import SiteFile
from wsi_fl.system.denormals import flush_denormals
from wsi_fl.types import Interrupted, NoCommonPlan, ReportableError, SiteFailed, UsageError, WsiFlError


def work_as_rank(study: Study, run: RunFolder, comm: Comm, watcher: Watcher) -> Summary:
    """Run the part of a run for the sites of `comm`; all ranks return the same summary."""
    start, study = time.perf_counter(), study.freeze_sites()
    run.refuse_changed_settings()
    names = load_run_pipeline(run.path / "config.toml").sites or []
    record_site_files(study, run, [names[index] for index in comm.sites])
    with flush_denormals(), RunContext.restore(study.pin_run(run.path), run) as initial_context:
        context = initial_context.hooks.sync_releases(initial_context, comm)
        rows = _train_sites(context, comm, watcher)
    summary = build_summary(context, rows, time.perf_counter() - start)
    if comm.running[0] in comm.sites or not (run.path / "summary.json").exists():
        run.write("summary", summary)
    return summary


def _train_sites(context: RunContext, comm: Comm, watcher: Watcher) -> list[SummaryRow]:
    """Run preflight and loop; return the rows of all sites."""
    sites = [build_site(context, index) for index in comm.sites]
    _run_preflight(context, sites, comm, watcher)
    method = context.method
    with ExitStack() as stack:
        for site in sites:  # one job per run: two would send two noisy versions of a round
            stack.enter_context(hold_site_lock(site.folder.path))
        for site in sites:
            store_decisions(site)
            if notice := describe_disclosures(site, method):
                watcher.print_message(f"  {notice}")
                site.folder.log(notice)
        context.hooks.prepare_rounds(context, sites, comm, watcher)
        report, recipe = _make_reporter(sites, context.pipeline, watcher), build_recipe(context)
        loop.run(sites, recipe, comm, report)
        CrossSiteScoring(  # of exchanged models, where test sets stay at their hospitals
            sites,
            method,
            comm,
            context.names,
            classes=tuple(context.open_data(sites[0].name).classes),
            rounds=recipe.rounds,
            masked=recipe.colluding is not None,
            is_isolated=not context.may_merge,
            reporting_sites=[site.index for site in sites if context.reports_scores(site.name)],
            report_alive=lambda site: report({"site": site.name, "round": recipe.rounds, "step": 1, "steps": 1}),
        ).run()
        context.hooks.finish_rounds(context, sites, comm)
    rows = comm.gather([build_row(site) for site in sites], SummaryRow, patient=True)
    for site in sites:
        site.folder.write_document("ledger", site.ledger.summary() | {"group": compute_group(site)})
    return rows


def _run_preflight(context: RunContext, sites: Sequence[Site], comm: Comm, watcher: Watcher) -> None:
    """Record what the sites begin with, compare their settings with all others', and note their numbers of units."""
    for site in sites:
        data = context.open_data(site.name)
        site.folder.record_store(data.digest(), data.describe_store())
        require_signed_model(site, context)
    local_documents = [build_preflight(site, context) for site in sites]
    for site, document in zip(sites, local_documents, strict=True):
        _note_preflight(context, site.name, document)
    documents = comm.gather(local_documents, preflight.PreflightDocument)
    preflight.compare_sites(documents)  # after the statistics were synchronised
    digests = {name: statistics.digest for name, statistics in context.statistics.items()}
    for site in sites:
        if digests:
            site.folder.record_statistics_digests(digests)
        site.announced_units = {
            index: (document["units"], document["sigma"])
            for index, document in zip(comm.running, documents, strict=True)
        }
    limits = {site.name: site.ledger.terms.max_epsilon for site in sites}
    warning = check_budgets(documents, limits, context.pipeline.train.rounds)
    if warning and comm.running[0] in comm.sites:
        watcher.print_message(f"  {warning}", public=True)


def _note_preflight(context: RunContext, name: str, document: preflight.PreflightDocument) -> None:
    """Log the preflight document that a real hospital will disclose, with its receivers, run and plan."""
    if not context.find_site(name).real:
        return
    others = ", ".join(other for other in context.names if other != name) or "nobody"
    plan = f" of plan {context.run.agreement_digest}" if context.run.agreement_digest else ""
    text = json.dumps(document, ensure_ascii=False, sort_keys=True)
    append_note(
        context.study.runs_path / f"{name}.log",
        f"preflight of {context.run.identity}{plan}: disclosed to {others}: {text}",
    )


def run_rank(run_path: Path) -> None:
    """Run the process of a rank: errors become a single event, and end all ranks."""
    run = RunFolder(run_path)
    study = Study(run_path.parent.parent).freeze_sites()
    context = RunContext.restore(study.pin_run(run.path), run)
    names, pipeline = context.names, context.pipeline
    owner = int(os.environ[launch.LAUNCHER]) if launch.LAUNCHER in os.environ else None

    def report_alive() -> None:
        events.check_owner()
        emit_event({"site": site.name})

    comm = MpiComm(
        pipeline.comm.timeout_s,
        context.running_locally,
        len(names),
        tuple(names),
        report_waiting=report_alive,
        report_late=lambda sites: emit_event({"site": site.name, "late": [names[k] for k in sites]}),
    )
    site = context.sites[comm.sites[0]]
    events = JsonEvents(owner, run.site_folder(site.name).log if site.real else None)
    emit_event({"site": site.name, "pid": os.getpid(), "host": socket.gethostname()})

    def report_error(text: str, usage: bool) -> None:
        emit_event({"error": text, "usage": usage})
        if not site.real:
            traceback.print_exc()  # into mpi.log

    def run_work(run: RunFolder) -> Summary:
        with hint_resume(study, run):
            return work_as_rank(study, run, comm, events)

    _run_guarded(comm, study, site, lambda: run, run_work, report_error)


def _run_guarded(
    comm: Comm,
    study: Study,
    site: SiteFile,
    find_run: Callable[[], RunFolder],
    work: Callable[[RunFolder], Summary],
    report_error: Callable[[str, bool], None],
) -> Summary:
    """Do the work of a rank; a failure is reported in one line and ends all ranks, which would wait in vain.

    A real hospital discloses no reason, as it may name slides, and they patients.
    """
    run, real = None, site.real
    try:
        with warnings.catch_warnings():
            if real:  # warnings name local files, and others see standard error
                warnings.showwarning = partial(_note_warning, study.runs_path / f"{site.name}.log")
            run = find_run()
            return work(run)
    except Interrupted:  # no failure here: the caller begins again
        raise
    except BaseException as error:
        is_public = not real or isinstance(error, ReportableError)  # otherwise not even the kind of failure
        kind = UsageError if is_public and isinstance(error, UsageError) else WsiFlError
        text = describe_failure(error, study.runs_path)
        if real:
            begun = (
                run is not None and run.site_folder(site.name).list_checkpoints()
            )  # otherwise its folder will be removed
            log = run.site_folder(site.name).log_path if run and begun else study.runs_path / f"{site.name}.log"
            with suppress(OSError):
                append_note(log, f"{text}\n{traceback.format_exc()}")
            if not is_public:
                text = f"site {site.name} failed; its own log says why ({study.relative_path(log)})"
        with suppress(OSError):  # the reader has ended
            report_error(text, kind is UsageError)
            sys.stderr.flush()
        comm.abort(2 if kind is UsageError else 1)
        if real:  # its text is for others
            kind = NoCommonPlan if kind is UsageError else ReportableError if is_public else SiteFailed
        raise kind(text) from None


def _note_warning(log: Path, message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    with suppress(OSError):  # a warning ends no run
        append_note(log, f"{category.__name__}: {message}")


def run_launched_rank(context: RunContext, request: RunRequest) -> Summary:
    """Run as one of the ranks that mpiexec or srun started; all return the summary."""
    running, names = context.running, context.names
    launch.share_threads()
    comm = MpiComm(context.pipeline.comm.timeout_s, running, len(names), tuple(names))
    return take_part(context, comm, request, claim_common_run)


def take_part(
    context: RunContext,
    comm: Comm,
    request: RunRequest,
    claim: Callable[[RunContext, RunRequest, Comm], AbstractContextManager[RunFolder]] | None = None,
) -> Summary:
    """Run as the process of a site, over any transport; return the summary.

    The sites agree on the run, by default as `select_run` does. A failure is reported in one line and ends the job
    everywhere.
    """
    study, site = context.study, context.sites[comm.sites[0]]

    def report_error(text: str, _: bool) -> None:
        print(f"wsi-fl: error: {text}", file=sys.stderr)

    def run_work(run: RunFolder) -> Summary:
        log = run.site_folder(site.name).log if site.real else None
        return work_as_rank(study, run, comm, SilentProgress(log))

    with ExitStack() as stack:

        def find_run() -> RunFolder:
            if claim is None:
                return select_run(context, request, comm)
            return stack.enter_context(claim(context, request, comm))

        return _run_guarded(comm, study, site, find_run, run_work, report_error)


def _make_reporter(sites: Sequence[Site], pipeline: Pipeline, watcher: Watcher) -> loop._Report:
    folders = {site.name: site.folder for site in sites}
    rounds, task = pipeline.train.rounds, sites[0].train.task

    def report_event(event: Mapping[str, Any]) -> None:
        done = event.get("done")
        if done is None:
            part = event["step"] / max(1, event["steps"])
            watcher.update(event["site"], event["round"] - 1 + part, rounds, f"round {event['round']}")
            return
        scores = done.get("merged") or done.get("own") or {}
        score = next(((name, scores[name]) for name in task.scores if scores.get(name) is not None), None)
        note = f"{score_in_sentence(score[0])} {score[1]:.3f}" if score else ""
        if done["epsilon"] is not None:
            note += f" ε {done['epsilon']:.2f}"
        watcher.update(event["site"], event["round"], rounds, note.strip())
        losses = ", ".join(f"{role} {value:.4f}" for role, value in done["loss"].items() if value is not None)
        folders[event["site"]].log(f"round {event['round']}/{rounds}: loss {losses}; {note}")

    return report_event
