"""An external test set: sites of the study that take no part in a run, all of whose patches are new to its models."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from wsi_fl.learning.aggregation import aggregated_scores
from wsi_fl.learning.examples import Examples, joined
from wsi_fl.learning.predictions import Predictions
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
    parts = {name: _whole(party, name, classes) for name in names}
    examples, said = joined([*parts.values()]), []
    for site in sites:
        found = answering(party.run, party.pipeline, site, classes, first.shape, device)
        with torch.no_grad():
            answers = {found.answer: found.probabilities(examples)}
        said.append(Predictions.of(parts, site=site.name, answer=found.answer, said=answers, outputs=classes))
    several = len(said) > 1 and examples.task.kind == "classes"
    together = aggregated_scores([one.answers for one in said], examples.label, weights) if several else None
    return {
        "sites": names,
        "n": len(examples),
        "rows": _rows(said),
        "aggregated": together,
        "left_out": None
        if left_out is None
        else {
            "site": left_out,
            "store": party.data(left_out).digest(),
            "rows": _rows([table.where(table.part == left_out) for table in said]),
        },
    }


def _rows(said: Sequence[Predictions]) -> list[dict[str, Any]]:
    return [{"site": table.site, **table.scores()} for table in said]


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
