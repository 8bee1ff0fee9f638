"""Training of one conditional StyleGAN2-ADA in two phases: without, then with the privacy loss.

Non-saturating logistic loss (Goodfellow et al., 2014), R1 (Mescheder et al., 2018) every few steps, path-length
regularisation, style mixing and exponential moving average (Karras et al., 2019, 2020), adaptive augmentation
(Karras et al., 2020b); the second phase adds the loss of Pennisi et al. `GanState` has the whole state of
a training, so a checkpoint continues bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import replace
from math import cos, pi, sqrt
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from wsi_fl.synthesis.ada import ADA_TARGET, Controller, augment_images
from wsi_fl.synthesis.keys import Gan
from wsi_fl.synthesis.lpips import Keepaway, Lpips, clamp_images, compute_squared_distances, half_precision
from wsi_fl.synthesis.stylegan2 import Discriminator, GanShape, Generator
from wsi_fl.synthesis.training_state import TrainingState, move_average, normalize_pixels, quantize_images

_W_MEAN_DECAY = 0.998
_PATH_DECAY = 0.01
_PATH_SHRINK = 2
"""Divisor of the batch size for path lengths."""
_R1_EVERY, _PATH_EVERY, _ADA_EVERY = 16, 4, 4
"""Intervals, in steps: of R1, of path lengths, and of the augmentation's probability."""
_INITIAL_P = 0.0
"""Initial probability of augmentation."""
_SEARCH_BATCH, _DRAW_BATCH = 16, 64
"""Batch sizes of a search of the latent space, and of drawing."""
_SEARCH_LR = 0.1
_MAX_CANDIDATES = 256
_EMA_RAMP = 0.05
"""The half-life of the moving average is at most this share of the images shown so far."""


def describe_terms(gan: Gan) -> dict[str, object]:
    """Return the training settings of a GAN, and its constants, as JSON."""
    keys = {"batch_size", "lr", "r1_gamma", "path_weight", "mixing", "ema_images", "ada_images", "privacy_weight"}
    intervals = {"r1_every": _R1_EVERY, "path_every": _PATH_EVERY}
    return gan.model_dump(include=keys) | intervals | {"ada_target": ADA_TARGET, "ada_p": _INITIAL_P}


class GanState(TrainingState):
    """Networks, optimizers, counters and the random generator of one training.

    Attributes:
        ada: the augmentation's controller.
        path_mean: moving mean of path lengths.
        margin: of the privacy loss, from the second phase on.
    """

    def __init__(self, shape: GanShape, terms: Gan, *, device: torch.device) -> None:
        super().__init__(terms.seed, device)
        self.shape, self.terms = shape, terms
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(terms.seed)
            self.generator = Generator(shape).to(device)
            self.discriminator = Discriminator(shape).to(device)
        self.average = deepcopy(self.generator).requires_grad_(False).eval()
        self.generator_optimizer = _build_adam(self.generator, terms.lr, _PATH_EVERY, terms.path_weight > 0)
        self.discriminator_optimizer = _build_adam(self.discriminator, terms.lr, _R1_EVERY, True)
        self.networks = {name: getattr(self, name) for name in ("generator", "discriminator", "average")}
        self.optimizers = {
            "adam/generator": self.generator_optimizer,
            "adam/discriminator": self.discriminator_optimizer,
        }
        self.ada = Controller(_INITIAL_P, terms.ada_images)
        self.path_mean = 0.0
        self.margin: float | None = None

    def build_document(self) -> dict[str, object]:
        """Return the other state, as JSON."""
        ada = {"p": self.ada.p, "sign_sum": self.ada.sign_sum, "seen": self.ada.seen}
        return super().build_document() | {"path_mean": self.path_mean, "margin": self.margin, "ada": ada}

    def load(self, tensors: Mapping[str, Tensor], document: Mapping[str, Any]) -> None:
        """Restore the state from its tensors and its JSON."""
        super().load(tensors, document)
        self.path_mean, self.margin = float(document["path_mean"]), document["margin"]
        self.ada = replace(self.ada, **document["ada"])


def _build_adam(network: torch.nn.Module, lr: float, interval: int, is_lazy: bool) -> torch.optim.Adam:
    """Return Adam with β = (0, 0.99), corrected for a regulariser at an interval of steps (appendix B of StyleGAN2)."""
    c = interval / (interval + 1) if is_lazy else 1.0
    return torch.optim.Adam(network.parameters(), lr=lr * c, betas=(0.0, 0.99**c), eps=1e-8)


def step(state: GanState, images: Tensor, labels: Tensor, keepaway: Keepaway | None = None) -> dict[str, float | None]:
    """Take one step of discriminator, generator, averages and augmentation; return its losses, None if left out.

    Args:
        images: uint8[n, c, h, h], all of them: batches are drawn by the state's random generator, with replacement.
        labels: int64[n].
        keepaway: given in the second phase.
    """
    terms = state.terms
    rows = state.draw_rows(len(images), terms.batch_size)
    real, classes = normalize_pixels(images[rows]), labels[rows]
    # 1. discriminator: logistic loss, and R1 every few steps
    discriminator, r1 = _train_discriminator(state, real, classes)
    # 2. generator: non-saturating loss and the privacy loss; the path-length penalty every few steps
    generator, privacy = _train_generator(state, real, labels, keepaway)
    path = None
    if terms.path_weight > 0 and state.iteration % _PATH_EVERY == 0:
        path = _regularize_paths(state, labels)
    # 3. moving average of the generator, and the augmentation's probability
    state.iteration += 1
    move_average(state.average, state.generator, _ema_decay(state.iteration * terms.batch_size, terms))
    if state.iteration % _ADA_EVERY == 0:
        state.ada = state.ada.update_probability()
    return {"generator": generator, "discriminator": discriminator, "r1": r1, "path": path, "privacy": privacy}


def _ema_decay(images_seen: int, terms: Gan) -> float:
    """Return the decay of the moving average for a batch: half after `ema_images`, sooner at the beginning."""
    half_life = min(terms.ema_images, max(images_seen * _EMA_RAMP, 1e-8))
    return float(0.5 ** (terms.batch_size / half_life))


def _draw_latents(state: GanState, n: int) -> Tensor:
    return torch.randn(n, state.shape.z_dim, generator=state.random, device=state.device)


def _draw_styles(state: GanState, labels: Tensor) -> Tensor:
    """Draw styles [b, n_styles, w_dim], mixed from two latents at a random layer; update the mean w."""
    generator, n = state.generator, len(labels)
    w = generator.mapping(_draw_latents(state, n), labels)
    with torch.no_grad():
        generator.mapping.w_mean.copy_(w.mean(dim=0).lerp(generator.mapping.w_mean, _W_MEAN_DECAY))
    styles = generator.repeat_styles(w)
    if state.terms.mixing > 0:
        uniform = torch.rand(2, n, generator=state.random, device=state.device)
        last = state.shape.n_styles
        cut = torch.where(uniform[0] < state.terms.mixing, 1 + (uniform[1] * (last - 1)).long(), last)
        other_styles = generator.repeat_styles(generator.mapping(_draw_latents(state, n), labels))
        is_behind = torch.arange(last, device=state.device)[None, :, None] >= cut[:, None, None]
        styles = torch.where(is_behind, other_styles, styles)
    return styles


def _train_discriminator(state: GanState, real: Tensor, classes: Tensor) -> tuple[float, float | None]:
    network, optimizer = state.discriminator.requires_grad_(True), state.discriminator_optimizer
    optimizer.zero_grad(set_to_none=True)
    with half_precision(state.device):
        with torch.no_grad():
            fake = state.generator.synthesis(_draw_styles(state, classes), state.random)
        fake_logits = network(augment_images(fake, state.ada.p, state.random), classes)
        real_logits = network(augment_images(real, state.ada.p, state.random), classes)
        loss = functional.softplus(fake_logits).mean() + functional.softplus(-real_logits).mean()
    torch.autograd.backward(loss)
    state.ada = state.ada.observe_logits(real_logits)
    penalty = None
    if state.iteration % _R1_EVERY == 0:
        gamma = state.terms.r1_gamma
        if gamma is None:
            gamma = 0.0002 * state.shape.resolution**2 / state.terms.batch_size
        penalty = _r1_penalty(network, real, classes, state.ada.p, state.random)
        torch.autograd.backward(penalty * (gamma / 2 * _R1_EVERY))
    optimizer.step()
    return float(loss.detach()), None if penalty is None else float(penalty.detach())


def _r1_penalty(
    network: torch.nn.Module, real: Tensor, classes: Tensor, p: float, generator: torch.Generator
) -> Tensor:
    """Return the mean squared norm of the logit's gradient by each real image, through the augmentation."""
    images = real.detach().requires_grad_(True)
    logits = network(augment_images(images, p, generator), classes)
    (gradient,) = torch.autograd.grad(logits.sum(), images, create_graph=True)
    return gradient.square().sum(dim=(1, 2, 3)).mean()


def _train_generator(
    state: GanState, real: Tensor, labels: Tensor, keepaway: Keepaway | None
) -> tuple[float, float | None]:
    state.discriminator.requires_grad_(False)
    optimizer = state.generator_optimizer
    optimizer.zero_grad(set_to_none=True)
    classes = labels[state.draw_rows(len(labels), state.terms.batch_size)]
    with half_precision(state.device):
        fake = state.generator.synthesis(_draw_styles(state, classes), state.random)
        logits = state.discriminator(augment_images(fake, state.ada.p, state.random), classes)
        loss = functional.softplus(-logits).mean()
    total, distance_loss = loss, None
    if keepaway is not None:
        distance_loss = keepaway(real, fake)
        total = loss + state.terms.privacy_weight * distance_loss
    torch.autograd.backward(total)
    optimizer.step()
    return float(loss.detach()), None if distance_loss is None else float(distance_loss.detach())


def _regularize_paths(state: GanState, labels: Tensor) -> float:
    """Take a generator step on the path-length penalty, which evens lengths; update `path_mean`, return the penalty."""
    state.generator_optimizer.zero_grad(set_to_none=True)
    classes = labels[state.draw_rows(len(labels), max(1, state.terms.batch_size // _PATH_SHRINK))]
    styles = _draw_styles(state, classes)
    images = state.generator.synthesis(styles, state.random)
    penalty, state.path_mean = _path_penalty(images, styles, state.path_mean, state.random)
    torch.autograd.backward(penalty * (state.terms.path_weight * _PATH_EVERY))
    state.generator_optimizer.step()
    return float(penalty.detach())


def _path_penalty(images: Tensor, styles: Tensor, mean: float, generator: torch.Generator) -> tuple[Tensor, float]:
    """Return ((|Jᵀy| − a)², a) with y noise of the images' size and a the moving mean of |Jᵀy| (StyleGAN2, eq. 4)."""
    # 1. Jᵀy is the gradient of ⟨g(w), y⟩ with respect to w, with y ~ N(0, I) scaled by the number of pixels
    pixels = images.shape[2] * images.shape[3]
    y = torch.randn(images.shape, generator=generator, device=images.device) / sqrt(pixels)
    (gradient,) = torch.autograd.grad((images * y).sum(), styles, create_graph=True)
    # 2. its length over all styles, and the moving mean a
    lengths = gradient.square().sum(dim=2).mean(dim=1).sqrt()
    new_mean = mean + _PATH_DECAY * (float(lengths.detach().mean()) - mean)
    return (lengths - new_mean).square().mean(), new_mean


# ---- images


@torch.no_grad()
def draw_samples(generator: Generator, labels: NDArray[np.int64], *, seed: int) -> Tensor:
    """Draw uint8[n, c, h, h] on the CPU, one image per label int64[n], n > 0; the same for the same seed and device."""
    device = _generator_device(generator)
    z = torch.randn(len(labels), generator.shape.z_dim, generator=torch.Generator().manual_seed(seed))
    noise = torch.Generator(device).manual_seed(seed)
    batches = zip(torch.split(z, _DRAW_BATCH), torch.split(torch.from_numpy(labels), _DRAW_BATCH), strict=True)
    image_batches = (generator(*(x.to(device) for x in b), generator=noise) for b in batches)
    return torch.cat([quantize_images(images).cpu() for images in image_batches])


def project_images(
    generator: Generator,
    lpips: Lpips,
    images: Tensor,
    *,
    steps: int,
    candidates: int,
    seed: int = 0,
    progress: Callable[[int], None] | None = None,
) -> tuple[Tensor, Tensor]:
    """Return (float32[n], uint8[n, c, h, h]): LPIPS between images uint8[n, c, h, h] and their projections, and these.

    Args:
        candidates: number of random latents, of all classes, for starting points; at most 256.
        progress: called with the number of finished images.
    """
    device = _generator_device(generator)
    starts, candidate_embeddings = _draw_candidates(generator, lpips, min(candidates, _MAX_CANDIDATES), seed)
    distances, projections = [], []
    for start in range(0, len(images), _SEARCH_BATCH):
        target = lpips(normalize_pixels(images[start : start + _SEARCH_BATCH].to(device)))
        w = starts[compute_squared_distances(target, candidate_embeddings).argmin(dim=1)]
        distance, best_images = _search_latents(generator, lpips, target, w, steps)
        distances.append(distance)
        projections.append(best_images)
        if progress is not None:
            progress(min(start + _SEARCH_BATCH, len(images)))
    return torch.cat(distances), torch.cat(projections)


def _generator_device(generator: Generator) -> torch.device:
    return generator.synthesis.constant.device


@torch.no_grad()
def _draw_candidates(generator: Generator, lpips: Lpips, m: int, seed: int) -> tuple[Tensor, Tensor]:
    """Draw (w [m, w_dim], embeddings [m, d]) of random latents of all classes."""
    device, shape = _generator_device(generator), generator.shape
    z = torch.randn(m, shape.z_dim, generator=torch.Generator().manual_seed(seed))
    w = generator.mapping(z.to(device), torch.arange(m, device=device) % shape.n_classes)
    images = (generator.synthesis(generator.repeat_styles(batch)) for batch in torch.split(w, _SEARCH_BATCH))
    return w, torch.cat([lpips(batch.clamp(-1, 1)) for batch in images])


def _search_latents(
    generator: Generator, lpips: Lpips, target: Tensor, start: Tensor, steps: int
) -> tuple[Tensor, Tensor]:
    """Return (LPIPS float32[b], uint8[b, c, h, h]) of the best w within so many steps, on the CPU."""
    w = start.clone().requires_grad_(True)
    optimizer = torch.optim.Adam([w], lr=_SEARCH_LR)
    best = torch.full((len(w),), torch.inf, device=w.device)
    best_w = start.clone()
    for k in range(steps + 1):
        optimizer.param_groups[0]["lr"] = _SEARCH_LR * 0.5 * (1 + cos(pi * k / max(steps, 1)))
        image = generator.synthesis(generator.repeat_styles(w))
        distance = (lpips(clamp_images(image)) - target).square().sum(dim=1)
        is_better = distance.detach() < best
        best = torch.where(is_better, distance.detach(), best)
        best_w = torch.where(is_better[:, None], w.detach(), best_w)
        if k < steps:
            (w.grad,) = torch.autograd.grad(distance.sum(), [w])
            optimizer.step()
    with torch.no_grad():
        images = quantize_images(generator.synthesis(generator.repeat_styles(best_w)))
    return best.cpu(), images.cpu()
