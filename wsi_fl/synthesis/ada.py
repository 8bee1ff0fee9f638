"""Adaptive discriminator augmentation: pixel, geometric and colour transforms, and the rule for their probability.

Karras et al., "Training generative adversarial networks with limited data", NeurIPS 2020, appendix B, the pipeline
"bgc", applied to real and generated images alike. It consists of gathers, products and sums, so it is twice
differentiable; an image without a drawn transform of a group passes that group bit for bit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import pi, sqrt

import torch
from torch import Tensor

from wsi_fl.synthesis.stylegan2 import downsample_maps, single_precision, upsample_maps

_TRANSLATION = 0.125
"""Shift over the image's size: the most for whole pixels, the standard deviation for fractions."""
_SCALE_SD = 0.2
ADA_TARGET = 0.6
"""Target of r_t, the sign of overfitting, as in the paper."""
_BRIGHTNESS_SD, _CONTRAST_SD, _SATURATION_SD = 0.2, 0.5, 1.0


class _Draws:
    """Random numbers for b images: each strength drawn with probability p, else its neutral value."""

    def __init__(self, b: int, p: float, generator: torch.Generator) -> None:
        self.b, self.p, self.generator, self.device = b, p, generator, generator.device

    def draw_uniform(self) -> Tensor:
        return torch.rand(self.b, generator=self.generator, device=self.device)

    def draw_normal(self) -> Tensor:
        return torch.randn(self.b, generator=self.generator, device=self.device)

    def draw_sometimes(self, value: Tensor, neutral: float, p: float | None = None) -> Tensor:
        is_chosen = self.draw_uniform() < (self.p if p is None else p)
        return torch.where(is_chosen, value, torch.full_like(value, neutral))


def augment_images(images: Tensor, p: float, generator: torch.Generator) -> Tensor:
    """Return images [b, c, h, h] of about [−1, 1] with each transform applied with probability p.

    Args:
        generator: on the images' device.
    """
    if p <= 0:
        return images
    draws = _Draws(len(images), p, generator)
    with single_precision(images.device):
        return _recolor_images(_warp_images(_shift_images(images, draws), draws), draws)


def _shift_images(images: Tensor, draws: _Draws) -> Tensor:
    """Mirror images, turn them by multiples of 90° and shift them by whole pixels, with reflection at the edge."""
    b, c, h, w = images.shape
    mirror = draws.draw_sometimes((draws.draw_uniform() * 2).floor(), 0).long()
    turns = draws.draw_sometimes((draws.draw_uniform() * 4).floor(), 0).long()
    move_y, move_x = (
        draws.draw_sometimes(((draws.draw_uniform() * 2 - 1) * _TRANSLATION * h).round(), 0).long() for _ in range(2)
    )
    y, x = torch.meshgrid(*(torch.arange(h, device=images.device),) * 2, indexing="ij")
    y = _reflect_positions(y - move_y[:, None, None], h)
    x = _reflect_positions(x - move_x[:, None, None], w)
    for turn in (1, 2, 3):
        is_turned = (turns >= turn)[:, None, None]
        y, x = torch.where(is_turned, x, y), torch.where(is_turned, h - 1 - y, x)
    x = torch.where((mirror == 1)[:, None, None], w - 1 - x, x)
    index = (y * w + x).reshape(b, 1, h * w).expand(-1, c, -1)
    return images.flatten(2).gather(2, index).view_as(images)


def _reflect_positions(position: Tensor, n: int) -> Tensor:
    """Return positions with those beyond 0 … n − 1 mirrored at the first and the last sample."""
    period = 2 * (n - 1)
    folded = position.remainder(period)
    return torch.where(folded > n - 1, period - folded, folded)


def _warp_images(images: Tensor, draws: _Draws) -> Tensor:
    """Scale, turn, stretch and shift images by any amount, at twice the resolution, with reflection at the edge."""
    matrix, is_changed = _draw_geometry(draws)
    rows = is_changed.nonzero()[:, 0]
    if not len(rows):
        return images
    fine = upsample_maps(images[rows])
    sampled = downsample_maps(_sample_bilinear(fine, matrix[rows]))
    return images.index_copy(0, rows, sampled.to(images.dtype))


def _draw_geometry(draws: _Draws) -> tuple[Tensor, Tensor]:
    """Draw (float[b, 2, 3] from points of the new image to those of the old, in half image sizes; which change)."""
    # 1. isotropic scaling, rotation, anisotropic scaling, rotation, translation; either rotation has probability p
    rate = 1 - sqrt(1 - draws.p)
    scale = draws.draw_sometimes(torch.exp2(draws.draw_normal() * _SCALE_SD), 1)
    first_angle = draws.draw_sometimes((draws.draw_uniform() * 2 - 1) * pi, 0, rate)
    stretch = draws.draw_sometimes(torch.exp2(draws.draw_normal() * _SCALE_SD), 1)
    second_angle = draws.draw_sometimes((draws.draw_uniform() * 2 - 1) * pi, 0, rate)
    move_x, move_y = (draws.draw_sometimes(draws.draw_normal() * 2 * _TRANSLATION, 0) for _ in range(2))
    # 2. the inverse map, from the new image to the old one
    sizes = torch.diag_embed(torch.stack([1 / (scale * stretch), stretch / scale], dim=1))
    linear = _rotation_matrix(-first_angle) @ sizes @ _rotation_matrix(-second_angle)
    offset = linear @ torch.stack([move_x, move_y], dim=1)[:, :, None]
    # 3. images without a drawn transform are unchanged
    is_neutral = (
        (scale == 1) & (first_angle == 0) & (stretch == 1) & (second_angle == 0) & (move_x == 0) & (move_y == 0)
    )
    return torch.cat([linear, -offset], dim=2), ~is_neutral


def _rotation_matrix(angle: Tensor) -> Tensor:
    cos, sin = angle.cos(), angle.sin()
    return torch.stack([torch.stack([cos, -sin], 1), torch.stack([sin, cos], 1)], 1)


def _sample_bilinear(images: Tensor, matrix: Tensor) -> Tensor:
    """Return images [b, c, h, h] interpolated where `matrix` [b, 2, 3] maps each pixel's centre."""
    b, c, h, w = images.shape
    centres = (torch.arange(h, device=images.device, dtype=matrix.dtype) * 2 + 1) / h - 1
    y, x = torch.meshgrid(centres, centres, indexing="ij")
    points = torch.stack([x, y, torch.ones_like(x)]).reshape(3, h * w)
    positions = ((matrix @ points + 1) * h - 1) / 2
    low = positions.floor()
    share = (positions - low).to(images.dtype)
    flat, low = images.flatten(2), low.long()
    out = torch.zeros_like(flat)
    for step_y in (0, 1):
        for step_x in (0, 1):
            row, column = _reflect_positions(low[:, 1] + step_y, h), _reflect_positions(low[:, 0] + step_x, w)
            weight = (share[:, 1] if step_y else 1 - share[:, 1]) * (share[:, 0] if step_x else 1 - share[:, 0])
            index = (row * w + column)[:, None, :].expand(-1, c, -1)
            out = out + flat.gather(2, index) * weight[:, None, :]
    return out.view(b, c, h, w)


def _recolor_images(images: Tensor, draws: _Draws) -> Tensor:
    """Change brightness, contrast, luma, hue and saturation by one affine map of colours; grey images have no hue."""
    matrix, is_changed = _draw_colors(draws)
    if images.shape[1] == 1:
        matrix = matrix[:, :3].mean(dim=1, keepdim=True)
        matrix = torch.cat([matrix[:, :, :3].sum(dim=2, keepdim=True), matrix[:, :, 3:]], dim=2)
    else:
        matrix = matrix[:, :3]
    matrix = matrix.to(images.dtype)
    mapped = (matrix[:, :, :-1] @ images.flatten(2) + matrix[:, :, -1:]).view_as(images)
    return torch.where(is_changed[:, None, None, None], mapped, images)


def _draw_colors(draws: _Draws) -> tuple[Tensor, Tensor]:
    """Draw (float[b, 4, 4] of homogeneous colours, which images change)."""
    brightness = draws.draw_sometimes(draws.draw_normal() * _BRIGHTNESS_SD, 0)
    contrast = draws.draw_sometimes(torch.exp2(draws.draw_normal() * _CONTRAST_SD), 1)
    flip = draws.draw_sometimes((draws.draw_uniform() * 2).floor(), 0)
    hue = draws.draw_sometimes((draws.draw_uniform() * 2 - 1) * pi, 0)
    saturation = draws.draw_sometimes(torch.exp2(draws.draw_normal() * _SATURATION_SD), 1)
    b, device = draws.b, draws.device
    identity = torch.eye(4, device=device).expand(b, 4, 4)
    axis = torch.tensor([1.0, 1.0, 1.0, 0.0], device=device) / sqrt(3)
    projector = torch.outer(axis, axis)
    shift = identity.clone()
    shift[:, :3, 3] = brightness[:, None]
    factor = torch.cat([contrast[:, None].expand(-1, 3), torch.ones(b, 1, device=device)], dim=1)
    luma = identity - 2 * projector * flip[:, None, None]
    gray = projector + torch.diag(torch.tensor([0.0, 0, 0, 1], device=device))
    saturated = gray + (identity - gray) * saturation[:, None, None]
    matrix = saturated @ _gray_rotation(hue) @ luma @ torch.diag_embed(factor) @ shift
    is_neutral = (brightness == 0) & (contrast == 1) & (flip == 0) & (hue == 0) & (saturation == 1)
    return matrix, ~is_neutral


def _gray_rotation(angle: Tensor) -> Tensor:
    """Return float[b, 4, 4], rotations about the axis of greys (Rodrigues)."""
    device = angle.device
    u = 1 / sqrt(3)
    cross = torch.tensor([[0, -u, u], [u, 0, -u], [-u, u, 0]], device=device)
    cos, sin = angle.cos()[:, None, None], angle.sin()[:, None, None]
    turn = cos * torch.eye(3, device=device) + sin * cross + (1 - cos) / 3
    out = torch.eye(4, device=device).repeat(len(angle), 1, 1)
    out[:, :3, :3] = turn
    return out


@dataclass(frozen=True)
class Controller:
    """The controller of p by the discriminator's mean sign on real images, r_t, and its target (section 3.1).

    Attributes:
        images: number of images over which p goes from 0 to 1; 500 000 in the paper.
        sign_sum, seen: sum of signs and number of the logits since the last update of p.
    """

    p: float
    images: float
    sign_sum: float = 0.0
    seen: int = 0

    def observe_logits(self, real_logits: Tensor) -> Controller:
        """Return the controller with the signs of one batch of real images added."""
        signs = float(real_logits.detach().sign().sum())
        return replace(self, sign_sum=self.sign_sum + signs, seen=self.seen + len(real_logits))

    def update_probability(self) -> Controller:
        """Return the controller with p updated and counts of 0."""
        p = self.p
        if self.seen:
            r_t = self.sign_sum / self.seen  # near 1 the discriminator knows its training images
            direction = (r_t > ADA_TARGET) - (r_t < ADA_TARGET)
            p = min(1.0, max(0.0, p + direction * self.seen / self.images))
        return Controller(p, self.images)
