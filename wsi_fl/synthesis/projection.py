"""Latent projection: how near a generator can come to a given image when its latent is searched for.

As in StyleGAN2 (Karras et al., 2020, appendix D), w is moved by Adam to lower the LPIPS distance to the image,
with fixed noise. The search starts from the nearest of many samples instead of the mean w: that is a stronger
attack and needs fewer steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import cos, pi

import torch
from torch import Tensor

from wsi_fl.synthesis.lpips import Lpips, squared_distances
from wsi_fl.synthesis.privacy_loss import clamped
from wsi_fl.synthesis.sampling import device_of, to_images, to_pixels
from wsi_fl.synthesis.stylegan2 import Generator

_BATCH = 16
_LR = 0.1
_MOST_CANDIDATES = 256


@dataclass(frozen=True)
class Projections:
    """The best that was found for each of n images.

    Attributes:
        distance: float32[n], LPIPS between the image and its projection.
        images: uint8[n, c, h, h], the projections.
    """

    distance: Tensor
    images: Tensor


def projected(
    generator: Generator,
    lpips: Lpips,
    images: Tensor,
    *,
    steps: int,
    candidates: int,
    seed: int = 0,
    told: Callable[[int], None] | None = None,
) -> Projections:
    """Projects images uint8[n, c, h, h].

    Args:
        candidates: random latents, of all classes, among which the starting points are; at most 256 are looked at.
        told: hears how many images are done.
    """
    device = device_of(generator)
    starts, embedded = _candidates(generator, lpips, min(candidates, _MOST_CANDIDATES), seed)
    distances, found = [], []
    for start in range(0, len(images), _BATCH):
        target = lpips(to_images(images[start : start + _BATCH].to(device)))
        w = starts[squared_distances(target, embedded).argmin(dim=1)]
        distance, best = _searched(generator, lpips, target, w, steps)
        distances.append(distance)
        found.append(best)
        if told is not None:
            told(min(start + _BATCH, len(images)))
    return Projections(torch.cat(distances), torch.cat(found))


@torch.no_grad()
def _candidates(generator: Generator, lpips: Lpips, m: int, seed: int) -> tuple[Tensor, Tensor]:
    """(w [m, w_dim], embeddings [m, d]) of random latents of all classes."""
    device = device_of(generator)
    n = generator.shape.n_classes
    z = torch.randn(m, generator.shape.z_dim, generator=torch.Generator().manual_seed(seed))
    w = generator.mapping(z.to(device), torch.arange(m, device=device) % n)
    parts = [
        lpips(generator.synthesis(generator.spread(w[k : k + _BATCH])).clamp(-1, 1))
        for k in range(0, m, _BATCH)
    ]
    return w, torch.cat(parts)


def _searched(
    generator: Generator, lpips: Lpips, target: Tensor, start: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """(LPIPS float32[b], uint8[b, c, h, h]) of the best w within so many steps, on the CPU."""
    w = start.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([w], lr=_LR)
    best = torch.full((len(w),), torch.inf, device=w.device)
    best_w = start.clone()
    for k in range(steps + 1):
        optimizer.param_groups[0]["lr"] = _LR * 0.5 * (1 + cos(pi * k / max(steps, 1)))
        image = generator.synthesis(generator.spread(w))
        distance = (lpips(clamped(image)) - target).square().sum(dim=1)
        better = distance.detach() < best
        best = torch.where(better, distance.detach(), best)
        best_w = torch.where(better[:, None], w.detach(), best_w)
        if k < steps:
            (w.grad,) = torch.autograd.grad(distance.sum(), [w])
            optimizer.step()
    with torch.no_grad():
        images = to_pixels(generator.synthesis(generator.spread(best_w)))
    return best.cpu(), images.cpu()
