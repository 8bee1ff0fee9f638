"""The payload of a method: what travels between sites in rounds, and everything that follows from its kind.

A payload travels as one vector float32[d]: the trained parameters of the model of the method's mixing role. The default
is a trained model. A method whose payload is something else, such as class statistics, overrides what differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from numpy.typing import NDArray

from wsi_fl.federation.push_sum import PushSum, Vector
from wsi_fl.types import UsageError, WsiFlError

if TYPE_CHECKING:
    from torch import nn

    from wsi_fl.data.cohort import Cohort
    from wsi_fl.federation.comm import Comm
    from wsi_fl.federation.message import Message
    from wsi_fl.federation.recipe import Recipe
    from wsi_fl.federation.site_state import Site
    from wsi_fl.learning.local_training import DPSettings, Learner
    from wsi_fl.privacy.privacy_plan import PrivateTrainer, Unit

_MAX_DISTANCE_RATIO = 10.0  # accepted distance from the local model, in units of the usual distance
_MIN_DISTANCES = 5


class ModelPayload:
    """The parameters of a model that is trained on batches; the default, and the base of all other payloads.

    Attributes:
        is_single_release: whether it is computed from all rows of a site at once and released a single time, instead of
            trained on batches in rounds. Then the method's private model is the local baseline, and sites without
            labels can receive it.
        has_secure_sum: whether sites can add payloads up without reading each other's (`privacy.noise = "shared"`).
        inert_keys: keys and sections of a pipeline without effect on it.
    """

    is_single_release: ClassVar[bool] = False
    has_secure_sum: ClassVar[bool] = False
    inert_keys: ClassVar[tuple[str, ...]] = ()

    def explain_unfit(self, x: NDArray[np.generic]) -> str:
        """Return why the payload cannot be made of a site's inputs x[b, …], or ""."""
        return ""

    def build_model(self, examples: Cohort, n_outputs: int, unit: Unit, projection: object) -> nn.Module:
        """Return the travelling model for examples in memory, where it is no architecture that a user chooses.

        Args:
            projection: of features, as `federate` was given it; None for the default.

        Raises:
            UsageError: for a payload that is a trained model.
        """
        raise UsageError("a trained model is given to `federate` by its caller")

    def build_trainer(self, learner: Learner, dp: DPSettings) -> PrivateTrainer:
        """Return what makes the payload differentially private; by default DP-SGD.

        Raises:
            WsiFlError: for a payload of a single release that has no mechanism of its own.
        """
        if self.is_single_release:
            raise WsiFlError(f"{type(self).__name__} has no differential privacy of its own (build_trainer)")
        from wsi_fl.learning.local_training import build_dp_trainer

        return build_dp_trainer(learner, dp)

    def load_rows(self, learner: Learner, rows: Cohort) -> None:
        """Show the travelling model its site's training rows before the first round; they never leave the site."""

    def find_problem(
        self, message: Message, site: Site, learner: Learner, distances: Sequence[float], *, is_single: bool
    ) -> str:
        """Return why no honest site would send a finite message of the agreed schema, or "".

        Args:
            learner: of the travelling model at the receiving site.
            distances: L2 distances of the last accepted messages from the local payload.
            is_single: whether the message is of its sender alone, not a mixture of several.
        """
        local_vector = learner.parameter_vector()
        distance = float(np.linalg.norm(message_state(message).z - local_vector))
        usual = median(distances) if len(distances) >= _MIN_DISTANCES else float(np.linalg.norm(local_vector))
        if not distance <= _MAX_DISTANCE_RATIO * usual:  # nor where it is NaN, as of 0 / 0
            return f"it lies {distance:.3g} from the local model, where {usual:.3g} is usual"
        return ""

    def replace_rejected(self, local_vector: Vector, share: float) -> PushSum | None:
        """Return the state that a rejected message of this share counts as; None for the receiver's own."""
        return None

    def load_mixture(self, learner: Learner, mixture: Vector, n_sites: int) -> None:
        """Load the mixture of n sites' payloads into the travelling model."""
        learner.load_vector(mixture)

    def aggregate_securely(
        self, sites: Sequence[Site], comm: Comm, recipe: Recipe, present: Sequence[int], round_: int
    ) -> None:
        """Give each local site the mean of all sites present, of which none can read another's payload.

        Raises:
            WsiFlError: for a payload without secure sum.
        """
        raise WsiFlError(f"{recipe.method.name} cannot be aggregated securely")

    def build_released_model(self, model: nn.Module, vector: Vector, *, is_single: bool) -> nn.Module:
        """Return a copy of a travelling model with released parameters and without the private state of its site.

        Args:
            vector: float32[d], of a single site's release (`is_single`) or the mean of all.
        """
        import copy

        import torch

        released_model = copy.deepcopy(model).to(memory_format=torch.contiguous_format)
        parameters = [p for p in released_model.parameters() if p.requires_grad]
        with torch.no_grad():
            parts = torch.split(torch.from_numpy(np.array(vector)), [p.numel() for p in parameters])
            for parameter, part in zip(parameters, parts, strict=True):
                parameter.copy_(part.view_as(parameter))
        return released_model.eval()

    def strip_local_state(self, model: nn.Module) -> nn.Module:
        """Return a travelling model with only what predictions from released numbers need, to publish it."""
        return model

    def count_effective_rows(self, model: nn.Module) -> tuple[float, float] | None:
        """Return the effective sample sizes of the local rows and of the travelling model.

        They weight the ensemble of both. None where the number is unknown, as of trained models.
        """
        return None

    def redraw_noise(self, model: nn.Module, rng: np.random.Generator) -> nn.Module | None:
        """Return a model as if the noise of privacy had been drawn anew; None where it has none that can be."""
        return None


def message_state(message: Message) -> PushSum:
    """Return the PushSum state in a message."""
    return PushSum(np.asarray(message.vector, np.float32), message.weight)
