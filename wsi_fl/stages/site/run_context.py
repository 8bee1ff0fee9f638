"""The run context: participating sites, settings, opened stores and statistics of a stage, made once."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import cached_property
from typing import Self, cast

from wsi_fl.data.cohort import IN_MEMORY_BYTES, Cohort, concatenate_examples
from wsi_fl.data.cross_site_counts import CrossSiteCounts, CrossSiteScores, score_cross_site
from wsi_fl.data.tasks import Task
from wsi_fl.federation.methods import METHODS, Method
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.runs.site_folder import SITE_FILE
from wsi_fl.slides.patching.scan_copies import Scan
from wsi_fl.stages.runtime.console import print_message
from wsi_fl.stages.site.example_kind import ExampleKind, find_example_kind
from wsi_fl.stages.site.site_data import SiteData, open_data
from wsi_fl.stages.site.study_hooks import EarlierRelease, StudyHooks, find_hooks
from wsi_fl.stages.site.target_labels import find_task
from wsi_fl.study.folder import Study, load_run_pipeline
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site_file import SiteFile
from wsi_fl.study.toml import read_setting
from wsi_fl.system.machine import count_ranks
from wsi_fl.types import UsageError


def find_method(name: str, pipeline: Pipeline) -> Method:
    """Return a method of METHODS, or its variant for a pipeline; UsageError for an unknown method."""
    if name not in METHODS:
        raise UsageError(f"unknown method {name!r}; known: {', '.join(METHODS)}")
    row = METHODS[name]
    values = {key: read_setting(pipeline, key) for key, _ in row.variants}
    return next((variant for (key, value), variant in row.variants.items() if values[key] == value), row)


def adapt_settings(name: str, study: Study, pipeline: Pipeline) -> Pipeline:
    """Return a pipeline's settings as adapted by a method."""
    return find_hooks(find_method(name, pipeline)).adapt_settings(study, pipeline)


@dataclass(frozen=True)
class RunContext:
    """The sites of a pipeline, their files read and their stores opened once; a context manager that closes them.

    Attributes:
        study: as it was when the run began, where there is a run.
        name: of the method.
        run: its folder; not written in a dry run.
        sites: the files of all, in order.
        common_sites: the sites whose released statistics all sites have; None for all files here.
        in_memory_bytes: examples of a split that take no more are kept in memory.
    """

    study: Study
    pipeline: Pipeline
    name: str
    run: RunFolder
    sites: tuple[SiteFile, ...]
    common_sites: frozenset[str] | None = None
    in_memory_bytes: int = IN_MEMORY_BYTES
    _opened: dict[str, SiteData] = field(default_factory=dict)
    _stores: ExitStack = field(default_factory=ExitStack)
    _scans: dict[str, list[Scan]] = field(default_factory=dict)

    @staticmethod
    def create(study: Study, pipeline: Pipeline, method: str, run: RunFolder | None = None) -> RunContext:
        """Read the files of the participating sites; stores are opened on demand."""
        study, folder = study.freeze_sites(), run or RunFolder(study.runs_path / "dry-run")
        single = find_method(method, pipeline).payload.is_single_release
        all_sites = study.load_sites(pipeline)
        left_out = pipeline.train.left_out
        sites = tuple(site for site in all_sites if site.name != left_out and (single or not site.is_receiver))
        pipeline = adapt_settings(method, study, pipeline)
        if single:
            sites = tuple(site.model_copy(update={"private_model": None, "batch_size": None}) for site in sites)
        if len(sites) < len(all_sites):
            pipeline = pipeline.model_copy(update={"sites": [site.name for site in sites]})
        return RunContext(study, pipeline, method, folder, sites)

    @staticmethod
    def restore(study: Study, run: RunFolder, pipeline: Pipeline | None = None) -> RunContext:
        """Return the context of a run, with its settings unless others are given; `study` as of its start."""
        settings = pipeline or load_run_pipeline(run.path / "config.toml")
        return RunContext.create(study, settings, str(run.manifest["method"]), run)

    @property
    def names(self) -> list[str]:
        """The names of all sites, in order."""
        return [site.name for site in self.sites]

    @cached_property
    def method(self) -> Method:
        """The method."""
        return find_method(self.name, self.pipeline)

    @cached_property
    def kind(self) -> ExampleKind:
        """The kind of examples of all sites."""
        return find_example_kind(self.pipeline)

    @property
    def uses_files(self) -> bool:
        """Whether sites participate by class statistics that they released before."""
        return self.method.uses_files

    @cached_property
    def hooks(self) -> StudyHooks:
        """What the method does outside the rounds."""
        return find_hooks(self.method)

    @cached_property
    def starter(self) -> StudyHooks | None:
        """The hooks of the method whose earlier releases a trained model starts from (`train.init_from`), if any."""
        start = self.pipeline.train.init_from
        if start == "fresh" or not self.method.needs_initial_weights:
            return None
        return find_hooks(find_method(start, self.pipeline))

    @cached_property
    def statistics(self) -> dict[str, EarlierRelease]:
        """The earlier releases by site, of files here; empty where none are used."""
        hooks = self.hooks if self.uses_files else self.starter
        files = {} if hooks is None else hooks.load_releases(self.study, self.sites)
        return {
            name: release for name, release in files.items() if self.common_sites is None or name in self.common_sites
        }

    @property
    def local_names(self) -> list[str]:
        """The sites whose models are made here: all, or those with a store where others participate by files."""
        return [name for name in self.names if not self.uses_files or self.has_store(name)]

    @property
    def members(self) -> list[SiteFile]:
        """The files of the sites with labels."""
        return [site for site in self.sites if not site.is_receiver]

    @property
    def receivers(self) -> list[str]:
        """The sites without labels, which only receive the federated model."""
        return [site.name for site in self.sites if site.is_receiver]

    @property
    def may_merge(self) -> bool:
        """Whether the test examples of all sites may be read here."""
        members = self.members
        return bool(members) and all(site.allows("patches") and site.name in self.local_names for site in members)

    @property
    def sites_lost(self) -> set[str]:
        """The sites that dropped out of the run and have not returned."""
        return {loss["site"] for loss in self.run.list_dropouts()}

    @property
    def running(self) -> tuple[int, ...]:
        """The indices of the sites that have not dropped out."""
        lost = self.sites_lost
        return tuple(k for k, name in enumerate(self.names) if name not in lost)

    @property
    def running_locally(self) -> tuple[int, ...]:
        """The indices of the running sites whose models are made on this machine."""
        return tuple(k for k in self.running if self.names[k] in self.local_names)

    @property
    def task(self) -> Task:
        """The prediction task."""
        return find_task(self.pipeline)

    def reports_scores(self, name: str) -> bool:
        """Return whether a site releases counts of models on its test set, which exist for classes only."""
        site = self.find_site(name)
        return self.task.kind == "classes" and site.allows("scores") and not site.is_receiver

    def find_site(self, name: str) -> SiteFile:
        """Return the file of a site."""
        return next(site for site in self.sites if site.name == name)

    def has_store(self, site: str) -> bool:
        """Return whether a site's store is on this machine."""
        return self.kind.store_path(self.study, site).exists()

    def open_data(self, site: str) -> SiteData:
        """Return the store of a site, opened at the first call."""
        if site not in self._opened:
            data = open_data(self.study, site, self.pipeline, self.in_memory_bytes)
            self._opened[site] = self._stores.enter_context(data)
        return self._opened[site]

    def list_scans(self, data: SiteData) -> list[Scan]:
        """Return the slides of a site's store with content marks, for which all its shards are opened once."""
        if data.site not in self._scans:
            self._scans[data.site] = data.list_scans()
        return self._scans[data.site]

    def load_cross_site_scores(self) -> CrossSiteScores | None:
        """Return the scores of the released models on each hospital's test part and on all; None without counts.

        Every site of a run stores the same counts, so those of the first site here are read.
        """
        stored = (self.run.site_folder(name).read_document("scores") for name in self.local_names)
        counts = next((counts for counts in stored if counts is not None), None)
        return None if counts is None else score_cross_site(cast(CrossSiteCounts, counts))

    def join_tests(self) -> Cohort:
        """Return the pooled test examples of all sites."""
        return concatenate_examples([self.open_data(site.name).test_examples for site in self.members])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stores.close()


def restore_study(study: Study, run: RunFolder, *, is_resumed: bool = False) -> Study:
    """Return the study with the settings snapshots of a run's start, and report site files that differ now.

    Of `allow` and `max_epsilon` the stricter holds, so that a hospital can withdraw permissions. A resumed run is
    refused where a site has a smaller δ now.
    """
    study = study.freeze_sites()
    restored = study.pin_run(run.path)
    for site_file in sorted(run.path.glob(f"sites/*/{SITE_FILE}")):
        name = site_file.parent.name
        if not (changed := restored.find_changed_settings(name)):
            continue
        if count_ranks() is None:
            words = "; ".join(changed)
            print_message(f"  sites/{name}.toml has changed since the run began: {words}; the stricter holds", "yellow")
        initial_delta, current_delta = restored.load_site(name).delta, study.load_site(name).delta
        if is_resumed and initial_delta is not None and current_delta is not None and current_delta < initial_delta:
            raise UsageError(
                f"sites/{name}.toml: delta = {current_delta:g} is below the {initial_delta:g} of this run; "
                "start a new run"
            )
    return restored
