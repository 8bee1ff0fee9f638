"""DP-SGD against a slow per-example loop, and the statistics of its noise and batches."""

import numpy as np
import pytest
import torch
from conftest import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from wsi_fl.models import build
from wsi_fl.privacy import gradients
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.privacy.dpsgd import (
    DPTrainer,
    _check_trainable,
    check_per_example_gradients,
)
from wsi_fl.privacy.gradients import ENGINES
from wsi_fl.privacy.plan import poisson_rows
from wsi_fl.types import Images, UsageError, WsiFlError


def net(kind="mlp", seed=0):
    return build(kind, n_classes=3, shape=Images(1, 16), seed=seed)


def batch(b, seed=0):
    g = torch.Generator().manual_seed(seed)
    return torch.randn(b, 1, 16, 16, generator=g), torch.randint(3, (b,), generator=g)


def vector(model):
    return torch.nn.utils.parameters_to_vector(model.parameters()).detach().clone()


def step(model, x, y, *, sigma, clip, divisor, lr=1.0, noise=None, engine=None):
    trainer = DPTrainer(
        model,
        torch.optim.SGD(model.parameters(), lr=lr),
        sigma=sigma,
        clip=clip,
        batch_size=divisor,
        engine=engine,
    )
    return trainer.step(x, lambda logits: functional.cross_entropy(logits, y), noise or CipherStream.fresh())


def clipped_sum(model, x, y, clip):
    """Σ_i g_i · min(1, C / |g_i|), one example at a time."""
    total = 0
    for k in range(len(x)):
        model.zero_grad()
        functional.cross_entropy(model(x[k : k + 1]), y[k : k + 1]).backward()
        g = torch.cat([p.grad.flatten() for p in model.parameters()])
        total = total + g * min(1.0, clip / float(g.norm()))
    model.zero_grad()
    return total


@pytest.mark.parametrize("engine", ENGINES)
@settings(max_examples=8, deadline=None)
@given(
    st.sampled_from(["mlp", "cnn1", "gn_cnn"]),
    st.integers(1, 7),
    st.sampled_from([0.01, 0.7, 3.0, 1e6]),
    st.integers(1, 50),
)
def test_a_step_is_the_sum_of_clipped_gradients_over_B(engine, kind, b, clip, divisor):
    x, y = batch(b, seed=b)
    model = net(kind)
    before = vector(model)
    wanted = clipped_sum(model, x, y, clip) / divisor
    step(model, x, y, sigma=0.0, clip=clip, divisor=divisor, engine=engine)
    torch.testing.assert_close(before - vector(model), wanted, rtol=2e-3, atol=2e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_no_noise_and_no_clipping_is_plain_sgd(engine):
    x, y = batch(6)
    plain, private = net("cnn1"), net("cnn1")
    loss = functional.cross_entropy(plain(x), y)
    loss.backward()
    torch.optim.SGD(plain.parameters(), lr=0.5).step()
    told = step(private, x, y, sigma=0.0, clip=float("inf"), divisor=6, lr=0.5, engine=engine)
    torch.testing.assert_close(vector(private), vector(plain))
    assert told == pytest.approx(float(loss.detach()))


@pytest.mark.parametrize("b", [0, 1, 9])
def test_noise_has_standard_deviation_sigma_C_over_B_whatever_the_batch(b):
    sigma, clip, divisor = 1.4, 0.7, 32
    x, y = batch(b)
    quiet, noisy = net(), net()
    start = vector(noisy)
    step(quiet, x, y, sigma=0.0, clip=clip, divisor=divisor)
    loss = step(noisy, x, y, sigma=sigma, clip=clip, divisor=divisor)
    noise = (vector(noisy) - vector(quiet)).double()
    n = len(noise)
    assert n > 50_000
    wanted = sigma * clip / divisor
    assert float(noise.std()) == pytest.approx(wanted, rel=6 / (2 * n) ** 0.5)
    assert abs(float(noise.mean())) < 6 * wanted / n**0.5
    assert float((noise.abs() > 2 * wanted).double().mean()) == pytest.approx(0.0455, abs=0.006)  # normal
    if b == 0:
        assert np.isnan(loss)
        assert torch.equal(vector(quiet), start)  # nothing but noise moves it


def test_poisson_sampling_with_empty_batches_trains_on():
    torch.manual_seed(0)
    model = net()
    trainer = DPTrainer(model, torch.optim.Adam(model.parameters()), sigma=1.0, clip=1.0, batch_size=1)
    x, y = batch(4)
    sampler, sizes = CipherStream.seeded(1), []
    for _ in range(12):
        rows = poisson_rows(4, 0.25, sampler)
        before = vector(model)
        trainer.step(
            x[rows], lambda logits, y=y[rows]: functional.cross_entropy(logits, y), CipherStream.fresh()
        )
        assert not torch.equal(vector(model), before)
        sizes.append(len(rows))
    assert 0 in sizes
    assert max(sizes) > 1
    assert torch.isfinite(vector(model)).all()


def test_batch_norm_is_refused_in_one_line():
    with pytest.raises(UsageError, match="BatchNorm") as caught:
        _check_trainable(torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.BatchNorm1d(2)))
    assert "\n" not in str(caught.value)
    model = torch.nn.Sequential(torch.nn.Conv2d(1, 2, 3), torch.nn.BatchNorm2d(2))
    with pytest.raises(UsageError, match="BatchNorm"):
        DPTrainer(model, torch.optim.SGD(model.parameters(), lr=1), sigma=1.0, clip=1.0, batch_size=2)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_parameter_that_the_loss_does_not_use_is_named_as_the_problem(engine):
    class Half(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle = torch.nn.Linear(256, 3), torch.nn.Linear(2, 2)

        def forward(self, x):
            return self.used(x.flatten(1))

    with pytest.raises(WsiFlError, match="2 parameters got no gradient"):
        step(Half(), *batch(3), sigma=1.0, clip=1.0, divisor=3, engine=engine)


def test_noise_differs_between_runs_unless_seeded():
    def trained(seed):
        model = net()
        noise = None if seed is None else CipherStream.seeded(seed)
        step(model, *batch(2), sigma=1.0, clip=1.0, divisor=2, noise=noise)
        return vector(model)

    assert not torch.equal(trained(None), trained(None))
    assert torch.equal(trained(3), trained(3))
    assert not torch.equal(trained(3), trained(4))


def test_each_row_enters_each_batch_independently_at_its_rate():
    n, rate, draws = 50, 0.3, 4000
    sampler = CipherStream.seeded(0)
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
    assert np.abs(off).max() < 6 / draws**0.5
    assert len(poisson_rows(n, 1.0, sampler)) == n
    assert len(poisson_rows(n, 0.0, sampler)) == 0


class Scaled(torch.nn.Module):
    """Convolution, a change of its output, and a linear head on 1 × 8 × 8 images."""

    def __init__(self, change):
        super().__init__()
        self.conv, self.head, self.change = torch.nn.Conv2d(1, 2, 3), torch.nn.Linear(72, 3), change

    def forward(self, x):
        return self.head(self.change(self.conv(x)).flatten(1))


def add_in_place(z):
    z += 1.0
    z *= 2.0
    return z * 1


@pytest.mark.parametrize("engine", ENGINES)
def test_operators_in_place_give_the_gradients_of_a_loop(engine):
    model = Scaled(add_in_place)
    g = torch.Generator().manual_seed(0)
    x, y = torch.randn(3, 1, 8, 8, generator=g), torch.tensor([0, 1, 2])
    before, wanted = vector(model), clipped_sum(model, x, y, 0.5) / 3
    step(model, x, y, sigma=0.0, clip=0.5, divisor=3, engine=engine)
    torch.testing.assert_close(before - vector(model), wanted, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("kernel", [1, 3])
def test_convolutions_of_channels_last_images_give_the_gradients_of_a_loop(kernel, engine):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 6, kernel), torch.nn.Flatten(), torch.nn.LazyLinear(3))
    x, y = torch.randn(3, 4, 8, 8).to(memory_format=torch.channels_last), torch.tensor([0, 1, 2])
    model(x)
    before, wanted = vector(model), clipped_sum(model, x, y, 0.5) / 3
    step(model, x, y, sigma=0.0, clip=0.5, divisor=3, engine=engine)
    torch.testing.assert_close(before - vector(model), wanted, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("kind", ["mlp", "cnn1", "gn_cnn"])
def test_the_check_passes_our_models_and_leaves_them_and_the_generator_as_they_were(kind):
    model = net(kind)
    before, state = vector(model), torch.random.get_rng_state()
    assert check_per_example_gradients(model, (1, 16, 16), 3) == "ghost"
    assert torch.equal(vector(model), before)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert all(m.training and not m._forward_hooks and not m._forward_pre_hooks for m in model.modules())


def test_the_check_looks_past_dropout_and_weights_that_begin_at_zero():
    class Net(Scaled):
        def forward(self, x):
            return functional.dropout(super().forward(x), 0.5, self.training)

    assert check_per_example_gradients(Net(torch.nn.Dropout(0.5)), (1, 8, 8), 3) == "ghost"
    silent = Scaled(lambda z: z - z.mean(0, keepdim=True))  # the fault is behind a gain of zero
    torch.nn.init.zeros_(silent.head.weight)
    with pytest.raises(UsageError, match="wrong"):
        check_per_example_gradients(silent, (1, 8, 8), 3)


class Outside(Scaled):
    """Uses the weight of a module without calling the module."""

    def forward(self, x):
        return self.head(functional.conv2d(x, self.conv.weight).flatten(1))


class Twisted(Scaled):
    """Reads what an operator changed in place again under another name."""

    def forward(self, x):
        z = self.conv(x) * 1
        same = z
        z *= 2.0
        return self.head((same * z).flatten(1))


class Idle(Scaled):
    def __init__(self):
        super().__init__(torch.nn.ReLU())
        self.idle = torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("model", "shape", "n_classes", "message"),
    [
        (Scaled(lambda z: z - z.mean(0, keepdim=True)), (1, 8, 8), 3, "gradients of conv.weight are wrong"),
        (Outside(None), (1, 8, 8), 3, "no per-example gradients of conv.weight"),
        (Idle(), (1, 8, 8), 3, "no per-example gradients of idle.weight"),
        (Scaled(torch.nn.ReLU()), (1, 9, 9), 3, "cannot take images of 1×9×9: "),
        (Scaled(torch.nn.ReLU()), (3, 8, 8), 3, "cannot take images of 3×8×8: "),
        (Scaled(torch.nn.ReLU()), (1, 8, 8), 4, "4 logits"),
        (Scaled(lambda z: z.add_(1).detach()), (1, 8, 8), 3, "cannot be trained|no per-example"),
        (Scaled(torch.nn.BatchNorm2d(2)), (1, 8, 8), 3, "BatchNorm"),
    ],
)
def test_models_with_other_gradients_are_refused_in_one_line(model, shape, n_classes, message):
    with pytest.raises(UsageError, match=message) as caught:
        check_per_example_gradients(model, shape, n_classes)
    assert "\n" not in str(caught.value)


class Scale(torch.nn.Module):
    """A parameter of its own, in a type of its own."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(()))

    def forward(self, x):
        return self.scale * x


@pytest.mark.parametrize(("model", "right"), [(Twisted(None), "ghost"), (Scaled(Scale()), "hooks")])
def test_the_check_names_the_engine_that_is_right(model, right):
    assert check_per_example_gradients(model, (1, 8, 8), 3) == right


def test_the_check_falls_back_on_hooks_where_ghost_is_wrong(monkeypatch):
    monkeypatch.setitem(ENGINES, "ghost", lambda *_: 1 / 0)
    assert check_per_example_gradients(net(), (1, 16, 16), 3) == "hooks"
    monkeypatch.setitem(ENGINES, "hooks", lambda *_: 1 / 0)
    refused(lambda: check_per_example_gradients(net(), (1, 16, 16), 3), "division by zero")


def test_the_check_finds_norms_that_are_wrong(monkeypatch):
    squares = gradients.squared_norms
    monkeypatch.setattr(gradients, "squared_norms", lambda z: squares(z) * 1.01)
    refused(lambda: check_per_example_gradients(net(), (1, 16, 16), 3), "norms", "ghost")
