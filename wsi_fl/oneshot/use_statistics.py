"""Use of released class statistics: in the global head of a site, or as start of a linear head that is trained."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch

from wsi_fl.learning.local_models import set_linear_layer
from wsi_fl.oneshot.class_statistics import refuse_invalid_statistics
from wsi_fl.oneshot.payload import require_head
from wsi_fl.oneshot.released_statistics import (
    ReleasedStatistics,
    build_header,
    has_patient_means,
    load_projection,
    refuse_mismatch,
    refuse_other_features,
)
from wsi_fl.oneshot.shared_head import SharedHead
from wsi_fl.types import Bags, Vectors

if TYPE_CHECKING:
    from wsi_fl.federation.methods import Method
    from wsi_fl.federation.site_state import Site
    from wsi_fl.stages.site.site_data import SiteData


def use_statistics(method: Method, data: SiteData, site: Site, released: Mapping[str, ReleasedStatistics]) -> None:
    """Load released statistics into a site's global head, or as start of its exchanged model.

    Raises:
        UsageError: for statistics of another plan or of other features.
        WsiFlError: for statistics that no honest site would release.
    """
    if method.uses_files:
        head = require_head(site.learners["shared"].model)
    else:
        assert isinstance(data.shape, Bags | Vectors)
        patients, projection = has_patient_means(data.pipeline), load_projection(data)
        head = SharedHead(len(data.classes), data.shape.n_features, projection=projection, patients=patients)
    study, header = data.study, build_header(data)
    for other, statistics in released.items():
        refuse_mismatch(statistics.header, header, label := study.relative_path(study.release_path(other)))
        refuse_invalid_statistics(head.layout, statistics, label)
    refuse_other_features(data, [statistics.header for statistics in released.values()])
    exact = np.mean([statistics.vector.astype(np.float64) for statistics in released.values()], axis=0)
    mean = np.asarray(exact, np.float32)
    if method.uses_files:
        if local_statistics := released.get(site.name):
            values = torch.from_numpy(local_statistics.vector).double()
            k = len(values) - local_statistics.header.columns
            head.set_noisy_statistics(values[:k], values[:k], values[k:])
        method.payload.load_mixture(site.learners["shared"], mean, len(released))
        return
    with torch.no_grad():
        head.sums.copy_(torch.from_numpy(mean))
    head.n_sites.fill_(len(released))
    set_linear_layer(site.mixing_learner(method).model, *head.linear_layer())
