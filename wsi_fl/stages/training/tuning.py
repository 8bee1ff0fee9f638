"""What a site's own model is given when it may choose its settings: `train.tune`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from wsi_fl.learning.examples import Examples, batches, epoch_rows, subset
from wsi_fl.learning.local import Learner, probabilities, supervised_step, undecided_where_broken
from wsi_fl.learning.metrics import Probabilities
from wsi_fl.learning.tuning import FittedHead, Way, fitted_head, tuned
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.stages.site.party import Party
from wsi_fl.types import Images

_SEED_STEP = 31


@dataclass(frozen=True)
class Tuned:
    """What was found for a site's private model.

    Attributes:
        facts: what the run keeps of it.
        head: the linear layer, fitted to all rows; None for models that are trained.
        way: the settings of those.
        held_out: float64[n, classes], what such models say of rows whose patients they have not seen; None where that
            is not known.
    """

    facts: dict[str, Any]
    head: FittedHead | None = None
    way: Way | None = None
    held_out: Probabilities | None = None

    def give(self, learner: Learner) -> None:
        """Put the fitted layer into a learner."""
        if self.head is None:
            return
        set_layer(learner.model, torch.from_numpy(self.head.weight), torch.from_numpy(self.head.bias))
        learner.fitted = True


def _layers(model: nn.Module) -> nn.Sequential:
    assert isinstance(model, nn.Sequential)
    return model


@torch.no_grad()
def set_layer(model: nn.Module, weight: torch.Tensor, bias: torch.Tensor) -> None:
    """Overwrite the last layer of a linear head, with weight [classes, d] and bias [classes]."""
    linear = _layers(model)[-1]
    assert isinstance(linear, nn.Linear)
    linear.weight.copy_(weight)
    linear.bias.copy_(bias)


def is_linear(name: str) -> bool:
    """Return whether an architecture is one linear layer on what is fixed."""
    return name in ("linear_head", "mean_head")


def tuned_for(
    party: Party, model: nn.Module, name: str, train: Examples, n_classes: int, device: torch.device
) -> Tuned:
    """Find the settings of a site's private model by cross-validation over the patients of its training rows.

    Args:
        model: a fresh one; models that are trained begin as it does.
        name: of its architecture.
    """
    if is_linear(name) and train.task.kind == "classes":
        below = _layers(model)[:-1].to(device)
        size = train.at_once or 256
        every = [np.arange(len(train))[k : k + size] for k in range(0, len(train), size)]
        with torch.no_grad():
            x = torch.cat([below(x) for x, _ in batches(train, iter(every), augment=None, device=device)])
        head = fitted_head(x.cpu().numpy(), train.label, train.patient, n_classes)
        return Tuned(head.facts, head=head, held_out=head.held_out)
    settings = party.pipeline.train
    start = {key: value.clone() for key, value in model.state_dict().items()}

    def trained(way: Way, seen: np.ndarray[Any, np.dtype[np.bool_]]) -> Probabilities:
        model.load_state_dict(start)
        some, others = (subset(train, np.flatnonzero(rows)) for rows in (seen, ~seen))
        learner = learner_of(model, way, some, n_classes, device)
        stream = CipherStream.seeded(settings.seed, "tuning")
        drawn = stream if settings.max_patches else None  # which patches are seen
        epochs = settings.rounds * settings.epochs_per_round
        rows = epoch_rows(len(some), settings.batch_size, epochs, sampler=stream)
        for batch in batches(some, rows, augment=None, device=device, draws=drawn):
            supervised_step(learner, batch, stream)
        said = probabilities(learner.logits, others, device)
        return undecided_where_broken(said, others)

    usual = Way(settings.lr, settings.weight_decay, settings.balance)
    folds = 1 if isinstance(party.data(party.names[0]).shape, Images) else 5
    way, held_out = tuned(train.label, train.patient, usual, trained, folds=folds, task=train.task)
    model.load_state_dict(start)
    return Tuned({"by": "cross-validation", **way.facts}, way=way, held_out=held_out)


def learner_of(model: nn.Module, way: Way, train: Examples, n_classes: int, device: torch.device) -> Learner:
    """Return a learner without differential privacy with these settings, for some training examples."""
    return Learner(
        model,
        lr=way.lr,
        weight_decay=way.weight_decay,
        device=device,
        dp=None,
        class_weights=class_weights(train.label, n_classes) if way.balance else None,
        task=train.task,
    )


def class_weights(labels: np.ndarray[Any, np.dtype[np.int64]], n_classes: int) -> list[float]:
    """Return how much a row of each class counts so that all classes count alike; 1 where all are as frequent.

    Example:
        >>> class_weights(np.array([0, 0, 0, 1]), 2)
        [0.6666666666666666, 2.0]
    """
    counts = np.bincount(labels, minlength=n_classes)
    present = counts > 0
    weights = np.where(present, len(labels) / present.sum() / np.maximum(counts, 1), 1.0)
    return [float(one) for one in weights]
