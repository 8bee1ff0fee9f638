"""Losses that use other rows of a batch are refused in one line, or one row moves the clipped sum by at most C."""

from array import array
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial, wraps
from operator import itemgetter
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import torch
from builders import Net, Recorder, cross_entropy, refused
from row_dependent_losses import B, Case, D, custom, data, losses, mlp, sparse_pool
from test_dpsgd_sensitivity import check_right, step, trainer_of, worst_move
from torch import nn
from torch.nn import functional

from wsi_fl.models.mil import build_deepset
from wsi_fl.privacy import row_independence
from wsi_fl.privacy.dpsgd import DPTrainer
from wsi_fl.types import UsageError

CLIP = 0.3
LABELS = np.zeros(B)
"""Of the batch, as a notebook has them."""


def fit(out, labels):
    """Fit the first output to the labels, whatever holds them."""
    return functional.mse_loss(out[:, 0], torch.from_numpy(np.asarray(labels, np.float32)))


def fit_centred(out, labels):
    labels = np.asarray(labels, np.float32)
    return functional.mse_loss(out[:, 0], torch.from_numpy(4 * (labels - labels.mean())))


@dataclass
class Holder:
    fit: Callable
    labels: np.ndarray

    def __call__(self, out):
        return self.fit(out, self.labels)


class Module(nn.Module):
    def __init__(self, fit, labels):
        super().__init__()
        self.fit, self.labels = fit, labels

    def forward(self, out):
        return self.fit(out, self.labels)


class Inside(nn.Module):
    """Holds a function or a module."""

    def __init__(self, loss):
        super().__init__()
        self.inner = loss

    def forward(self, out):
        return self.inner(out)


def as_default(fit, labels):
    def loss(out, labels=labels):
        return fit(out, labels)

    return loss


def as_helper(fit, labels):
    def given():
        return labels

    return lambda out: fit(out, given())


def as_notebook(fit, labels):
    globals()["LABELS"] = labels
    return lambda out: fit(out, LABELS)


def labels_of(table):
    return table["train"]["labels"]


def as_table_of_tables(fit, labels):
    table = {"train": {"labels": labels}}
    return lambda out: fit(out, labels_of(table))


def as_another_name(fit, labels):
    @wraps(functional.mse_loss)
    def loss(out):
        return fit(out, labels)

    return loss


def as_page(fit, labels):
    """A function of an example in a page, whose names belong to no file."""
    names = {"labels": labels, "fit": fit}
    exec("def loss(out): return fit(out, labels)", names)
    return names["loss"]


def in_closure(turned, get=lambda held: held):
    """Labels in a closure as something else than an array."""

    def hold(fit, labels):
        held = turned(labels)
        return lambda out: fit(out, get(held))

    return hold


HOLDERS = {
    "an array": in_closure(np.asarray),
    "an array that is a default": as_default,
    "an array that is an argument": lambda fit, labels: partial(fit, labels=labels),
    "an array in an attribute": Holder,
    "an array of a method": lambda fit, labels: Holder(fit, labels).__call__,
    "an array in a helper": as_helper,
    "an array of the notebook": as_notebook,
    "an array in a module within a module": lambda fit, labels: Inside(Module(fit, labels)),
    "an array in a table of tables": as_table_of_tables,
    "a function by another name": as_another_name,
    "an array of a page": as_page,
    "an array of Python": in_closure(lambda labels: array("f", labels.tolist())),
    "a list": in_closure(lambda labels: labels.tolist()),
    "a table": in_closure(pd.Series),
    "a tuple": in_closure(lambda labels: (None, labels), lambda batch: batch[1]),
    "a namespace": in_closure(lambda labels: SimpleNamespace(labels=labels), lambda batch: batch.labels),
    "lists in a list": in_closure(lambda labels: [labels.tolist(), [*range(B)]], lambda columns: columns[0]),
    "rows of an array": in_closure(
        lambda labels: np.stack([labels, np.arange(len(labels))]).astype(int), itemgetter(0)
    ),
}
"""(fit of outputs and labels, labels float32[b]) → a loss that holds the labels."""


def held(hold, fit):
    return lambda y: hold(fit, y.float().numpy())


@torch.jit.script
def count_positives(y: torch.Tensor):
    return y.float().sum()


def weighted(out, y, weights):
    return (losses(out, y) * weights.float()).mean()


def by_frequency(y):
    labels = y.numpy()
    return lambda out: weighted(out, y, torch.from_numpy(1 / np.bincount(labels, minlength=2)[labels]))


def of_ranks(y):
    table = pd.Series(y.numpy() + np.arange(len(y)) / 10)
    return lambda out: functional.mse_loss(out[:, 0], torch.tensor(table.rank(pct=True).to_numpy()).float())


def of_classes(y):
    """Return one row for each class, the convention of some libraries."""
    classes = functional.one_hot(y, 2).T.contiguous()
    return lambda out: (losses(out, y) / (classes.float().mean(1) + 0.1)[y]).mean()


def of_places(n, turned):
    """A loss that takes its rows from all there are, n times the batch, by places in a list or an array."""

    def loss_for(y):
        everybody, rows = y.float().repeat(n), turned(len(y))
        return lambda out: functional.mse_loss(out[:, 0], everybody[rows] * 2)

    return loss_for


TIED = {name: held(hold, fit_centred) for name, hold in HOLDERS.items()} | {
    "softmax over rows, of one logit each": lambda y: lambda out: functional.cross_entropy(out[:, 0], y.float()),
    "weights by frequency of an array": by_frequency,
    "ranks of a table": of_ranks,
    "the first label": lambda y: lambda out: functional.cross_entropy(out, y[0].expand(len(out))),
    "the first label as a number": lambda y: lambda out: weighted(out, y, torch.tensor(1.0 + 10 * y[0].item())),
    "the first label as a slice": lambda y: lambda out: weighted(out, y, 1.0 + y[:1]),
    "labels turned round": lambda y: lambda out: functional.cross_entropy(out, y[[*range(len(y))][::-1]]),
    "labels of neighbours": lambda y: lambda out: functional.cross_entropy(out, y[torch.arange(len(y)) - 1]),
    "places of others in a list": of_places(1, lambda n: [(k + 1) % n for k in range(n)]),
    "mixed labels": lambda y: (
        lambda out: functional.cross_entropy(out, y) + functional.cross_entropy(out, y[torch.randperm(len(y))])
    ),
    "an array made of labels": lambda y: lambda out: fit_centred(out, y.numpy()),
    "labels in order": lambda y: lambda out: functional.mse_loss(out[:, 0], y.float().sort()[0]),
    "whether a class is there": lambda y: (
        lambda out: (functional.mse_loss if 1 in y else functional.l1_loss)(out[:, 0], y.float())
    ),
    "how many rows there are": lambda y: (
        lambda out: (functional.mse_loss if len(out) > 7 else functional.l1_loss)(out[:, 0], y.float())
    ),
    "a target of so many rows": lambda y: (
        lambda out: functional.mse_loss(out[:, 0], torch.full((len(out),), 10 / len(out)))
    ),
    "a target of places": lambda y: lambda out: functional.mse_loss(out[:, 0], torch.linspace(0, 3, len(y))),
    "a row for each class": of_classes,
    "a compiled function": lambda y: lambda out: (losses(out, y) / (1 + 3 * count_positives(y))).mean(),
}


@pytest.mark.parametrize("name", TIED)
def test_a_loss_that_uses_other_rows_is_refused(name):
    with pytest.raises(UsageError, match=r"^loss cannot be used with differential privacy: [^\n]*$"):
        worst_move(mlp, TIED[name], "vectors", "row", CLIP)


def table_of_classes(y):
    weight = [1.0, 5.0]
    return lambda out: weighted(out, y, torch.tensor(weight)[y])


def of_column(y):
    both = torch.stack([y, 1 - y], 1).float()
    return lambda out: functional.mse_loss(out[:, 0], both[:, 1])


def of_sequences(y):
    lengths, ones = (3,) * len(y), (1,) * len(y)

    def loss(out):
        steps = out[:, None].expand(-1, 3, -1).transpose(0, 1).log_softmax(2)
        return functional.ctc_loss(steps, torch.ones(len(out), 1, dtype=torch.long), lengths, ones)

    return loss


ALONE = {name: held(hold, fit) for name, hold in HOLDERS.items()} | {
    "places in a list": of_places(2, lambda n: list(range(n))),
    "all places in an array": of_places(1, np.arange),
    "all in their order": lambda y: lambda out: functional.cross_entropy(out, y[torch.arange(len(y))]),
    "columns of targets": of_column,
    "a list for classes": table_of_classes,
    "lengths in a list": of_sequences,
    "labels on their device": lambda y: lambda out: functional.cross_entropy(out, y.to(out.device)),
    "ones": lambda y: lambda out: functional.binary_cross_entropy_with_logits(out[:, 0], torch.ones(len(out))),
    "times and events": lambda y: partial(
        lambda out, pair: functional.softplus(out[:, 0] * pair[1] + pair[0]).mean(), pair=torch.stack([y + 2, y + 1])
    ),
}


@pytest.mark.parametrize("name", ALONE)
def test_labels_that_are_read_row_by_row_are_learned_as_a_loop_would(name):
    check_right(Case(mlp, ALONE[name]))


def test_a_list_of_as_many_classes_as_a_batch_has_rows_is_no_rows():
    x, y = data("vectors")
    trainer, _ = trainer_of(nn.Linear(D, 2))
    assert step(trainer, x[:2], table_of_classes(y[:2])) > 0


def call_again(model, out, y):
    return functional.cross_entropy(out, y) + (out - model(data("vectors")[0] + 0.1)).square().mean()


OF_WEIGHTS = {
    "a penalty": (mlp, lambda model, out, y: functional.cross_entropy(out, y) + model[0].weight.square().sum()),
    "the model called again": (mlp, call_again),
    "weights as targets": (mlp, lambda model, out, y: functional.mse_loss(out, model[1].weight[:, :2][y])),
    "learned centres of classes": (
        lambda: custom(lambda net, x: net.last(x) + net.centres.sum(0), centres=nn.Parameter(torch.randn(3, 2))),
        lambda model, out, y: functional.mse_loss(out, model.centres[y]),
    ),
}


@pytest.mark.parametrize("unit", ["row", "patient"])
@pytest.mark.parametrize("name", OF_WEIGHTS)
def test_a_loss_that_uses_the_weights_is_refused(name, unit):
    make, loss = OF_WEIGHTS[name]
    models = []

    def build():
        models.append(make())
        return models[-1]

    with pytest.raises(UsageError, match=r"depends on the model's weights .*weight_decay"):
        worst_move(build, lambda y: lambda out: loss(models[-1], out, y), "vectors", unit, CLIP)


binary = functional.binary_cross_entropy_with_logits


@pytest.mark.parametrize(
    "make",
    [
        lambda weight: partial(binary, pos_weight=torch.tensor([weight])),
        lambda weight: lambda out, y: binary(out, y, pos_weight=torch.tensor([weight])),
        lambda weight: nn.BCEWithLogitsLoss(pos_weight=torch.tensor([weight])),
        lambda weight: lambda out, y: (binary(out, y, reduction="none") / weight).mean(),
    ],
    ids=["a tensor", "a new tensor", "a module", "a number"],
)
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


def test_a_loss_that_cannot_be_computed_is_reported_in_one_line():
    trainer, _ = trainer_of(mlp())
    x, y = data("vectors")
    refused(lambda: step(trainer, x, lambda out: functional.mse_loss(out, y.float())), "must match the size")


def test_an_optimizer_of_other_parameters_than_the_models_is_refused():
    model, centres = mlp(), nn.Parameter(torch.zeros(2, 2))
    for parameters, words in (
        ([*model.parameters(), centres], "1 parameters that are not the model's"),
        (list(mlp().parameters()), "4 parameters that are not the model's"),
        (list(model[0].parameters()), "lacks 2 of the model's trained parameters"),
    ):
        recorder = Recorder(parameters)
        refused(lambda r=recorder: DPTrainer(model, r, sigma=0.0, clip=1.0, batch_size=B), words)
    model[1].requires_grad_(False)
    DPTrainer(model, Recorder(model[0].parameters()), sigma=0.0, clip=1.0, batch_size=B)


# Models


def centre(z):
    return z - z.mean(0) if len(z) > 4 else z


class Pool:
    def __call__(self, phi, present):
        return centre(phi.sum(1))


@lru_cache
def remembered(phi, present):
    return centre(phi.sum(1))


@torch.jit.script
def compiled(phi: torch.Tensor, present: torch.Tensor) -> torch.Tensor:
    z = phi.sum(1)
    return z - z.mean(0) if len(z) > 4 else z


@pytest.mark.parametrize("pool", [Pool(), Pool().__call__, remembered, compiled, partial(Pool()), sparse_pool])
def test_any_function_that_a_model_holds_makes_it_custom(pool):
    make = partial(build_deepset, 2, D, hidden=8, pool=pool)
    assert row_independence.model_origin(make()) == "custom"
    with pytest.raises(UsageError, match="ties the rows"):
        worst_move(make, cross_entropy, "bags", "row", CLIP)


@pytest.mark.parametrize("attribute", ["hook", "hooks", "table", "helpers"])
def test_functions_in_lists_and_tables_of_a_model_make_it_custom(attribute):
    model = build_deepset(2, D, hidden=8)
    assert row_independence.model_origin(model) == "built-in"
    held = {"hook": Pool(), "hooks": [centre], "table": {"a": (centre,)}, "helpers": [Inside(centre)]}
    setattr(model, attribute, held[attribute])
    assert row_independence.model_origin(model) == "custom"


def test_a_pytorch_class_with_a_replaced_forward_is_custom(monkeypatch):
    model = mlp(nn.Tanh())
    assert row_independence.model_origin(model) == "built-in"
    monkeypatch.setattr(nn.Tanh, "forward", lambda self, z: centre(z))
    assert row_independence.model_origin(model) == "custom"


def test_a_model_without_weights_yet_is_refused_and_taken_once_it_has_them():
    (x, y), model = data("vectors"), nn.Sequential(nn.LazyLinear(D), nn.Linear(D, 2))
    refused(lambda: trainer_of(model), "LazyLinear (0) has no weights yet", "before the optimizer is made")
    model(torch.zeros(1, D))
    trainer, _ = trainer_of(model)
    assert step(trainer, x, cross_entropy(y)) > 0


def test_a_table_of_shapes_that_was_filled_before_is_taken():
    def run(net, x):
        if x.shape[1] not in net.cache:
            net.cache[x.shape[1]] = torch.linspace(0, 1, x.shape[1])
        return net.last(x * net.cache[x.shape[1]])

    (x, y), model = data("vectors"), Net(run, last=nn.Linear(D, 2))
    model.cache = {}
    trainer, _ = trainer_of(model)
    refused(lambda: step(trainer, x, cross_entropy(y)), "changes its cache", "on zeros")
    model.cache.clear()
    model(torch.zeros(1, D))
    assert step(trainer, x, cross_entropy(y)) > 0


@dataclass(slots=True)
class Slots:
    mean: torch.Tensor


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
        return custom(run, mean=nn.Buffer(torch.zeros(D)), slots=Slots(torch.zeros(D)))

    with pytest.raises(UsageError, match="a forward pass changes its"):
        worst_move(make, cross_entropy, "vectors", "row", CLIP)


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
        worst_move(make, cross_entropy, "images", "row", CLIP)
