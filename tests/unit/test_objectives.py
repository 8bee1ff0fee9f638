"""Objectives, examples, transforms and the local step, each against its definition."""

import sys
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pytest
import torch
from conftest import refused
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional

from wsi_fl.data.augmentation import build_augmentation, check_augmentation
from wsi_fl.data.batches import build_tensor, draw_epoch_rows, load_batches
from wsi_fl.data.cohort import Cohort, concatenate_examples
from wsi_fl.data.tasks import kl_divergence, mutual_loss
from wsi_fl.federation.methods import METHODS, Weights
from wsi_fl.learning.local_training import DPSettings, Learner, predict_examples, take_mutual_step, take_supervised_step
from wsi_fl.models import create_model
from wsi_fl.privacy import row_independence
from wsi_fl.privacy.cipher import CipherStream
from wsi_fl.types import Images, WsiFlError

CPU = torch.device("cpu")


def logits(seed, b=5, k=4):
    return torch.randn(b, k, generator=torch.Generator().manual_seed(seed)) * 3


def pixels_of(n, size=8, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (n, size, size, 3)).astype(np.uint8)


def examples_of(pixels, seed=0):
    n = len(pixels)
    label = np.random.default_rng(seed).integers(0, 2, n)
    names = np.array([f"s{seed}_{k}" for k in range(n)])
    return Cohort.from_columns(lambda rows: pixels[rows], label, names, names)


def learner(seed=0, *, dp=None, kind="mlp", size=8):
    model = create_model(kind, n_classes=2, shape=Images(3, size), seed=seed)
    return Learner(model, lr=0.01, weight_decay=0.0, device=CPU, dp=dp)


def make_batch(b=6):
    return next(load_batches(examples_of(pixels_of(b)), iter([np.arange(b)]), augment=None, device=CPU))


@given(st.integers(0, 999), st.integers(1000, 1999))
def test_divergence_is_that_of_torch_with_the_student_as_the_target(a, b):
    """torch.kl_div(input, target) is KL[target ‖ input]: the student is the distribution that is averaged over."""
    f, h = logits(a), logits(b)
    oracle = functional.kl_div(h.log_softmax(1), f.log_softmax(1), log_target=True, reduction="batchmean")
    torch.testing.assert_close(kl_divergence(f, h), oracle, rtol=1e-4, atol=1e-6)


@given(st.floats(0.01, 1))
def test_the_mutual_loss_is_a_weighted_mean_over_examples_and_trains_the_student_alone(weight):
    f, h, y = logits(0).requires_grad_(), logits(1).requires_grad_(), torch.tensor([0, 1, 2, 3, 0])
    loss = mutual_loss(f, y, h, weight)
    wanted = (1 - weight) * functional.cross_entropy(f, y) + weight * kl_divergence(f, h)
    torch.testing.assert_close(loss, wanted)
    single = [mutual_loss(f[k : k + 1], y[k : k + 1], h[k : k + 1], weight) for k in range(5)]
    torch.testing.assert_close(loss, torch.stack(single).mean())
    loss.backward()
    assert h.grad is None and f.grad.abs().sum() > 0


@pytest.mark.parametrize(("beta", "independent"), [(0.0, True), (0.3, False)])
def test_the_proxy_of_strict_mode_is_independent_of_the_private_model(beta, independent):
    proxies = []
    for private_seed in (1, 2):
        learners = {
            "private": learner(private_seed, kind="cnn1", size=16),
            "proxy": learner(0, dp=DPSettings(1.4, 0.7, 6), size=16),
        }
        noise = CipherStream.from_seed(5)
        batch = (torch.randn(6, 3, 16, 16, generator=torch.Generator().manual_seed(0)), torch.arange(6) % 2)
        for _ in range(3):
            METHODS["proxyfl"].step(learners, batch, Weights(0.3, beta), noise)
        proxies.append(learners["proxy"].parameter_vector())
    assert (proxies[0].tobytes() == proxies[1].tobytes()) is independent


def test_the_proxy_steps_first_and_the_private_model_learns_from_the_moved_proxy():
    """Algorithm 1, lines 3–4."""
    learners = {"private": learner(1), "proxy": learner(2)}
    by_hand = {"private": learner(1), "proxy": learner(2)}
    batch, noise = make_batch(), CipherStream.from_entropy()
    METHODS["proxyfl"].step(learners, batch, Weights(0.3, 0.4), noise)
    x, y = batch
    for student, teacher, weight in (("proxy", "private", 0.4), ("private", "proxy", 0.3)):
        with torch.no_grad():
            answers = by_hand[teacher].model(x)
        by_hand[student].optimizer.zero_grad()
        mutual_loss(by_hand[student].model(x), y, answers, weight).backward()
        by_hand[student].optimizer.step()
    for role, mine in learners.items():
        np.testing.assert_allclose(mine.parameter_vector(), by_hand[role].parameter_vector(), atol=1e-6)


def test_an_empty_batch_moves_only_a_learner_under_privacy():
    x, y = torch.empty(0, 3, 8, 8), torch.empty(0, dtype=torch.int64)
    for dp, moves in ((None, False), (DPSettings(1.0, 1.0, 4), True)):
        mine = learner(dp=dp)
        before = mine.parameter_vector()
        assert np.isnan(take_mutual_step(mine, None, 0.5, (x, y), CipherStream.from_entropy()))
        assert (mine.parameter_vector() != before).any() == moves and np.isfinite(mine.parameter_vector()).all()


@pytest.mark.parametrize("dp", [None, DPSettings(1.0, 1.0, 6)])
def test_a_restored_learner_goes_on_as_if_nothing_had_happened(dp):
    def steps(mine, n, seed):
        noise = CipherStream.from_seed(seed)
        for _ in range(n):
            take_supervised_step(mine, make_batch(), noise)

    straight, first, second = learner(dp=dp), learner(dp=dp), learner(3, dp=dp)
    steps(straight, 2, 0)
    steps(straight, 2, 1)
    steps(first, 2, 0)
    second.load_state({k: v.clone() for k, v in first.state_tensors().items()})
    steps(second, 2, 1)
    assert second.parameter_vector().tobytes() == straight.parameter_vector().tobytes()


def test_a_parameter_vector_round_trips_and_leaves_the_optimizer_unchanged():
    mine, other = learner(0), learner(1)
    take_supervised_step(mine, make_batch(), CipherStream.from_entropy())
    state = {k: v for k, v in mine.state_tensors().items() if k.startswith("optimizer/")}
    mine.load_vector(other.parameter_vector())
    assert (
        mine.parameter_vector().tobytes() == other.parameter_vector().tobytes()
        and mine.parameter_vector().dtype == np.float32
    )
    assert state and all(torch.equal(mine.state_tensors()[k], v) for k, v in state.items())


def test_probabilities_are_in_order_and_independent_of_the_batch_size():
    mine, data = learner(), examples_of(pixels_of(23))
    p = predict_examples(mine.predict_logits, data, CPU, batch_size=5)
    x = build_tensor(data.read(np.arange(23)))
    np.testing.assert_allclose(p, torch.softmax(mine.predict_logits(x), 1).numpy(), atol=1e-6)
    np.testing.assert_allclose(p.sum(1), 1, atol=1e-6)


@given(st.integers(1, 60), st.integers(1, 70), st.integers(1, 3))
def test_a_shuffled_epoch_is_one_pass(n, batch_size, epochs):
    drawn = list(draw_epoch_rows(n, batch_size, epochs, sampler=CipherStream.from_seed(0)))
    per_epoch = -(-n // batch_size)
    assert len(drawn) == epochs * per_epoch
    for e in range(epochs):
        rows = np.concatenate(drawn[e * per_epoch : (e + 1) * per_epoch])
        assert sorted(rows) == list(range(n))
    assert max(map(len, drawn)) <= batch_size


@pytest.mark.parametrize("factor", [1, 2, 4])
def test_resizing_takes_the_mean_over_areas(factor):
    pixels = pixels_of(5, 16)
    small = examples_of(pixels).resize_images(16 // factor).read(np.array([3, 0]))
    wanted = pixels[[3, 0]].reshape(2, 16 // factor, factor, 16 // factor, factor, 3).mean((2, 4))
    assert small.dtype == np.uint8 and np.abs(small - wanted).max() <= 0.5
    assert examples_of(pixels).resize_images(4).read(np.empty(0, np.int64)).shape[0] == 0


@given(st.lists(st.integers(0, 5), min_size=1, max_size=4).filter(any), st.integers(0, 99))
def test_concatenated_examples_read_like_the_concatenated_arrays(sizes, seed):
    parts = [pixels_of(n, 4, seed=k) for k, n in enumerate(sizes)]
    both = concatenate_examples([examples_of(p, seed=k) for k, p in enumerate(parts)])
    everything = np.concatenate(parts)
    rows = np.random.default_rng(seed).integers(0, len(everything), 7)
    np.testing.assert_array_equal(both.read(rows), everything[rows])
    assert len(both) == len(everything) and both.read(np.empty(0, np.int64)).shape == (0, 4, 4, 3)


def test_batches_are_normalised_by_constants_and_may_be_empty():
    pixels = pixels_of(6)
    pixels[0], pixels[1] = 0, 255
    data = examples_of(pixels)
    rows = [np.array([0, 1, 4]), np.empty(0, np.int64)]
    (x, y), (nothing, none) = load_batches(data, iter(rows), augment=lambda image: image, device=CPU)
    assert x.shape == (3, 3, 8, 8) and (float(x[0].max()), float(x[1].min())) == (-1.0, 1.0)
    np.testing.assert_allclose(x[2].permute(1, 2, 0).numpy(), pixels[4] / 127.5 - 1, atol=1e-6)
    assert y.tolist() == data.label[[0, 1, 4]].tolist() and nothing.shape == (0, 3, 8, 8)
    assert none.shape == (0,)


@pytest.mark.parametrize(
    ("names", "odds"),
    [
        ("mirror", [1 / 2, 0, 0, 0, 1 / 2, 0, 0, 0]),
        ("quarter_turns", [1 / 4] * 4 + [0] * 4),
        (["mirror", "quarter_turns"], [1 / 8] * 8),
        ("flips", [1 / 6, 1 / 12, 1 / 6, 1 / 12] * 2),
    ],
)
def test_an_augmentation_draws_symmetries_with_the_odds_that_it_names(names, odds):
    image = torch.arange(12.0).view(3, 2, 2)
    symmetries = [side.rot90(k, (1, 2)) for side in (image, image.flip(2)) for k in range(4)]
    augment, n = build_augmentation(names, CipherStream.from_seed(5)), 3000
    drawn = [[torch.equal(view, one) for one in symmetries].index(True) for view in (augment(image) for _ in range(n))]
    np.testing.assert_allclose(np.bincount(drawn, minlength=8) / n, odds, atol=0.025)
    assert all(np.bincount(drawn, minlength=8)[np.array(odds) == 0] == 0)


def test_only_a_name_of_monai_imports_monai(monkeypatch):
    monkeypatch.setitem(sys.modules, "monai", None)
    for name in ("none", "mirror", "quarter_turns", "flips", "stain"):
        check_augmentation(name)
        build_augmentation([name], CipherStream.from_seed(0))
    refused(lambda: check_augmentation("flip"), "unknown augmentation 'flip'", "mirror, quarter_turns, flips, stain")
    refused(lambda: check_augmentation("monai:RandZoom"), "needs MONAI", "pip install monai", error=WsiFlError)


@pytest.mark.parametrize(("name", "digest"), [("flips", "6076fa1b9586a66c"), ("stain", "62fd27f84b40c266")])
def test_an_augmentation_reproduces_recorded_values(name, digest):
    """Number for number what MONAI's flips, scaling and shifts made of these draws; old plans rest on it."""
    augment = build_augmentation(name, CipherStream.from_seed(3))
    out = torch.stack([augment(image.clone()) for image in build_tensor(pixels_of(60, 8))])
    assert sha256((out * 1000).round().to(torch.int16).numpy().tobytes()).hexdigest()[:16] == digest


def limit_memory(model, most):
    """Limit the rows that fit the model's memory; return the list of batch sizes."""
    shown = []

    def refuse(_, inputs):
        shown.append(len(inputs[0]))
        if len(inputs[0]) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")

    model.register_forward_pre_hook(refuse)
    return shown


PRIVATE = DPSettings(sigma=0.0, clip=0.3, batch_size=6)
WAYS = {
    "plain": None,
    "ghost": PRIVATE,
    "hooks": replace(PRIVATE, engine="hooks"),
    "patients": replace(PRIVATE, unit="patient"),
}


def assert_same_step(whole, parts, batch, answers):
    """Check that a step of both has the same loss and leaves the same predictions."""
    losses = [take_mutual_step(one, answers, 0.4, batch, CipherStream.from_entropy()) for one in (whole, parts)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    said = [predict_examples(one.predict_logits, examples_of(pixels_of(5, 16)), CPU) for one in (whole, parts)]
    np.testing.assert_allclose(*said, atol=1e-4)


@pytest.mark.parametrize("way", WAYS)
def test_a_step_that_exceeds_memory_is_computed_in_parts(way, monkeypatch):
    monkeypatch.setattr(row_independence, "_is_changed", lambda part: False)  # this hook only looks
    whole, parts = (learner(dp=WAYS[way], kind="gn_cnn_small", size=16) for _ in range(2))
    x, (_, y) = torch.rand(6, 3, 16, 16, generator=torch.Generator().manual_seed(0)), make_batch()
    batch = (x, y, torch.tensor([0, 0, 0, 1, 1, 1])) if way == "patients" else (x, y)
    shown = limit_memory(parts.model, 2)
    for _ in range(2):
        assert_same_step(whole, parts, batch, logits(1, b=6, k=2))
    assert {6, 3} & set(shown) and max(shown[-3:]) <= 2  # the second step knows what fits
    for one, other in zip(whole.model.parameters(), parts.model.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-3, atol=1e-4)  # a step is 0.01


def test_an_example_that_exceeds_memory_is_refused_in_one_line():
    one = learner()
    limit_memory(one.model, 0)
    words = "the GPU's memory does not hold one example; lower train.input_px"
    refused(lambda: take_supervised_step(one, make_batch(), CipherStream.from_entropy()), words, error=WsiFlError)


def test_a_model_may_train_in_bfloat16_and_predicts_in_float32():
    model = create_model("lenet5", n_classes=3, shape=Images(1, 28), seed=0)
    one = Learner(model, lr=1e-3, weight_decay=0.0, device=CPU, dp=None, bfloat16=True)
    x, y = torch.randn(5, 1, 28, 28), torch.arange(5) % 3
    assert one.predict_logits(x).dtype == torch.float32 and not torch.equal(one.predict_logits(x), model(x))
    before = functional.cross_entropy(one.predict_logits(x), y)
    for _ in range(20):
        take_supervised_step(one, (x, y), CipherStream.from_entropy())
    assert functional.cross_entropy(one.predict_logits(x), y) < before
