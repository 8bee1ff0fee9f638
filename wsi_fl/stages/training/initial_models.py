"""Models of a site before the first round: at random, from weights, or from released class statistics."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from torch import nn

from wsi_fl.data.validation import COMMON
from wsi_fl.federation.site_state import Site
from wsi_fl.learning.local_models import set_linear_layer
from wsi_fl.models import HUB, StartWeights, create_model
from wsi_fl.models.weights import NoWeightsError
from wsi_fl.oneshot.class_statistics import explain_invalid_statistics
from wsi_fl.oneshot.released_statistics import build_header, has_patient_means, load_projection, refuse_mismatch
from wsi_fl.oneshot.shared_head import SharedHead
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.site_file import SiteFile
from wsi_fl.types import Bags, Vectors, WsiFlError

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
    if isinstance(model, SharedHead):
        model.set_projection(load_projection(data), patients=has_patient_means(pipeline))
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


def load_released(context: RunContext, site: Site) -> None:
    """Load released statistics into a site's one-shot global head, or as start of its exchanged model.

    WsiFlError for statistics that no honest site would release.
    """
    study, data, name, learners = context.study, context.open_data(site.name), site.name, site.learners
    header = build_header(data)
    if context.uses_files:
        head = learners["shared"].model
    else:
        assert isinstance(data.shape, Bags | Vectors)
        patients, projection = has_patient_means(context.pipeline), load_projection(data)
        head = SharedHead(len(data.classes), data.shape.n_features, projection=projection, patients=patients)
    assert isinstance(head, SharedHead)
    for other, statistics in context.statistics.items():
        refuse_mismatch(statistics.header, header, label := study.relative_path(study.release_path(other)))
        values, facts = torch.from_numpy(statistics.vector), statistics.header
        if problem := explain_invalid_statistics(head, values, facts.n, facts.sigma, rows=facts.unit == "row"):
            raise WsiFlError(f"{label}: no statistics of {facts.n} {facts.unit}s: {problem}; ask its site for the file")
    exact = np.mean([statistics.vector.astype(np.float64) for statistics in context.statistics.values()], axis=0)
    mean, n = np.asarray(exact, np.float32), len(context.statistics)
    if context.uses_files:
        if local_statistics := context.statistics.get(name):
            values = torch.from_numpy(local_statistics.vector).double()
            k = len(values) - local_statistics.header.columns
            head.set_noisy_statistics(values[:k], values[:k], values[k:])
        context.method.payload.load_mixture(learners["shared"], mean, n)
        return
    assert context.method.mixing_role is not None
    learner = learners[context.method.mixing_role]
    with torch.no_grad():
        head.sums.copy_(torch.from_numpy(mean))
    head.n_sites.fill_(n)
    set_linear_layer(learner.model, *head.linear_layer())
