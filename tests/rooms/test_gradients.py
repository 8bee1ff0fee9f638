"""Both engines against a loop over single examples, ghost's rules layer by layer, and which engine a model gets."""

import itertools
from unittest.mock import patch

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from wsi_fl.learning.local import DPSettings, Learner, supervised_step
from wsi_fl.models import build
from wsi_fl.models.mil import deepset
from wsi_fl.privacy import gradients
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.dpsgd import DPTrainer, check_per_example_gradients
from wsi_fl.privacy.gradients import ENGINES, GHOSTS, _gradients_of, _obstacle
from wsi_fl.types import Images, WsiFlError

N_CLASSES = 3


def loss_for(y):
    return lambda logits: functional.cross_entropy(logits, y)


def looped(model, x, y):
    """Per-example gradients [b, …] of each parameter, from b passes."""
    rows = []
    for k in range(len(x)):
        loss = functional.cross_entropy(model(x[k : k + 1]), y[k : k + 1])
        parameters = [p for p in model.parameters() if p.requires_grad]
        rows.append(torch.autograd.grad(loss, parameters))
    return [torch.stack(column) for column in zip(*rows, strict=True)]


def compare(engine, model, x, y, rtol=1e-3):
    """The engine's sums, clipped so that some examples are and some are not, are those of the loop."""
    each = looped(model, x, y)
    norms = torch.stack([g.flatten(1).norm(dim=1) for g in each]).norm(dim=0)
    clip = float(norms.sort().values[: len(x) // 2 + 1].mean())
    told = []

    def weigh(found):
        told.append(found)
        return (clip / found).clamp(max=1.0)

    sums, loss = ENGINES[engine](model, x, loss_for(y), weigh)
    c = (clip / norms).clamp(max=1.0)
    assert len(x) == 1 or 0 < int((c < 1).sum()) < len(x)
    torch.testing.assert_close(told[0], norms.double(), rtol=rtol, atol=0.0)
    for g, total in zip(each, sums, strict=True):
        wanted = torch.einsum("n,n...->...", c, g)
        assert total.shape == wanted.shape
        assert float((total - wanted).norm()) <= rtol * float(wanted.norm()) + 1e-6 * clip
    torch.testing.assert_close(loss, functional.cross_entropy(model(x), y).detach())


def images(b, channels, size_px, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(b, channels, size_px, size_px, generator=g), torch.arange(b) % N_CLASSES


MODELS = {"mlp": 16, "lenet5": 28, "cnn1": 16, "cnn2": 16, "gn_cnn": 16, "resnet18": 32, "timm:resnet10t": 32}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("name", MODELS)
def test_every_engine_sums_the_clipped_gradients_of_a_loop(name, engine):
    model = build(name, n_classes=N_CLASSES, shape=Images(3, MODELS[name]), seed=0).train()
    with torch.no_grad():
        for p in model.parameters():  # a gain of 0 hides the rest
            if p.min() == p.max():
                p.uniform_(0.5, 1.5, generator=torch.Generator().manual_seed(0))
    compare(engine, model, *images(4, 3, MODELS[name]))


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("n_instances", [1, 5, 40])  # 2 · 40² > 16 · 32: both branches of the rule
def test_every_engine_sums_the_clipped_gradients_of_bags(engine, n_instances):
    torch.manual_seed(0)
    bags = torch.cat([torch.randn(4, n_instances, 16), torch.ones(4, n_instances, 1)], 2)
    compare(engine, deepset(N_CLASSES, 16, hidden=32), bags, torch.arange(4) % 3)


# the rules of ghost


def autograd_norms(module, a, g):
    """|g_i|² and g_i of a layer by autograd, one example at a time."""
    parameters = [p for p in module.parameters() if p.requires_grad]
    rows = []
    for x, out in zip(a, g, strict=True):
        rows.append(torch.autograd.grad(module(x[None]), parameters, out[None]))
    each = [torch.stack(column) for column in zip(*rows, strict=True)]
    return sum(e.flatten(1).square().sum(1) for e in each), each


def check_layer(module, a):
    """gradients_of by either way against autograd. Returns whether the rule prefers the ghost norm."""
    g = torch.randn(module(a).shape)
    squares, each = autograd_norms(module, a, g)
    c = torch.rand(len(a))
    with torch.no_grad():
        preferred = GHOSTS[type(module)](module, a, g) is not None
        for pays in (True, False):
            with patch.object(gradients, "_pays", lambda *_, pays=pays: pays):
                way = _gradients_of(module, [(a, g)])
            scale = float(squares.max())
            # where positions cancel, a norm may come out too long by round-off of what cancels, never too short
            cancels = 2e-6 * float((a.flatten(1).norm(dim=1) * g.flatten(1).norm(dim=1)).square().max())
            torch.testing.assert_close(way.squares, squares.double(), rtol=1e-3, atol=1e-5 * scale + cancels)
            sums = way.weighted(c, slice(None))
            for parameter, e in zip((p for p in module.parameters() if p.requires_grad), each, strict=True):
                wanted = torch.einsum("n,n...->...", c, e)
                torch.testing.assert_close(sums[parameter], wanted, rtol=1e-3, atol=1e-4 * scale**0.5)
    return preferred


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_convolutions_of_any_shape(data):
    def draw(*values):
        return data.draw(st.sampled_from(values))

    groups = draw(1, 1, 2, 3)
    module = nn.Conv2d(
        groups * draw(1, 2, 5),
        groups * draw(1, 3, 8),
        (draw(1, 2, 3, 5), draw(1, 3)),
        stride=draw(1, 2, (2, 1)),
        padding=draw(0, 1, (2, 1), "valid"),
        dilation=draw(1, 2),
        groups=groups,
        bias=draw(True, False),
        padding_mode=draw("zeros", "zeros", "reflect", "circular"),
    )
    a = torch.randn(draw(1, 2, 5), module.in_channels, draw(3, 4, 7), draw(3, 6))
    try:
        module(a)
    except RuntimeError:
        assume(False)
    check_layer(module, a)


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize("kernel", [2, 3])
def test_a_convolution_padded_to_the_same_size(kernel):
    assert check_layer(nn.Conv2d(32, 32, kernel, padding="same"), torch.randn(3, 32, 4, 5))


def test_small_images_of_many_channels_take_the_ghost_norm_and_large_ones_the_matrix():
    many, few = nn.Conv2d(32, 32, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
    assert check_layer(many, torch.randn(3, 32, 4, 4))
    assert not check_layer(many, torch.randn(3, 32, 12, 12))
    assert not check_layer(few, torch.randn(3, 3, 12, 12))


def test_inner_products_are_taken_a_few_examples_at_a_time(monkeypatch):
    monkeypatch.setattr("wsi_fl.privacy.gradients._GRAM_CPU", 2 * 36**2)
    assert check_layer(nn.Conv2d(32, 32, 3, padding=1), torch.randn(5, 32, 4, 4))
    assert check_layer(nn.Conv2d(64, 64, 3, padding=1, groups=2), torch.randn(5, 64, 4, 4))


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 7), max_size=2),
    st.integers(1, 9),
    st.integers(1, 9),
    st.booleans(),
    st.integers(1, 4),
)
def test_linear_layers_over_any_positions(positions, d, p, bias, b):
    taken = check_layer(nn.Linear(d, p, bias=bias), torch.randn(b, *positions, d))
    n_positions = torch.Size(positions).numel()
    assert taken == (2 * n_positions**2 <= d * p)


@pytest.mark.parametrize("kind", [nn.Linear, nn.Conv2d])
@pytest.mark.parametrize("frozen", ["weight", "bias"])
def test_frozen_halves_of_a_layer(kind, frozen):
    module = nn.Linear(9, 9) if kind is nn.Linear else nn.Conv2d(32, 32, 3)
    getattr(module, frozen).requires_grad_(False)
    a = torch.randn(3, 9) if kind is nn.Linear else torch.randn(3, 32, 4, 4)
    assert check_layer(module, a) == (frozen == "bias")


class Twice(nn.Module):
    """Uses the same layers again."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(4, 4, 3, padding=1), nn.GroupNorm(2, 4), nn.Linear(4, 4)

    def forward(self, x):
        for _ in range(2):
            x = torch.relu(self.norm(self.conv(x)))
        return self.fc(torch.tanh(self.fc(x.mean((2, 3)))))[:, :N_CLASSES]


class InPlace(nn.Module):
    """Changes outputs of layers in place."""

    def __init__(self):
        super().__init__()
        self.conv, self.fc = nn.Conv2d(1, 4, 3), nn.Linear(4 * 16, N_CLASSES)

    def forward(self, x):
        z = self.conv(x)
        z *= 2.0
        z = functional.relu(z, inplace=True)
        logits = self.fc(z.flatten(1))
        logits += 1.0
        return logits


class Branches(nn.Module):
    """Two layers whose outputs are added have the same output gradient, in one tensor."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(36, N_CLASSES), nn.Linear(36, N_CLASSES)

    def forward(self, x):
        return self.one(x.flatten(1)) + self.other(x.flatten(1))


class Mixed(nn.Module):
    """Layers with Opacus's own rule for their gradients."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv1d(6, 8, 3, padding=1), nn.LayerNorm(6)
        self.spread, self.fc = nn.InstanceNorm1d(8, affine=True), nn.Linear(8, N_CLASSES)

    def forward(self, x):
        return self.fc(self.spread(self.conv(self.norm(x.squeeze(1)))).square().mean(2))


@pytest.mark.parametrize(
    ("model", "channels"),
    [(Twice(), 4), (InPlace(), 1), (Branches(), 1), (Mixed(), 1)],
    ids=lambda v: type(v).__name__,
)
def test_ghost_follows_what_a_model_does_with_its_layers(model, channels):
    compare("ghost", model, *images(4, channels, 6))


def test_frozen_layers_are_left_out():
    model = build("cnn1", n_classes=N_CLASSES, shape=Images(1, 16), seed=0)
    model[0].requires_grad_(False)
    model[3].bias.requires_grad_(False)
    for engine in ENGINES:
        compare(engine, model, *images(4, 1, 16))


class Spoilt(nn.Module):
    """Overwrites what a layer has read."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(36, 36), nn.Linear(36, N_CLASSES)

    def forward(self, x):
        z = self.first(x.flatten(1)) * 1.0
        logits = self.head(z)
        z.zero_()
        return logits


class Folded(nn.Module):
    """Makes one batch of all rows of all images."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(6, N_CLASSES)

    def forward(self, x):
        return self.head(x.reshape(-1, 6)).view(len(x), -1, N_CLASSES).mean(1)


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(36, N_CLASSES)

    def forward(self, x):
        return self.head(input=x.flatten(1))


@pytest.mark.parametrize(
    ("model", "frozen", "words"),
    [
        (Spoilt(), False, "modified by an inplace operation"),  # what autograd says
        (Spoilt(), True, "changed in place"),  # where autograd has not kept the input
        (Folded(), False, "18 rows"),
        (Named(), False, "by position"),
    ],
)
def test_ghost_stops_where_it_cannot_see_a_layers_gradient(model, frozen, words):
    x, y = images(3, 1, 6)
    model.head.weight.requires_grad_(not frozen)
    with pytest.raises((WsiFlError, RuntimeError), match=words):
        ENGINES["ghost"](model, x, loss_for(y), torch.ones_like)
    assert not any(m._forward_hooks for m in model.modules())


def test_models_that_ghost_does_not_suit_get_hooks():
    tied = nn.Sequential(nn.Flatten(), nn.Linear(36, 36), nn.Linear(36, 36), nn.Linear(36, N_CLASSES))
    tied[2].weight = tied[1].weight
    weighed = nn.Sequential(nn.Flatten(), nn.utils.weight_norm(nn.Linear(36, N_CLASSES)))
    curved = nn.Sequential(nn.Flatten(), nn.PReLU(), nn.Linear(36, N_CLASSES))
    for model, words in ((tied, "1 and 2 share"), (weighed, "1 (Linear)"), (curved, "1 (PReLU)")):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        assert words in _obstacle(model)
        assert DPTrainer(model, sgd, sigma=0.0, clip=1.0, batch_size=3).engine == "hooks"
    assert check_per_example_gradients(tied, (1, 6, 6), N_CLASSES) == "hooks"


@pytest.mark.parametrize("engine", ENGINES)
def test_a_model_is_left_as_it_was(engine):
    model = build("gn_cnn", n_classes=N_CLASSES, shape=Images(1, 16), seed=0)
    x, y = images(3, 1, 16)
    ENGINES[engine](model, x, loss_for(y), torch.ones_like)
    with pytest.raises(ZeroDivisionError):
        ENGINES[engine](model, x, lambda logits: logits.sum() / (1 // 0), torch.ones_like)
    plain = set(vars(nn.ReLU()))
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks and not module._backward_hooks
        assert not {"activations", "max_batch_len", "ft_compute_sample_grad"} & set(vars(module)) - plain
    assert all(p.grad is None and not vars(p) for p in model.parameters())


# the choice


def dropping(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Flatten(), nn.Linear(36, 24), nn.Dropout(0.5), nn.Linear(24, N_CLASSES))


def test_a_learner_takes_ghost_wherever_it_can_unless_told_otherwise():
    curved = nn.Sequential(nn.Flatten(), nn.PReLU(), nn.Linear(36, N_CLASSES))
    for model, told, engine in (
        (dropping(), None, "ghost"),
        (dropping(), "hooks", "hooks"),
        (curved, None, "hooks"),
    ):
        dp = DPSettings(1.0, 1.0, 4, engine=told)
        learner = Learner(model, lr=0.01, weight_decay=0.0, device=torch.device("cpu"), dp=dp)
        assert learner.trainer.engine == engine
        supervised_step(learner, images(4, 1, 6), CipherStream.fresh())
    assert Learner(dropping(), lr=0.01, weight_decay=0.0, device=torch.device("cpu"), dp=None).trainer is None


def test_engines_agree_under_the_same_noise():
    vectors = []
    for engine in ENGINES:
        model = build("cnn1", n_classes=N_CLASSES, shape=Images(1, 16), seed=0)
        sgd = torch.optim.SGD(model.parameters(), lr=0.5)
        trainer = DPTrainer(model, sgd, sigma=1.0, clip=0.5, batch_size=5, engine=engine)
        for seed in range(3):
            x, y = images(5, 1, 16, seed)
            trainer.step(x, loss_for(y), CipherStream.seeded(seed))
        vectors.append(nn.utils.parameters_to_vector(model.parameters()).detach())
    for one, other in itertools.pairwise(vectors):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-5)


def test_hooks_of_opacus_are_quiet_about_inputs_without_gradients(recwarn):
    model = build("mlp", n_classes=N_CLASSES, shape=Images(1, 6), seed=0)
    x, y = images(3, 1, 6)
    ENGINES["hooks"](model, x, loss_for(y), torch.ones_like)
    assert not [w for w in recwarn if "backward hook" in str(w.message)]
