"""Who takes part in a stage, and with what: made once at its door and handed on; what a run keeps of its sites."""

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
    """Return a row of METHODS, or the variant of it that a pipeline names; UsageError for an unknown method."""
    if name not in METHODS:
        raise UsageError(f"unknown method {name!r}; known: {', '.join(METHODS)}")
    row = METHODS[name]
    values = {key: value_of(pipeline, key) for key, _ in row.variants}
    return next((one for (key, value), one in row.variants.items() if values[key] == value), row)


def settings_for(name: str, study: Study, pipeline: Pipeline) -> Pipeline:
    """Return the settings that a method makes of a pipeline's."""
    return _of_one_release(name, study, pipeline) if method_for(name, pipeline).once else pipeline


def _of_one_release(name: str, study: Study, pipeline: Pipeline) -> Pipeline:
    """Return the settings of a method that releases once: one round, and heads that are solved and not trained."""
    linear = kind_of(pipeline).linear
    if linear is None:
        raise UsageError(
            f"{name} shares sums of features; compute them with `wsi-fl features` (or `wsi-fl mosaic`) and set "
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
        study: as the run saw it when it began, where there is one.
        name: of the method.
        run: its folder, which a plan that is not run never writes.
        sites: in order, the files of all.
        letters: whose released sums all sites have in common; None for all that lie here.
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
        """Read the site files of those who take part; stores are opened when somebody asks for them."""
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
        """Return those who took part in a run, with its own settings unless others are given; study `as_begun`."""
        settings = pipeline or load_pipeline(run.path / "config.toml")
        return RunContext.of(study, settings, str(run.manifest["method"]), run)

    @property
    def names(self) -> list[str]:
        """The names of all sites, in order."""
        return [site.name for site in self.sites]

    @cached_property
    def method(self) -> Method:
        """The row of the method."""
        return method_for(self.name, self.pipeline)

    @cached_property
    def kind(self) -> ExampleKind:
        """What all of them learn from."""
        return kind_of(self.pipeline)

    @property
    def examples(self) -> str:
        """What an example is, in the plural: patches, slides or patients."""
        return self.kind.word

    @property
    def by_files(self) -> bool:
        """Whether sites take part by what they have released before, whoever carries it."""
        return self.method.once and self.pipeline.train.from_released

    @cached_property
    def releases(self) -> dict[str, ReleasedSums]:
        """The released sums of the sites that have a file here; empty where none are used."""
        starting = self.method.starts and self.pipeline.train.init_from == RUN
        found = releases_of(self.study, self.sites) if starting or self.by_files else {}
        return {name: one for name, one in found.items() if self.letters is None or name in self.letters}

    @property
    def here(self) -> list[str]:
        """The sites whose models are made: all, or those with a store here where the others take part by files."""
        return [name for name in self.names if not self.by_files or self.has_store(name)]

    @property
    def members(self) -> list[SiteFile]:
        """The files of the sites that have labels to learn from."""
        return [site for site in self.sites if not site.receives]

    @property
    def receivers(self) -> list[str]:
        """The sites that take what the members' letters make, and give nothing."""
        return [site.name for site in self.sites if site.receives]

    @property
    def may_merge(self) -> bool:
        """Whether one place may read what all sites hold for testing."""
        members = self.members
        return bool(members) and all(one.allows("patches") and one.name in self.here for one in members)

    @property
    def lost(self) -> set[str]:
        """The sites that were lost in the run and have not come back."""
        return {loss["site"] for loss in self.run.losses()}

    @property
    def running(self) -> tuple[int, ...]:
        """The indices of the sites that were not lost."""
        lost = self.lost
        return tuple(k for k, name in enumerate(self.names) if name not in lost)

    @property
    def running_here(self) -> tuple[int, ...]:
        """Of these, the sites whose models are made on this machine."""
        return tuple(k for k in self.running if self.names[k] in self.here)

    @property
    def task(self) -> Task:
        """What is asked of an example."""
        return task_of(self.pipeline.target)

    def tells_scores(self, name: str) -> bool:
        """Return whether a site tells the others how models do on its test part; there are counts of classes alone."""
        site = self.site(name)
        return self.task.kind == "classes" and site.allows("scores") and not site.receives

    def site(self, name: str) -> SiteFile:
        """Return the file of one of the sites."""
        return next(site for site in self.sites if site.name == name)

    def has_store(self, site: str) -> bool:
        """Return whether a site's store is on this machine."""
        return self.kind.path(self.study, site).exists()

    def data(self, site: str) -> Data:
        """Return the store of a site, opened by whoever asks first."""
        if site not in self._opened:
            self._opened[site] = self._stores.enter_context(open_data(self.study, site, self.pipeline))
        return self._opened[site]

    def merged(self) -> Examples:
        """Return the test examples of all sites together."""
        return joined([self.data(site.name).held_out for site in self.members])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stores.close()


def as_begun(study: Study, run: RunFolder, *, goes_on: bool = False) -> Study:
    """Return the study with the promises that the run began with, and say which site files promise something else now.

    Of `allow` and `max_epsilon` the stricter holds: what a hospital has withdrawn since is withdrawn. A run that goes
    on is refused where a site has a smaller δ now.
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
