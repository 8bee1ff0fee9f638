"""StyleGAN2 layer by layer against definitions in double precision, and its adaptive augmentation."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from conftest import same
from scipy.signal import convolve2d, upfirdn
from torch.autograd import gradcheck, gradgradcheck

from wsi_fl.synthesis import stylegan2
from wsi_fl.synthesis.ada import Controller, _Draws, _recolor_images, _shift_images, _warp_images, augment_images
from wsi_fl.synthesis.gan_training import GanState, _path_penalty, _r1_penalty, draw_samples, project_images, step
from wsi_fl.synthesis.keys import Gan
from wsi_fl.synthesis.lpips import Keepaway, load_lpips
from wsi_fl.synthesis.stylegan2 import Discriminator, GanShape, Generator, downsample_maps, upsample_maps
from wsi_fl.synthesis.training_state import balance_labels, quantize_images

TINY = GanShape(16, 3, 2, z_dim=6, w_dim=6, mapping_layers=2, channel_base=96, channel_max=12)


def double(*shape, seed=0):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("demodulate", [True, False])
def test_modulation_is_each_image_under_its_own_filters(demodulate):
    x, weight, style = double(3, 4, 6, 6), double(5, 4, 3, 3, seed=1), double(3, 4, seed=2)
    expected = []
    for image, s in zip(x, style, strict=True):
        filters = weight * s[None, :, None, None]
        if demodulate:
            filters = filters / filters.square().sum(dim=(1, 2, 3), keepdim=True).add(1e-8).sqrt()
        expected.append(torch.conv2d(image[None], filters, padding=1))
    assert torch.allclose(stylegan2._convolve_modulated(x, weight, style, demodulate=demodulate), torch.cat(expected))


def test_upsampling_modulation_inserts_zeros_then_filters_then_blurs_binomially():
    x, weight, style = double(2, 3, 4, 4), double(2, 3, 3, 3, seed=1), double(2, 3, seed=2)
    found = stylegan2._convolve_modulated(x, weight, style, up=True).numpy()
    taps = np.array([1, 3, 3, 1]) / 8
    kernel = 4 * np.outer(taps, taps)
    scale = stylegan2._demodulation_factors(weight, style).numpy()
    for b in range(2):
        for o in range(2):
            total = np.zeros((9, 9))
            for i in range(3):
                spread = np.zeros((7, 7))
                spread[::2, ::2] = x[b, i].numpy() * float(style[b, i])
                total += convolve2d(spread, weight[o, i].numpy(), "full")
            expected = convolve2d(total, kernel, "full")[2:10, 2:10] * scale[b, o]
            assert np.allclose(found[b, o], expected)


@pytest.mark.parametrize(
    ("resample", "gain", "rate"), [(upsample_maps, 2, (2, 1)), (downsample_maps, 1, (1, 2))], ids=["up", "down"]
)
def test_resampling_equals_that_of_scipy(resample, gain, rate):
    x = double(2, 3, 8, 8)
    expected, rows = x.numpy(), np.arange(1, 1 + 8 * rate[0] // rate[1])
    for axis in (2, 3):
        full = upfirdn(gain * np.array([1, 3, 3, 1]) / 8, expected, *rate, axis=axis)
        expected = np.take(full, rows, axis=axis)
    assert np.allclose(resample(x).numpy(), expected)


def test_the_learning_rate_is_equalised():
    """Weights of any fan-in are N(0, 1) and outputs of unit variance; the multiplier slows learning, not the output."""
    torch.manual_seed(0)
    x = torch.randn(4000, 64)
    for multiplier in (1.0, 0.01):
        layer = stylegan2._EqualLinear(64, 64, multiplier=multiplier)
        assert (layer.weight * multiplier).std().item() == pytest.approx(1, abs=0.05)
        assert layer(x).std().item() == pytest.approx(1, abs=0.05)
    conv = stylegan2._EqualConv(16, 8, 3, active=False)
    assert conv(torch.randn(8, 16, 16, 16))[:, :, 1:-1, 1:-1].std().item() == pytest.approx(1, abs=0.15)


def test_minibatch_std_is_the_mean_spread_within_groups():
    x = double(8, 3, 2, 2)
    found = stylegan2._append_minibatch_std(x.float(), 4)
    for start in (0, 1):  # image k of group k % 2
        expected = np.sqrt(x[start::2].numpy().var(axis=0) + 1e-8).mean()
        assert np.allclose(found[start::2, 3].numpy(), expected, atol=1e-5)
    assert stylegan2._append_minibatch_std(torch.randn(7, 3, 2, 2), 4).shape == (7, 4, 2, 2)


@pytest.mark.parametrize(("resolution", "channels"), [(16, 3), (64, 1)])
def test_classes_and_latents_both_matter_to_both_networks_at_every_resolution(resolution, channels):
    torch.manual_seed(0)
    shape = replace(TINY, resolution=resolution, channels=channels)
    generator, discriminator = Generator(shape), Discriminator(shape)
    z, labels = torch.randn(1, 6), torch.tensor([0])
    image = generator(z, labels)
    assert image.shape == (1, channels, resolution, resolution)
    assert torch.equal(image, generator(z, labels))
    assert not torch.allclose(image, generator(z, labels + 1))
    assert not torch.allclose(image, generator(torch.randn(1, 6), labels))
    assert not torch.allclose(discriminator(image, labels), discriminator(image, labels + 1))


def test_r1_of_the_discriminator_equals_autograd_image_by_image():
    torch.manual_seed(0)
    network, images, labels = Discriminator(TINY).double(), double(4, 3, 16, 16), torch.tensor([0, 1, 0, 1])
    found = _r1_penalty(network, images, labels, 0.0, torch.Generator())
    jacobian = torch.autograd.functional.jacobian(lambda x: network(x, labels), images)
    # minibatch std ties the images of a batch: the gradient is of the sum of logits
    expected = jacobian.sum(dim=0).square().sum(dim=(1, 2, 3)).mean()
    assert float(found.detach()) == pytest.approx(float(expected), rel=1e-6)


def test_path_lengths_of_a_linear_generator():
    a = double(3, 4, 4, 5)
    w = double(6, 2, 5, seed=1).requires_grad_(True)
    images = torch.einsum("chwd,bd->bchw", a, w.sum(dim=1))
    penalty, mean = _path_penalty(images, w, 2.0, torch.Generator().manual_seed(0))
    y = torch.randn(images.shape, generator=torch.Generator().manual_seed(0)).double() / 4
    lengths = torch.einsum("chwd,bchw->bd", a, y).square().sum(dim=1).sqrt()
    assert mean == pytest.approx(2.0 + 0.01 * (float(lengths.mean()) - 2.0), rel=1e-6)
    assert float(penalty.detach()) == pytest.approx(float((lengths - mean).square().mean()), rel=1e-5)


def tiny_state(seed=0, **terms):
    given = {"batch_size": 4, "ada_images": 100, "seed": seed} | terms
    state = GanState(TINY, Gan(**given), device=torch.device("cpu"))
    state.ada = replace(state.ada, p=0.3)
    return state


def tiny_images(n=12):
    rng = np.random.default_rng(0)
    return torch.from_numpy(rng.integers(0, 256, (n, 3, 16, 16)).astype(np.uint8)), torch.arange(n) % 2


def test_a_restored_state_continues_bit_for_bit():
    images, labels = tiny_images()
    keepaway = Keepaway(load_lpips("random:0"), 0.5)
    straight, broken = tiny_state(), tiny_state()
    for k in range(5):
        for state in (straight, broken):
            state.margin = 0.5 if k >= 2 else None
            step(state, images, labels, keepaway if k >= 2 else None)
        if k in {1, 2}:
            fresh = tiny_state(seed=99)
            fresh.load(broken.copy_tensors(), broken.build_document())
            broken = fresh
    assert same(straight.copy_tensors(), broken.copy_tensors()) and straight.build_document() == broken.build_document()
    assert straight.ada.p != 0.3


def test_training_depends_on_its_seed_alone():
    images, labels = tiny_images()
    found = []
    for seed, disturbance in ((1, 0), (1, 7), (2, 0)):
        state = tiny_state(seed=seed)
        torch.manual_seed(disturbance)
        step(state, images, labels)
        found.append(draw_samples(state.average, balance_labels(2, 2), seed=0))
    assert torch.equal(found[0], found[1]) and not torch.equal(found[0], found[2])


@pytest.mark.slow
def test_a_gan_learns_the_colour_of_each_class():
    """Red for class 0, blue for class 1: a claim about learning, not only about running."""
    images = torch.full((16, 3, 16, 16), 40, dtype=torch.uint8)
    labels = torch.arange(16) % 2
    images[labels == 0, 0] = images[labels == 1, 2] = 220
    terms = Gan(batch_size=8, path_weight=0, ema_images=100)
    state = GanState(TINY, terms, device=torch.device("cpu"))
    for _ in range(100):
        step(state, images, labels)
    made = draw_samples(state.average, balance_labels(2, 8), seed=0).float().mean(dim=(2, 3))
    red, blue = made[0::2].mean(dim=0), made[1::2].mean(dim=0)
    assert red[0] - red[2] > 60 and blue[2] - blue[0] > 60


@pytest.mark.slow
def test_a_projection_finds_an_image_that_the_generator_can_make():
    """It beats the nearest of the starting points and never loses to it; foreign images stay far."""
    torch.manual_seed(0)
    network, lpips = Generator(TINY).requires_grad_(False), load_lpips("random:0")
    own = quantize_images(network(torch.randn(2, 6), torch.tensor([0, 1])))
    foreign = tiny_images(2)[0]
    both = torch.cat([own, foreign])
    start, _ = project_images(network, lpips, both, steps=0, candidates=16)
    found, made = project_images(network, lpips, both, steps=40, candidates=16)
    assert bool((found <= start).all()) and bool((found[:2] < 0.1 * start[:2]).all())
    assert float(found[:2].max()) < 0.01 * float(found[2:].min())
    assert made.shape == both.shape and made.dtype == torch.uint8


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def images(b=4, size=8, channels=3, dtype=torch.float32):
    return torch.rand(b, channels, size, size, dtype=dtype, generator=seeded(1)) * 2 - 1


class Scripted(_Draws):
    """Returns the given random draws, in order."""

    def __init__(self, *values):
        super().__init__(len(values[0]), 1.0, seeded())
        self.values = [torch.tensor(value, dtype=torch.float32) for value in values]

    def draw_sometimes(self, value, neutral, p=None):
        return self.values.pop(0)


@pytest.mark.parametrize("channels", [1, 3])
def test_images_without_a_drawn_transform_stay_bit_for_bit(channels):
    x, generator = images(200, channels=channels), seeded()
    before = generator.get_state()
    assert augment_images(x, 0.0, generator) is x and torch.equal(generator.get_state(), before)
    assert 100 < sum(map(torch.equal, x, augment_images(x, 0.01, generator))) < 200


@pytest.mark.parametrize("channels", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_augmentation_is_differentiable_twice(channels):
    x = images(1, 4, channels, torch.float64).requires_grad_(True)
    assert gradcheck(lambda y: augment_images(y, 1.0, seeded()), x)
    assert gradgradcheck(lambda y: augment_images(y, 1.0, seeded()).square(), x)


def test_rotations_flips_and_shifts_are_exact():
    x = images(4)
    zeros = [0.0] * 4
    turned = _shift_images(x, Scripted(zeros, [0.0, 1.0, 2.0, 3.0], zeros, zeros))
    way = 1 if torch.equal(turned[1], torch.rot90(x[1], 1, (1, 2))) else -1
    assert all(torch.equal(turned[k], torch.rot90(x[k], way * k, (1, 2))) for k in range(4))
    mirrored = _shift_images(x, Scripted([1.0] * 4, zeros, zeros, zeros))
    assert torch.equal(mirrored, x.flip(3))
    moved = _shift_images(x, Scripted(zeros, zeros, [1.0] * 4, [-2.0] * 4))
    assert torch.equal(moved[:, :, 1:, :-2], x[:, :, :-1, 2:])
    assert torch.equal(moved[:, :, 0, :-2], x[:, :, 1, 2:])  # reflected


def test_warping_by_right_angles_whole_pixels_and_factor_two_equals_blitting():
    x, neutral, none = torch.zeros(3, 1, 16, 16), [1.0] * 3, [0.0] * 3
    x[:, :, 6:10, 3:9] = 1.0
    found = _warp_images(x, Scripted(neutral, [torch.pi, 0.0, 0.0], neutral, none, [0.0, 0.25, 0.0], none))
    blurred = _warp_images(x, Scripted(neutral, none, neutral, none, [1e-9] * 3, none))
    assert torch.allclose(found[0], blurred[0].flip((1, 2)), atol=1e-5)
    assert torch.allclose(found[1][:, :, 2:-2], blurred[1].roll(2, 2)[:, :, 2:-2], atol=1e-5)
    assert torch.equal(found[2], x[2]) and float((blurred - x).abs().mean()) < 0.06
    small = torch.zeros(1, 1, 32, 32)
    small[:, :, 12:20, 12:20] = 1.0
    doubled = _warp_images(small, Scripted([2.0], [0.0], [1.0], [0.0], [0.0], [0.0]))
    assert float(doubled.sum()) == pytest.approx(4 * 64, rel=0.05)


def test_colours_follow_their_definitions():
    x = images(5)
    neutral = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0])[:, None].repeat(1, 5)  # of each transform, for each image
    for k, value in enumerate((0.25, 1.5, 1.0, 2 * torch.pi / 3, 0.0)):
        neutral[k, k] = value
    found = _recolor_images(x, Scripted(*neutral.tolist()))
    grey = x.mean(dim=1, keepdim=True)
    assert torch.allclose(found[0], x[0] + 0.25, atol=1e-6)
    assert torch.allclose(found[1], x[1] * 1.5, atol=1e-6)
    assert torch.allclose(found[2], (x - 2 * grey)[2], atol=1e-6)  # luma turned over, hue and saturation kept
    assert torch.allclose(found[3], x[3].roll(1, 0), atol=1e-6)  # a third of a turn exchanges the channels
    assert torch.allclose(found[4], grey[4].expand(3, -1, -1), atol=1e-6)


def test_the_probability_of_each_transform_is_p():
    x = images(2000, 4)
    changed = (_recolor_images(x, _Draws(2000, 0.2, seeded())) != x).flatten(1).any(dim=1).float().mean()
    # flips are none half of the time; the other four always change a colour
    expected = 1 - 0.8**4 * 0.9
    assert float(changed) == pytest.approx(expected, abs=0.04)


def test_p_rises_while_the_discriminator_is_overconfident_and_falls_otherwise():
    sure, unsure = torch.ones(8), torch.tensor([1.0, -1.0] * 4)
    start = Controller(0.5, 100)
    assert start.observe_logits(sure).update_probability().p == pytest.approx(0.58)
    assert start.observe_logits(unsure).observe_logits(sure).update_probability().p == pytest.approx(0.34)
    assert start.update_probability() == start
    assert Controller(0.99, 100).observe_logits(sure).update_probability().p == 1.0
    assert Controller(0.02, 100).observe_logits(unsure).update_probability().p == 0.0
