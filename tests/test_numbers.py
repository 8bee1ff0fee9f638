"""Arithmetic that a guarantee rests on: tails of the noise, norms of large layers, gradients that are not finite."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

from wsi_fl.privacy.dpsgd import DPTrainer, entropy_generator, seed_from_entropy

EDGE = 5.7681  # no float32 number of PyTorch's on a CPU is larger


def noise_of(n, generator, sigma=1.0, clip=1.0):
    """float32[n]: what a step on an empty batch puts into a model of zeros, times −1."""
    model = nn.Linear(n, 1, bias=False)
    nn.init.zeros_(model.weight)
    trainer = DPTrainer(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        sigma=sigma,
        clip=clip,
        batch_size=1,
        grad_mode="hooks",
    )
    trainer.step(torch.zeros(0, n), lambda logits: logits.sum(), generator)
    return -model.weight.detach().flatten()


# finding 4: the noise has a tail


def test_noise_goes_beyond_the_edge_of_float32_numbers(monkeypatch):
    """Where the draws lie at their edge, in the worst signs, the noise lies far beyond it."""

    def at_the_edge(tensor, *_, **__):
        half = tensor.numel() // 2
        tensor.view(-1)[:half], tensor.view(-1)[half:] = EDGE, -EDGE
        return tensor

    monkeypatch.setattr(torch.Tensor, "normal_", at_the_edge)
    assert float(noise_of(3000, torch.Generator()).abs().max()) > 8.1


def test_noise_lies_on_no_grid_of_float32_draws():
    values = noise_of(3 * 2**14, torch.Generator().manual_seed(0))
    assert len(torch.unique(values)) > 0.999 * len(values)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 49_151, 49_152, 49_153, 100_000])
def test_noise_is_normal_and_independent_whatever_the_number_of_parameters(n):
    generator = torch.Generator().manual_seed(n)
    draws = torch.stack(
        [noise_of(n, generator, sigma=2.0, clip=0.5) for _ in range(max(4, 6_000 // n))]
    ).double()
    flat = draws.flatten().numpy()
    spread = 1 / np.sqrt(len(flat))
    assert abs(flat.mean()) < 5 * spread
    assert abs(flat.var() - 1) < 8 * spread
    assert abs((flat**4).mean() - 3) < 50 * spread
    for lag in (1, 2, 3):
        if n > lag:
            product = (draws[:, lag:] * draws[:, :-lag]).flatten()
            assert abs(float(product.mean())) < 6 / np.sqrt(len(product))


def test_noise_is_standard_deviation_sigma_times_clip_over_b():
    model = nn.Linear(30_000, 1, bias=False)
    nn.init.zeros_(model.weight)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = DPTrainer(model, sgd, sigma=1.4, clip=0.7, batch_size=16, grad_mode="hooks")
    trainer.step(torch.zeros(0, 30_000), lambda logits: logits.sum(), torch.Generator().manual_seed(3))
    assert float(model.weight.std()) == pytest.approx(1.4 * 0.7 / 16, rel=0.02)


# finding 12: no clipped gradient exceeds C


@pytest.mark.parametrize("mode", ["ghost", "hooks"])
def test_a_clipped_gradient_of_a_very_large_layer_is_no_longer_than_c(mode):
    n = 12_000_000
    model = nn.Linear(n, 2, bias=False)
    nn.init.zeros_(model.weight)
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = DPTrainer(model, sgd, sigma=0.0, clip=0.7, batch_size=1, grad_mode=mode)
    x = torch.randn(1, n, generator=torch.Generator().manual_seed(0))
    trainer.step(x, lambda logits: functional.cross_entropy(logits, torch.tensor([1])), torch.Generator())
    length = float(torch.linalg.vector_norm(model.weight.detach().double()))
    assert 0.7 * (1 - 1e-5) < length <= 0.7


# finding 13: a gradient that is not finite has no part

ENGINES = ["ghost", "hooks", "functorch", "patient"]


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.GroupNorm(2, 8), nn.ReLU(), nn.Linear(8, 3))


def stepped(engine, x, teacher=None, keep=slice(None)):
    """The parameters after a step on x's kept rows without noise; the divisor stays that of all."""
    model, x = net(), x[keep]
    labels = (torch.arange(5) % 3)[keep]
    unit = {"unit": "patient"} if engine == "patient" else {"grad_mode": engine}
    sgd = torch.optim.SGD(model.parameters(), lr=1.0)
    trainer = DPTrainer(model, sgd, sigma=0.0, clip=0.5, batch_size=5, **unit)

    def loss_of(logits):
        losses = functional.cross_entropy(logits, labels, reduction="none")
        if teacher is not None:
            losses = losses + (logits.softmax(1) * teacher[keep]).sum(1)
        return losses.mean()

    trainer.step(x, loss_of, torch.Generator(), torch.arange(5)[keep])
    return torch.cat([p.detach().flatten() for p in model.parameters()])


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan, 3e38, 1e25])
def test_a_record_whose_gradient_is_not_finite_changes_nothing(engine, value):
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    x[2, 3] = value
    others = stepped(engine, x, keep=torch.tensor([0, 1, 3, 4]))
    found = stepped(engine, x)
    assert found.isfinite().all()
    if not np.isfinite(value):  # what is huge may have a gradient, which is clipped
        torch.testing.assert_close(found, others, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("engine", ENGINES)
def test_a_teacher_that_says_nothing_of_one_record_spoils_no_other(engine):
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(1))
    teacher = torch.ones(5, 3)
    teacher[4] = torch.nan
    found, others = stepped(engine, x, teacher), stepped(engine, x, teacher, keep=torch.tensor([0, 1, 2, 3]))
    torch.testing.assert_close(found, others, rtol=1e-5, atol=1e-6)


# finding 17: dropout


def test_dropout_draws_on_a_whole_secret_state():
    states = set()
    with torch.random.fork_rng(devices=[]):
        for _ in range(3):
            seed_from_entropy("cpu")
            states.add(torch.get_rng_state().numpy().tobytes())
        torch.manual_seed(0)
        plain = torch.get_rng_state()
        seed_from_entropy("cpu", 5)
        fixed = torch.rand(3)
        seed_from_entropy("cpu", 5)
        assert torch.equal(torch.rand(3), fixed)
    assert len(states) == 3 and plain.numpy().tobytes() not in states
    assert not torch.equal(entropy_generator().get_state(), entropy_generator().get_state())
