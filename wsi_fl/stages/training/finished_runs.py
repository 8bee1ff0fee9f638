"""The finished runs of a study, and whether two have the same settings and stores."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.site.example_kind import find_example_kind
from wsi_fl.stages.site.run_context import find_method
from wsi_fl.stages.training.train import SeriesMember
from wsi_fl.study.folder import Study, load_run_pipeline
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site_file import SiteFile
from wsi_fl.study.toml import Section
from wsi_fl.types import WsiFlError

_CLOSED_FORM_HEADS = ("linear_head", "mean_head")
"""Models that are fitted in closed form with `train.tune`."""
_ROUND_SETTINGS = (
    *("train.rounds", "train.epochs_per_round", "train.batch_size", "train.lr", "train.private_lr"),
    *("train.weight_decay", "train.balance", "model.proxy"),
)
"""Settings without effect on models that are fitted in closed form."""


@dataclass(frozen=True)
class FinishedRun:
    """A finished run.

    Attributes:
        inputs: digest of the training store of every site here.
        summary: the document of `train --json`.
    """

    folder: RunFolder
    method: str
    pipeline: Pipeline
    inputs: Mapping[str, str]
    summary: Mapping[str, Any]

    @classmethod
    def load(cls, path: Path) -> FinishedRun:
        """Load the run in a folder.

        Raises:
            WsiFlError: when it is not finished.
        """
        folder = RunFolder(path)
        summary, pipeline = folder.require_summary(), load_run_pipeline(path / "config.toml")
        receivers = summary.get("inference_sites", ())
        inputs = {name: digest for name, digest in folder.store_digests().items() if name not in receivers}
        return cls(folder, folder.manifest["method"], pipeline, inputs, summary)

    @property
    def seed(self) -> int:
        return self.pipeline.train.seed

    @property
    def repetition(self) -> SeriesMember:
        """The repetition: seed, fold and left-out site."""
        return SeriesMember.read_member(self.pipeline)

    @property
    def division(self) -> tuple[int | None, bool]:
        """The division of patients: the number of folds, and whether a site is left out."""
        return self.pipeline.train.folds, self.pipeline.train.left_out is not None

    @property
    def dp(self) -> bool:
        return self.pipeline.privacy.has_noise

    @cached_property
    def site_files(self) -> Mapping[str, SiteFile]:
        """The snapshot of the file of every site here."""
        study = Study(self.folder.path).pin_run(self.folder.path)
        return {name: file for name in self.inputs if (file := study.load_site_snapshot(name))}

    @property
    def site_settings(self) -> dict[str, object]:
        """The settings of site files that affected it."""
        return effective_site_settings(self.method, self.pipeline, self.site_files)

    @property
    def settings(self) -> dict[str, object]:
        """All settings that affected it."""
        return effective_settings(self.method, self.pipeline) | self.site_settings

    def has_same_inputs(self, inputs: Mapping[str, str]) -> bool:
        """Return whether it was trained on stores with these digests; runs with a left-out site differ in sites."""
        if self.pipeline.train.left_out is None:
            return self.inputs == inputs
        return all(inputs.get(name, digest) == digest for name, digest in self.inputs.items())

    def repeats(self, method: str, pipeline: Pipeline, inputs: Mapping[str, str]) -> bool:
        """Return whether it has these settings and stores, whatever its seed or fold."""
        return (
            self.method == method
            and self.pipeline.privacy.enabled == pipeline.privacy.enabled
            and self.has_same_inputs(inputs)
            and effective_settings(self.method, self.pipeline) == effective_settings(method, pipeline)
        )


def effective_settings(method: str, pipeline: Pipeline) -> dict[str, object]:
    """Return the settings that affect training of this method on given stores."""
    ignored = ["sites", "subtypes.", *find_method(method, pipeline).inert_keys]
    for name, section in pipeline:
        if isinstance(section, Section):
            ignored += [f"{name}.{key}" for key in section.without_effect]
    if not find_example_kind(pipeline).is_images:
        ignored += ["train.augment", "train.input_px"]
    if _has_closed_form(pipeline):
        ignored += _ROUND_SETTINGS
    if not pipeline.privacy.enabled:
        ignored += ["privacy."]
    elif pipeline.privacy.target_epsilon is not None:  # every site has its own
        ignored += ["privacy.sigma", "train.batch_size"]
    if pipeline.privacy.enabled and pipeline.privacy.mode == "strict":
        ignored += ["train.beta"]
    return {key: value for key, value in flatten_settings(pipeline).items() if not key.startswith(tuple(ignored))}


def effective_site_settings(method: str, pipeline: Pipeline, site_files: Mapping[str, SiteFile]) -> dict[str, object]:
    """Return the settings of site files that affect training of this method, as `sites.S2.batch_size`."""
    row = find_method(method, pipeline)
    if row.payload.is_single_release:
        return {}
    keys = [] if _has_closed_form(pipeline) else ["batch_size"]
    keys += [] if all(role.common for role in row.learners.values()) else ["private_model"]
    return {f"sites.{name}.{key}": getattr(file, key) for name, file in sorted(site_files.items()) for key in keys}


def _has_closed_form(pipeline: Pipeline) -> bool:
    return pipeline.train.tune and not pipeline.privacy.enabled and pipeline.model.private in _CLOSED_FORM_HEADS


def flatten_settings(pipeline: Pipeline) -> dict[str, object]:
    """Return the settings by their keys as after `--set`."""
    values: dict[str, object] = {}
    for section, content in pipeline.model_dump(by_alias=True).items():
        keys = content if isinstance(content, dict) else {"": content}
        values |= {f"{section}.{key}".removesuffix("."): value for key, value in keys.items()}
    return values


def find_finished_runs(study: Study, method: str = "*") -> Iterator[FinishedRun]:
    """Yield the finished runs of a study, or of a method in it, the last first."""
    for path in sorted(study.runs_path.glob(f"[0-9]*-{method}-*"), reverse=True):
        with suppress(WsiFlError):  # unfinished, or written by another version
            yield FinishedRun.load(path)


def find_finished_run(study: Study, method: str, pipeline: Pipeline, inputs: Mapping[str, str]) -> FinishedRun | None:
    """Return the last finished run of a method with these settings, seed and fold, and those of today's site files, on
    these stores; None without."""
    for run in find_finished_runs(study, method):
        same = run.repetition == SeriesMember.read_member(pipeline) and run.division[0] == pipeline.train.folds
        if same and run.repeats(method, pipeline, inputs):
            site_files = {name: study.load_site(name) for name in run.site_files}
            if run.site_settings == effective_site_settings(method, pipeline, site_files):
                return run
    return None
