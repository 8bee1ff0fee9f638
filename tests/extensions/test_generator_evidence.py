"""Evidence on generators: distances against closed forms, nearest images against brute force, detection of copying."""

from itertools import permutations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from scipy.linalg import sqrtm
from torch.nn import functional
from torchvision.models import inception_v3

from wsi_fl.models.encoder import Encoder
from wsi_fl.synthesis import copying_evidence
from wsi_fl.synthesis.copying_evidence import (
    compare_relative,
    find_nearest,
    find_nearest_other,
    judge_copies,
    list_doubts,
)


def normal(n, d, seed=0, shift=0.0, scale=1.0):
    return (np.random.default_rng(seed).normal(size=(n, d)) * scale + shift).astype(np.float32)


def test_fid_equals_the_formula_with_matrix_roots():
    a, b = normal(80, 6), normal(60, 6, 1, 0.5, 2.0)
    x, y = a.astype(float), b.astype(float)
    root = sqrtm(np.cov(x.T) @ np.cov(y.T)).real
    difference = x.mean(0) - y.mean(0)
    expected = difference @ difference + np.trace(np.cov(x.T) + np.cov(y.T) - 2 * root)
    assert copying_evidence.frechet_distance(a, b) == pytest.approx(expected, rel=1e-6)
    assert copying_evidence.frechet_distance(a, a) == pytest.approx(0, abs=1e-6)


@pytest.mark.slow
def test_inception_features_for_fid_are_those_of_torchvisions_network_with_the_named_weights(tmp_path):
    """2048 numbers after the last pooling, of images resized to 299 px and scaled to [−1, 1]."""
    network = inception_v3(weights=None, aux_logits=True, transform_input=False, init_weights=False).eval()
    save_file(network.state_dict(), tmp_path / "inception.safetensors")
    network.fc = torch.nn.Identity()
    pixels = np.random.default_rng(0).integers(0, 256, (2, 64, 64, 3), np.uint8)
    encoder = Encoder("inception_v3", tmp_path / "inception.safetensors", input_px=299)
    images = torch.from_numpy(pixels).permute(0, 3, 1, 2).float() / 255
    resized = functional.interpolate(images, (299, 299), mode="bicubic", antialias=True).clamp(0, 1)
    with torch.no_grad():
        expected = network(resized * 2 - 1).numpy()
    found = encoder(pixels)
    assert found.shape == (2, 2048) and np.abs(found - expected).max() < 0.01 * np.ptp(expected, axis=0).mean()
    assert copying_evidence.frechet_distance(found, found) == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize("n", [2, 3, 50])
def test_fid_of_a_set_and_itself_is_zero_and_never_negative(n):
    for seed in range(20):
        a = normal(n, 16, seed, 3.0)
        assert 0 <= copying_evidence.frechet_distance(a, a.copy()) < 1e-9
        assert 0 <= copying_evidence.frechet_distance(a, a[::-1]) < 1e-9


@pytest.mark.parametrize("distance", [copying_evidence.frechet_distance, copying_evidence.kernel_distance])
def test_a_single_image_has_no_spread_and_no_distance(distance):
    some, one, none = normal(20, 4), normal(1, 4, 1), normal(0, 4)
    assert distance(one, some) is distance(some, one) is distance(one, one) is distance(some, none) is None
    assert np.isfinite(distance(normal(2, 4), some))


def test_kid_is_unbiased():
    """Zero on average between two samples of one distribution, however small; loops of the definition agree."""
    values = [copying_evidence.kernel_distance(normal(12, 4, 2 * k), normal(15, 4, 2 * k + 1)) for k in range(300)]
    assert abs(np.mean(values)) < 4 * np.std(values) / np.sqrt(300)
    assert copying_evidence.kernel_distance(normal(50, 4), normal(50, 4, 1, 2.0)) > 1
    a, b = normal(5, 3), normal(4, 3, 1)

    def k(u, v):
        return (float(u @ v) / 3 + 1) ** 3

    within = [np.mean([k(u, v) for u, v in permutations(x, 2)]) for x in (a, b)]
    between = np.mean([k(u, v) for u in a for v in b])
    assert copying_evidence.kernel_distance(a, b) == pytest.approx(sum(within) - 2 * between, rel=1e-5)


def distances(n, seed, low=1.0):
    return np.random.default_rng(seed).gamma(20, low / 20, n)


def compare(*distances):
    """Compare distances of training and held-out images that are relative to usual ones already."""
    return compare_relative(distances, list(map(np.ones_like, distances)))


def test_a_generator_of_the_distribution_passes():
    found = [compare(distances(300, k), distances(200, k + 100)) for k in range(40)]
    failed = [one for one in found if one.list_reasons("nearest sample")]
    assert len(failed) <= 1 and list_doubts({"nearest sample": found[0]}, 200) == []
    assert 0.4 < found[0].nearer < 0.6


@pytest.mark.parametrize(
    ("memorised", "word"), [(1.0, "of pairs"), (0.15, "% of the training images"), (0.02, "reproduced almost exactly")]
)
def test_memorising_all_or_few_images_or_being_nearer_to_all_is_detected(memorised, word):
    training = distances(300, 0)
    training[: round(memorised * 300)] *= 0.05
    reasons = list_doubts({"projection": compare(training, distances(200, 1))}, 200)
    assert any(word in reason for reason in reasons), reasons
    nearer = compare(distances(300, 0, low=0.8), distances(200, 1))
    assert nearer.copies_training == 0 and nearer.nearer > 0.6 and list_doubts({"nearest sample": nearer}, 200)


def test_without_held_out_images_or_a_comparison_nothing_passes():
    assert "only 3 held-out" in list_doubts({}, 3)[0] and list_doubts({}, 200)
    training = films(40, 1)
    for n in (0, 5):
        found = judge_copies(find_nearest(films(20, 3), training), find_nearest(films(n, 2), training), 0)
        assert "held-out images" in found.reasons[0] and found.copy_below is None


def test_spread_and_paired_shift():
    before = distances(60, 0)
    assert copying_evidence.summarize_distances(before).q05 == pytest.approx(np.quantile(before, 0.05))
    up, down, same = (copying_evidence.compare_paired(before + step, before) for step in (0.01, -0.01, 0.0))
    assert (up.raised, down.raised) == (1.0, 0.0)
    assert up.p < 1e-6 and down.p > 0.99 and same.p is None
    assert up.median_difference == pytest.approx(0.01)


def films(n, seed, side=8):
    """Images as alike as chest films: a common shape, few degrees of freedom, some noise."""
    rng = np.random.default_rng(seed)
    base = np.random.default_rng(99).normal(0, 1, (6, side * side * 3))
    values = 128 + 30 * rng.normal(0, 1, (n, 6)) @ base + rng.normal(0, 6, (n, side * side * 3))
    return values.clip(0, 255).astype(np.uint8).reshape(n, side, side, 3)


def pairwise_distances(a, b):
    """Distances [n, m] between images, by brute force."""
    return np.sqrt(((a[:, None].astype(float) - b[None]) ** 2).reshape(len(a), len(b), -1).mean(-1)) / 255


@given(st.integers(1, 25), st.integers(1, 70), st.integers(1, 6), st.integers(0, 10**6), st.integers(0, 200_000))
@settings(max_examples=20, deadline=None)
def test_distances_by_blocks_equal_brute_force(n, m, side, seed, memory):
    rng = np.random.default_rng(seed)
    a, b = (rng.integers(0, 256, (k, side, side, 3)).astype(np.uint8) for k in (n, m))
    found, every = find_nearest(a, b, memory_bytes=memory), pairwise_distances(a, b)
    assert np.allclose(found.distance, every.min(1)) and (found.row == every.argmin(1)).all()
    usual = 0.5 * np.sort(every, axis=1)[:, :50].mean(1)
    assert np.allclose(found.relative, np.divide(every.min(1), usual, out=np.zeros(n), where=usual > 0))


def test_a_memorising_generator_fails_and_an_honest_one_passes():
    training, held_out = films(150, 1), films(60, 2)
    calibration = find_nearest(held_out, training)
    honest = judge_copies(find_nearest(films(200, 3), training), calibration, 0)
    assert (honest.reasons, honest.copies) == ([], 0)
    copies = training.astype(int) + np.random.default_rng(4).integers(-3, 4, training.shape)
    planted = np.concatenate([films(190, 5), copies[:10].clip(0, 255).astype(np.uint8)])
    caught = judge_copies(find_nearest(planted, training), calibration, 0)
    assert caught.copies == 10 and "10 of 200 generated images are copies" in caught.reasons[0]


def test_a_fixed_threshold_would_have_failed_the_honest_generator():
    """All images are nearer than 0.1: the paper's threshold cannot separate them, the verdict can."""
    rng = np.random.default_rng(0)
    alike = [(128 + rng.normal(0, 8, (n, 16, 16, 3))).astype(np.uint8) for n in (150, 60, 100)]
    found = judge_copies(find_nearest(alike[2], alike[0]), find_nearest(alike[1], alike[0]), 0)
    assert (found.below_paper, found.held_out_below_paper, found.reasons) == (100, 60, [])


def test_twins_among_real_images_do_not_fail_a_generator():
    """Two films of one patient, one of them held out, occur in real and in generated images."""
    training, held_out = films(150, 1), films(60, 2)
    held_out[:6] = training[:6]
    generated = films(200, 3)
    generated[:5] = training[10:15]
    found = judge_copies(find_nearest(generated, training), find_nearest(held_out, training), 0)
    assert (found.copies, found.held_out_copies, found.reasons) == (5, 6, [])


@given(st.integers(2, 30), st.integers(0, 10**6), st.integers(0, 50_000))
@settings(max_examples=20, deadline=None)
def test_the_nearest_other_image_is_never_the_image_itself(n, seed, memory):
    a = np.random.default_rng(seed).integers(0, 256, (n, 3, 3, 1)).astype(np.uint8)
    patient = np.random.default_rng(seed + 1).integers(0, 1 + n // 2, n).astype(str)
    every = pairwise_distances(a, a)
    every[(patient[:, None] == patient) | (every == 0)] = np.inf
    assert np.allclose(find_nearest_other(a, patient, memory_bytes=memory), every.min(1))


def numbered(images):
    return np.arange(len(images)).astype(str)


def check_images(training, patient, held_out, generated):
    """Compare as the check does."""
    usual = find_nearest_other(training, patient), find_nearest(held_out, training).distance
    return compare_relative([find_nearest(images, generated).distance for images in (training, held_out)], usual)


def patient_images(n, each, seed):
    """Return images that resemble those of the same patient."""
    rng = np.random.default_rng(seed)
    centres = np.repeat(rng.integers(30, 226, (n, 8, 8, 1)), each, 0)
    images = (centres + rng.integers(-25, 26, centres.shape)).clip(0, 255).astype(np.uint8)
    return images, np.repeat(np.arange(n), each).astype(str)


def test_images_of_the_same_patient_hide_no_memorisation():
    """A training image has siblings in the training set, a held-out one has none."""
    training, patient = patient_images(20, 10, 1)
    held_out, honest = patient_images(20, 5, 2)[0], patient_images(40, 10, 3)[0]
    found = check_images(training, patient, held_out, honest)
    assert found.list_reasons("honest") == [] and 0.35 < found.nearer < 0.65
    copies = np.concatenate([honest, (training[:20] // 2 * 2)])
    assert check_images(training, patient, held_out, copies).list_reasons("twenty copies")
    rng = np.random.default_rng(4)
    alike = (training.astype(int) + rng.integers(-40, 41, training.shape)).clip(0, 255).astype(np.uint8)
    assert check_images(training, patient, held_out, alike).list_reasons("knows the patients")


def test_training_images_with_a_twin_are_compared():
    """They are copied first."""
    training, held_out, honest = films(150, 1), films(60, 2), films(300, 3)
    training[40:80] = training[:40]
    copier = np.concatenate([honest, training[:40]])
    assert check_images(training, numbered(training), held_out, honest).copies_training == 0
    found = check_images(training, numbered(training), held_out, copier)
    assert found.copies_training == 80 and found.list_reasons("twins")


def test_a_chance_split_does_not_fail_a_generator_but_memorising_does():
    """Held-out images far from everything are far from an honest generator too."""
    training, odd = films(150, 1), films(60, 2).astype(int)
    odd = (odd + np.random.default_rng(7).integers(-25, 26, odd.shape)).clip(0, 255).astype(np.uint8)
    honest = films(300, 3)
    bare = compare(*(100 * find_nearest(images, honest).distance for images in (training, odd)))
    assert bare.copies_training == 0 and bare.list_reasons("bare"), "this is what dividing is for"
    assert check_images(training, numbered(training), odd, honest).list_reasons("over") == []
    noise = np.random.default_rng(8).integers(-12, 13, (75, *training.shape[1:]))
    remembered = (training[:75] + noise).clip(0, 255).astype(np.uint8)
    assert check_images(training, numbered(training), odd, remembered).list_reasons("over")
