"""DP-SGD against a slow per-example loop, and the statistics of its noise and batches."""

import threading

import numpy as np
import pytest
import torch
from builders import Net, clipped, cross_entropy, each_gradient
from conftest import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from wsi_fl.models import create_model
from wsi_fl.privacy import gradients, layer_gradients
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.dpsgd import DPTrainer, check_per_example_gradients
from wsi_fl.privacy.gradients import ENGINES
from wsi_fl.privacy.privacy_plan import poisson_rows
from wsi_fl.types import Images, UsageError, WsiFlError

EACH = pytest.mark.parametrize("engine", ENGINES)


def net(kind="mlp"):
    return create_model(kind, n_classes=3, shape=Images(1, 16), seed=0)


def batch(b, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(b, 1, 16, 16, generator=g), torch.randint(3, (b,), generator=g)


def vector(model):
    return nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def step(model, x, y, *, sigma, clip, divisor, noise=None, engine=None):
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = DPTrainer(model, sgd, sigma=sigma, clip=clip, batch_size=divisor, engine=engine)
    return trainer.step(x, cross_entropy(y), noise or CipherStream.from_entropy())


@EACH
@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from(["mlp", "cnn1", "gn_cnn"]),
    st.integers(1, 7),
    st.sampled_from([0.01, 0.7, 3.0, float("inf")]),
    st.integers(1, 50),
)
def test_a_step_is_the_sum_of_clipped_gradients_over_B(engine, kind, b, clip, divisor):
    (x, y), model = batch(b, seed=b), net(kind)
    before = vector(model)
    wanted = torch.cat([g.flatten() for g in clipped(each_gradient(model, x, y), clip)]) / divisor
    loss = functional.cross_entropy(model(x), y)
    told = step(model, x, y, sigma=0.0, clip=clip, divisor=divisor, engine=engine)
    assert told == pytest.approx(float(loss.detach()), rel=1e-4)
    torch.testing.assert_close(before - vector(model), wanted, rtol=2e-3, atol=2e-6)


@pytest.mark.parametrize("b", [0, 1, 9])
def test_noise_has_standard_deviation_sigma_C_over_B_for_any_batch(b):
    sigma, clip, divisor = 1.4, 0.7, 32
    x, y = batch(b)
    quiet, noisy = net(), net()
    start = vector(noisy)
    step(quiet, x, y, sigma=0.0, clip=clip, divisor=divisor)
    loss = step(noisy, x, y, sigma=sigma, clip=clip, divisor=divisor)
    noise = (vector(noisy) - vector(quiet)).double()
    n, wanted = len(noise), sigma * clip / divisor
    assert n > 50_000 and float(noise.std()) == pytest.approx(wanted, rel=6 / (2 * n) ** 0.5)
    assert abs(float(noise.mean())) < 6 * wanted / n**0.5
    assert float((noise.abs() > 2 * wanted).double().mean()) == pytest.approx(0.0455, abs=0.006)  # normal
    if b == 0:
        assert np.isnan(loss)
        assert torch.equal(vector(quiet), start)  # nothing but noise moves it


@EACH
def test_a_parameter_that_the_loss_does_not_use_is_named_as_the_problem(engine):
    half = Net(lambda net, x: net.used(x.flatten(1)), used=nn.Linear(256, 3), idle=nn.Linear(2, 2))
    with pytest.raises(WsiFlError, match="2 parameters got no gradient"):
        step(half, *batch(3), sigma=1.0, clip=1.0, divisor=3, engine=engine)


def test_noise_differs_between_runs_unless_seeded():
    def trained(seed):
        model = net()
        noise = None if seed is None else CipherStream.from_seed(seed)
        step(model, *batch(2), sigma=1.0, clip=1.0, divisor=2, noise=noise)
        return vector(model)

    assert not torch.equal(trained(None), trained(None)) and torch.equal(trained(3), trained(3))
    assert not torch.equal(trained(3), trained(4))


def test_each_row_enters_each_batch_independently_at_its_rate():
    n, rate, draws = 50, 0.3, 4000
    sampler = CipherStream.from_seed(0)
    chosen = np.zeros((draws, n))
    for k in range(draws):
        rows = poisson_rows(n, rate, sampler)
        assert (np.diff(rows) > 0).all()
        chosen[k, rows] = 1
    spread = (rate * (1 - rate) / draws) ** 0.5
    assert np.abs(chosen.mean(0) - rate).max() < 5 * spread
    sizes = chosen.sum(1)
    assert sizes.var() == pytest.approx(n * rate * (1 - rate), rel=0.12)  # fixed-size batches would have none
    off = np.corrcoef(chosen.T)[~np.eye(n, dtype=bool)]
    assert np.abs(off).max() < 6 / draws**0.5 and len(poisson_rows(n, 1.0, sampler)) == n
    assert len(poisson_rows(n, 0.0, sampler)) == 0


def scaled_network(change, **layers):
    """Convolution, a change of its output or a layer by name, and a linear head on 1 × 8 × 8 images."""

    def run(net, x):
        z = net.conv(x)
        return net.head((getattr(net, change)(z) if isinstance(change, str) else change(z)).flatten(1))

    return Net(run, conv=nn.Conv2d(1, 2, 3), head=nn.Linear(72, 3), **layers)


@pytest.mark.parametrize("kind", ["mlp", "cnn1", "gn_cnn"])
def test_the_check_passes_our_models_and_leaves_them_and_the_generator_as_they_were(kind):
    model = net(kind)
    before, state = vector(model), torch.random.get_rng_state()
    assert check_per_example_gradients(model, (1, 16, 16), 3) == "ghost"
    assert torch.equal(vector(model), before) and torch.equal(torch.random.get_rng_state(), state)
    assert all(m.training and not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def silent():
    """A fault behind a gain of zero."""
    model = scaled_network(lambda z: z - z.mean(0, keepdim=True))
    nn.init.zeros_(model.head.weight)
    return model


def use_weight_outside(net, x):
    """Uses the weight of a module without calling the module."""
    return net.head(functional.conv2d(x, net.conv.weight).flatten(1))


@pytest.mark.parametrize(
    ("model", "shape", "n_classes", "message"),
    [
        (scaled_network(lambda z: z - z.mean(0, keepdim=True)), (1, 8, 8), 3, "ties the rows of a batch together"),
        (silent(), (1, 8, 8), 3, "ties the rows"),
        (scaled_network(nn.ReLU(), idle=nn.Linear(2, 2)), (1, 8, 8), 3, "does not depend on idle.weight; freeze it"),
        (scaled_network(nn.ReLU()), (1, 9, 9), 3, "cannot take images of 1×9×9: "),
        (scaled_network(nn.ReLU()), (3, 8, 8), 3, "cannot take images of 3×8×8: "),
        (scaled_network(nn.ReLU()), (1, 8, 8), 4, "4 logits"),
        (scaled_network(lambda z: z.add_(1).detach()), (1, 8, 8), 3, "cannot be trained"),
        (scaled_network("norm", norm=nn.BatchNorm2d(2)), (1, 8, 8), 3, "BatchNorm"),
    ],
)
def test_models_with_other_gradients_are_refused_in_one_line(model, shape, n_classes, message):
    with pytest.raises(UsageError, match=message) as caught:
        check_per_example_gradients(model, shape, n_classes)
    assert "\n" not in str(caught.value)


def scale():
    """A parameter of its own, in a type of its own."""
    return Net(lambda net, z: net.factor * z, factor=nn.Parameter(torch.ones(())))


def twist_in_place(z):
    """Read an output under another name after an operator changed it in place."""
    z = z * 1
    same = z
    z *= 2.0
    return same * z


@pytest.mark.parametrize(
    ("model", "right"),
    [
        (lambda: net("gn_cnn"), "ghost"),
        (lambda: flat(nn.Dropout(0.5)), "ghost"),
        (lambda: flat(nn.PReLU()), "hooks"),
        (lambda: scaled_network(twist_in_place), "singly"),
        (lambda: scaled_network("scale", scale=scale()), "singly"),
        (lambda: Net(use_weight_outside, conv=nn.Conv2d(1, 2, 3, bias=False), head=nn.Linear(72, 3)), "singly"),
    ],
)
def test_the_check_selects_the_correct_engine(model, right):
    shape = (1, 16, 16) if right == "ghost" and not isinstance(model()[0], nn.Flatten) else (1, 8, 8)
    assert check_per_example_gradients(model(), shape, 3) == right


def flat(*layers):
    return nn.Sequential(nn.Flatten(), *layers, nn.Linear(64, 3))


def test_the_check_falls_back_on_an_engine_that_works(monkeypatch):
    monkeypatch.setitem(ENGINES, "ghost", lambda *_: 1 / 0)
    assert check_per_example_gradients(net(), (1, 16, 16), 3) == "hooks"
    monkeypatch.setitem(ENGINES, "hooks", lambda *_: 1 / 0)
    assert check_per_example_gradients(net(), (1, 16, 16), 3) == "singly"


def test_the_check_finds_norms_that_are_wrong(monkeypatch):
    squares = gradients.square_norms
    for module in (gradients, layer_gradients):
        monkeypatch.setattr(module, "square_norms", lambda z: squares(z) * 1.01)
    assert check_per_example_gradients(net(), (1, 16, 16), 3) == "singly"


def halved(net, x):
    """Drops half of its output at random in any mode."""
    return functional.dropout(net.linear(x), 0.5, training=True)


@pytest.fixture
def another_thread_draws():
    """Draw continually from PyTorch's generator, which all threads of a process share."""
    is_over = threading.Event()

    def draw():
        while not is_over.wait(0.0005):
            torch.rand(1)

    thread = threading.Thread(target=draw)
    thread.start()
    yield
    is_over.set()
    thread.join()


def test_random_draws_of_another_thread_are_not_blamed_on_a_model(another_thread_draws):
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    for _ in range(20):
        assert np.isfinite(
            step(Net(lambda net, x: net.linear(x), linear=nn.Linear(4, 3)), x, y, sigma=1.0, clip=1.0, divisor=8)
        )


def test_random_numbers_of_a_model_are_refused_while_other_threads_draw(another_thread_draws):
    x, y = torch.randn(8, 4), torch.randint(3, (8,))
    refused(
        lambda: step(Net(halved, linear=nn.Linear(4, 3)), x, y, sigma=1.0, clip=1.0, divisor=8),
        "random numbers",
        error=UsageError,
    )


@pytest.mark.parametrize("kind", ["mlp", "cnn1", "gn_cnn"])
def test_a_single_row_is_computed_alike_in_the_first_step_and_later(kind):
    """A resumed run may begin with a batch of one row, which the uninterrupted run had in its midst."""
    (x, y), (lone, label) = batch(5), batch(1, seed=9)
    before = net(kind)
    after = net(kind)
    trainers = [
        DPTrainer(model, torch.optim.SGD(model.parameters(), lr=1.0), sigma=0.0, clip=0.3, batch_size=4)
        for model in (before, after)
    ]
    trainers[0].step(x, cross_entropy(y), CipherStream.from_entropy())
    after.load_state_dict(before.state_dict())
    for trainer in trainers:
        trainer.step(lone, cross_entropy(label), CipherStream.from_entropy())
    assert torch.equal(vector(before), vector(after))
