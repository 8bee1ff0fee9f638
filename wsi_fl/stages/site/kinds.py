"""Which kind of store a pipeline trains on."""

from __future__ import annotations

from wsi_fl.stages.site.data import Data, Features, Patches
from wsi_fl.stages.site.slides import Asked, Mosaics
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.types import UsageError

KINDS: dict[str, type[Data]] = {"patches": Patches, "features": Features, "mosaics": Mosaics}


def kind_of(pipeline: Pipeline) -> type[Data]:
    """Return the kind of store that a pipeline trains on.

    Raises:
        UsageError: when something is asked that this kind of store does not answer.
    """
    kind = KINDS[pipeline.train.data]
    if not pipeline.target.asked:
        return kind
    if kind is not Mosaics:
        raise UsageError("[target] asks about slides; set train.data = 'mosaics'")
    return Asked


def examples_of(pipeline: Pipeline) -> str:
    """Return what a pipeline's examples are, in the plural: patches, slides or patients."""
    return f"{pipeline.target.of}s" if pipeline.target.asked else kind_of(pipeline).word


def open_data(study: Study, site: str, pipeline: Pipeline) -> Data:
    """Open the store that a pipeline trains on; says which command makes a missing one."""
    return kind_of(pipeline)(study, site, pipeline)
