"""Class statistics as the payload of the one-shot method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from wsi_fl.federation.payload import ModelPayload, message_state
from wsi_fl.federation.push_sum import PushSum, Vector

if TYPE_CHECKING:
    from torch import Tensor, nn

    from wsi_fl.data.cohort import Cohort
    from wsi_fl.federation.comm import Comm
    from wsi_fl.federation.message import Message
    from wsi_fl.federation.recipe import Recipe
    from wsi_fl.federation.site_state import Site
    from wsi_fl.learning.local_training import Batch, DPSettings, Learner
    from wsi_fl.oneshot.shared_head import SharedHead
    from wsi_fl.privacy.cipher import CipherStream
    from wsi_fl.privacy.privacy_plan import PrivateTrainer, Unit

_MAX_ROWS = 1 << 30  # more rows than any sum has


class StatisticsPayload(ModelPayload):
    """Class statistics of all rows of a site, from which all sites solve a global head."""

    is_single_release = True
    has_secure_sum = True
    inert_keys = (
        *("train.rounds", "train.epochs_per_round", "train.batch_size", "train.lr", "train.private_lr"),
        *("train.weight_decay", "train.tune", "train.balance", "model.", "privacy.clip", "topology."),
    )

    def explain_unfit(self, x: NDArray[np.generic]) -> str:
        is_features = x.ndim in (2, 3)
        return "" if is_features else "One-shot sums features, not images; give float32[n, d] or bags of them"

    def build_model(self, examples: Cohort, n_outputs: int, unit: Unit, projection: object) -> nn.Module:
        from wsi_fl.oneshot.projection import N_RANDOM, Projection
        from wsi_fl.oneshot.shared_head import SharedHead

        x = examples.read(np.zeros(1, np.int64))
        bags = x.ndim == 3
        assert isinstance(projection, Projection | int | None)
        return SharedHead(
            n_outputs,
            x.shape[-1] - bags,
            bags=bags,
            projection=N_RANDOM if projection is None else projection,
            patients=unit == "patient",
            kind=examples.task.kind,
        )

    def build_trainer(self, learner: Learner, dp: DPSettings) -> PrivateTrainer:
        from wsi_fl.oneshot.class_statistics import NoisyStatistics

        return NoisyStatistics(dp.sigma, dp.clip, dp.batch_size, dp.unit)

    def load_rows(self, learner: Learner, rows: Cohort) -> None:
        import torch

        from wsi_fl.data.batches import load_batches
        from wsi_fl.data.metrics import fill_patient_names
        from wsi_fl.data.tasks import target_columns

        if not len(rows):
            return
        head, names = require_head(learner.model), fill_patient_names(rows.patient)
        patient = torch.from_numpy(np.unique(names, return_inverse=True)[1]).to(learner.device)
        for x, y in load_batches(rows, iter([np.arange(len(rows))]), augment=None, device=learner.device):
            head.set_local_statistics(head.embed_rows(x), target_columns(learner.task, y), patient)

    def find_problem(
        self, message: Message, site: Site, learner: Learner, distances: Sequence[float], *, is_single: bool
    ) -> str:
        """Return why numbers cannot be class statistics of the announced units, or "" where they can.

        The number of units is known for statistics of a single sender, not for a mean of several.
        """
        import torch

        from wsi_fl.oneshot.class_statistics import explain_invalid_statistics

        head, is_noisy = require_head(learner.model), bool(site.plan and site.plan.sigma)
        if problem := find_range_problem(message.vector, head.shape[0], is_noisy=is_noisy):
            return problem
        unknown = (None, None)
        announced = site.announced_units.get(message.sender, unknown) if is_single else unknown
        rows = site.units.kind == "row" and site.canaries is None  # of canaries about half have a row
        return explain_invalid_statistics(head.layout, torch.tensor(message_state(message).z), *announced, rows=rows)

    def replace_rejected(self, local_vector: Vector, share: float) -> PushSum | None:
        """Return empty statistics."""
        return PushSum(np.zeros_like(local_vector), share)

    def load_mixture(self, learner: Learner, mixture: Vector, n_sites: int) -> None:
        require_head(learner.model).n_sites.fill_(n_sites)
        learner.load_vector(mixture)

    def aggregate_securely(
        self, sites: Sequence[Site], comm: Comm, recipe: Recipe, present: Sequence[int], round_: int
    ) -> None:
        from wsi_fl.oneshot.secure_aggregation import aggregate_statistics

        aggregate_statistics(sites, comm, recipe, present, round_=round_)

    def build_released_model(self, model: nn.Module, vector: Vector, *, is_single: bool) -> nn.Module:
        released_model = super().build_released_model(model, vector, is_single=is_single)
        head = require_head(released_model)
        head.clear_local_statistics()
        if is_single:
            head.n_sites.fill_(1)
        return released_model

    def strip_local_state(self, model: nn.Module) -> nn.Module:
        return require_head(model).solve_released_head()

    def count_effective_rows(self, model: nn.Module) -> tuple[float, float] | None:
        return require_head(model).effective_sample_sizes()

    def redraw_noise(self, model: nn.Module, rng: np.random.Generator) -> nn.Module | None:
        head = require_head(model)
        return head.redraw_noise(rng) if head.is_noisy else None


def require_head(model: nn.Module) -> SharedHead:
    """Return the one-shot global head of a learner or a run."""
    from wsi_fl.oneshot.shared_head import SharedHead

    assert isinstance(model, SharedHead)
    return model


def find_range_problem(vector: NDArray[np.generic], n_columns: int, *, is_noisy: bool) -> str:
    """Return why numbers cannot be sums of rows of norm at most 1 with variances of noise, or ""."""
    largest, variance = float(np.abs(vector).max(initial=0)), float(vector[-n_columns:].min())
    if variance < 0 or (is_noisy and variance == 0):
        return f"its noise has a variance of {variance:.3g}"
    return f"it holds {largest:.3g}, which is no sum of rows" if largest > _MAX_ROWS else ""


def compute_statistics(learner: Learner, batch: Batch, noise: CipherStream) -> None:
    """Compute the class statistics of a batch of all examples, noisy for a private learner."""
    from wsi_fl.data.tasks import target_columns
    from wsi_fl.oneshot.class_statistics import NoisyStatistics

    x, y, *patients = batch
    mechanism = learner.trainer or NoisyStatistics(0.0, 1.0, len(x))
    assert isinstance(mechanism, NoisyStatistics)  # another trainer would add no noise
    columns: Tensor = target_columns(learner.task, y)
    mechanism.fill(require_head(learner.model), x, columns, noise, patients[0] if patients else None)
