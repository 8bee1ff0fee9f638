"""The recipe of a run: what all sites agree on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from wsi_fl.data.augmentation import Augment
from wsi_fl.federation.methods import Method, Weights
from wsi_fl.federation.topology import Topology
from wsi_fl.privacy.cipher import CipherStream


@dataclass(frozen=True)
class Recipe:
    """Training settings, the same at all sites. Noise and its cost are in each site's privacy plan.

    Attributes:
        batch_size: privacy units of a batch, where a site has no privacy plan.
        lr, local_lr: learning rates, the second of models that stay at their site and have no noise; None for `lr`.
        balance: whether classes count alike in models without noise.
        weights: α and β.
        self_weight: P[i, i], where the graph does not set it.
        counts_units: whether a site's model weighs in the mean by its number of privacy units, as announced before.
        graph: in place of the method's graph.
        make_augment: random stream → augmentation of an image.
        draws_patches: whether the patches of a bag are drawn anew in each batch.
        prediction_model: "private", "proxy", "shared", "mean", "local", "ensemble" (weighted on local rows), or "auto"
            (the best of them at each site).
        local_baseline: whether a site trains a local model beside those of a method with exchange.
        tune: whether local models without noise are tuned by cross-validation.
        tuning_folds: folds of a choice in tuning; 1 for the slowest models.
        reset_optimizer: whether the exchanged model's optimizer is reset after each exchange.
        insecure_seed: fixed noise, for tests alone.
        colluding: tolerated colluding sites, with distributed noise; None where each site adds its own.
        dropouts: tolerated dropouts in secure aggregation.
    """

    method: Method
    rounds: int
    batch_size: int
    lr: float
    weights: Weights
    seed: int = 0
    epochs_per_round: int = 1
    eval_every: int = 1
    local_lr: float | None = None
    weight_decay: float = 0.0
    balance: bool = False
    bfloat16: bool = False
    self_weight: float = 0.0
    counts_units: bool = False
    graph: Topology | None = None
    make_augment: Callable[[CipherStream], Augment | None] = lambda _: None
    draws_patches: bool = False
    prediction_model: str = "private"
    local_baseline: bool = False
    tune: bool = False
    tuning_folds: int = 5
    reset_optimizer: bool = False
    insecure_seed: int | None = None
    colluding: int | None = None
    dropouts: int = 0
