"""What a pipeline's examples are, and the store they are in."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from wsi_fl.stages.site.data import Data, Patches
from wsi_fl.stages.site.slides import Bagged
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.types import Bags, Shape, UsageError, Vectors


@dataclass(frozen=True)
class ExampleKind:
    """What a pipeline learns from.

    Attributes:
        data: which store, `train.data`.
        example: what a row is, `train.example`.
        word: what examples are called, in the plural.
    """

    data: Literal["patches", "features", "mosaics"]
    example: Literal["patch", "slide", "patient"]
    word: str

    @property
    def of_images(self) -> bool:
        """Whether models see pixels."""
        return self.data == "patches"

    @property
    def cut_by(self) -> Literal["tile", "mosaic"]:
        """The command, and the section of a pipeline, by which slides become what the store holds."""
        return "mosaic" if self.data == "mosaics" else "tile"

    @property
    def linear(self) -> str | None:
        """The linear head on such examples; None for pixels."""
        return None if self.of_images else "mean_head" if self.example == "slide" else "linear_head"

    def shape(self, n_features: int) -> Shape:
        """Return what models see of examples of so many features."""
        return (Bags if self.example == "slide" else Vectors)(n_features)

    def path(self, study: Study, site: str) -> Path:
        """Return where a site's store is, or would be."""
        return {"patches": study.store, "features": study.features, "mosaics": study.mosaic}[self.data](site)


def kind_of(pipeline: Pipeline) -> ExampleKind:
    """Return what a pipeline learns from.

    Raises:
        UsageError: when there are no such examples, or something is asked that they do not answer.
    """
    data, example, target = pipeline.train.data, pipeline.example, pipeline.target
    if data == "patches" and example != "patch":
        raise UsageError(
            f"train.example = {example!r} is for features; set train.data = 'features' or 'mosaics'"
        )
    if not target.asked:
        return ExampleKind(data, example, {"patch": "patches"}.get(example, f"{example}s"))
    if example == "patch":
        raise UsageError(
            "[target] asks about slides; set train.data = 'mosaics', or train.example = 'slide' or 'patient'"
        )
    if example == "patient" and target.of != "patient":
        raise UsageError(
            "[target] asks about slides, and train.example = 'patient'; set target.per = 'patient'"
        )
    return ExampleKind(data, example, f"{target.of}s")


def open_data(study: Study, site: str, pipeline: Pipeline) -> Data:
    """Open the store that a pipeline trains on; says which command makes a missing one."""
    return (Patches if kind_of(pipeline).of_images else Bagged)(study, site, pipeline)
