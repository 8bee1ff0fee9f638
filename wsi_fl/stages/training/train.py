"""`train`: one run, or a series of them that are told together, from the plan to the document at the end."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any, NamedTuple, TypedDict, cast
from uuid import uuid4

from wsi_fl.federation.comm import LocalComm, mpi_of
from wsi_fl.learning.validation import rare_classes
from wsi_fl.report.words import absences, detected_of, letters
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.site.account import spends, spent_words
from wsi_fl.stages.site.party import RunContext
from wsi_fl.stages.training import launch
from wsi_fl.stages.training.checks import check, tell_doubts
from wsi_fl.stages.training.going_on import Asked, describe_run, note_who_goes_on, taken_up
from wsi_fl.stages.training.summary import Summary, finished_in
from wsi_fl.stages.work.console import Line, Lines, OneOf, Silent, Watcher, say
from wsi_fl.study.folder import Study, load_pipeline
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.system.machine import launched_ranks
from wsi_fl.types import UsageError, WsiFlError


class Summaries(TypedDict):
    """What was trained as a series: the summaries of its runs, and what sets them apart."""

    method: str
    seeds: list[int]
    folds: int | None
    left_out: list[str]
    runs: list[Summary]


@dataclass(frozen=True)
class _Series:
    """Runs that differ in their seed, in the fold that they test, or in the site that they leave out.

    Attributes:
        folds: how many folds each seed has; None for no cross-validation.
        sites: each is left out by one run of each seed; empty where none is.
    """

    id: str
    seeds: tuple[int, ...]
    folds: int | None = None
    sites: tuple[str, ...] = ()

    @property
    def members(self) -> list[Member]:
        """All of its runs, in order."""
        folds = range(1, self.folds + 1) if self.folds else (None,)
        return [Member(*one) for one in product(self.seeds, folds, self.sites or (None,))]

    def pipeline_of(self, pipeline: Pipeline, member: Member) -> Pipeline:
        """Return the pipeline of one run: that of the series, or of another run, under what sets this one apart."""
        folds = {"fold": member.fold} if self.folds else {}
        left_out = {"left_out": member.left_out} if self.sites else {}
        own = pipeline.changed(train={"seed": member.seed, **folds, **left_out})
        return own.model_copy(update={"sites": list(self.sites)}) if self.sites else own

    def begun(self, study: Study) -> dict[Member, RunFolder]:
        """Return its runs that there are; what all of them share, such as a fold of the pipeline, sets none apart."""
        found = {}
        for path in sorted(study.runs.glob("[0-9]*-*/manifest.json")):
            run = RunFolder(path.parent)
            if (run.manifest.get("series") or {}).get("id") == self.id:
                seed, fold, left_out = Member.of(load_pipeline(run.path / "config.toml"))
                found[Member(seed, fold if self.folds else None, left_out if self.sites else None)] = run
        return found


class Member(NamedTuple):
    """What sets one run of a series apart."""

    seed: int
    fold: int | None
    left_out: str | None

    @staticmethod
    def of(pipeline: Pipeline) -> Member:
        """Return which run of a series has this configuration."""
        train = pipeline.train
        return Member(train.seed, train.fold, train.left_out)

    @property
    def place(self) -> tuple[int, int, str]:
        """What members are ordered by."""
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
    watcher: Watcher | None = None,
    told: bool = False,
) -> Summary:
    """Train one run and return its summary; `told` where what is unusual of its stores was said already.

    Started by mpiexec or srun it joins as one rank; otherwise it starts one rank per site itself, or runs all sites in
    this process with backend "local".
    """
    name = study.pipeline_name(pipeline_name)
    pipeline = study.pipeline(name, overrides)
    if (ranks := launched_ranks()) is not None:
        party = RunContext.of(study, pipeline, method)
        _check_ranks(ranks, party)
        from wsi_fl.stages.training.ranks import join  # and with it PyTorch; launchers need not wait for it

        check(party, backend, stores=False)
        return join(party, Asked(name))
    return begin(study, pipeline, method, name, backend=backend, watcher=watcher or Silent(), told=told)


def begin(
    study: Study,
    pipeline: Pipeline,
    method: str,
    name: str,
    *,
    backend: str,
    watcher: Watcher,
    series: _Series | None = None,
    told: bool = False,
) -> Summary:
    """Start the ranks of a new run, or run it in this process."""
    party = RunContext.of(study, pipeline, method)
    check(party, backend)
    tell_doubts(party, stores=not told)
    if backend == "mpi":
        launch.find_mpiexec()
    run = RunFolder.create(study.runs, method, name)
    describe_run(party, Asked(name), uuid4().hex, run, asdict(series) if series else None)
    try:
        return _start(replace(party, run=run), backend, watcher)
    except UsageError:  # refused before the first step
        run.discard_if_unstarted()
        raise


def resume(
    study: Study,
    run_name: str,
    *,
    without: Sequence[str] = (),
    backend: str = "mpi",
    watcher: Watcher | None = None,
) -> Summary:
    """Continue a run from the last round that all its sites had finished, `without` sites that are left out now.

    A site that was lost on the way comes back in the round where the others stand, even when they have finished.
    """
    ranks = launched_ranks()
    run = RunFolder(study.run(run_name))
    asked = Asked(run.name, run, without=without)
    party, finished = taken_up(study, asked)
    if finished is not None:
        say(f"{finished['run']} has finished already; nothing is sent again")
        return finished
    if ranks is not None:
        _check_ranks(ranks, party)
    check(party, backend, stores=ranks is None)
    note_who_goes_on(party, asked)
    if ranks is not None:
        from wsi_fl.stages.training.ranks import join

        return join(party, asked)
    return _start(party, backend, watcher or Silent())


def _check_ranks(ranks: int, party: RunContext) -> None:
    """Refuse another number of ranks than of sites before anything else is loaded."""
    if ranks != (n := len(party.running)):
        raise UsageError(f"{n} sites need {n} ranks, but {ranks} were started")
    mpi_of(ranks)


def _start(party: RunContext, backend: str, watcher: Watcher) -> Summary:
    """Start the ranks, and those of the other sites once more whenever one is lost."""
    study, run, names = party.study, party.run, party.names
    if backend == "local":
        from wsi_fl.stages.training.ranks import work_as_rank

        comm = LocalComm(len(names), running=party.running_here)
        with launch.naming_resume(study, run):
            return work_as_rank(study, run, comm, watcher)
    again = launch.resume_command(study, run)
    while True:
        running = [names[k] for k in party.running_here]
        try:
            launch.run_ranks(
                running,
                ["rank", str(run.path)],
                log=run.path / "mpi.log",
                timeout_s=party.pipeline.comm.timeout_s,
                watcher=watcher,
                resume=again,
            )
            break
        except launch.SitesLost as lost:
            left, least = len(set(running) - set(lost.reasons)), party.pipeline.train.min_sites or 1
            if not left:
                raise WsiFlError(f"all sites were lost; continue with `{again}`") from None
            if left < least:
                gone = ", ".join(lost.reasons)
                raise WsiFlError(
                    f"{gone} was lost, and {left} of at least {least} sites are left (train.min_sites); continue with "
                    f"`{again}`"
                ) from None
            for name, reason in lost.reasons.items():
                loss = run.note_loss(name, reason)
                watcher.say(f"  {name} was lost in round {loss['round']}: {reason}; the others go on")
    summary = finished_in(run)
    if summary is None:
        raise WsiFlError(f"the ranks ended without a summary; continue with `{again}`")
    return summary


def summary_lines(summary: Summary, again: str = "") -> Lines:
    """The summary for people; `again` is the command by which a lost site comes back, by default `train --resume`."""
    for row in summary["sites"]:
        yield Line(f"  {row['site']}: {row['rounds']} rounds, {spent_words(row)}")
    if found := detected_of(summary["sites"]):
        yield Line(f"  {found}")
    for name in summary.get("inference_sites", ()):
        yield Line(f"  {name}: receives; it released nothing and paid nothing")
    if digests := summary.get("statistics"):
        yield Line(f"  made of {len(digests)} letters: {letters(digests)}")
    c = summary["communication"]
    yield Line(
        f"  {c['messages']} messages, {c['bytes'] / 1e6:.1f} MB, {c['seconds']:.1f} s of communication"
    )
    for loss in summary["losses"]:
        yield Line(f"  {loss['site']} was lost in round {loss['round']}: {loss['reason']}", "yellow")
        yield Line(f"  it can come back: {again or 'wsi-fl train --resume ' + summary['run']}")
    yield from (Line(f"  {said}", "yellow") for said in absences(summary["sites"]))
    yield Line(f"{summary['run']} done in {summary['seconds']:.0f} s; next: wsi-fl evaluate {summary['run']}")


def train_series(
    study: Study,
    *,
    seeds: int | None = None,
    leave_site_out: bool = False,
    method: str,
    pipeline_name: str | None = None,
    overrides: Sequence[str] = (),
    backend: str = "mpi",
    watcher: Watcher | None = None,
) -> Summaries:
    """Train all runs of a series.

    There is one for each of train.seed, train.seed + 1, …; of each seed one per fold where `train.folds` is set and no
    fold is named, or one per site that takes no part in it with `leave_site_out`.
    """
    if seeds is not None and seeds < 1:
        raise UsageError("--seeds must be at least 1")
    name = study.pipeline_name(pipeline_name)
    pipeline = study.pipeline(name, overrides)
    if launched_ranks() is not None:
        raise UsageError(
            "--seeds, --folds and --leave-site-out start ranks of their own; leave out mpiexec or srun, or train one "
            "run after another"
        )
    series = _series(study, pipeline, seeds or 1, leave_site_out=leave_site_out)
    for member in series.members:  # what is wrong with the last one is said before the first is trained
        check(RunContext.of(study, series.pipeline_of(pipeline, member), method), backend, told=True)
    with RunContext.of(study, pipeline, method) as party:
        _tell(party, series)
    return _complete(study, series, method, name, pipeline, backend=backend, watcher=watcher or Silent())


def _series(study: Study, pipeline: Pipeline, seeds: int, *, leave_site_out: bool) -> _Series:
    train = pipeline.train
    sites = tuple(site.name for site in study.sites(pipeline)) if leave_site_out else ()
    if leave_site_out and (train.folds or train.left_out):
        raise UsageError(
            "--leave-site-out tests whole sites; leave out --folds, train.folds and train.left_out"
        )
    if leave_site_out and len(sites) < 2:
        raise UsageError("--leave-site-out needs two sites or more")
    folds = train.folds if train.fold is None else None
    return _Series(uuid4().hex, tuple(range(train.seed, train.seed + seeds)), folds, sites)


def _tell(party: RunContext, series: _Series) -> None:
    """Say what the runs cost together, and which classes are too rare for as many folds."""
    n, target = len(series.members), party.pipeline.privacy.target_epsilon
    if n > 1 and (series.folds or series.sites) and spends(party.pipeline):
        say(
            f"  every run is charged on the ledgers by itself: {n} runs cost a site about {n} times as much",
            "yellow",
        )
        for site in party.sites:
            if site.real and site.max_epsilon is not None and target and n * target > site.max_epsilon:
                say(
                    f"  sites/{site.name}.toml: max_epsilon = {site.max_epsilon:g} may not be enough for {n} runs of "
                    f"ε = {target:g}; what is not affordable is not trained",
                    "yellow",
                )
    for name in party.names if series.folds and party.task.kind == "classes" else ():
        if not (party.site(name).allows("patches") and party.has_store(name)):
            continue
        table, classes, n_folds = party.data(name).table, party.data(name).classes, series.folds or 1
        for kind, patients in rare_classes(table.patient, table.label, n_folds=n_folds).items():
            say(
                f"  site {name}: {patients} patients of class {classes[kind]} for {n_folds} folds, so some folds test "
                "none of them here",
                "yellow",
            )


def resume_series(
    study: Study, run_name: str, *, backend: str = "mpi", watcher: Watcher | None = None
) -> Summaries | None:
    """Complete the series that a run belongs to; None where it belongs to none, or under mpiexec of one's own."""
    if launched_ranks() is not None:
        return None
    run = RunFolder(study.run(run_name))
    manifest = run.manifest
    if not (known := manifest.get("series")):
        return None
    series = _Series(known["id"], tuple(known["seeds"]), known.get("folds"), tuple(known.get("sites") or ()))
    pipeline = load_pipeline(run.path / "config.toml")
    method, name = manifest["method"], manifest["pipeline"]
    return _complete(study, series, method, name, pipeline, backend=backend, watcher=watcher or Silent())


def _complete(
    study: Study,
    series: _Series,
    method: str,
    name: str,
    pipeline: Pipeline,
    *,
    backend: str,
    watcher: Watcher,
) -> Summaries:
    """The runs of all members: those there are finished, the others begun."""
    begun, members = series.begun(study), series.members
    to_do = [one for one in members if one not in begun or begun[one].summary() is None]
    summaries: list[Summary] = []
    for number, member in enumerate(members, 1):
        say(f"{member} ({number} of {len(members)})")
        run = begun.get(member)
        if run is not None and (summary := finished_in(run)) is not None:
            summaries.append(summary)
            continue
        place = to_do.index(member)
        how: Any = {"backend": backend, "watcher": OneOf(watcher, place, len(to_do))}
        first = next(iter(series.begun(study).values()), None)
        with launch.naming_resume(study, first) if first is not None else nullcontext():
            if run is not None:
                summary = resume(study, run.name, **how)
            else:
                own = series.pipeline_of(pipeline, member)
                summary = begin(study, own, method, name, **how, series=series, told=place > 0)
        summaries.append(summary)
    return {
        "method": method,
        "seeds": list(series.seeds),
        "folds": series.folds,
        "left_out": list(series.sites),
        "runs": summaries,
    }


def lines(document: Summary | Summaries) -> Lines:
    """The summary of a run, or of the runs of a series, for people."""
    if "runs" not in document:
        yield from summary_lines(document)
        return
    document = cast(Summaries, document)
    runs, n_seeds = document["runs"], len(document["seeds"])
    seconds, names = sum(one["seconds"] for one in runs), " ".join(one["run"] for one in runs)
    parts = "folds" if document["folds"] else "sites left out" if document["left_out"] else "seeds"
    seeded = f" from {n_seeds} seeds" if parts != "seeds" and n_seeds > 1 else ""
    done = f"{len(runs)} {parts}{seeded} of {document['method']} done"
    yield Line(f"{done}, {seconds:.0f} s of training; next: wsi-fl compare {names}")
