"""The kind of a pipeline's examples: images, features of patches, slides as bags, patients."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wsi_fl import types
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.types import Shape, UsageError


@dataclass(frozen=True)
class ExampleKind:
    """The kind of a pipeline's examples: its store, the example, and the plural for texts."""

    data: Literal["patches", "features", "mosaics"]
    example: Literal["patch", "slide", "patient"]
    plural: str

    @property
    def is_images(self) -> bool:
        """Whether examples are images."""
        return self.data == "patches"

    @property
    def tiling_command(self) -> Literal["tile", "mosaic"]:
        """The command, and the section of a pipeline, that cuts slides for the store."""
        return "mosaic" if self.data == "mosaics" else "tile"

    @property
    def linear_head(self) -> str | None:
        """The linear head for such examples; None for images."""
        return None if self.is_images else "mean_head" if self.example == "slide" else "linear_head"

    def shape(self, n_features: int) -> Shape:
        """Return the shape of a model's input, given the number of features."""
        return (types.Bags if self.example == "slide" else types.Vectors)(n_features)

    def store_path(self, study: Study, site: str) -> Path:
        """Return the path of a site's store, which may not exist."""
        paths = {"patches": study.store_path, "features": study.features_path, "mosaics": study.mosaic_path}
        return paths[self.data](site)


def counts_patients(pipeline: Pipeline) -> bool:
    """Return whether the privacy unit is the patient; otherwise it is the row."""
    return pipeline.privacy.enabled and pipeline.privacy.unit == "patient"


def find_example_kind(pipeline: Pipeline) -> ExampleKind:
    """Return the kind of a pipeline's examples; UsageError for settings that exclude each other."""
    data, example, target = pipeline.train.data, pipeline.example_level, pipeline.target
    if data == "patches" and example != "patch":
        raise UsageError(f"train.example = {example!r} is for features; set train.data = 'features' or 'mosaics'")
    if not target.is_set:
        return ExampleKind(data, example, {"patch": "patches"}.get(example, f"{example}s"))
    if example == "patch":
        raise UsageError("[target] is for slides; set train.data = 'mosaics', or train.example = 'slide' or 'patient'")
    if example == "patient" and target.example_level != "patient":
        raise UsageError("[target] is for slides, and train.example = 'patient'; set target.per = 'patient'")
    return ExampleKind(data, example, f"{target.example_level}s")
