"""Losses that read labels or learn weights are recognized: each row is learned as if alone in its batch, or refused."""

from collections import namedtuple
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from builders import Net, refused
from row_dependent_losses import B, Case, D, data, mlp
from test_dpsgd_sensitivity import clipped_sum, looped_sum, step, trainer_of, worst_move
from torch import nn
from torch.nn import functional

from wsi_fl.models.mil import build_deepset
from wsi_fl.privacy import row_independence
from wsi_fl.types import UsageError

CLIPS = (0.01, 0.3, 5.0)
Batch = namedtuple("Batch", "rows labels")


@torch.jit.script
def count_positives(y: torch.Tensor):
    return y.float().sum()


def squared(out, numbers):
    return functional.mse_loss(out[:, 0], numbers)


def divided(out, y, n):
    return (functional.cross_entropy(out, y, reduction="none") / (1 + 3 * n)).mean()


def of_tuple(y):
    batch = (None, y.numpy())

    def loss(out):
        _, labels = batch
        return divided(out, y, int(labels.sum()))

    return loss


def of_namedtuple(y):
    batch = Batch(None, y.numpy())
    return lambda out: divided(out, y, int(batch.labels.sum()))


def of_namespace(y):
    batch = SimpleNamespace(labels=y.numpy())
    return lambda out: divided(out, y, int(batch.labels.sum()))


def of_lists(y):
    columns = [y.tolist(), list(range(len(y)))]
    return lambda out: divided(out, y, sum(columns[0]))


def of_columns(y):
    columns = np.stack([y.numpy(), np.arange(len(y))])
    return lambda out: divided(out, y, int(columns[0].sum()))


def of_classes(y):
    """Return one row for each class, the convention of some libraries."""
    classes = functional.one_hot(y, 2).T.contiguous()

    def loss(out):
        share = classes.float().mean(1) + 0.1
        return (functional.cross_entropy(out, y, reduction="none") / share[y]).mean()

    return loss


TIED = {
    "a list made of labels": lambda y: (
        lambda out: squared(out, torch.tensor([4 * (k - sum(y.tolist()) / len(y)) for k in y.tolist()]))
    ),
    "an array made of labels": lambda y: (
        lambda out: squared(out, torch.from_numpy(4 * (y.numpy() - y.numpy().mean())).float())
    ),
    "labels in order": lambda y: lambda out: squared(out, y.float().sort()[0]),
    "whether a class is there": lambda y: (
        lambda out: (functional.mse_loss if 1 in y else functional.l1_loss)(out[:, 0], y.float())
    ),
    "how many rows there are": lambda y: (
        lambda out: (functional.mse_loss if len(out) > 7 else functional.l1_loss)(out[:, 0], y.float())
    ),
    "a target of so many rows": lambda y: lambda out: squared(out, torch.full((len(out),), 10 / len(out))),
    "a target of places": lambda y: lambda out: squared(out, torch.linspace(0, 3, len(y))),
    "a tuple": of_tuple,
    "a named tuple": of_namedtuple,
    "a namespace": of_namespace,
    "lists in a list": of_lists,
    "rows of an array": of_columns,
    "a row for each class": of_classes,
    "a compiled function": lambda y: lambda out: divided(out, y, count_positives(y)),
}


@pytest.mark.parametrize("name", TIED)
@pytest.mark.parametrize("clip", CLIPS)
def test_a_loss_that_reads_other_labels_is_refused(name, clip):
    with pytest.raises(UsageError, match=r"^loss cannot be used with differential privacy: [^\n]*$"):
        worst_move(mlp, TIED[name], "vectors", "row", clip)


class Centres(nn.Module):
    """Learn a center for each class, to which its loss draws rows."""

    def __init__(self):
        super().__init__()
        self.layer, self.centres = nn.Linear(D, 2), nn.Parameter(torch.randn(3, 2))

    def forward(self, x):
        return self.layer(x) + self.centres.sum(0)


@pytest.mark.parametrize("unit", ["row", "patient"])
@pytest.mark.parametrize(
    ("make", "weights_of"), [(Centres, lambda net: net.centres), (mlp, lambda net: net[1].weight[:, :2])]
)
def test_weights_of_the_model_are_no_targets(make, weights_of, unit):
    models = []

    def build():
        models.append(make())
        return models[-1]

    with pytest.raises(UsageError, match="depends on the model's weights"):
        worst_move(
            build, lambda y: lambda out: functional.mse_loss(out, weights_of(models[-1])[y]), "vectors", unit, 0.3
        )


ALONE = {
    "a list of the labels": lambda y: lambda out: squared(out, torch.tensor([float(k) for k in y.tolist()])),
    "an array of the labels": lambda y: lambda out: squared(out, torch.from_numpy(y.numpy()).float()),
    "a tuple": lambda y: partial(lambda out, batch: functional.cross_entropy(out, batch[1]), batch=(None, y)),
    "labels on their device": lambda y: lambda out: functional.cross_entropy(out, y.to(out.device)),
    "ones": lambda y: lambda out: functional.binary_cross_entropy_with_logits(out[:, 0], torch.ones(len(out))),
    "times and events": lambda y: partial(
        lambda out, pair: functional.softplus(out[:, 0] * pair[1] + pair[0]).mean(),
        pair=torch.stack([torch.arange(len(y)), y]),
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_labels_that_are_read_row_by_row_are_learned_as_a_loop_would(name):
    case, (x, y) = Case(mlp, ALONE[name]), data("vectors")
    assert worst_move(mlp, case.loss, "vectors", "row", 0.3) <= 1 + 1e-5
    found = clipped_sum(mlp, case.loss, x, y, 0.3)
    wanted = looped_sum(case, x, y, 0.3, torch.arange(B))
    torch.testing.assert_close(found, wanted, rtol=2e-3, atol=1e-5)


def of_tensor(weight):
    weights = torch.tensor([weight])
    return lambda out, y: functional.binary_cross_entropy_with_logits(out, y, pos_weight=weights)


def of_module(weight):
    return nn.BCEWithLogitsLoss(pos_weight=torch.tensor([weight]))


@pytest.mark.parametrize("make", [of_tensor, of_module])
def test_a_weight_of_the_batch_is_noticed_when_it_changes(make):
    trainer, _ = trainer_of(nn.Linear(D, 2))
    x, y = data("vectors")

    def balanced(rows):
        criterion = make(float((y[rows] == 0).sum()) / 4)
        return lambda out: criterion(out[:, 0], y[rows].float())

    step(trainer, x, balanced(slice(0, 8)))
    refused(lambda: step(trainer, x[2:], balanced(slice(2, 8))), "a number in it was 1.75 and is 1.5")


def test_a_weight_that_is_a_constant_is_taken_in_batches_of_a_row_too():
    trainer, _ = trainer_of(nn.Linear(D, 2))
    x, y = data("vectors")
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor([3.0]))
    for rows in (slice(0, 8), slice(0, 1), slice(1, 2), slice(2, 8)):
        assert step(trainer, x[rows], lambda out, rows=rows: criterion(out[:, 0], y[rows].float())) > 0


def test_a_number_that_a_loss_makes_a_tensor_of_is_noticed_when_it_changes():
    trainer, _ = trainer_of(nn.Linear(D, 2))
    x, y = data("vectors")

    def balanced(rows):
        weight = float((y[rows] == 0).sum()) / 4
        return lambda out: functional.binary_cross_entropy_with_logits(
            out[:, 0], y[rows].float(), pos_weight=torch.tensor([weight])
        )

    step(trainer, x, balanced(slice(0, 8)))
    refused(lambda: step(trainer, x[2:], balanced(slice(2, 8))), "a number in it was 1.75 and is 1.5")


# Models


class Slots:
    __slots__ = ("mean",)


def learn_by_data(net, x):
    net.mean.data.lerp_(x.detach().mean(0), 1e-4)
    return net.last(x - net.mean)


def learn_by_new_data(net, x):
    net.mean.data = 0.9999 * net.mean.data + 1e-4 * x.detach().mean(0)
    return net.last(x - net.mean)


def learn_in_slots(net, x):
    net.slots.mean = 0.9999 * net.slots.mean + 1e-4 * x.detach().mean(0)
    return net.last(x - net.slots.mean)


@pytest.mark.parametrize("run", [learn_by_data, learn_by_new_data, learn_in_slots])
def test_a_slowly_updated_memory_is_refused_wherever_it_is_stored(run):
    def make():
        net = Net(run, last=nn.Linear(D, 2), slots=Slots())
        net.register_buffer("mean", torch.zeros(D))
        net.slots.mean = torch.zeros(D)
        return net

    with pytest.raises(UsageError, match="a forward pass changes its"):
        worst_move(make, lambda y: lambda out: functional.cross_entropy(out, y), "vectors", "row", 0.3)


def far_apart():
    """Use rows as places of a sequence, of which every other one is read."""
    return nn.Sequential(
        nn.Flatten(1),
        nn.Unflatten(0, (1, 1, -1)),
        nn.Conv2d(1, 1, (3, 1), padding=(2, 0), dilation=(2, 1)),
        nn.Flatten(0, 2),
        nn.Linear(D * D, 2),
    )


def permuted():
    ops = pytest.importorskip("torchvision.ops")
    convolution = nn.Conv1d(D, D, 3, padding=2, dilation=2)
    return nn.Sequential(
        nn.Flatten(1), nn.Linear(D * D, D), ops.Permute([1, 0]), convolution, ops.Permute([1, 0]), nn.Linear(D, 2)
    )


@pytest.mark.parametrize("make", [far_apart, permuted])
def test_layers_that_move_the_axis_of_rows_are_custom(make):
    assert row_independence.model_origin(make()) == "custom"
    with pytest.raises(UsageError, match="ties the rows"):
        worst_move(make, lambda y: lambda out: functional.cross_entropy(out, y), "images", "row", 0.3)


class Pool(nn.Module):
    def forward(self, phi, present):
        z = phi.sum(1)
        return z - z.mean(0) if len(z) > 4 else z


def test_an_unregistered_module_makes_a_model_custom():
    model = build_deepset(2, D, hidden=8, pool=Pool().__call__)
    assert row_independence.model_origin(model) == "custom"
    model = build_deepset(2, D, hidden=8)
    model.helpers = [Pool()]
    assert row_independence.model_origin(model) == "custom"
