"""`train --seeds`, `--folds`, `--leave-site-out`: runs that are told together; resuming one of them completes all."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple
from uuid import uuid4

from wsi_fl.learning.validation import rare_classes
from wsi_fl.runs.run import RunFolder
from wsi_fl.stages.site.account import spends
from wsi_fl.stages.site.data import Data
from wsi_fl.stages.site.party import RunContext
from wsi_fl.stages.training.checks import check
from wsi_fl.stages.training.going_on import Series
from wsi_fl.stages.training.launch import naming_resume
from wsi_fl.stages.training.train import begin, resume
from wsi_fl.stages.work.console import Line, Lines, OneOf, Silent, Watcher, say
from wsi_fl.study.folder import Study, load_pipeline
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.system.ranks import launched_ranks
from wsi_fl.types import UsageError


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
) -> dict[str, Any]:
    """Train all runs of a series and return {"method", "seeds", "folds", "left_out", "runs"}.

    Args:
        seeds: a run for each of train.seed, train.seed + 1, …; None for that seed alone. Where `train.folds` is set and
            no fold is named, each seed has a run per fold.
        leave_site_out: whether each seed has a run per site, which takes no part in it.

    Raises:
        UsageError: when there is nothing to train, or ranks were started by mpiexec or srun.
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
    for member in _members(series):  # what is wrong with the last one is said before the first is trained
        check(RunContext.of(study, _pipeline_of(pipeline, series, member), method), backend, told=True)
    with RunContext.of(study, pipeline, method) as party:
        _tell(party, series)
    return _complete(study, series, method, name, pipeline, backend=backend, watcher=watcher or Silent())


def is_series(pipeline: Pipeline) -> bool:
    """Return whether a pipeline asks for a run per fold."""
    return pipeline.train.folds is not None and pipeline.train.fold is None


def _series(study: Study, pipeline: Pipeline, seeds: int, *, leave_site_out: bool) -> Series:
    train = pipeline.train
    sites = tuple(site.name for site in study.sites(pipeline)) if leave_site_out else ()
    if leave_site_out and (train.folds or train.left_out):
        raise UsageError(
            "--leave-site-out tests whole sites; leave out --folds, train.folds and train.left_out"
        )
    if leave_site_out and len(sites) < 2:
        raise UsageError("--leave-site-out needs two sites or more")
    folds = train.folds if train.fold is None else None
    return Series(uuid4().hex, tuple(range(train.seed, train.seed + seeds)), folds, sites)


def _members(series: Series) -> list[Member]:
    """All runs of a series, in order."""
    folds = range(1, series.folds + 1) if series.folds else (None,)
    return [
        Member(seed, fold, site)
        for seed in series.seeds
        for fold in folds
        for site in series.sites or (None,)
    ]


def _tell(party: RunContext, series: Series) -> None:
    """Say what the runs cost together, and which classes are too rare for as many folds."""
    n, target = len(_members(series)), party.pipeline.privacy.target_epsilon
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
    for name in party.names if series.folds else ():
        if party.site(name).allows("patches") and party.has_store(name):
            _tell_rare(party.data(name), series.folds or 1)


def _tell_rare(data: Data, n_folds: int) -> None:
    table, classes = data.table, data.classes
    if data.task.kind != "classes":
        return
    for kind, patients in rare_classes(table.patient, table.label, n_folds=n_folds).items():
        say(
            f"  site {data.site}: {patients} patients of class {classes[kind]} for {n_folds} folds, so some folds test "
            "none of them here",
            "yellow",
        )


def resume_series(
    study: Study, run_name: str, *, backend: str = "mpi", watcher: Watcher | None = None
) -> dict[str, Any] | None:
    """Completes the series that a run belongs to; None where it belongs to none, or under mpiexec of one's own."""
    if launched_ranks() is not None:
        return None
    run = RunFolder(study.run(run_name))
    manifest = run.manifest
    if not (known := manifest.get("series")):
        return None
    series = Series(known["id"], tuple(known["seeds"]), known.get("folds"), tuple(known.get("sites") or ()))
    pipeline = load_pipeline(run.path / "config.toml")
    return _complete(
        study,
        series,
        manifest["method"],
        manifest["pipeline"],
        pipeline,
        backend=backend,
        watcher=watcher or Silent(),
    )


def _complete(
    study: Study,
    series: Series,
    method: str,
    name: str,
    pipeline: Pipeline,
    *,
    backend: str,
    watcher: Watcher,
) -> dict[str, Any]:
    """The runs of all members: those there are finished, the others begun."""
    begun, members = _begun(study, series), _members(series)
    to_do = [one for one in members if one not in begun or begun[one].summary() is None]
    summaries: list[dict[str, Any]] = []
    for number, member in enumerate(members, 1):
        say(f"{member} ({number} of {len(members)})")
        run = begun.get(member)
        if run is not None and (summary := run.summary()) is not None:
            summaries.append(summary)
            continue
        part = OneOf(watcher, to_do.index(member), len(to_do))
        first = next(iter(_begun(study, series).values()), None)
        with naming_resume(study, first) if first is not None else nullcontext():
            if run is not None:
                summaries.append(resume(study, run.name, backend=backend, watcher=part))
                continue
            own = _pipeline_of(pipeline, series, member)
            told = bool(to_do.index(member))
            summaries.append(
                begin(study, own, method, name, backend=backend, watcher=part, series=series, told=told)
            )
    return {
        "method": method,
        "seeds": list(series.seeds),
        "folds": series.folds,
        "left_out": list(series.sites),
        "runs": summaries,
    }


def _pipeline_of(pipeline: Pipeline, series: Series, member: Member) -> Pipeline:
    """The pipeline of one run: that of the series, or of another of its runs, under what sets this one apart."""
    own = {"seed": member.seed} | ({"fold": member.fold} if series.folds else {})
    if not series.sites:
        return pipeline.model_copy(update={"train": pipeline.train.model_copy(update=own)})
    train = pipeline.train.model_copy(update=own | {"left_out": member.left_out})
    return pipeline.model_copy(update={"train": train, "sites": list(series.sites)})


def _begun(study: Study, series: Series) -> dict[Member, RunFolder]:
    """The runs of the series that there are."""
    found = {}
    for path in sorted(study.runs.glob("[0-9]*-*/manifest.json")):
        run = RunFolder(path.parent)
        if (run.manifest.get("series") or {}).get("id") == series.id:
            member = Member.of(load_pipeline(run.path / "config.toml"))
            found[_as_counted(member, series)] = run
    return found


def _as_counted(member: Member, series: Series) -> Member:
    """What all runs of a series share, such as a fold named in its pipeline, sets none of them apart."""
    return Member(
        member.seed, member.fold if series.folds else None, member.left_out if series.sites else None
    )


def series_lines(document: dict[str, Any]) -> Lines:
    """The runs for people."""
    runs = " ".join(summary["run"] for summary in document["runs"])
    seconds = sum(summary["seconds"] for summary in document["runs"])
    n = len(document["runs"])
    parts = "folds" if document["folds"] else "sites left out" if document["left_out"] else "seeds"
    seeded = (
        f" from {len(document['seeds'])} seeds" if parts != "seeds" and len(document["seeds"]) > 1 else ""
    )
    yield Line(
        f"{n} {parts}{seeded} of {document['method']} done, {seconds:.0f} s of training; next: wsi-fl compare {runs}"
    )
