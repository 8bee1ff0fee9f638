"""Models of a site before the first round: at random, or from weights."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from wsi_fl.data.validation import COMMON
from wsi_fl.models import HUB, StartWeights, create_model
from wsi_fl.models.weights import NoWeightsError
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site_file import SiteFile
from wsi_fl.types import WsiFlError

_PRIVATE_SEED_STEP = 1000
"""Distance of the private models' seeds from the proxies' common seed."""


def build_model(
    context: RunContext, index: int, role: str, *, common: bool = False, state: Mapping[str, torch.Tensor] | None = None
) -> nn.Module:
    """Return a model of a site: of common kind and seed for a role in COMMON or if `common`, otherwise the site's."""
    site, pipeline, private = context.sites[index], context.pipeline, role not in COMMON and not common
    data = context.open_data(site.name)
    kind = find_architecture(site, pipeline, role, common=common)
    try:
        model = create_model(
            kind,
            n_classes=len(data.classes),
            shape=data.shape,
            seed=pipeline.train.seed + (_PRIVATE_SEED_STEP * (index + 1) if private else 0),
            start=find_start(pipeline, data.study if state is None else None),
        )
    except NoWeightsError as error:
        raise NoWeightsError(f"{error}: model.weights = 'FILE.safetensors'") from None
    if state is not None:
        try:
            model.load_state_dict(state)
        except RuntimeError:
            raise WsiFlError(
                f"{context.run.name}: the {role} model of {site.name} differs from this run's; put its backup back"
            ) from None
    if role in COMMON:
        context.hooks.configure_model(data, model)
    return model


def find_start(pipeline: Pipeline, study: Study | None = None) -> StartWeights | None:
    """Return the start of networks; None for random. Without a study weights are loaded afterwards."""
    settings = pipeline.model
    if not settings.weights:
        return None
    if study is None or settings.weights == HUB:
        return StartWeights(settings.train, HUB if study else None)
    return StartWeights(settings.train, study.resolve(settings.weights), study.root / "weights")


def find_architecture(site: SiteFile, pipeline: Pipeline, role: str, *, common: bool = False) -> str:
    """Return the architecture of a role at a site."""
    if role in COMMON:
        return pipeline.model.proxy
    return pipeline.model.private if common else (site.private_model or pipeline.model.private)
