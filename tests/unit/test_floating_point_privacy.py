"""DP-SGD keeps its guarantee in floating point: unbounded noise without a grid, bounding norms, no part for NaN."""

import itertools
from functools import partial

import pytest
import torch
from builders import Net, Recorder, cross_entropy
from conftest import refused
from torch import nn
from torch.nn import functional

from wsi_fl.data.tasks import mutual_loss
from wsi_fl.models import create_model
from wsi_fl.models.mil import build_deepset
from wsi_fl.privacy import dpsgd
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.dpsgd import DPTrainer
from wsi_fl.privacy.gradients import ENGINES
from wsi_fl.privacy.layer_gradients import layer_gradients
from wsi_fl.types import Images

WAYS = (*ENGINES, "patient")
"""To a sum of clipped gradients; every row is a patient of its own."""

N_CLASSES = 3


def gradient(model, x, loss_of, *, way="ghost", sigma=0.0, clip=1.0, divisor=1, seed=0):
    """Return float32[d], the gradient that one step hands to the optimizer, (sum + noise) / B."""
    given, unit = Recorder(model.parameters()), "patient" if way == "patient" else "row"
    engine = None if way == "patient" else way
    trainer = DPTrainer(model, given, sigma=sigma, clip=clip, batch_size=divisor, engine=engine, unit=unit)
    trainer.step(x, loss_of, CipherStream.from_seed(seed), torch.arange(len(x)))
    return given.mean.float()


def test_noise_exceeds_the_largest_float32_normal_number():
    """One in 10⁸ normal numbers lies beyond 5.77, where PyTorch's float32 ones end; this seed gives one."""
    drawn = gradient(nn.Linear(2048, 2048, bias=False), torch.zeros(0, 2048), torch.sum, sigma=1.0, seed=73)
    assert 5.8 < float(drawn.abs().max()) < 7
    for power, moment in ((1, 0), (2, 1), (3, 0), (4, 3)):
        assert float((drawn.double() ** power).mean()) == pytest.approx(moment, abs=0.03), power


def test_no_digit_of_a_sum_shows_through_the_noise():
    """1 − 2⁻²⁴ plus a float32 number below −1, which is a multiple of 2⁻²³, is an odd multiple of 2⁻²⁴."""
    n, sum_ = 100_000, 1 - 2.0**-24
    model = nn.Linear(1, n, bias=False)
    given = gradient(model, torch.ones(1, 1), lambda z: z.sum() * sum_, sigma=1e-3, clip=1e3).double()
    quarters = given[(given > -0.5) & (given < -0.25)] * 2**25
    assert len(quarters) > 3000 and torch.equal(quarters, quarters.round())
    odd = (quarters / 2).remainder(2) == 1
    assert float(odd.double().mean()) == pytest.approx(0.25, abs=0.03)


def rarely(_, x):
    """Drop an example once in a thousand times, in any mode."""
    return x * (torch.rand(len(x), 1) > 0.001)


def forgetful(net, x):
    """Drops inputs in a module that has parameters."""
    return functional.linear(functional.dropout(x.flatten(1), 0.5, net.training), net.weight)


def test_private_training_has_no_dropout():
    """Dropout masks would have to stay secret. The same noise gives the same step for any state of PyTorch."""
    model, x, y = build_case("linear", 4)
    model, found = nn.Sequential(nn.Dropout(0.5), model), []
    for seed in (1, 2):
        torch.manual_seed(seed)
        found.append(gradient(model.train(), x, cross_entropy(y)))
    assert torch.equal(*found) and float(found[0].norm()) > 0
    drawing = Net(forgetful, weight=nn.Parameter(torch.randn(N_CLASSES, 16)))
    for one in (drawing, nn.Sequential(nn.Flatten(), Net(rarely), nn.Linear(16, N_CLASSES))):
        act = partial(dpsgd.check_per_example_gradients, one, (1, 4, 4), N_CLASSES)
        refused(act, "set its dropout to 0")


@pytest.mark.parametrize("way", WAYS)
def test_a_gradient_of_millions_of_equal_numbers_is_clipped_to_C(way):
    """Added one by one, four million equal squares come out 10⁻³ too few."""
    model = nn.Linear(2**21, 2, bias=False)
    found = gradient(model, torch.full((1, 2**21), 1.1), cross_entropy(torch.tensor([1])), way=way, clip=0.7)
    assert 0.7 * (1 - 3e-6) < float(found.double().norm()) <= 0.7


def test_the_norm_of_cancelling_positions_is_not_below_their_sum():
    """Alike inputs times output gradients of mean 0: all digits of the inner products go, not those of the sum."""
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    for spread in (1.0, 1e-2, 1e-3, 1e-4, 1e-5):
        a, g = torch.randn(9, 1, 64) + spread * torch.randn(9, 8, 64), torch.randn(9, 8, 64)
        ghost = layer_gradients(layer, [(a, g - g.mean(1, keepdim=True))])
        for k in range(9):
            found = ghost.weighted_sum(torch.ones(9), torch.tensor([k]))
            summed = sum(float(total.double().square().sum()) for total in found.values())
            assert summed <= float(ghost.squares[k]) * (1 + 1e-6)


MODELS = {
    "mlp": (partial(create_model, "mlp", n_classes=N_CLASSES, shape=Images(1, 16), seed=0), (1, 16, 16)),
    "gn_cnn_small": (
        partial(create_model, "gn_cnn_small", n_classes=N_CLASSES, shape=Images(3, 16), seed=0),
        (3, 16, 16),
    ),
    "deepset": (partial(build_deepset, N_CLASSES, 16, hidden=32), (5, 17)),
    "linear": (partial(nn.Linear, 12, N_CLASSES), (12,)),
}
EVERY = pytest.mark.parametrize(("name", "way"), itertools.product(MODELS, WAYS))


def build_case(name, b):
    """Return the model, x[b, …] and y."""
    torch.manual_seed(0)
    model, shape = MODELS[name]
    x = torch.randn(b, *shape)
    if name == "deepset":
        x[..., -1] = 1  # no padding
    return model(), x, torch.arange(b) % N_CLASSES


@EVERY
def test_one_example_moves_the_sum_by_at_most_C(name, way):
    for factor in (0.0, 1.0, 1e4, 1e12, 1e18, 1e30):
        model, x, y = build_case(name, 1)
        found = gradient(model, x * factor, cross_entropy(y), way=way, clip=0.3)
        assert float(found.double().norm()) <= 0.3, factor


@EVERY
@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan, 3e38, 1e25, "teacher"])
def test_an_example_without_a_finite_gradient_has_no_part_in_the_step(name, way, value):
    model, x, y = build_case(name, 5)
    teacher, others = torch.randn(5, N_CLASSES), torch.tensor([0, 1, 3, 4])

    def stepped(rows):
        def loss_of(logits):
            return mutual_loss(logits, y[rows], teacher[rows], 0.5)

        return gradient(model, x[rows], loss_of, way=way, clip=0.5, divisor=4)

    alone = stepped(others)
    spoilt, number = (teacher, torch.nan) if value == "teacher" else (x, value)
    spoilt[2].view(-1)[1] = number
    found = stepped(torch.arange(5))
    assert float(alone.norm()) > 0.1
    if number in (3e38, 1e25):  # its gradient may be finite, and is clipped then
        assert float((found - alone).norm()) <= 0.5 / 4 * (1 + 1e-5)
    else:
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("clip", [0.7, 1e-2, 1e-3, 1e-4])
def test_a_gradient_near_the_end_of_float32_is_clipped_to_C_too(clip):
    """Its weight would be a subnormal number, of few digits."""
    torch.manual_seed(0)
    model = nn.Linear(12, 3)
    for _ in range(20):
        x, far = torch.randn(1, 12) * 1e18, torch.randn(1, 3) * 3e18
        found = gradient(model, x, lambda logits, far=far: (logits * far).sum(), way="ghost", clip=clip)
        assert float(found.double().norm()) <= clip


@EVERY
def test_a_batch_without_finite_gradients_is_a_step_of_noise(name, way):
    model, x, y = build_case(name, 3)
    x.view(3, -1)[:, 0] = torch.nan
    found = gradient(model, x, cross_entropy(y), way=way, sigma=2.0, seed=4)
    assert torch.equal(found, gradient(model, x[:0], cross_entropy(y[:0]), sigma=2.0, seed=4))
    assert torch.isfinite(found).all()
