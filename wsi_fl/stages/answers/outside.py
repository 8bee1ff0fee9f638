"""An external test set: sites of the study that take no part in a run, all of whose patches are new to its models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from wsi_fl.learning.aggregation import aggregated_scores
from wsi_fl.learning.examples import Examples, joined
from wsi_fl.learning.tasks import Said, scored
from wsi_fl.stages.answers.trained import answering
from wsi_fl.stages.site.party import Party
from wsi_fl.stages.work.devices import device_of_rank
from wsi_fl.study.site import SiteFile
from wsi_fl.types import SPLITS, UsageError


def outside(party: Party, sites: Sequence[SiteFile], weights: Sequence[float]) -> dict[str, Any] | None:
    """Every site's scores on `evaluate.external` and the site that was left out, and those of all predictions as one;
    None where there is neither.

    Args:
        weights: of the sites, for weighted aggregation.

    Raises:
        UsageError: when an external site took part, tells other classes apart, or does not let its patches be read.
    """
    left_out = party.pipeline.train.left_out
    names = [name for name in party.pipeline.evaluate.external if name != left_out]
    names += [] if left_out is None else [left_out]
    if not names:
        return None
    first = party.data(sites[0].name)
    classes, device = first.classes, device_of_rank()
    parts = [_whole(party, name, classes) for name in names]
    examples = joined(parts)
    with torch.no_grad():
        said = [
            answering(party.run, party.pipeline, site, classes, first.shape, device).probabilities(examples)
            for site in sites
        ]
    rows = [
        {"site": site.name, **scored(p, examples.label, examples.task)}
        for site, p in zip(sites, said, strict=True)
    ]
    several = len(said) > 1 and examples.task.kind == "classes"
    aggregated = aggregated_scores(said, examples.label, weights) if several else None
    return {
        "sites": names,
        "n": len(examples),
        "rows": rows,
        "aggregated": aggregated,
        "left_out": None if left_out is None else _left_out(party, left_out, rows, parts[-1], said),
    }


def _left_out(
    party: Party, name: str, rows: Sequence[Mapping[str, Any]], examples: Examples, said: Sequence[Said]
) -> dict[str, Any]:
    """Every site's scores on the site that was left out alone, which is the last part of what was said."""
    n, task = len(examples), examples.task
    return {
        "site": name,
        "store": party.data(name).digest(),
        "rows": [
            {"site": row["site"], **scored(p[-n:], examples.label, task)}
            for row, p in zip(rows, said, strict=True)
        ],
    }


def _whole(party: Party, name: str, classes: tuple[str, ...]) -> Examples:
    """All patches of an external site, whatever their split."""
    site = party.study.site(name)
    if name in party.names:
        raise UsageError(f"evaluate.external: site {name} took part in the run")
    if not site.allows("patches"):
        raise UsageError(
            f'sites/{name}.toml: evaluate.external reads its patches; allow = ["patches"] lets it'
        )
    data = party.data(name)
    if (theirs := data.classes) != classes:
        raise UsageError(f"evaluate.external: site {name} has other classes, {', '.join(theirs)}")
    parts = [data.examples(split) for split in SPLITS]
    return joined([part for part in parts if len(part)])
