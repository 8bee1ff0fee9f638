"""Models that a site trains for itself, without differential privacy: linear heads fitted at once, networks tuned."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from wsi_fl.data.batches import load_batches
from wsi_fl.data.cohort import Cohort
from wsi_fl.data.metrics import Probabilities
from wsi_fl.learning.local_training import DPSettings, Learner, predict_examples, replace_nonfinite
from wsi_fl.learning.tuning import FittedHead, HyperParameters, fit_linear_head, tune_hyperparameters
from wsi_fl.models.mil import MeanOfBag
from wsi_fl.privacy.privacy_plan import PrivateTrainer

_HEAD_ROWS = 256
"""Examples at a time in the fixed layers below a head."""


@dataclass(frozen=True)
class LocalFit:
    """Local models after tuning.

    Attributes:
        learners: the models by role.
        held_out: float64[n, classes], cross-validated predictions on the training rows; None where unknown.
        settings: the tuned settings, as a run stores them; None for none.
    """

    learners: Mapping[str, Learner]
    held_out: Probabilities | None = None
    settings: Mapping[str, Any] | None = None


def build_learner(
    model: nn.Module,
    hyperparameters: HyperParameters,
    train: Cohort,
    n_classes: int,
    device: torch.device,
    *,
    bfloat16: bool = False,
    dp: DPSettings | None = None,
    build_trainer: Callable[[Learner, DPSettings], PrivateTrainer] | None = None,
) -> Learner:
    """Return a learner for training examples; with differential privacy classes are not balanced."""
    balances = hyperparameters.balance and dp is None
    return Learner(
        model,
        lr=hyperparameters.lr,
        weight_decay=hyperparameters.weight_decay,
        device=device,
        dp=dp,
        class_weights=_class_weights(train.label, n_classes) if balances else None,
        task=train.task,
        bfloat16=bfloat16,
        build_trainer=build_trainer,
    )


def _class_weights(labels: NDArray[np.int64], n_classes: int) -> list[float]:
    """Return the weight of a row by class, so that all classes have equal total weight; 1 for equal frequencies."""
    counts = np.bincount(labels, minlength=n_classes)
    present = counts > 0
    weights = np.where(present, len(labels) / present.sum() / np.maximum(counts, 1), 1.0)
    return [float(weight) for weight in weights]


BuildLearner = Callable[[nn.Module, HyperParameters, Cohort], Learner]
"""A model, its hyperparameters and training examples → its learner."""


def fit_local_models(
    learners: Mapping[str, Learner],
    train: Cohort,
    defaults: HyperParameters,
    build: BuildLearner,
    train_alone: Callable[[Learner, Cohort], None],
    *,
    folds: int,
) -> LocalFit:
    """Fit linear heads to all examples, or tune networks by cross-validation over the site's patients.

    Args:
        learners: local models by role, which start alike, so that the tuned settings are for all; empty for none.
        defaults: the hyperparameters of which tuning starts.
        train_alone: trains a learner on examples for all epochs of a run.
        folds: of a choice between hyperparameters; 1 for the slowest models.
    """
    if not learners:
        return LocalFit(learners)
    first = next(iter(learners.values()))
    if is_linear_head(first.model):
        head = _fit_head(first.model, train, first.device)
        for learner in learners.values():
            set_linear_layer(learner.model, torch.from_numpy(head.weight), torch.from_numpy(head.bias))
            learner.fitted = True
        summary = {"by": "cross-validation", "strength": head.strength, "loss": head.loss}
        return LocalFit(learners, head.held_out, summary)
    model, start = first.model, {key: value.clone() for key, value in first.model.state_dict().items()}

    def predict_others(hyperparameters: HyperParameters, is_training: NDArray[np.bool_]) -> Probabilities:
        model.load_state_dict(start)
        rows, others = train[is_training], train[~is_training]
        learner = build(model, hyperparameters, rows)
        train_alone(learner, rows)
        return replace_nonfinite(predict_examples(learner.predict_logits, others, first.device), others)

    best, held_out = tune_hyperparameters(
        train.label, train.patient, defaults, predict_others, folds=folds, task=train.task
    )
    model.load_state_dict(start)
    tuned_learners = {role: build(learner.model, best, train) for role, learner in learners.items()}
    return LocalFit(tuned_learners, held_out, {"by": "cross-validation", **asdict(best)})


def is_linear_head(model: nn.Module) -> bool:
    """Return whether a model is a linear layer on fixed layers."""
    *below, last = model.children() if isinstance(model, nn.Sequential) else [model]
    return isinstance(last, nn.Linear) and all(isinstance(layer, nn.LayerNorm | MeanOfBag) for layer in below)


@torch.no_grad()
def set_linear_layer(model: nn.Module, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Overwrite the last layer of a linear head, with weight [classes, d] and bias [classes]."""
    assert isinstance(model, nn.Sequential)
    linear = model[-1]
    assert isinstance(linear, nn.Linear)
    linear.weight.copy_(weight)
    linear.bias.copy_(bias)


def _fit_head(model: nn.Module, train: Cohort, device: torch.device) -> FittedHead:
    """Return the linear layer with the best held-out loss, on outputs of the fixed layers of a linear head."""
    assert isinstance(model, nn.Sequential)
    fixed_layers, linear = model[:-1].to(device), model[-1]
    assert isinstance(linear, nn.Linear)
    size = train.at_once or _HEAD_ROWS
    row_blocks = [np.arange(len(train))[k : k + size] for k in range(0, len(train), size)]
    with torch.no_grad():
        x = torch.cat([fixed_layers(x) for x, _ in load_batches(train, iter(row_blocks), augment=None, device=device)])
    return fit_linear_head(x.cpu().numpy(), train.label, train.patient, linear.out_features, train.task)
