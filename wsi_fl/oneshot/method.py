"""The one-shot method (entry point `wsi_fl.methods`): heads solved from class statistics, which sites release once."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

from wsi_fl.federation.methods import FILES, Disclosure, Method, Role, Weights
from wsi_fl.oneshot.payload import StatisticsPayload, compute_statistics

if TYPE_CHECKING:
    from torch import nn

    from wsi_fl.learning.local_training import Batch, Learners
    from wsi_fl.oneshot.column_sums import HeadKind
    from wsi_fl.privacy.cipher import CipherStream
    from wsi_fl.stages.site.study_hooks import StudyHooks
    from wsi_fl.types import Shape


def _step_statistics(learners: Learners, batch: Batch, weights: Weights, noise: CipherStream) -> dict[str, float]:
    """Compute the class statistics of all rows; the private model was fitted before."""
    del weights
    compute_statistics(learners["shared"], batch, noise)
    return {}


def _load_hooks() -> StudyHooks:
    from wsi_fl.oneshot.hooks import HOOKS

    return HOOKS


def _build_method() -> Method:
    """Return the method; in its variant the statistics are read from files, and nothing is sent."""
    statistics = Disclosure("sums", "star", "shared", timing="once")
    row = Method(
        "One-shot",
        "class statistics, released once",
        {"private": Role(dp=False), "shared": Role(dp=True, common=True)},
        _step_statistics,
        (statistics,),
        payload=StatisticsPayload(),
        load_hooks=_load_hooks,
    )
    by_files = replace(row, disclosures=(replace(statistics, route=FILES),), learns_from="nothing")
    return replace(row, variants={("train.from_released", True): by_files})


ONESHOT = _build_method()


def build_head(n_classes: int, shape: Shape, *options: str) -> nn.Module:
    """Return the empty head `shared_head[:COMPONENTS[:TASK]]` (entry point `wsi_fl.payload_models`)."""
    from wsi_fl.oneshot.projection import N_RANDOM
    from wsi_fl.oneshot.shared_head import SharedHead
    from wsi_fl.types import Bags, Images, UsageError

    if isinstance(shape, Images):
        raise UsageError("the global head of class statistics takes features, not images; set train.data = 'features'")
    n, kind = int(options[0]) if options else N_RANDOM, cast("HeadKind", options[1] if len(options) > 1 else "classes")
    return SharedHead(n_classes, shape.n_features, bags=isinstance(shape, Bags), projection=n, kind=kind)
