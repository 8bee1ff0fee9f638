"""LPIPS: its definition, its memory bound, published distances where the weights exist, and the privacy loss."""

import numpy as np
import pytest
import torch
from conftest import SHARED, refused
from safetensors.torch import load_file, save_file
from scipy.ndimage import gaussian_filter
from torch.nn import functional

from wsi_fl.synthesis.lpips import (
    _HEADS_FILE,
    Keepaway,
    Lpips,
    _hinge_loss,
    _pairwise_lpips,
    clamp_images,
    compute_margin,
    embed_images,
    find_nearest_lpips,
    load_lpips,
)
from wsi_fl.synthesis.training_state import normalize_pixels
from wsi_fl.types import UsageError, WsiFlError

WEIGHTS = SHARED / "weights" / "vgg16_features.fp16.safetensors"
PCAM = SHARED / "data" / "pcam_3000_balanced.npz"


@pytest.fixture(scope="module")
def lpips():
    return load_lpips("random:0")


def images(n, size=32, seed=0, channels=3):
    return torch.rand(n, channels, size, size, generator=torch.Generator().manual_seed(seed)) * 2 - 1


def paired_lpips(lpips: Lpips, a, b):
    """LPIPS float32[n] between a[k] and b[k]."""
    return (lpips(a) - lpips(b)).square().sum(1)


def by_definition(lpips: Lpips, a, b):
    """Zhang et al., eq. 1, layer by layer."""
    total = torch.zeros(len(a))
    x, y = ((one - lpips.shift) / lpips.scale for one in (a, b))
    for k, block in enumerate(lpips.trunk):
        if k:
            x, y = functional.max_pool2d(x, 2), functional.max_pool2d(y, 2)
        x, y = block(x), block(y)
        unit = [one / (one.square().sum(1, keepdim=True).sqrt() + 1e-10) for one in (x, y)]
        weights = load_file(_HEADS_FILE)[f"lin{k}"].view(1, -1, 1, 1)
        total += ((unit[0] - unit[1]).square() * weights).sum(1).mean(dim=(1, 2))
    return total


@pytest.mark.parametrize("memory_bytes", [1, 1 << 30])
def test_the_squared_length_equals_the_definition_for_all_pairs_in_chunks_of_any_size(lpips, memory_bytes):
    a, b = images(3, 16), images(2, 16, seed=1)
    expected = torch.stack([by_definition(lpips, a, b[k].expand_as(a)) for k in range(2)], dim=1)
    found = _pairwise_lpips(lpips, a, b, memory_bytes=memory_bytes)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(paired_lpips(lpips, a, a), torch.zeros(3))


def test_the_nearest_other_image_is_not_the_image_itself(lpips):
    given = {"dtype": torch.uint8, "generator": torch.Generator().manual_seed(0)}
    images = torch.randint(0, 256, (6, 3, 32, 32), **given)
    units = normalize_pixels(images)
    wanted = _pairwise_lpips(lpips, units, units).double().numpy().copy()
    assert find_nearest_lpips(lpips, images, images).tolist() == [0.0] * 6
    whose = np.array(["a", "a", "b", "c", "d", "e"])
    wanted[whose[:, None] == whose] = np.inf
    found = find_nearest_lpips(lpips, images, images, (whose, whose))
    np.testing.assert_allclose(found, wanted.min(1), rtol=1e-6)
    twins, whose = torch.cat([images, images[:1]]), np.array(list("abcdefg"))
    assert (find_nearest_lpips(lpips, twins, twins, (whose, whose)) > 0.001).all(), "a twin is no measure"
    assert find_nearest_lpips(lpips, images[:1], images[:1], (whose[:1], whose[:1])).tolist() == [np.inf]


def test_weights_that_do_not_fit_are_refused_in_one_line(tmp_path, lpips):
    refused(lambda: load_lpips("random:x"), "random:SEED", error=UsageError)
    refused(lambda: load_lpips(str(tmp_path / "none.safetensors")), "no such file", error=WsiFlError)
    save_file({"features.0.weight": torch.zeros(64, 3, 3, 3)}, tmp_path / "part.safetensors")
    refused(lambda: load_lpips(str(tmp_path / "part.safetensors")), "features.0.bias", error=WsiFlError)
    (tmp_path / "pickle.pth").write_bytes(b"x")
    refused(lambda: load_lpips(str(tmp_path / "pickle.pth")), "pickle", error=WsiFlError)
    refused(lambda: lpips(images(1, 8)), "16 px", error=UsageError)


@pytest.mark.skipif(not (WEIGHTS.exists() and PCAM.exists()), reason="needs VGG-16 and PatchCamelyon")
def test_distances_of_blurred_images_are_as_published():
    """Gaussian blur of σ 0.5, 1, 2, 4 on a few 96-px patches: 0.09, 0.34, 0.47, 0.54 with the real weights."""
    lpips = load_lpips(str(WEIGHTS))
    assert lpips.trained
    pixels = np.load(PCAM)["x"][:3].astype(np.float64)
    sharp = normalize_pixels(torch.from_numpy(pixels).permute(0, 3, 1, 2))
    found = []
    for sigma in (0.5, 1, 2, 4):
        blurred = gaussian_filter(pixels, (0, sigma, sigma, 0))
        soft = normalize_pixels(torch.from_numpy(blurred).permute(0, 3, 1, 2))
        found.append(float(paired_lpips(lpips, sharp, soft).mean()))
    assert found == pytest.approx([0.09, 0.34, 0.47, 0.54], abs=0.05)


def test_the_loss_is_the_sum_over_all_pairs_with_kept_images_in_place_of_the_batch(lpips):
    real, synthetic = images(3), images(4, seed=1)
    distances = _pairwise_lpips(lpips, real, synthetic)
    margin = float(distances.median())
    expected = (1 - distances / margin).clamp_min(0).square().sum() / 4
    assert float(Keepaway(lpips, margin)(real, synthetic)) == pytest.approx(float(expected), rel=1e-3)
    kept = Keepaway(lpips, margin, embed_images(lpips, real, piece=2))(images(1, seed=3), synthetic)
    assert float(kept) == pytest.approx(float(expected), rel=1e-3)


def test_without_a_margin_the_loss_is_eq_3_of_the_paper_with_its_sign_turned(lpips):
    """Pair by pair by the definition of LPIPS; its slope is opposite to that of eq. 3, so that distances grow."""
    real, synthetic = images(3, 16), images(2, 16, seed=1).requires_grad_(True)
    pairs = [by_definition(lpips, real[k : k + 1], synthetic[j : j + 1]) for k in range(3) for j in range(2)]
    printed = torch.cat(pairs).sum() / 2
    (expected,) = torch.autograd.grad(printed, synthetic)
    loss = Keepaway(lpips, None)(real, synthetic)
    (slope,) = torch.autograd.grad(loss, synthetic)
    assert loss.item() == pytest.approx(-printed.item(), rel=1e-4)
    assert torch.allclose(slope, -expected, atol=1e-3 * float(expected.abs().max()))


def test_the_loss_is_bounded_and_zero_beyond_the_margin():
    distances = torch.linspace(0, 100, 1001, requires_grad=True)
    loss = _hinge_loss(distances, 0.7)
    loss.sum().backward()
    assert (loss.max().item(), loss.min().item()) == (1.0, 0.0)
    assert bool((distances.grad[distances >= 0.7] == 0).all())
    assert bool((distances.grad[distances < 0.7] < 0).all()), "a lower loss is apart, not together"
    assert float(distances.grad[0]) == pytest.approx(-2 / 0.7)


@pytest.mark.slow
def test_a_step_down_the_loss_moves_images_apart_and_then_stops(lpips):
    real = images(2, 16)
    synthetic = (real + 0.02 * images(2, 16, seed=1)).requires_grad_(True)
    margin = compute_margin(lpips, images(12, 16, seed=2), 0.5)
    first = float(paired_lpips(lpips, real, synthetic).min())
    optimizer = torch.optim.Adam([synthetic], lr=0.02)
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = Keepaway(lpips, margin)(real, synthetic)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert float(paired_lpips(lpips, real, clamp_images(synthetic)).min()) > 5 * first and losses[0] <= 2
    assert losses[-1] < 0.2 * losses[0]
