"""Models and losses that tie the rows of a batch together in various ways, and row-independent ones."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from builders import Net, cross_entropy
from torch import nn
from torch.nn import functional

from wsi_fl.data.tasks import CLASSES, MutualLoss, NumberTask, SurvivalTask
from wsi_fl.models import create_model
from wsi_fl.models.mil import build_deepset
from wsi_fl.types import Bags, Images

B, D = 8, 6


def data(kind):
    """Rows of a kind, and their classes, of which one is rare."""
    g = torch.Generator().manual_seed(0)
    shape = {"vectors": (D,), "images": (1, D, D), "large images": (1, 16, 16), "bags": (4, D + 1)}[kind]
    x = 2 * torch.randn(B, *shape, generator=g)
    if kind == "bags":
        x[..., -1] = 1
        x[0, 2:] = 0
    return x, torch.tensor([1] + [0] * (B - 1))


def losses(out, y):
    """Return the loss of each row."""
    return functional.cross_entropy(out, y, reduction="none")


PATIENTS = torch.tensor([7, 2, 7, 7, 0, 2, 7, 0])
"""Of each row of a batch."""


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    loss: Callable = cross_entropy
    kind: str = "vectors"
    unit: str = "row"


def head(run, **layers):
    """Two layers with an operation between them."""
    return Net(lambda net, x: net.last(run(net, net.first(x))), first=nn.Linear(D, D), last=nn.Linear(D, 2), **layers)


def custom(run, **parts):
    """A function of the rows and a last layer."""
    return Net(run, **{"last": nn.Linear(D, 2)} | parts)


def conv(*between):
    return nn.Sequential(nn.Conv2d(1, 3, 3), *between, nn.Flatten(), nn.Linear(48, 2))


def mlp(*between):
    return nn.Sequential(nn.Linear(D, D), *between, nn.Linear(D, 2))


def frozen(module):
    return module.requires_grad_(False)


def with_gradient(change):
    """A layer without effect but on gradients."""

    class Changed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            return z.clone()

        @staticmethod
        def backward(ctx, g):
            return change(g)

    return Case(lambda: head(lambda net, z: Changed.apply(z)))


class Sub(nn.BatchNorm1d):
    """A norm by another name."""


def tie_from_fifth_call(net, x):
    net.calls += 1
    return net.last(x - x.mean(0) if net.calls > 4 else x)


def compare_with_earlier(net, x):
    shift = torch.stack(net.seen).mean(0) if net.seen else 0.0
    net.seen.append(x.detach().mean(0))
    return net.last(x - shift)


def move_buffer(net, x):
    net.mean.lerp_(x.detach().mean(0), 0.1)
    return net.last(x - net.mean)


def rebind_mean(net, x):
    net.mean = 0.5 * net.mean + 0.5 * x.detach().mean(0)
    return net.last(x - net.mean)


SEEN: list = []


def remember_globally(net, x):
    SEEN.append(x.detach().mean(0))
    return net.last(x - torch.stack(SEEN).mean(0))


def scale_weights(net, x):
    with torch.no_grad():
        net.last.weight.mul_(1 / (1 + x.abs().mean()))
    return net.last(x)


def observe_range(net, z):
    net.most = torch.maximum(net.most, z.detach().abs().max())
    return z / (1 + net.most)


def show_attention(net, x):
    """Attention over the patches of a bag that stores its weights for display, as MIL models do."""
    net.shown = net.score(x[..., :-1]).softmax(1)
    return net.last((net.shown * x[..., :-1]).sum(1))


def attend(net, x):
    z = x[..., :-1]
    return net.last(net.attend(z, z, z)[0].mean(1))


def hooked():
    model = mlp(nn.Tanh())
    model[0].register_forward_hook(lambda module, inputs, output: output - output.mean(0))
    return model


def pulled():
    model = mlp(nn.Tanh())
    model.forward = lambda x: model[2](x - x.median(0).values)
    return model


def silent():
    model = head(lambda net, z: z - z.mean(0))
    nn.init.zeros_(model.last.weight)
    return model


def sparse_pool(phi, present):
    return phi.sum(1) - phi.sum((0, 1)) / len(phi)


# Losses


def weighted(y):
    return lambda out: functional.cross_entropy(out, y, weight=torch.tensor([1.0, 30.0]))


def contrastive(y):
    def loss(out):
        z = functional.normalize(out)
        return functional.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))

    return loss


def cox(y):
    """Cox's partial likelihood, whose risk sets are the other patients of the batch."""
    time = torch.arange(len(y)).float()

    def loss(out):
        at_risk = torch.where(time[None] >= time[:, None], out[:, 0][None], -torch.inf)
        return -(out[:, 0] - at_risk.logsumexp(1)).mean()

    return loss


def focal(out, y):
    each = losses(out, y)
    return (1 - (-each).exp()) ** 2 * each


def smoothed_to_batch(y):
    def loss(out):
        own = functional.one_hot(y, 2).float()
        return functional.cross_entropy(out, 0.9 * own + 0.1 * own.mean(0))

    return loss


def averaging(y):
    state = [1.0]

    def loss(out):
        own = functional.cross_entropy(out, y)
        state[0] = 0.5 * state[0] + 0.5 * float(own.detach())
        return own / state[0]

    return loss


def where_present(y):
    """Tie rows only in batches with the rare class."""

    def loss(out):
        own = functional.cross_entropy(out, y)
        return own + out.var(0).sum() if bool((y == 1).any()) else own

    return loss


def standardised(y):
    return lambda out: functional.mse_loss(out[:, 0], (y - y.float().mean()) / (y.float().std() + 0.1))


WRONG = {
    "frozen BatchNorm2d": Case(lambda: conv(frozen(nn.BatchNorm2d(3))), kind="images"),
    "BatchNorm2d in evaluation": Case(lambda: conv(frozen(nn.BatchNorm2d(3)).eval()), kind="images"),
    "trained BatchNorm1d": Case(lambda: mlp(nn.BatchNorm1d(D))),
    "BatchNorm of patches": Case(
        lambda: nn.Sequential(
            nn.BatchNorm1d(4, affine=False, track_running_stats=False), nn.Flatten(), nn.Linear(28, 2)
        ),
        kind="bags",
    ),
    "SyncBatchNorm": Case(lambda: conv(frozen(nn.SyncBatchNorm(3))), kind="images"),
    "lazy BatchNorm": Case(lambda: conv(nn.LazyBatchNorm2d(affine=False)), kind="images"),
    "a subclass of BatchNorm": Case(lambda: mlp(Sub(D, affine=False))),
    "InstanceNorm with statistics": Case(lambda: conv(nn.InstanceNorm2d(3, track_running_stats=True)), kind="images"),
    "BatchNorm of a patient's rows": Case(lambda: conv(frozen(nn.BatchNorm2d(3))), kind="images", unit="patient"),
    "functional batch_norm": Case(lambda: head(lambda net, z: functional.batch_norm(z, None, None, training=True))),
    "softmax over the batch": Case(lambda: mlp(nn.Softmax(0))),
    "LayerNorm over the batch": Case(lambda: mlp(nn.LayerNorm((B, D)))),
    "rows as channels": Case(lambda: nn.Sequential(nn.Conv1d(B, B, 3), nn.Linear(4, 2))),
    "a batch that is flattened": Case(lambda: conv(nn.Flatten(0, 1)), kind="images"),
    "rows as a sequence": Case(  # the first axis of such a layer
        lambda: nn.Sequential(nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0), nn.Linear(D, 2))
    ),
    "bags as a sequence": Case(lambda: custom(attend, attend=nn.MultiheadAttention(D, 2)), kind="bags"),
    "sorting over the batch": Case(lambda: head(lambda net, z: z.sort(0).values)),
    "the most of the batch": Case(lambda: head(lambda net, z: z / z.abs().amax(0))),
    "neighbours in the batch": Case(lambda: head(lambda net, z: z + z.roll(1, 0))),
    "centred images": Case(
        lambda: Net(
            lambda net, x: net.fc(net.conv(x - x.mean()).flatten(1)), conv=nn.Conv2d(1, 3, 3), fc=nn.Linear(48, 2)
        ),
        kind="images",
    ),
    "centred bags": Case(lambda: build_deepset(2, D, hidden=8, pool=sparse_pool), kind="bags"),
    "tied on some rows": Case(lambda: head(lambda net, z: z - z.mean(0) if bool((z.abs() > 2.5).any()) else z)),
    "tied in large batches": Case(lambda: head(lambda net, z: z - z.mean(0) if len(z) > 4 else z)),
    "tied behind a gain of zero": Case(silent),
    "tied from the fifth call on": Case(lambda: custom(tie_from_fifth_call, calls=0)),
    "a bank of rows": Case(lambda: custom(compare_with_earlier, seen=[])),
    "a bank of patients' rows": Case(lambda: custom(compare_with_earlier, seen=[]), unit="patient"),
    "a mean in a buffer": Case(lambda: custom(move_buffer, mean=nn.Buffer(torch.zeros(D)))),
    "a mean in an attribute": Case(lambda: custom(rebind_mean, mean=torch.zeros(D))),
    "a global memory": Case(lambda: SEEN.clear() or custom(remember_globally)),
    "an observer of ranges": Case(lambda: mlp(Net(observe_range, most=nn.Buffer(torch.zeros(()))))),
    "weights changed by rows": Case(lambda: custom(scale_weights)),
    "dropout as a function": Case(lambda: head(lambda net, z: functional.dropout(z, 0.5))),
    "stochastic depth": Case(lambda: head(lambda net, z: z if random.random() < 0.5 else z * 2)),
    "spectral_norm": Case(lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(D, D)), nn.Linear(D, 2))),
    "a hook that centres": Case(hooked),
    "another forward": Case(pulled),
    "a gradient of the batch": with_gradient(lambda g: g.mean(0, keepdim=True).expand_as(g)),
    "a gradient times the batch": with_gradient(lambda g: g * len(g)),
    "weights of classes": Case(mlp, weighted),
    "weights of classes, patients": Case(mlp, weighted, unit="patient"),
    "weights by frequency": Case(
        mlp, lambda y: lambda out: (losses(out, y) / (torch.bincount(y, minlength=2) / len(y))[y]).mean()
    ),
    "similarity": Case(mlp, lambda y: lambda out: (functional.normalize(out) @ functional.normalize(out).T).mean()),
    "contrast": Case(mlp, contrastive),
    "triplets": Case(mlp, lambda y: lambda out: functional.triplet_margin_loss(out, out.roll(1, 0), out.roll(2, 0))),
    "Cox": Case(mlp, cox),
    "Cox, patients": Case(mlp, cox, unit="patient"),
    "focal by positives": Case(mlp, lambda y: lambda out: focal(out, y).sum() / (y == 1).sum().clamp(min=1)),
    "a sum": Case(conv, lambda y: lambda out: functional.cross_entropy(out, y, reduction="sum"), kind="images"),
    "a mean times the batch": Case(mlp, lambda y: lambda out: functional.cross_entropy(out, y) * len(out)),
    "a target that is broadcast": Case(mlp, lambda y: lambda out: functional.mse_loss(out[:, :1], y.float())),
    "labels to ignore": Case(mlp, lambda y: lambda out: functional.cross_entropy(out, y, ignore_index=1)),
    "smoothing towards the batch": Case(mlp, smoothed_to_batch),
    "a loss that remembers": Case(mlp, averaging),
    "the hardest rows": Case(mlp, lambda y: lambda out: losses(out, y).topk(min(3, len(y))).values.mean()),
    "log-softmax over the batch": Case(mlp, lambda y: lambda out: -out.log_softmax(0)[:, 1].mean()),
    "tied where a class is present": Case(mlp, where_present),
    "positives alone": Case(mlp, lambda y: lambda out: functional.softplus(-out[y == 1]).mean()),
    "a loss that draws": Case(mlp, lambda y: lambda out: functional.cross_entropy(out + torch.randn_like(out), y)),
    "standardised targets": Case(mlp, standardised),
    "the largest loss": Case(mlp, lambda y: lambda out: losses(out, y).max()),
    "losses of rows": Case(mlp, lambda y: lambda out: losses(out, y)),
    "ranking": Case(
        lambda: build_deepset(2, D, hidden=8),
        lambda y: lambda out: (out[:, 0][None] - out[:, 0][:, None]).relu().mean(),
        kind="bags",
    ),
}


def use_weight_again(net, x):
    return net.last(functional.linear(torch.relu(net.first(x)), net.first.weight.t()))


def tied():
    return custom(use_weight_again, first=nn.Linear(D, D))


def twice():
    layer = nn.Linear(D, D)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(D, 2))


def half():
    model = mlp(nn.ReLU())
    frozen(model[0])
    return model


def parametrised(change):
    return nn.Sequential(change(nn.Linear(D, D)), nn.Linear(D, 2))


def distilled(y):
    teacher = torch.stack([y - 0.5, 1.0 - y], 1)
    return lambda out: functional.kl_div(out.log_softmax(1), teacher.softmax(1), reduction="batchmean")


def indexed(y):
    """As `y[rows]` chooses the labels of a batch among all."""
    everybody, rows = torch.cat([y, y]), torch.arange(len(y))
    return lambda out: functional.cross_entropy(out, everybody[rows.numpy()])


def constant_weights(y):
    """Weights of classes that are constants, in a mean over rows."""
    weight = torch.tensor([1.0, 5.0])
    return lambda out: (losses(out, y) * weight[y]).mean()


def weighted_binary(y):
    positive = torch.tensor(3.0)
    return lambda out: functional.binary_cross_entropy_with_logits(out[:, 1], y.float(), pos_weight=positive)


def mutual(task, truth):
    return lambda y: MutualLoss(truth(y), None, 0.0, None, task)


def built_in(name, shape):
    return lambda: create_model(name, n_classes=2, shape=shape, seed=0)


RIGHT = {
    "linear": Case(lambda: nn.Linear(D, 2)),
    "perceptron": Case(lambda: mlp(nn.ReLU()), indexed),
    "GroupNorm": Case(lambda: conv(nn.GroupNorm(1, 3), nn.ReLU()), kind="images"),
    "InstanceNorm without statistics": Case(lambda: conv(nn.InstanceNorm2d(3, affine=True)), kind="images"),
    "LayerNorm without bias": Case(lambda: mlp(nn.LayerNorm(D, bias=False))),
    "RMSNorm": Case(lambda: mlp(nn.RMSNorm(D))),
    "PReLU and dropout": Case(lambda: mlp(nn.PReLU(), nn.Dropout(0.5))),
    "cnn1": Case(built_in("cnn1", Images(1, 16)), kind="large images"),
    "abmil": Case(built_in("abmil", Bags(D)), kind="bags"),
    "transmil": Case(built_in("transmil", Bags(D)), kind="bags"),
    "mlp, patients": Case(mlp, unit="patient"),
    "cnn1, patients": Case(built_in("cnn1", Images(1, 16)), kind="large images", unit="patient"),
    "gn_cnn_small, patients": Case(built_in("gn_cnn_small", Images(1, 16)), kind="large images", unit="patient"),
    "deepset, patients": Case(lambda: build_deepset(2, D, hidden=8), kind="bags", unit="patient"),
    "a layer twice": Case(twice),
    "half frozen": Case(half),
    "weights again outside": Case(tied),
    "weights again outside, patients": Case(tied, unit="patient"),
    "weight_norm": Case(lambda: parametrised(nn.utils.parametrizations.weight_norm)),
    "spectral norm that rests": Case(lambda: parametrised(nn.utils.parametrizations.spectral_norm)),
    "attention among patches": Case(
        lambda: custom(attend, attend=nn.MultiheadAttention(D, 2, batch_first=True)), kind="bags"
    ),
    "attention that is shown": Case(lambda: custom(show_attention, score=nn.Linear(D, 1), shown=None), kind="bags"),
    "a recurrent layer": Case(
        lambda: custom(
            lambda net, x: net.last(net.over(x[..., :-1])[0][:, -1]),
            over=nn.GRU(D, 5, batch_first=True),
            last=nn.Linear(5, 2),
        ),
        kind="bags",
    ),
    "in place": Case(lambda: head(lambda net, z: z.mul(2).relu_())),
    "a wrong gradient of each row": with_gradient(lambda g: g.sign() * 3),
    "focal": Case(mlp, lambda y: lambda out: focal(out, y).mean()),
    "constant weights": Case(mlp, constant_weights),
    "smoothing": Case(mlp, lambda y: partial(functional.cross_entropy, target=y, label_smoothing=0.1)),
    "probabilities": Case(mlp, lambda y: lambda out: functional.cross_entropy(out, functional.one_hot(y, 2).float())),
    "mean squared error": Case(mlp, lambda y: lambda out: functional.mse_loss(out[:, 0], y.float())),
    "binary": Case(mlp, weighted_binary),
    "margins": Case(mlp, lambda y: lambda out: functional.multi_margin_loss(out, y)),
    "a module of a loss": Case(mlp, lambda y: lambda out: nn.CrossEntropyLoss()(out, y)),
    "distilled": Case(mlp, distilled),
    "classes of a study": Case(mlp, mutual(CLASSES, lambda y: y)),
    "numbers of a study": Case(lambda: nn.Linear(D, 1), mutual(NumberTask(0.0, 2.0), lambda y: y.float())),
    "survival of a study": Case(
        lambda: nn.Linear(D, 3), mutual(SurvivalTask((1.0, 2.0, 3.0)), lambda y: torch.stack([y + 0.5, y], 1).float())
    ),
}
