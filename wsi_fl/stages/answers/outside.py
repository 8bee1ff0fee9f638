"""An external test set: sites of the study that take no part in a run, all of whose patches are new to its models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from wsi_fl.learning.aggregation import aggregated_scores
from wsi_fl.learning.examples import Examples, joined
from wsi_fl.learning.metrics import scores
from wsi_fl.runs import RunFolder
from wsi_fl.stages.answers.trained import answering
from wsi_fl.stages.site.data import open_data, shape_of, split_of
from wsi_fl.stages.work.devices import device_of_rank
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site import SiteFile
from wsi_fl.types import SPLITS, UsageError


def outside(
    study: Study, run: RunFolder, pipeline: Pipeline, sites: Sequence[SiteFile], weights: Sequence[float]
) -> dict[str, Any] | None:
    """Every site's scores on `evaluate.external`, and those of all predictions as one; None where none is named.

    Args:
        weights: of the sites, for weighted aggregation.

    Raises:
        UsageError: when an external site took part, tells other classes apart, or does not let its patches be read.
    """
    names = pipeline.evaluate.external
    if not names:
        return None
    with open_data(study, sites[0].name, pipeline) as store:
        classes, shape = store.meta.classes, shape_of(pipeline, store)
    examples = joined([_whole(study, pipeline, name, classes) for name in names])
    device = device_of_rank()
    with torch.no_grad():
        said = [
            answering(run, pipeline, site, classes, shape, device).probabilities(examples) for site in sites
        ]
    rows = [{"site": site.name, **scores(p, examples.label)} for site, p in zip(sites, said, strict=True)]
    aggregated = aggregated_scores(said, examples.label, weights) if len(said) > 1 else None
    return {"sites": names, "n": len(examples), "rows": rows, "aggregated": aggregated}


def _whole(study: Study, pipeline: Pipeline, name: str, classes: tuple[str, ...]) -> Examples:
    """All patches of an external site, whatever their split."""
    site = study.site(name)
    if name in [one.name for one in study.sites(pipeline)]:
        raise UsageError(f"evaluate.external: site {name} took part in the run")
    if not site.allows("patches"):
        raise UsageError(
            f'sites/{name}.toml: evaluate.external reads its patches; allow = ["patches"] lets it'
        )
    store = open_data(study, name, pipeline)
    if store.meta.classes != classes:
        raise UsageError(f"evaluate.external: site {name} has other classes, {', '.join(store.meta.classes)}")
    parts = [split_of(pipeline, store, split) for split in SPLITS]
    return joined([part for part in parts if len(part)])
