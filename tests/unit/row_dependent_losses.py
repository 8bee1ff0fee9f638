"""Models and losses that tie the rows of a batch together in various ways, and row-independent ones."""

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from builders import Net
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


def cross_entropy(y):
    return lambda out: functional.cross_entropy(out, y)


def patients(n):
    """Two rows of each."""
    return torch.arange(n) // 2


@dataclass(frozen=True)
class Case:
    make: Callable[[], nn.Module]
    loss: Callable = cross_entropy
    kind: str = "vectors"
    unit: str = "row"


def head(run, **layers):
    """Two layers with an operation between them."""
    return Net(lambda net, x: net.last(run(net, net.first(x))), first=nn.Linear(D, D), last=nn.Linear(D, 2), **layers)


def conv(*between):
    return nn.Sequential(nn.Conv2d(1, 3, 3), *between, nn.Flatten(), nn.Linear(48, 2))


def mlp(*between):
    return nn.Sequential(nn.Linear(D, D), *between, nn.Linear(D, 2))


def frozen(module):
    return module.requires_grad_(False)


class Sub(nn.BatchNorm1d):
    """A norm by another name."""


class Counting(nn.Module):
    """Ties rows together from its fifth call on."""

    def __init__(self):
        super().__init__()
        self.layer, self.calls = nn.Linear(D, 2), 0

    def forward(self, x):
        self.calls += 1
        return self.layer(x - x.mean(0) if self.calls > 4 else x)


class Bank(nn.Module):
    """Compare a row with earlier rows."""

    def __init__(self):
        super().__init__()
        self.layer, self.seen = nn.Linear(D, 2), []

    def forward(self, x):
        shift = torch.stack(self.seen).mean(0) if self.seen else 0.0
        self.seen.append(x.detach().mean(0))
        return self.layer(x - shift)


class Moving(nn.Module):
    """Store the mean of rows in a buffer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, 2)
        self.weight = nn.Parameter(torch.ones(D))
        self.register_buffer("mean", torch.zeros(D))

    def forward(self, x):
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return self.layer((x - self.mean) * self.weight)


class Rebound(Moving):
    """Store the mean of rows in a plain tensor that is replaced each time."""

    def __init__(self):
        super().__init__()
        del self.mean
        self.mean = torch.zeros(D)

    def forward(self, x):
        self.mean = 0.5 * self.mean + 0.5 * x.detach().mean(0)
        return self.layer((x - self.mean) * self.weight)


SEEN: list = []


class Worldwide(nn.Module):
    """Remembers rows outside itself."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, 2)
        SEEN.clear()

    def forward(self, x):
        SEEN.append(x.detach().mean(0))
        return self.layer(x - torch.stack(SEEN).mean(0))


class Renormed(nn.Module):
    """Scale its weights in place by the values of its rows."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(D, 2)

    def forward(self, x):
        with torch.no_grad():
            self.layer.weight.mul_(1 / (1 + x.abs().mean()))
        return self.layer(x)


class Looking(nn.Module):
    """Attention over the patches of a bag that stores its weights for display, as MIL models do."""

    def __init__(self):
        super().__init__()
        self.score, self.last, self.shown = nn.Linear(D, 1), nn.Linear(D, 2), None

    def forward(self, x):
        self.shown = self.score(x[..., :-1]).softmax(1)
        return self.last((self.shown * x[..., :-1]).sum(1))


class Mixed(torch.autograd.Function):
    """A gradient that is the mean over the batch."""

    @staticmethod
    def forward(ctx, z):
        return z.clone()

    @staticmethod
    def backward(ctx, g):
        return g.mean(0, keepdim=True).expand_as(g)


class Counted(Mixed):
    """A gradient that grows with the batch."""

    @staticmethod
    def backward(ctx, g):
        return g * len(g)


class Wrong(Mixed):
    """A wrong gradient, but of each row independently."""

    @staticmethod
    def backward(ctx, g):
        return g.sign() * 3


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


def attending():
    layer = nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0)  # whose first axis is the sequence
    return nn.Sequential(layer, nn.Linear(D, 2))


def observed():
    class Watch(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("most", torch.zeros(()))

        def forward(self, z):
            self.most = torch.maximum(self.most, z.detach().abs().max())
            return z / (1 + self.most)

    return mlp(Watch())


def sparse_pool(phi, present):
    return phi.sum(1) - phi.sum((0, 1)) / len(phi)


def on_some_rows(net, z):
    return z - z.mean(0) if bool((z.abs() > 2.5).any()) else z


def in_large_batches(net, z):
    return z - z.mean(0) if len(z) > 4 else z


def batch_norm(net, z):
    return functional.batch_norm(z, None, None, training=True)


class AmongBags(nn.Module):
    """Bags that attend to each other, since the first axis is taken for the sequence."""

    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(D, 2)
        self.last = nn.Linear(D, 2)

    def forward(self, x):
        z = x[..., :-1]
        return self.last(self.attend(z, z, z)[0].mean(1))


# Losses


def weighted(y):
    return lambda out: functional.cross_entropy(out, y, weight=torch.tensor([1.0, 30.0]))


def balanced(y):
    """Weights of classes by how often they are in the batch, counted inside."""

    def loss(out):
        share = torch.bincount(y, minlength=2) / len(y)
        return (functional.cross_entropy(out, y, reduction="none") / share[y]).mean()

    return loss


def similarity(y):
    return lambda out: (functional.normalize(out) @ functional.normalize(out).T).mean()


def contrastive(y):
    def loss(out):
        z = functional.normalize(out)
        return functional.cross_entropy(z @ z.T / 0.1, torch.arange(len(z)))

    return loss


def triplet(y):
    return lambda out: functional.triplet_margin_loss(out, out.roll(1, 0), out.roll(2, 0))


def cox(y):
    """Cox's partial likelihood, whose risk sets are the other patients of the batch."""
    time = torch.arange(len(y)).float()

    def loss(out):
        at_risk = torch.where(time[None] >= time[:, None], out[:, 0][None], -torch.inf)
        return -(out[:, 0] - at_risk.logsumexp(1)).mean()

    return loss


def focal_by_positives(y):
    def loss(out):
        each = functional.cross_entropy(out, y, reduction="none")
        return ((1 - (-each).exp()) ** 2 * each).sum() / (y == 1).sum().clamp(min=1)

    return loss


def summed(y):
    return lambda out: functional.cross_entropy(out, y, reduction="sum")


def squared_length(y):
    return lambda out: functional.cross_entropy(out, y) * len(out)


def broadcast(y):
    return lambda out: functional.mse_loss(out[:, :1], y.float())


def ignoring(y):
    return lambda out: functional.cross_entropy(out, y, ignore_index=1)


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


def hardest(y):
    return lambda out: functional.cross_entropy(out, y, reduction="none").topk(min(3, len(y))).values.mean()


def over_batch(y):
    return lambda out: -out.log_softmax(0)[:, 1].mean()


def where_present(y):
    """Tie rows only in batches with the rare class."""

    def loss(out):
        own = functional.cross_entropy(out, y)
        return own + out.var(0).sum() if bool((y == 1).any()) else own

    return loss


def of_positives(y):
    return lambda out: functional.softplus(-out[y == 1]).mean()


def noisy(y):
    return lambda out: functional.cross_entropy(out + torch.randn_like(out), y)


def standardised(y):
    return lambda out: functional.mse_loss(out[:, 0], (y - y.float().mean()) / (y.float().std() + 0.1))


def maximum(y):
    return lambda out: functional.cross_entropy(out, y, reduction="none").max()


def each(y):
    return lambda out: functional.cross_entropy(out, y, reduction="none")


def rank(y):
    return lambda out: (out[:, 0][None] - out[:, 0][:, None]).relu().mean()


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
    "functional batch_norm": Case(lambda: head(batch_norm)),
    "softmax over the batch": Case(lambda: mlp(nn.Softmax(0))),
    "LayerNorm over the batch": Case(lambda: mlp(nn.LayerNorm((B, D)))),
    "rows as channels": Case(lambda: nn.Sequential(nn.Conv1d(B, B, 3), nn.Linear(4, 2))),
    "a batch that is flattened": Case(lambda: conv(nn.Flatten(0, 1)), kind="images"),
    "rows as a sequence": Case(attending),
    "bags as a sequence": Case(AmongBags, kind="bags"),
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
    "tied on some rows": Case(lambda: head(on_some_rows)),
    "tied in large batches": Case(lambda: head(in_large_batches)),
    "tied behind a gain of zero": Case(silent),
    "tied from the fifth call on": Case(Counting),
    "a bank of rows": Case(Bank),
    "a bank of patients' rows": Case(Bank, unit="patient"),
    "a mean in a buffer": Case(Moving),
    "a mean in an attribute": Case(Rebound),
    "a global memory": Case(Worldwide),
    "an observer of ranges": Case(observed),
    "weights changed by rows": Case(Renormed),
    "dropout as a function": Case(lambda: head(lambda net, z: functional.dropout(z, 0.5))),
    "stochastic depth": Case(lambda: head(lambda net, z: z if random.random() < 0.5 else z * 2)),
    "spectral_norm": Case(lambda: nn.Sequential(nn.utils.spectral_norm(nn.Linear(D, D)), nn.Linear(D, 2))),
    "a hook that centres": Case(hooked),
    "another forward": Case(pulled),
    "a gradient of the batch": Case(lambda: head(lambda net, z: Mixed.apply(z))),
    "a gradient times the batch": Case(lambda: head(lambda net, z: Counted.apply(z))),
    "weights of classes": Case(mlp, weighted),
    "weights of classes, patients": Case(mlp, weighted, unit="patient"),
    "weights by frequency": Case(mlp, balanced),
    "similarity": Case(mlp, similarity),
    "contrast": Case(mlp, contrastive),
    "triplets": Case(mlp, triplet),
    "Cox": Case(mlp, cox),
    "Cox, patients": Case(mlp, cox, unit="patient"),
    "focal by positives": Case(mlp, focal_by_positives),
    "a sum": Case(conv, summed, kind="images"),
    "a mean times the batch": Case(mlp, squared_length),
    "a target that is broadcast": Case(mlp, broadcast),
    "labels to ignore": Case(mlp, ignoring),
    "smoothing towards the batch": Case(mlp, smoothed_to_batch),
    "a loss that remembers": Case(mlp, averaging),
    "the hardest rows": Case(mlp, hardest),
    "log-softmax over the batch": Case(mlp, over_batch),
    "tied where a class is present": Case(mlp, where_present),
    "positives alone": Case(mlp, of_positives),
    "a loss that draws": Case(mlp, noisy),
    "standardised targets": Case(mlp, standardised),
    "the largest loss": Case(mlp, maximum),
    "losses of rows": Case(mlp, each),
    "ranking": Case(lambda: build_deepset(2, D, hidden=8), rank, kind="bags"),
}


class Tied(nn.Module):
    """Uses the weights of a layer again, outside it."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(D, D), nn.Linear(D, 2)

    def forward(self, x):
        return self.last(functional.linear(torch.relu(self.first(x)), self.first.weight.t()))


class Sequence(nn.Module):
    """A recurrent layer over the patches."""

    def __init__(self):
        super().__init__()
        self.over, self.last = nn.GRU(D, 5, batch_first=True), nn.Linear(5, 2)

    def forward(self, x):
        return self.last(self.over(x[..., :-1])[0][:, -1])


class Among(AmongBags):
    """Attention among the patches of a bag."""

    def __init__(self):
        super().__init__()
        self.attend.batch_first = True


def twice():
    layer = nn.Linear(D, D)
    return nn.Sequential(layer, nn.Tanh(), layer, nn.Linear(D, 2))


def half():
    model = mlp(nn.ReLU())
    frozen(model[0])
    return model


def normed(layer):
    return nn.Sequential(nn.utils.parametrizations.weight_norm(layer), nn.Linear(D, 2))


def spectral():
    return nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(D, D)), nn.Linear(D, 2))


def focal(y):
    def loss(out):
        own = functional.cross_entropy(out, y, reduction="none")
        return ((1 - (-own).exp()) ** 2 * own).mean()

    return loss


def constant_weights(y):
    """Weights of classes that are constants, in a mean over rows."""
    weight = torch.tensor([1.0, 5.0])
    return lambda out: (functional.cross_entropy(out, y, reduction="none") * weight[y]).mean()


def distilled(y):
    teacher = torch.linspace(-1, 1, 2 * len(y)).view(-1, 2)
    return lambda out: functional.kl_div(out.log_softmax(1), teacher.softmax(1), reduction="batchmean")


def indexed(y):
    """As `y[rows]` chooses the labels of a batch among all."""
    everybody, rows = torch.cat([y, y]), torch.arange(len(y))
    return lambda out: functional.cross_entropy(out, everybody[rows.numpy()])


def mutual(task, truth):
    return lambda y: MutualLoss(truth(y), None, 0.0, None, task)


RIGHT = {
    "linear": Case(lambda: nn.Linear(D, 2)),
    "perceptron": Case(lambda: mlp(nn.ReLU()), indexed),
    "GroupNorm": Case(lambda: conv(nn.GroupNorm(1, 3), nn.ReLU()), kind="images"),
    "InstanceNorm without statistics": Case(lambda: conv(nn.InstanceNorm2d(3, affine=True)), kind="images"),
    "LayerNorm without bias": Case(lambda: mlp(nn.LayerNorm(D, bias=False))),
    "RMSNorm": Case(lambda: mlp(nn.RMSNorm(D))),
    "PReLU and dropout": Case(lambda: mlp(nn.PReLU(), nn.Dropout(0.5))),
    "cnn1": Case(lambda: create_model("cnn1", n_classes=2, shape=Images(1, 16), seed=0), kind="large images"),
    "abmil": Case(lambda: create_model("abmil", n_classes=2, shape=Bags(D), seed=0), kind="bags"),
    "transmil": Case(lambda: create_model("transmil", n_classes=2, shape=Bags(D), seed=0), kind="bags"),
    "deepset, patients": Case(lambda: build_deepset(2, D, hidden=8), kind="bags", unit="patient"),
    "a layer twice": Case(twice),
    "half frozen": Case(half),
    "weights again outside": Case(Tied),
    "weights again outside, patients": Case(Tied, unit="patient"),
    "weight_norm": Case(lambda: normed(nn.Linear(D, D))),
    "spectral norm that rests": Case(spectral),
    "attention among patches": Case(Among, kind="bags"),
    "attention that is shown": Case(Looking, kind="bags"),
    "a recurrent layer": Case(Sequence, kind="bags"),
    "in place": Case(lambda: head(lambda net, z: z.mul(2).relu_())),
    "a wrong gradient of each row": Case(lambda: head(lambda net, z: Wrong.apply(z))),
    "focal": Case(mlp, focal),
    "constant weights": Case(mlp, constant_weights),
    "smoothing": Case(mlp, lambda y: partial(functional.cross_entropy, target=y, label_smoothing=0.1)),
    "probabilities": Case(mlp, lambda y: lambda out: functional.cross_entropy(out, functional.one_hot(y, 2).float())),
    "mean squared error": Case(mlp, lambda y: lambda out: functional.mse_loss(out[:, 0], y.float())),
    "binary": Case(
        mlp,
        lambda y: (
            lambda out: functional.binary_cross_entropy_with_logits(out[:, 1], y.float(), pos_weight=torch.tensor(3.0))
        ),
    ),
    "margins": Case(mlp, lambda y: lambda out: functional.multi_margin_loss(out, y)),
    "a module of a loss": Case(mlp, lambda y: lambda out: nn.CrossEntropyLoss()(out, y)),
    "distilled": Case(mlp, distilled),
    "classes of a study": Case(mlp, mutual(CLASSES, lambda y: y)),
    "numbers of a study": Case(lambda: nn.Linear(D, 1), mutual(NumberTask(0.0, 2.0), lambda y: y.float())),
    "survival of a study": Case(
        lambda: nn.Linear(D, 3), mutual(SurvivalTask((1.0, 2.0, 3.0)), lambda y: torch.stack([y + 0.5, y], 1).float())
    ),
}
