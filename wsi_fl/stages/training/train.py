"""`train`: a run, or a series of runs with a common document."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext, suppress
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, NamedTuple, TypedDict, cast
from uuid import uuid4

from wsi_fl.data.validation import rare_classes
from wsi_fl.federation.comm import LocalComm, load_mpi
from wsi_fl.report.formatting import describe_absences, describe_worst_detection, format_statistics
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.runtime.console import Lines, NestedProgress, SilentProgress, TextLine, Watcher, print_message
from wsi_fl.stages.site.privacy_account import costs_epsilon, describe_spending
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.training import launch
from wsi_fl.stages.training.checks import check_run, report_doubts
from wsi_fl.stages.training.resume import RunRequest, note_participants, open_run, record_site_files
from wsi_fl.stages.training.summary import Summary, load_summary
from wsi_fl.stages.training.unfinished_runs import claim_run, is_repeated, list_open_sites
from wsi_fl.study.folder import Study, load_run_pipeline
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.system.files import file_lock
from wsi_fl.system.machine import count_ranks
from wsi_fl.types import UsageError, WsiFlError


class SeriesSummary(TypedDict):
    """A series: the summaries of its runs, and their seeds, folds or left-out sites."""

    method: str
    seeds: list[int]
    folds: int | None
    left_out: list[str]
    runs: list[Summary]


@dataclass(frozen=True)
class _RunSeries:
    """Runs that differ in seed, test fold or left-out site.

    Attributes:
        folds: number of folds of each seed; None for no cross-validation.
        sites: each is left out by one run of each seed; empty for none.
    """

    id: str
    seeds: tuple[int, ...]
    folds: int | None = None
    sites: tuple[str, ...] = ()

    @property
    def members(self) -> list[SeriesMember]:
        """The members of the series, in order."""
        folds = range(1, self.folds + 1) if self.folds else (None,)
        return [SeriesMember(*values) for values in product(self.seeds, folds, self.sites or (None,))]

    def build_pipeline(self, pipeline: Pipeline, member: SeriesMember) -> Pipeline:
        """Return the pipeline of a member, given that of the series or of another member."""
        folds = {"fold": member.fold} if self.folds else {}
        left_out = {"left_out": member.left_out} if self.sites else {}
        member_pipeline = pipeline.replace_keys(train={"seed": member.seed, **folds, **left_out})
        return member_pipeline.model_copy(update={"sites": list(self.sites)}) if self.sites else member_pipeline

    @staticmethod
    def list_series(study: Study) -> Iterator[tuple[_RunSeries, RunFolder]]:
        """Yield the runs of a study that belong to a series, each with its series."""
        for path in sorted(study.runs_path.glob("[0-9]*-*/config.toml")):
            run = RunFolder(path.parent)
            with suppress(WsiFlError):  # a damaged manifest is of no series
                if document := run.manifest.get("series"):
                    yield _RunSeries.parse_document(document), run

    @staticmethod
    def parse_document(document: Mapping[str, Any]) -> _RunSeries:
        """Return the series of a run's manifest."""
        sites = tuple(document.get("sites") or ())
        return _RunSeries(document["id"], tuple(document["seeds"]), document.get("folds"), sites)

    def find_runs(self, study: Study) -> dict[SeriesMember, RunFolder]:
        """Return the existing runs by member, without settings common to all, such as a fold of the pipeline."""
        runs = {}
        for series, run in self.list_series(study):
            if series.id == self.id:
                seed, fold, left_out = SeriesMember.read_member(load_run_pipeline(run.path / "config.toml"))
                runs[SeriesMember(seed, fold if self.folds else None, left_out if self.sites else None)] = run
        return runs

    def find_unfinished(self, study: Study, pipeline: Pipeline, method: str) -> _RunSeries | None:
        """Return the newest unfinished series of the same members, settings and stores; None without one."""
        same_members = {
            series.id: series for series, _ in self.list_series(study) if replace(series, id=self.id) == self
        }
        for series in reversed(same_members.values()):
            runs = series.find_runs(study)
            if len(runs) == len(self.members) and all(load_summary(run) is not None for run in runs.values()):
                continue
            if all(self._repeats_run(study, pipeline, method, *item) for item in runs.items()):
                return series
        return None

    def _repeats_run(self, study: Study, pipeline: Pipeline, method: str, member: SeriesMember, run: RunFolder) -> bool:
        with RunContext.create(study, self.build_pipeline(pipeline, member), method) as context:
            return is_repeated(run, context, list_open_sites(context))


class SeriesMember(NamedTuple):
    """Seed, fold and left-out site of a run of a series."""

    seed: int
    fold: int | None
    left_out: str | None

    @staticmethod
    def read_member(pipeline: Pipeline) -> SeriesMember:
        """Return the member of a pipeline."""
        train = pipeline.train
        return SeriesMember(train.seed, train.fold, train.left_out)

    @property
    def sort_key(self) -> tuple[int, int, str]:
        """The sort key of members."""
        return self.seed, self.fold or 0, self.left_out or ""

    def __str__(self) -> str:
        fold = "" if self.fold is None else f", fold {self.fold}"
        return f"seed {self.seed}{fold}" + ("" if self.left_out is None else f" without {self.left_out}")


def train(
    study: Study,
    *,
    method: str,
    pipeline_name: str | None = None,
    overrides: Sequence[str] = (),
    backend: str = "mpi",
    resume: bool = True,
    watcher: Watcher | None = None,
    is_reported: bool = False,
) -> Summary:
    """Train a run and return its summary.

    Started by mpiexec or srun it is one rank; otherwise it starts a rank per site, or runs all sites in this process
    with backend "local".

    Args:
        resume: whether to go on with the newest unfinished run of the same settings and stores, where there is one; a
            new run is charged in addition.
        is_reported: whether doubts about the stores were reported already.
    """
    name = study.pipeline_name(pipeline_name)
    pipeline = study.load_pipeline(name, overrides)
    if (ranks := count_ranks()) is not None:
        context = RunContext.create(study, pipeline, method)
        _check_ranks(ranks, context)
        from wsi_fl.stages.training.ranks import (
            run_launched_rank,  # and with it PyTorch; launchers need not wait for it
        )

        check_run(context, backend, stores=False)
        return run_launched_rank(context, RunRequest(name, is_new=not resume))
    return train_pipeline(
        study,
        pipeline,
        method,
        name,
        backend=backend,
        resume=resume,
        watcher=watcher or SilentProgress(),
        is_reported=is_reported,
    )


def train_pipeline(
    study: Study,
    pipeline: Pipeline,
    method: str,
    name: str,
    *,
    backend: str,
    watcher: Watcher,
    resume: bool = True,
    series: _RunSeries | None = None,
    is_reported: bool = False,
) -> Summary:
    """Start the ranks of the unfinished run of a pipeline or of a new one, or run it in this process; see `train`."""
    context = RunContext.create(study, pipeline, method)
    backend = _select_backend(context, backend)
    check_run(context, backend)
    report_doubts(context, stores=not is_reported)
    if backend == "mpi":
        launch.find_mpiexec()
    with claim_run(context, name, resume=resume, series=asdict(series) if series else None) as (run, is_begun):
        if is_begun:
            return _continue_run(study, RunRequest(run.name, run), backend, watcher, is_reported=True)
        try:
            return _start_run(replace(context, run=run), backend, watcher)
        except UsageError:  # refused before the first step
            run.discard_if_unstarted()
            raise


def resume_run(
    study: Study, run_name: str, *, without: Sequence[str] = (), backend: str = "mpi", watcher: Watcher | None = None
) -> Summary:
    """Resume a run from the last round that all its sites had finished, `without` excluded sites.

    A site that dropped out returns in the current round of the others, even when they have finished.
    """
    run = RunFolder(study.find_run(run_name))
    with run.hold_lock() if count_ranks() is None else nullcontext():  # the ranks hold it by themselves
        return _continue_run(study, RunRequest(run.name, run, without=without), backend, watcher or SilentProgress())


def _continue_run(
    study: Study, request: RunRequest, backend: str, watcher: Watcher, *, is_reported: bool = False
) -> Summary:
    """Continue the requested run; the caller holds it, unless it is a rank of mpiexec or srun."""
    ranks = count_ranks()
    context, finished = open_run(study, request)
    if finished is not None:
        print_message(f"{finished['run']} has finished already; nothing is sent again")
        return finished
    if ranks is not None:
        _check_ranks(ranks, context)
    else:
        backend = _select_backend(context, backend)
    check_run(context, backend, stores=ranks is None, is_reported=is_reported)
    note_participants(context, request)
    if ranks is not None:
        from wsi_fl.stages.training.ranks import run_launched_rank

        return run_launched_rank(context, request)
    return _start_run(context, backend, watcher)


def _select_backend(context: RunContext, backend: str) -> str:
    """Return "local" in place of "mpi" where ranks would cost more than they save: for one site, and for methods that
    release once, also in files.

    Stores of several real hospitals stay in processes of their own.
    """
    releases_once = context.uses_files or context.method.payload.is_single_release
    may_share_process = releases_once and all(site.allows("patches") for site in context.sites)
    needs_ranks = len(context.local_names) > 1 and not may_share_process
    return "local" if backend == "mpi" and not needs_ranks else backend


def _check_ranks(ranks: int, context: RunContext) -> None:
    """Refuse another number of ranks than of sites before anything else is loaded."""
    if ranks != (n := len(context.running)):
        raise UsageError(f"{n} sites need {n} ranks, but {ranks} were started")
    load_mpi(ranks)


def _start_run(context: RunContext, backend: str, watcher: Watcher) -> Summary:
    """Start the ranks, and again those of the remaining sites after each dropout."""
    study, run, names = context.study, context.run, context.names
    if backend == "local":
        from wsi_fl.stages.training.ranks import work_as_rank

        comm = LocalComm(len(names), running=context.running_locally)
        with launch.hint_resume(study, run):
            return work_as_rank(study, run, comm, watcher)
    resume_hint = launch.resume_command(study, run)
    record_site_files(study, run, [names[k] for k in context.running_locally])  # ranks read these
    while True:
        running = [names[k] for k in context.running_locally]
        try:
            launch.run_ranks(
                running,
                ["rank", str(run.path)],
                log=run.path / "mpi.log",
                timeout_s=context.pipeline.comm.timeout_s,
                watcher=watcher,
                resume=resume_hint,
            )
            break
        except launch.SitesLost as lost:
            n_left, min_sites = len(set(running) - set(lost.reasons)), context.pipeline.train.min_sites or 1
            if not n_left:
                raise WsiFlError(f"all sites were lost; continue with `{resume_hint}`") from None
            if n_left < min_sites:
                lost_names = ", ".join(lost.reasons)
                raise WsiFlError(
                    f"{lost_names} was lost, and {n_left} of at least {min_sites} sites are left (train.min_sites); "
                    f"continue with `{resume_hint}`"
                ) from None
            for name, reason in lost.reasons.items():
                loss = run.record_dropout(name, reason)
                watcher.print_message(f"  {name} was lost in round {loss['round']}: {reason}; the others go on")
    summary = load_summary(run)
    if summary is None:
        raise WsiFlError(f"the ranks ended without a summary; continue with `{resume_hint}`")
    return summary


def summary_lines(summary: Summary, return_command: str = "") -> Lines:
    """Yield the summary for people; `return_command` brings a site back, by default `train --resume`."""
    for row in summary["sites"]:
        yield TextLine(f"  {row['site']}: {row['rounds']} rounds, {describe_spending(row)}")
    if detection_line := describe_worst_detection(summary["sites"]):
        yield TextLine(f"  {detection_line}")
    for name in summary.get("inference_sites", ()):
        yield TextLine(f"  {name}: without labels; it released and spent nothing")
    if digests := summary.get("statistics"):
        yield TextLine(f"  made of {len(digests)} class statistics: {format_statistics(digests)}")
    c = summary["communication"]
    yield TextLine(f"  {c['messages']} messages, {c['bytes'] / 1e6:.1f} MB, {c['seconds']:.1f} s of communication")
    for loss in summary["losses"]:
        yield TextLine(f"  {loss['site']} was lost in round {loss['round']}: {loss['reason']}", "yellow")
        yield TextLine(f"  it can come back: {return_command or 'wsi-fl train --resume ' + summary['run']}")
    yield from (TextLine(f"  {line}", "yellow") for line in describe_absences(summary["sites"]))
    yield TextLine(f"{summary['run']} done in {summary['seconds']:.0f} s; next: wsi-fl evaluate {summary['run']}")


def train_series(
    study: Study,
    *,
    seeds: int | None = None,
    leave_site_out: bool = False,
    method: str,
    pipeline_name: str | None = None,
    overrides: Sequence[str] = (),
    backend: str = "mpi",
    resume: bool = True,
    watcher: Watcher | None = None,
) -> SeriesSummary:
    """Train all runs of a series, or with `resume` the remaining ones of the newest unfinished series of the same runs.

    There is one for each of train.seed, train.seed + 1, …; of each seed one per fold where `train.folds` is set and no
    fold is named, or one per site that takes no part in it with `leave_site_out`.
    """
    if seeds is not None and seeds < 1:
        raise UsageError("--seeds must be at least 1")
    name = study.pipeline_name(pipeline_name)
    pipeline = study.load_pipeline(name, overrides)
    if count_ranks() is not None:
        raise UsageError(
            "--seeds, --folds and --leave-site-out start ranks of their own; leave out mpiexec or srun, or train one "
            "run after another"
        )
    first, folds = pipeline.train.seed, pipeline.train.folds if pipeline.train.fold is None else None
    sites = tuple(site.name for site in study.load_sites(pipeline)) if leave_site_out else ()
    if leave_site_out and (pipeline.train.folds or pipeline.train.left_out):
        raise UsageError("--leave-site-out tests whole sites; leave out --folds, train.folds and train.left_out")
    if leave_site_out and len(sites) < 2:
        raise UsageError("--leave-site-out needs two sites or more")
    series = _RunSeries(uuid4().hex, tuple(range(first, first + (seeds or 1))), folds, sites)
    if (unfinished := series.find_unfinished(study, pipeline, method)) is not None:
        runs = unfinished.find_runs(study).values()
        n_done = len([run for run in runs if load_summary(run) is not None])
        progress = f"the series of {min(run.name for run in runs)}, {n_done} of {len(series.members)} runs done"
        print_message(f"  {'goes on with' if resume else 'stays unfinished:'} {progress}; --new starts another")
        series = unfinished if resume else series
    for member in series.members:  # all are checked before the first is trained
        check_run(RunContext.create(study, series.build_pipeline(pipeline, member), method), backend, is_reported=True)
    with RunContext.create(study, pipeline, method) as context:
        _report_series(context, series)
    return _complete_series(study, series, method, name, pipeline, backend=backend, watcher=watcher or SilentProgress())


def _report_series(context: RunContext, series: _RunSeries) -> None:
    """Report the total cost of the runs, and classes too rare for the number of folds."""
    n, target = len(series.members), context.pipeline.privacy.target_epsilon
    if n > 1 and (series.folds or series.sites) and costs_epsilon(context.pipeline):
        print_message(
            f"  every run is charged on the ledgers by itself: {n} runs cost a site about {n} times as much", "yellow"
        )
        for site in context.sites:
            if site.real and site.max_epsilon is not None and target and n * target > site.max_epsilon:
                print_message(
                    f"  sites/{site.name}.toml: max_epsilon = {site.max_epsilon:g} may not be enough for {n} runs of "
                    f"ε = {target:g}; runs beyond the budget are not trained",
                    "yellow",
                )
    for name in context.names if series.folds and context.task.kind == "classes" else ():
        if not (context.find_site(name).allows("patches") and context.has_store(name)):
            continue
        data, n_folds = context.open_data(name), series.folds or 1
        for kind, patients in rare_classes(data.cohort.patient, data.cohort.label, n_folds=n_folds).items():
            print_message(
                f"  site {name}: {patients} patients of class {data.classes[kind]} for {n_folds} folds, so some folds "
                "test none of them here",
                "yellow",
            )


def resume_series(
    study: Study, run_name: str, *, backend: str = "mpi", watcher: Watcher | None = None
) -> SeriesSummary | None:
    """Complete the series of a run; None where it has none, or under mpiexec or srun."""
    if count_ranks() is not None:
        return None
    run = RunFolder(study.find_run(run_name))
    manifest = run.manifest
    if not (document := manifest.get("series")):
        return None
    series = _RunSeries.parse_document(document)
    pipeline = load_run_pipeline(run.path / "config.toml")
    method, name = manifest["method"], manifest["pipeline"]
    return _complete_series(study, series, method, name, pipeline, backend=backend, watcher=watcher or SilentProgress())


def _complete_series(
    study: Study, series: _RunSeries, method: str, name: str, pipeline: Pipeline, *, backend: str, watcher: Watcher
) -> SeriesSummary:
    """Finish existing runs and train the others; return the series."""
    busy = "another command works on this series; wait for it, or end it"
    with file_lock(study.runs_path / f".series-{series.id}.lock", busy, patience_s=2):
        return _train_members(study, series, method, name, pipeline, backend=backend, watcher=watcher)


def _train_members(
    study: Study, series: _RunSeries, method: str, name: str, pipeline: Pipeline, *, backend: str, watcher: Watcher
) -> SeriesSummary:
    runs, members = series.find_runs(study), series.members
    open_members = [member for member in members if member not in runs or runs[member].read("summary") is None]
    summaries: list[Summary] = []
    for number, member in enumerate(members, 1):
        print_message(f"{member} ({number} of {len(members)})")
        run = runs.get(member)
        if run is not None and (summary := load_summary(run)) is not None:
            summaries.append(summary)
            continue
        position = open_members.index(member)
        options: Any = {"backend": backend, "watcher": NestedProgress(watcher, position, len(open_members))}
        first = next(iter(series.find_runs(study).values()), None)
        with launch.hint_resume(study, first) if first is not None else nullcontext():
            if run is not None:
                summary = resume_run(study, run.name, **options)
            else:
                member_pipeline = series.build_pipeline(pipeline, member)
                summary = train_pipeline(
                    study, member_pipeline, method, name, **options, series=series, is_reported=position > 0
                )
        summaries.append(summary)
    return {
        "method": method,
        "seeds": list(series.seeds),
        "folds": series.folds,
        "left_out": list(series.sites),
        "runs": summaries,
    }


def train_lines(document: Summary | SeriesSummary) -> Lines:
    """Yield the summary of a run or a series for people."""
    if "runs" not in document:
        yield from summary_lines(document)
        return
    document = cast(SeriesSummary, document)
    runs, n_seeds = document["runs"], len(document["seeds"])
    seconds, names = sum(summary["seconds"] for summary in runs), " ".join(summary["run"] for summary in runs)
    parts = "folds" if document["folds"] else "sites left out" if document["left_out"] else "seeds"
    seeded = f" from {n_seeds} seeds" if parts != "seeds" and n_seeds > 1 else ""
    done = f"{len(runs)} {parts}{seeded} of {document['method']} done"
    yield TextLine(f"{done}, {seconds:.0f} s of training; next: wsi-fl compare {names}")
