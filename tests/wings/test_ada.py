"""Adaptive augmentation: exact where nothing is drawn, right where something is, and differentiable twice."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck

from wsi_fl.synthesis.ada import Controller, _coloured, _Draws, _shifted, _warped, augmented


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def images(b=4, size=8, channels=3, dtype=torch.float32):
    return torch.rand(b, channels, size, size, dtype=dtype, generator=seeded(1)) * 2 - 1


class Scripted(_Draws):
    """_Draws what it is told, in order."""

    def __init__(self, *values):
        super().__init__(len(values[0]), 1.0, seeded())
        self.values = [torch.tensor(value, dtype=torch.float32) for value in values]

    def sometimes(self, value, neutral, p=None):
        return self.values.pop(0)


@pytest.mark.parametrize("channels", [1, 3])
def test_images_that_nothing_is_drawn_for_stay_bit_for_bit(channels):
    x, generator = images(200, channels=channels), seeded()
    before = generator.get_state()
    assert augmented(x, 0.0, generator) is x and torch.equal(generator.get_state(), before)
    assert 100 < sum(map(torch.equal, x, augmented(x, 0.01, generator))) < 200


@pytest.mark.parametrize("channels", [1, pytest.param(3, marks=pytest.mark.slow)])
def test_it_is_differentiable_twice(channels):
    x = images(1, 4, channels, torch.float64).requires_grad_(True)
    assert gradcheck(lambda y: augmented(y, 1.0, seeded()), x)
    assert gradgradcheck(lambda y: augmented(y, 1.0, seeded()).square(), x)


def test_turns_mirrors_and_moves_are_exact():
    x = images(4)
    zeros = [0.0] * 4
    turned = _shifted(x, Scripted(zeros, [0.0, 1.0, 2.0, 3.0], zeros, zeros))
    way = 1 if torch.equal(turned[1], torch.rot90(x[1], 1, (1, 2))) else -1
    assert all(torch.equal(turned[k], torch.rot90(x[k], way * k, (1, 2))) for k in range(4))
    mirrored = _shifted(x, Scripted([1.0] * 4, zeros, zeros, zeros))
    assert torch.equal(mirrored, x.flip(3))
    moved = _shifted(x, Scripted(zeros, zeros, [1.0] * 4, [-2.0] * 4))
    assert torch.equal(moved[:, :, 1:, :-2], x[:, :, :-1, 2:])
    assert torch.equal(moved[:, :, 0, :-2], x[:, :, 1, 2:])  # reflected


def test_warping_by_whole_turns_pixels_and_twice_is_what_blitting_does():
    x, neutral, none = torch.zeros(3, 1, 16, 16), [1.0] * 3, [0.0] * 3
    x[:, :, 6:10, 3:9] = 1.0
    found = _warped(x, Scripted(neutral, [torch.pi, 0.0, 0.0], neutral, none, [0.0, 0.25, 0.0], none))
    blurred = _warped(x, Scripted(neutral, none, neutral, none, [1e-9] * 3, none))
    assert torch.allclose(found[0], blurred[0].flip((1, 2)), atol=1e-5)
    assert torch.allclose(found[1][:, :, 2:-2], blurred[1].roll(2, 2)[:, :, 2:-2], atol=1e-5)
    assert torch.equal(found[2], x[2])
    assert float((blurred - x).abs().mean()) < 0.06
    small = torch.zeros(1, 1, 32, 32)
    small[:, :, 12:20, 12:20] = 1.0
    doubled = _warped(small, Scripted([2.0], [0.0], [1.0], [0.0], [0.0], [0.0]))
    assert float(doubled.sum()) == pytest.approx(4 * 64, rel=0.05)


def test_colours_follow_their_definitions():
    x = images(5)
    neutral = torch.tensor([0.0, 1.0, 0.0, 0.0, 1.0])[:, None].repeat(
        1, 5
    )  # of each transform, for each image
    for k, value in enumerate((0.25, 1.5, 1.0, 2 * torch.pi / 3, 0.0)):
        neutral[k, k] = value
    found = _coloured(x, Scripted(*neutral.tolist()))
    grey = x.mean(dim=1, keepdim=True)
    assert torch.allclose(found[0], x[0] + 0.25, atol=1e-6)
    assert torch.allclose(found[1], x[1] * 1.5, atol=1e-6)
    assert torch.allclose(found[2], (x - 2 * grey)[2], atol=1e-6)  # luma turned over, hue and saturation kept
    assert torch.allclose(found[3], x[3].roll(1, 0), atol=1e-6)  # a third of a turn exchanges the channels
    assert torch.allclose(found[4], grey[4].expand(3, -1, -1), atol=1e-6)


def test_the_probability_of_each_transform_is_p():
    x = images(2000, 4)
    changed = (_coloured(x, _Draws(2000, 0.2, seeded())) != x).flatten(1).any(dim=1).float().mean()
    # flips are none half of the time; the other four always change a colour
    expected = 1 - 0.8**4 * 0.9
    assert float(changed) == pytest.approx(expected, abs=0.04)


def test_p_rises_while_the_discriminator_is_too_sure_and_falls_else():
    sure, unsure = torch.ones(8), torch.tensor([1.0, -1.0] * 4)
    start = Controller(0.5, 0.6, 100)
    assert start.observed(sure).moved().p == pytest.approx(0.58)
    assert start.observed(unsure).observed(sure).moved().p == pytest.approx(0.34)
    assert start.moved() == start
    assert Controller(0.99, 0.6, 100).observed(sure).moved().p == 1.0
    assert Controller(0.02, 0.6, 100).observed(unsure).moved().p == 0.0
    assert Controller(0.5, None, 100).observed(sure).moved().p == 0.5
