"""The run context: participating sites, settings, opened stores and statistics of a stage, made once."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self

from wsi_fl.federation.methods import METHODS, SHARED, Method
from wsi_fl.learning.examples import Examples, joined
from wsi_fl.learning.tasks import Task
from wsi_fl.runs.run import RunFolder
from wsi_fl.runs.site import SITE_FILE
from wsi_fl.stages.site.data import Data, ExampleKind, kind_of, open_data
from wsi_fl.stages.site.sums import RUN, ReleasedSums, open_directions, releases_of
from wsi_fl.stages.site.targets import task_of
from wsi_fl.stages.work.console import say
from wsi_fl.study.folder import Study, load_pipeline
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site import SiteFile
from wsi_fl.study.toml import value_of
from wsi_fl.system.machine import launched_ranks
from wsi_fl.types import UsageError


def method_for(name: str, pipeline: Pipeline) -> Method:
    """Return a method of METHODS, or its variant for a pipeline; UsageError for an unknown method."""
    if name not in METHODS:
        raise UsageError(f"unknown method {name!r}; known: {', '.join(METHODS)}")
    row = METHODS[name]
    values = {key: value_of(pipeline, key) for key, _ in row.variants}
    return next((one for (key, value), one in row.variants.items() if values[key] == value), row)


def settings_for(name: str, study: Study, pipeline: Pipeline) -> Pipeline:
    """Return a pipeline's settings as adapted by a method."""
    return _of_one_release(name, study, pipeline) if method_for(name, pipeline).once else pipeline


def _of_one_release(name: str, study: Study, pipeline: Pipeline) -> Pipeline:
    """Return the settings of a one-shot method: a single round, and heads that are solved, not trained."""
    linear = kind_of(pipeline).linear
    if linear is None:
        raise UsageError(
            f"{name} needs features; compute them with `wsi-fl features` (or `wsi-fl mosaic`) and set "
            "train.data = 'features' (or 'mosaics')"
        )
    once = {"rounds": 1, "epochs_per_round": 1, "eval_every": 1, "tune": True}
    wanted = pipeline.model.projection
    n = wanted if isinstance(wanted, int) else open_directions(study, wanted).n
    kind = pipeline.target.kind
    model = {"private": linear, "proxy": f"{SHARED}:{n}" + (f":{kind}" if kind != "classes" else "")}
    return pipeline.changed(train=once, model=model, privacy={"clip": 1.0, "mode": "strict"})


@dataclass(frozen=True)
class RunContext:
    """The sites of a pipeline, their files read and their stores opened once; a context manager that closes them.

    Attributes:
        study: as it was when the run began, where there is a run.
        name: of the method.
        run: its folder; not written in a dry run.
        sites: the files of all, in order.
        common_sites: the sites whose released statistics all sites have; None for all files here.
    """

    study: Study
    pipeline: Pipeline
    name: str
    run: RunFolder
    sites: tuple[SiteFile, ...]
    letters: frozenset[str] | None = None
    _opened: dict[str, Data] = field(default_factory=dict)
    _stores: ExitStack = field(default_factory=ExitStack)

    @staticmethod
    def of(study: Study, pipeline: Pipeline, method: str, run: RunFolder | None = None) -> RunContext:
        """Read the files of the participating sites; stores are opened on demand."""
        folder = run or RunFolder(study.runs / "dry-run")
        once, every = method_for(method, pipeline).once, study.sites(pipeline)
        left_out = pipeline.train.left_out
        sites = tuple(site for site in every if site.name != left_out and (once or not site.receives))
        pipeline = settings_for(method, study, pipeline)
        if once:
            sites = tuple(site.model_copy(update={"private_model": None}) for site in sites)
        if len(sites) < len(every):
            pipeline = pipeline.model_copy(update={"sites": [site.name for site in sites]})
        return RunContext(study, pipeline, method, folder, sites)

    @staticmethod
    def of_run(study: Study, run: RunFolder, pipeline: Pipeline | None = None) -> RunContext:
        """Return the context of a run, with its settings unless others are given; `study` as of its start."""
        settings = pipeline or load_pipeline(run.path / "config.toml")
        return RunContext.of(study, settings, str(run.manifest["method"]), run)

    @property
    def names(self) -> list[str]:
        """The names of all sites, in order."""
        return [site.name for site in self.sites]

    @cached_property
    def method(self) -> Method:
        """The method."""
        return method_for(self.name, self.pipeline)

    @cached_property
    def kind(self) -> ExampleKind:
        """The kind of examples of all sites."""
        return kind_of(self.pipeline)

    @property
    def examples(self) -> str:
        """The plural of an example: patches, slides or patients."""
        return self.kind.word

    @property
    def by_files(self) -> bool:
        """Whether sites participate by class statistics that they released before."""
        return self.method.once and self.pipeline.train.from_released

    @cached_property
    def releases(self) -> dict[str, ReleasedSums]:
        """The released class statistics by site, of files here; empty where none are used."""
        starting = self.method.starts and self.pipeline.train.init_from == RUN
        found = releases_of(self.study, self.sites) if starting or self.by_files else {}
        return {name: one for name, one in found.items() if self.letters is None or name in self.letters}

    @property
    def here(self) -> list[str]:
        """The sites whose models are made here: all, or those with a store where others participate by files."""
        return [name for name in self.names if not self.by_files or self.has_store(name)]

    @property
    def members(self) -> list[SiteFile]:
        """The files of the sites with labels."""
        return [site for site in self.sites if not site.receives]

    @property
    def receivers(self) -> list[str]:
        """The sites without labels, which only receive the federated model."""
        return [site.name for site in self.sites if site.receives]

    @property
    def may_merge(self) -> bool:
        """Whether the test examples of all sites may be read here."""
        members = self.members
        return bool(members) and all(one.allows("patches") and one.name in self.here for one in members)

    @property
    def lost(self) -> set[str]:
        """The sites that dropped out of the run and have not returned."""
        return {loss["site"] for loss in self.run.losses()}

    @property
    def running(self) -> tuple[int, ...]:
        """The indices of the sites that have not dropped out."""
        lost = self.lost
        return tuple(k for k, name in enumerate(self.names) if name not in lost)

    @property
    def running_here(self) -> tuple[int, ...]:
        """The indices of the running sites whose models are made on this machine."""
        return tuple(k for k in self.running if self.names[k] in self.here)

    @property
    def task(self) -> Task:
        """The prediction task."""
        return task_of(self.pipeline.target)

    def tells_scores(self, name: str) -> bool:
        """Return whether a site releases counts of models on its test set, which exist for classes only."""
        site = self.site(name)
        return self.task.kind == "classes" and site.allows("scores") and not site.receives

    def site(self, name: str) -> SiteFile:
        """Return the file of a site."""
        return next(site for site in self.sites if site.name == name)

    def has_store(self, site: str) -> bool:
        """Return whether a site's store is on this machine."""
        return self.kind.path(self.study, site).exists()

    def data(self, site: str) -> Data:
        """Return the store of a site, opened at the first call."""
        if site not in self._opened:
            self._opened[site] = self._stores.enter_context(open_data(self.study, site, self.pipeline))
        return self._opened[site]

    def merged(self) -> Examples:
        """Return the pooled test examples of all sites."""
        return joined([self.data(site.name).held_out for site in self.members])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stores.close()


def as_begun(study: Study, run: RunFolder, *, goes_on: bool = False) -> Study:
    """Return the study with the settings snapshots of a run's start, and report site files that differ now.

    Of `allow` and `max_epsilon` the stricter holds, so that a hospital can withdraw permissions. A resumed run is
    refused where a site has a smaller δ now.
    """
    seen = study.as_of(run.path)
    for kept in sorted(run.path.glob(f"sites/*/{SITE_FILE}")):
        name = kept.parent.name
        began, changed = seen.site_of_run(name), seen.changed_promises(name)
        if changed and launched_ranks() is None:
            words = "; ".join(changed)
            say(f"  sites/{name}.toml has changed since the run began: {words}; the stricter holds", "yellow")
        was, now = began.delta if began else None, study.site(name).delta if changed else None
        if goes_on and was is not None and now is not None and now < was:
            raise UsageError(
                f"sites/{name}.toml: delta = {now:g} is smaller than the {was:g} of this run; start a new run"
            )
    return seen
