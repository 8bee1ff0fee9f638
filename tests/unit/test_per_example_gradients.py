"""Both gradient engines against a loop over single examples, ghost norms by layer, and the choice of the engine."""

from functools import partial
from unittest.mock import patch

import pytest
import torch
from builders import Net, compare_with_loop, cross_entropy, trainable, vary
from conftest import nightly
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from wsi_fl.learning.local_training import DPSettings, Learner, take_supervised_step
from wsi_fl.models import create_model
from wsi_fl.models.mil import build_deepset
from wsi_fl.privacy import layer_gradients as layer_rules
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.dpsgd import DPTrainer, check_per_example_gradients
from wsi_fl.privacy.gradients import ENGINES
from wsi_fl.privacy.layer_gradients import GHOST_RULES, find_obstacle, layer_gradients
from wsi_fl.types import Images, WsiFlError

N_CLASSES = 3
EACH = pytest.mark.parametrize("engine", ENGINES)


def build_model(name, size_px=16, channels=1):
    return create_model(name, n_classes=N_CLASSES, shape=Images(channels, size_px), seed=0)


def images(b, channels, size_px):
    x = torch.randn(b, channels, size_px, size_px, generator=torch.Generator().manual_seed(0))
    return x, torch.arange(b) % N_CLASSES


TIMM = ["convnext_atto", *nightly("resnet18", "efficientnet_lite0", "mobilenetv3_small_050")]


@pytest.mark.parametrize("name", TIMM)
def test_the_engine_that_a_timm_model_gets_sums_the_clipped_gradients_of_a_loop(name):
    model = vary(build_model(f"timm:{name}", 32, 3)).train()
    compare_with_loop(ENGINES["hooks" if find_obstacle(model) else "ghost"], model, *images(2, 3, 32))


def check_layer(module, a):
    """Check gradients_of by either way against autograd; return whether the rule prefers the ghost norm."""
    g = torch.randn(module(a).shape)
    rows = [torch.autograd.grad(module(x[None]), trainable(module), out[None]) for x, out in zip(a, g, strict=True)]
    each = [torch.stack(column) for column in zip(*rows, strict=True)]
    squares = sum(e.flatten(1).square().sum(1) for e in each)
    c = torch.rand(len(a))
    with torch.no_grad():
        preferred = GHOST_RULES[type(module)](module, a, g) is not None
        for pays in (True, False):
            with patch.object(layer_rules, "_is_ghost_smaller", lambda *_, pays=pays: pays):
                way = layer_gradients(module, [(a, g)])
            scale = float(squares.max())
            # where positions cancel, a norm may come out too long by round-off of what cancels, never too short
            cancels = 2e-6 * float((a.flatten(1).norm(dim=1) * g.flatten(1).norm(dim=1)).square().max())
            torch.testing.assert_close(way.squares, squares.double(), rtol=1e-3, atol=1e-5 * scale + cancels)
            sums = way.weighted_sum(c, slice(None))
            for parameter, e in zip(trainable(module), each, strict=True):
                wanted = torch.einsum("n,n...->...", c, e)
                torch.testing.assert_close(sums[parameter], wanted, rtol=1e-3, atol=1e-4 * scale**0.5)
    return preferred


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_gradients_of_convolutions_of_any_shape_match_autograd(data):
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


def frozen(layer, *names):
    for name in names:
        layer.get_parameter(name).requires_grad_(False)
    return layer


@pytest.mark.filterwarnings("ignore:Using padding='same'")
@pytest.mark.parametrize(
    ("layer", "shape", "ghost"),
    [
        (nn.Conv2d(32, 32, 3, padding=1), (3, 32, 4, 4), True),
        (nn.Conv2d(32, 32, 3, padding=1), (3, 32, 12, 12), False),
        (nn.Conv2d(3, 4, 3, padding=1), (3, 3, 12, 12), False),
        (nn.Conv2d(32, 32, 2, padding="same"), (3, 32, 4, 5), True),
        (nn.Conv2d(32, 32, 3, padding="same"), (3, 32, 4, 5), True),
        (frozen(nn.Conv2d(32, 32, 3), "weight"), (3, 32, 4, 4), False),
        (frozen(nn.Conv2d(32, 32, 3), "bias"), (3, 32, 4, 4), True),
        (frozen(nn.Linear(9, 9), "weight"), (3, 9), False),
        (frozen(nn.Linear(9, 9), "bias"), (3, 9), True),
    ],
)
def test_small_images_of_many_channels_take_the_ghost_norm_and_large_ones_the_matrix(layer, shape, ghost):
    assert check_layer(layer, torch.randn(shape)) == ghost


def test_inner_products_are_taken_a_few_examples_at_a_time(monkeypatch):
    monkeypatch.setattr("wsi_fl.privacy.layer_gradients._GRAM_ENTRIES_CPU", 2 * 36**2)
    assert check_layer(nn.Conv2d(32, 32, 3, padding=1), torch.randn(5, 32, 4, 4))
    assert check_layer(nn.Conv2d(64, 64, 3, padding=1, groups=2), torch.randn(5, 64, 4, 4))


SMALL = st.integers(1, 9)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 7), max_size=2), SMALL, SMALL, st.booleans(), st.integers(1, 4))
def test_gradients_of_linear_layers_over_any_positions_match_autograd(positions, d, p, bias, b):
    taken = check_layer(nn.Linear(d, p, bias=bias), torch.randn(b, *positions, d))
    assert taken == (2 * torch.Size(positions).numel() ** 2 <= d * p)


def twice(net, x):
    """Uses the same layers again."""
    for _ in range(2):
        x = torch.relu(net.norm(net.conv(x)))
    return net.fc(torch.tanh(net.fc(x.mean((2, 3)))))[:, :N_CLASSES]


def in_place(net, x):
    """Changes outputs of layers in place."""
    z = net.conv(x)
    z *= 2.0
    z = functional.relu(z, inplace=True)
    logits = net.fc(z.flatten(1))
    logits += 1.0
    return logits


def branches(net, x):
    """Two layers whose outputs are added have the same output gradient, in one tensor."""
    return net.one(x.flatten(1)) + net.other(x.flatten(1))


def mix_layers(net, x):
    """Layers with Opacus's own rule for their gradients."""
    return net.fc(net.spread(net.conv(net.norm(x.squeeze(1)))).square().mean(2))


def half_frozen():
    model = frozen(build_model("cnn1"), "3.bias")
    model[0].requires_grad_(False)
    return model


NORMS = {
    "GroupNorm": lambda timm: timm.GroupNorm(4, 2),
    "GroupNorm1": lambda timm: timm.GroupNorm1(4),
    "LayerNorm2d": lambda timm: timm.LayerNorm2d(4),
    "GroupNormAct": lambda timm: timm.GroupNormAct(4, 2, inplace=False, act_layer=nn.SiLU),
    "GroupNorm1Act": lambda timm: timm.GroupNorm1Act(4, inplace=False),
    "LayerNorm": lambda timm: nn.Sequential(nn.Flatten(2), timm.LayerNorm(16)),
    "LayerNormAct": lambda timm: nn.Sequential(nn.Flatten(2), timm.LayerNormAct(16, inplace=False)),
    "without bias": lambda _: nn.Sequential(nn.Flatten(2), nn.LayerNorm(16, bias=False)),
    "without bias, over two axes": lambda _: nn.LayerNorm((4, 4), bias=False),
}


def with_norm(name, *, trains_gain):
    from timm import layers

    norm = NORMS[name](layers)
    model = vary(nn.Sequential(nn.Conv2d(1, 4, 3), norm, nn.Flatten(), nn.Linear(64, N_CLASSES)))
    assert find_obstacle(model) is None
    (norm[1] if isinstance(norm, nn.Sequential) else norm).weight.requires_grad_(trains_gain)
    return model


MODELS = {"mlp": 16, "lenet5": 28, "cnn1": 16, "cnn2": 16, "gn_cnn": 16, "resnet18": 32, "timm:resnet10t": 32}
NETS = {
    name: (lambda name=name: vary(build_model(name, MODELS[name], 3)).train(), (3, MODELS[name], MODELS[name]))
    for name in MODELS
}
NETS |= {  # 2 · 40² > 16 · 32: both branches of the rule
    f"bags of {n}": (lambda: build_deepset(N_CLASSES, 16, hidden=32), (n, 17)) for n in (1, 5, 40)
}
NETS |= {
    "twice": (
        lambda: Net(twice, conv=nn.Conv2d(4, 4, 3, padding=1), norm=nn.GroupNorm(2, 4), fc=nn.Linear(4, 4)),
        (4, 6, 6),
    ),
    "in place": (lambda: Net(in_place, conv=nn.Conv2d(1, 4, 3), fc=nn.Linear(64, N_CLASSES)), (1, 6, 6)),
    "branches": (lambda: Net(branches, one=nn.Linear(36, 3), other=nn.Linear(36, 3)), (1, 6, 6)),
    "mixed": (
        lambda: Net(
            mix_layers,
            conv=nn.Conv1d(6, 8, 3, padding=1),
            norm=nn.LayerNorm(6),
            spread=nn.InstanceNorm1d(8, affine=True),
            fc=nn.Linear(8, N_CLASSES),
        ),
        (1, 6, 6),
    ),
    "half frozen": (half_frozen, (1, 16, 16)),
    "channels last": (lambda: nn.Sequential(nn.Conv2d(4, 6, 3), nn.Flatten(), nn.Linear(96, 3)), (4, 6, 6)),
    "channels last, 1 × 1": (lambda: nn.Sequential(nn.Conv2d(4, 6, 1), nn.Flatten(), nn.Linear(216, 3)), (4, 6, 6)),
}
NETS |= {name: (partial(with_norm, name, trains_gain=True), (1, 6, 6)) for name in NORMS}
NETS |= {f"{name}, frozen gain": (partial(with_norm, name, trains_gain=False), (1, 6, 6)) for name in NORMS}


@EACH
@pytest.mark.parametrize("name", NETS)
def test_every_engine_sums_the_clipped_gradients_of_a_loop(name, engine):
    torch.manual_seed(0)
    make, shape = NETS[name]
    x, y = torch.randn(4, *shape), torch.arange(4) % N_CLASSES
    if "bags" in name:
        x[..., -1] = 1
    compare_with_loop(ENGINES[engine], make(), x.to(memory_format=torch.channels_last) if "last" in name else x, y)


def spoilt(net, x):
    """Overwrite a layer's input after its use."""
    z = net.first(x.flatten(1)) * 1.0
    logits = net.head(z)
    z.zero_()
    return logits


def spoiling(requires_grad):
    net = Net(spoilt, first=nn.Linear(36, 36), head=nn.Linear(36, N_CLASSES))
    net.head.weight.requires_grad_(requires_grad)
    return net


def fold_images(net, x):
    """Makes one batch of all rows of all images."""
    return net.head(x.reshape(-1, 6)).view(len(x), -1, N_CLASSES).mean(1)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (spoiling(True), "modified by an inplace operation"),  # what autograd says
        (spoiling(False), "changed in place"),  # where autograd has not kept the input
        (Net(fold_images, head=nn.Linear(6, N_CLASSES)), "18 rows"),
        (Net(lambda net, x: net.head(input=x.flatten(1)), head=nn.Linear(36, N_CLASSES)), "by position"),
    ],
)
def test_ghost_stops_where_it_cannot_see_a_layers_gradient(model, words):
    x, y = images(3, 1, 6)
    with pytest.raises((WsiFlError, RuntimeError), match=words):
        ENGINES["ghost"](model, x, cross_entropy(y), torch.ones_like)
    assert not any(m._forward_hooks for m in model.modules())


def flat(*layers):
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(36, N_CLASSES))


def test_models_unsuited_to_ghost_norms_use_hooks():
    tied = flat(nn.Linear(36, 36), nn.Linear(36, 36))
    tied[2].weight = tied[1].weight
    weighed = nn.Sequential(nn.Flatten(), nn.utils.weight_norm(nn.Linear(36, N_CLASSES)))
    for model, words, way in (
        (tied, "1 and 2 share", "hooks"),
        (weighed, "1 (Linear)", "singly"),  # a function hangs on it
        (flat(nn.PReLU()), "1 (PReLU)", "hooks"),
    ):
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        assert words in find_obstacle(model)
        assert DPTrainer(model, sgd, sigma=0.0, clip=1.0, batch_size=3).engine == way
    assert check_per_example_gradients(tied, (1, 6, 6), N_CLASSES) == "hooks"


def test_a_network_of_timm_with_group_norms_goes_by_ghost():
    with torch.device("meta"):
        model = create_model("timm:resnet50_gn", n_classes=2, shape=Images(3, 32), seed=0)
    assert find_obstacle(model) is None


@EACH
def test_a_model_is_left_unchanged_without_warnings(engine, recwarn):
    model = build_model("gn_cnn")
    x, y = images(3, 1, 16)
    ENGINES[engine](model, x, cross_entropy(y), torch.ones_like)
    assert not [w for w in recwarn if "backward hook" in str(w.message)]
    with pytest.raises(ZeroDivisionError):
        ENGINES[engine](model, x, lambda logits: logits.sum() / (1 // 0), torch.ones_like)
    plain = set(vars(nn.ReLU()))
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks and not module._backward_hooks
        assert not {"activations", "max_batch_len", "ft_compute_sample_grad"} & set(vars(module)) - plain
    assert all(p.grad is None and not vars(p) for p in model.parameters())


@pytest.mark.parametrize(
    ("layers", "told", "engine"),
    [([nn.Dropout(0.5)], None, "ghost"), ([nn.Dropout(0.5)], "hooks", "hooks"), ([nn.PReLU()], None, "hooks")],
)
def test_a_learner_uses_ghost_norms_where_possible_by_default(layers, told, engine):
    dp = DPSettings(1.0, 1.0, 4, engine=told)
    learner = Learner(flat(*layers), lr=0.01, weight_decay=0.0, device=torch.device("cpu"), dp=dp)
    assert learner.trainer.engine == engine
    take_supervised_step(learner, images(4, 1, 6), CipherStream.from_entropy())
