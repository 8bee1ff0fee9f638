"""What a run makes of sums that were released before: the heads of `oneshot`, or where a travelling model starts."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray

from wsi_fl.federation.methods import SHARED
from wsi_fl.learning.local import Learner, Learners
from wsi_fl.models import build
from wsi_fl.models.shared_head import SharedHead
from wsi_fl.stages.site.party import Party
from wsi_fl.stages.site.sums import Sums, read_sums, refuse_others, wanted_of
from wsi_fl.stages.training.tuning import set_layer
from wsi_fl.types import WsiFlError


def bring_released(party: Party, name: str, learners: Learners) -> None:
    """Give a site's learners what all released files tell: a shared head its sums, or what travels its start.

    Raises:
        UsageError: when a file is of another plan, projection or encoder than the site's own store.
        WsiFlError: when what the site keeps at home is missing, damaged, or not what it released.
    """
    study, data = party.study, party.data(name)
    wanted = wanted_of(data, party.pipeline)
    for other, sums in party.releases.items():
        refuse_others(sums.facts, wanted, study.relative(study.release(other)))
    mean, n = _mean(party.releases.values()), len(party.releases)
    if party.by_files:
        learner = learners["proxy"]
        if name in party.releases:
            _hold_own(party, name, learner)
        learner.load_vector(mean, n_sites=n)
        return
    assert party.method.travels is not None
    learner = learners[party.method.travels]
    name_of_head = f"{SHARED}:{party.pipeline.model.directions}"
    head = build(name_of_head, n_classes=len(data.classes), shape=data.shape, seed=0)
    assert isinstance(head, SharedHead)
    with torch.no_grad():
        head.sums.copy_(torch.from_numpy(mean))
    head.n_sites.fill_(n)
    set_layer(learner.model, *head.linear())


def _mean(releases: Iterable[Sums]) -> NDArray[np.float32]:
    """Return float32[k + 1], the mean of what sites have released."""
    mean = np.mean([sums.vector.astype(np.float64) for sums in releases], axis=0)
    return np.asarray(mean, np.float32)


def _hold_own(party: Party, name: str, learner: Learner) -> None:
    """Give a shared head the site's own sums, exact and as they left."""
    study = party.study
    home, file = study.release_at_home(name), study.release(name)
    again = f"run `wsi-fl release --site {name}`, which spends nothing"
    if not home.exists():
        raise WsiFlError(f"{study.relative(home)} is missing; {again}")
    own = read_sums(home, study.relative(home))
    if own.exact is None or own.facts != party.releases[name].facts:
        raise WsiFlError(f"{study.relative(file)} is not what {study.relative(home)} holds; {again}")
    assert isinstance(learner.model, SharedHead)
    released = torch.from_numpy(own.vector).double()
    learner.model.hold(torch.from_numpy(own.exact), released[:-1], float(released[-1]))
