"""The unfinished runs of a study: a repeated `train` goes on with one, so that no round is charged twice.

A run is repeated where method, pipeline, graph, sites, site files, stores and versions of the code are the same. The
commands that work on a run hold its lock, so that a second one neither goes on with it meanwhile nor begins another
unasked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import cached_property
from typing import Any, NamedTuple
from uuid import uuid4

from wsi_fl.federation.comm import Comm
from wsi_fl.privacy.ledger_file import LedgerEntry, LedgerFile
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.runtime.console import print_message
from wsi_fl.stages.site.privacy_account import costs_epsilon
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.training.checks import collect_versions
from wsi_fl.stages.training.resume import (
    RunRequest,
    RunState,
    RunStates,
    describe_run,
    find_graph_digest,
    note_participants,
    open_run,
    select_run,
)
from wsi_fl.study.folder import Study, load_run_pipeline
from wsi_fl.types import WsiFlError

_MAX_SHOWN_RUNS = 3
"""Unfinished runs of other settings in one message."""


class ClaimedRun(NamedTuple):
    """A run for this process alone, and whether it was begun before."""

    folder: RunFolder
    is_begun: bool


@contextmanager
def claim_run(
    context: RunContext, pipeline_name: str, *, resume: bool, series: Mapping[str, Any] | None = None
) -> Iterator[ClaimedRun]:
    """Hold the unfinished run that a context repeats, or a new one; other commands find it at work.

    Args:
        resume: whether to look for unfinished runs; the choice is printed.
        series: the series of a new run, as in its manifest.

    Raises:
        WsiFlError: where another process works on the run.
    """
    study, is_begun = context.study, False
    with ExitStack() as stack:
        with RunFolder.hold_numbers(study.runs_path):
            run = _find_local_run(context, resume=resume) if series is None else None
            if run is not None:
                busy = (
                    f"{study.relative_path(run.path)} has these settings and is at work; wait for it, or start another "
                    "run with --new, which is charged in addition"
                )
                stack.enter_context(run.hold_lock(busy))
                is_begun = True
            else:
                run = RunFolder.make_next(study.runs_path, context.name, pipeline_name)
                stack.enter_context(run.hold_lock())
                describe_run(context, RunRequest(pipeline_name), uuid4().hex, run, series)
        yield ClaimedRun(run, is_begun)


def _find_local_run(context: RunContext, *, resume: bool) -> RunFolder | None:
    """Return the newest unfinished run that the context repeats; None without one, or where a new one is wanted."""
    unfinished = UnfinishedRuns(context, list_open_sites(context))
    with context:
        run = unfinished.find_repeated()
    unfinished.report_choice(run, resume=resume)
    return run if resume else None


@contextmanager
def claim_common_run(context: RunContext, request: RunRequest, comm: Comm) -> Iterator[RunFolder]:
    """Hold the run of ranks that mpiexec or srun started: the requested one, one that all repeat, or a new one."""
    run = request.run
    if run is None and (run := _find_common_run(context, request, comm)) is not None:
        begun_context, _ = open_run(context.study, replace(request, run=run))
        note_participants(begun_context, request)
    run = run or select_run(context, request, comm)
    with run.hold_lock() if comm.running[0] in comm.sites else nullcontext():
        yield run


def _find_common_run(context: RunContext, request: RunRequest, comm: Comm) -> RunFolder | None:
    """Return the newest unfinished run that all ranks repeat; None without one, or for a request of a new one."""
    with context:
        unfinished = UnfinishedRuns(context, [context.names[k] for k in comm.sites])
        runs = {run.id: run for run in unfinished.list_repeated()}
    states = [RunState(identity=identity, rounds=count_rounds(run), lost=[]) for identity, run in runs.items()]
    first, *others = comm.gather([RunStates(runs=states)], RunStates)
    identities = [{state["identity"] for state in other["runs"]} for other in others]
    common = [state["identity"] for state in first["runs"] if all(state["identity"] in ids for ids in identities)]
    run = runs[common[0]] if common else None
    if comm.running[0] in comm.sites:
        unfinished.report_choice(run, resume=not request.is_new, is_common=True)
    return None if request.is_new else run


class UnfinishedRuns:
    """The runs of a study without a summary, as a new run with the settings of a context would find them.

    Args:
        sites: the sites whose stores may be opened here.
    """

    def __init__(self, context: RunContext, sites: Sequence[str]) -> None:
        self._context, self._sites = context, sites

    @cached_property
    def run_folders(self) -> list[RunFolder]:
        """The unfinished runs of the study without a signed plan, the newest first."""
        return list(_list_unfinished(self._context.study))

    def list_repeated(self) -> list[RunFolder]:
        """Return the unfinished runs that the context repeats, the newest first."""
        return [run for run in self.run_folders if is_repeated(run, self._context, self._sites)]

    def find_repeated(self) -> RunFolder | None:
        """Return the newest unfinished run that the context repeats; None without one."""
        return next((run for run in self.run_folders if is_repeated(run, self._context, self._sites)), None)

    def report_choice(self, repeated: RunFolder | None, *, resume: bool, is_common: bool = False) -> None:
        """Print which run goes on, and which others are unfinished though charged.

        What is printed for ranks (`is_common`) may be read elsewhere, so there real sites' other runs are not named.
        """
        if repeated is not None:
            print_message(f"  {self._describe_repeated(repeated, resume=resume)}", "" if resume else "yellow")
            return
        if is_common and any(site.real for site in self._context.sites):
            return
        charged = {run.name: n for run in self.run_folders if (n := self._count_charged(run)) and not run.is_at_work()}
        if charged:
            names = [f"{name} (charged for {n} rounds)" for name, n in charged.items()][:_MAX_SHOWN_RUNS]
            more = f" and {len(charged) - _MAX_SHOWN_RUNS} more" if len(charged) > _MAX_SHOWN_RUNS else ""
            print_message(
                f"  unfinished, with other settings, stores or versions: {', '.join(names)}{more}; `wsi-fl train "
                f"--resume {next(iter(charged))}` would go on with it",
                "yellow",
            )

    def _describe_repeated(self, run: RunFolder, *, resume: bool) -> str:
        pipeline = self._context.pipeline
        single = self._context.method.payload.is_single_release
        place = "" if single else f", round {count_rounds(run) + 1} of {pipeline.train.rounds}"
        if resume:
            charge = ", which is charged in addition" if costs_epsilon(pipeline) else ""
            return f"goes on with {run.name}{place}; --new starts another run{charge}"
        n = self._count_charged(run)
        charge = f"; its {n} rounds stay charged, and those of the new run are charged in addition" if n else ""
        return f"{run.name} of these settings stays unfinished{place}{charge}"

    def _count_charged(self, run: RunFolder) -> int:
        """Return the most rounds of a run on the ledger of one of its sites here."""
        site_entries = (self._entries_by_site.get(path.name, ()) for path in run.path.glob("sites/*/"))
        return max(
            (
                len({entry.round for entry in entries if entry.mechanism and entry.run_id == run.id})
                for entries in site_entries
            ),
            default=0,
        )

    @cached_property
    def _entries_by_site(self) -> dict[str, list[LedgerEntry]]:
        """The lines of the ledger of each site here; of a damaged one none, which its training refuses."""
        entries = {}
        for name in self._context.names:
            with suppress(WsiFlError, OSError):
                entries[name] = LedgerFile(self._context.study.ledger_path(name)).entries
        return entries


def _list_unfinished(study: Study) -> Iterator[RunFolder]:
    for path in sorted(study.runs_path.glob("[0-9]*-*/config.toml"), reverse=True):
        run, is_planned = RunFolder(path.parent), True
        with suppress(WsiFlError):  # a damaged manifest describes no settings
            is_planned = bool(run.agreement_digest)
        if not is_planned and not (run.path / "summary.json").exists():
            yield run


def list_open_sites(context: RunContext) -> list[str]:
    """Return the sites whose stores any process may open."""
    return [site.name for site in context.sites if site.allows("patches")]


def count_rounds(run: RunFolder) -> int:
    """Return the number of rounds that all sites of a run have finished here, without those that dropped out."""
    lost = {loss["site"] for loss in run.list_dropouts()}
    folders = [run.site_folder(path.name) for path in run.path.glob("sites/*/") if path.name not in lost]
    return min((len(folder.read_metrics()) for folder in folders), default=0)


def is_repeated(run: RunFolder, context: RunContext, sites: Sequence[str]) -> bool:
    """Return whether a run has the method and settings of a context, and the site files and stores of these sites."""
    try:
        run.refuse_changed_settings()
        pipeline, manifest = load_run_pipeline(run.path / "config.toml"), run.manifest
        if pipeline != context.pipeline.model_copy(update={"sites": context.names}):
            return False
        if (manifest["method"], manifest.get("graph")) != (context.name, find_graph_digest(context)):
            return False
        if not collect_versions().items() <= manifest["versions"].items():
            return False
        pinned = context.study.freeze_sites().pin_run(run.path)
        if any(pinned.find_changed_settings(name) for name in context.names):
            return False
        count_rounds(run)
        return all(_has_same_inputs(run, context, name) for name in sites)
    except (WsiFlError, OSError):  # edited since, damaged, or of another version
        return False


def _has_same_inputs(run: RunFolder, context: RunContext, name: str) -> bool:
    """Return whether a site's store and the class statistics are those that a run began with, as far as recorded."""
    folder = run.site_folder(name)
    recorded = folder.read_statistics_digests() or {}
    digests = {site: release.digest for site, release in context.statistics.items()} if recorded else {}
    if any(digests.get(site, digest) != digest for site, digest in recorded.items()):
        return False
    if folder.store_digest() is None or not context.has_store(name):
        return True
    data = context.open_data(name)
    return folder.has_store(data.digest(), data.describe_store())
