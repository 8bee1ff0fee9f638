"""A class-conditional denoising diffusion model, trained from scratch: the only module that imports diffusers.

Noise prediction (Ho et al., NeurIPS 2020, eq. 14) by a U-Net with a class embedding, an exponential moving average
of its weights, optionally classifier-free guidance (Ho and Salimans, 2022). Sampling by the full chain (DDPM), by
DDIM (Song et al., ICLR 2021) or by DPM-Solver++ (Lu et al., 2022). `DdpmState` has the whole state of a
training, so a checkpoint continues bit for bit.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from fractions import Fraction
from functools import partial
from math import ceil, gcd
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from wsi_fl.synthesis.keys import Ddpm
from wsi_fl.synthesis.lpips import half_precision
from wsi_fl.synthesis.training_state import TrainingState, move_average, normalize_pixels, quantize_images
from wsi_fl.system.extras import require_extra

require_extra("synthesis")
from diffusers import DDIMScheduler, DDPMScheduler, DPMSolverMultistepScheduler, UNet2DModel  # noqa: E402

_Sampler = Literal["ddpm", "ddim", "dpm++"]

_IMAGES_PER_CLASS = 320_000
"""Images of each class shown by the rule for epochs, repeats included."""
_MAX_GROUPS = 16
_HEAD_DIM = 8
_CLIP_NORM = 1.0
_MAX_BETA = 0.999
EMA_DECAY = 0.999
"""Decay of the moving average of the weights at each step."""
_EMA_RAMP = 10
"""Decay of the moving average after t steps is at most (1 + t) / (10 + t)."""


@dataclass(frozen=True)
class DdpmShape:
    """The shape of a denoiser, the same at all sites.

    Attributes:
        resolution: of the images, in pixels; divisible by 2^(len(widths) − 1).
        channels: of the images.
        widths: feature maps at each resolution of the U-Net, the finest first; attention at the coarsest.
        layers: residual blocks at each.
        chain: steps of the diffusion, T.
        schedule: of its variances, as Ho et al.'s, scaled where the chain is not of 1000 steps.
    """

    resolution: int
    channels: int
    n_classes: int
    widths: Sequence[int]
    layers: int = 1
    chain: int = 1000
    schedule: str = "linear"

    @property
    def diffusion(self) -> dict[str, object]:
        """The chain as arguments of diffusers. A short chain takes larger steps, so that it ends in noise too."""
        scale = 1000 / self.chain
        ends = {"beta_start": min(1e-4 * scale, _MAX_BETA), "beta_end": min(0.02 * scale, _MAX_BETA)}
        return {"num_train_timesteps": self.chain, "beta_schedule": self.schedule, **ends}

    @property
    def schema(self) -> str:
        """A digest of the shape, equal for compatible denoisers."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()

    @property
    def null(self) -> int:
        """The label of no class, for classifier-free guidance."""
        return self.n_classes


@dataclass(frozen=True)
class Sampling:
    """Parameters of drawing images in batches.

    Attributes:
        steps: evaluations of the denoiser for each image; "ddpm" with the whole chain is the paper's.
        guidance: 1 is the plain conditional model; more draws images more typical of their class.
    """

    sampler: _Sampler = "ddim"
    steps: int = 25
    guidance: float = 1.0
    batch_size: int = 64


def count_training_steps(n_images: int, n_classes: int, batch_size: int) -> int:
    """Return the optimizer steps of a training: more epochs for more classes and for fewer images (appendix B.2).

    The paper's text lacks the formula. This rule has both properties: each class is shown 320 000 images in all, with
    repeats.

    Example:
        >>> count_training_steps(1000, 2, 1000), count_training_steps(1000, 6, 1000), count_training_steps(500, 2, 1000)
        (640, 1920, 1280)
    """
    return ceil(_IMAGES_PER_CLASS * n_classes / n_images) * ceil(n_images / batch_size)


class UNet(UNet2DModel):  # type: ignore[misc]
    """A U-Net, (noisy images, step, classes) → the noise, with an additional class for "no class"."""

    def __init__(self, shape: DdpmShape) -> None:
        depth = len(shape.widths)
        super().__init__(
            sample_size=shape.resolution,
            in_channels=shape.channels,
            out_channels=shape.channels,
            layers_per_block=shape.layers,
            block_out_channels=tuple(shape.widths),
            norm_num_groups=gcd(_MAX_GROUPS, *shape.widths),
            attention_head_dim=_HEAD_DIM,
            down_block_types=("DownBlock2D",) * (depth - 1) + ("AttnDownBlock2D",),
            up_block_types=("AttnUpBlock2D",) + ("UpBlock2D",) * (depth - 1),
            num_class_embeds=shape.n_classes + 1,
        )
        self.shape = shape


class DdpmState(TrainingState):
    """Networks, optimizer and random generator of one training."""

    def __init__(self, shape: DdpmShape, terms: Ddpm, *, device: torch.device) -> None:
        super().__init__(terms.seed, device)
        self.shape, self.terms = shape, terms
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(terms.seed)
            self.denoiser = UNet(shape).to(device)
        self.average = deepcopy(self.denoiser).requires_grad_(False).eval()
        fused = device.type in ("cpu", "cuda")
        self.optimizer = torch.optim.Adam(self.denoiser.parameters(), lr=terms.lr, fused=fused)
        self.noising = DDPMScheduler(**shape.diffusion)
        self.networks = {"denoiser": self.denoiser, "average": self.average}
        self.optimizers = {"adam": self.optimizer}


def step(state: DdpmState, images: Tensor, labels: Tensor) -> float:
    """Take one step on E‖ε − ε_θ(√ᾱ_t x + √(1 − ᾱ_t) ε, t, y)‖²; returns that loss.

    Args:
        images: uint8[n, c, h, h], all of them: batches are drawn by the state's random generator, with replacement.
        labels: int64[n].
    """
    shape, terms, random, device = state.shape, state.terms, state.random, state.device
    # 1. x from the data, t uniform over the chain, ε ~ N(0, I)
    rows = state.draw_rows(len(images), terms.batch_size)
    x = normalize_pixels(images[rows])
    t = torch.randint(shape.chain, (terms.batch_size,), generator=random, device=device)
    noise = torch.randn(x.shape, generator=random, device=device)
    # 2. classifier-free guidance: some images are shown without their class
    is_unnamed = torch.rand(terms.batch_size, generator=random, device=device) < terms.class_dropout
    classes = labels[rows].masked_fill(is_unnamed, shape.null)
    # 3. predict ε from x_t = √ᾱ_t x + √(1 − ᾱ_t) ε (Ho et al., eq. 14)
    with half_precision(device):
        predicted = state.denoiser(state.noising.add_noise(x, noise, t), t, classes).sample
    loss = (predicted.float() - noise).square().mean()
    # 4. a step with clipped gradients, then the moving average
    state.optimizer.zero_grad(set_to_none=True)
    torch.autograd.backward(loss)
    torch.nn.utils.clip_grad_norm_(state.denoiser.parameters(), _CLIP_NORM)
    state.optimizer.step()
    move_average(state.average, state.denoiser, _ema_decay(state.iteration))
    state.iteration += 1
    return float(loss.detach())


def _ema_decay(iteration: int) -> float:
    """Return the decay of the moving average in the step after so many."""
    return min(EMA_DECAY, (1 + iteration) / (_EMA_RAMP + iteration))


class _Ddim(DDIMScheduler):  # type: ignore[misc]
    """DDIM with steps that end at the next listed time, and the last at the clean image (Song et al., eq. 12).

    The library's class goes back by a whole number of chain steps per sampling step, regardless of its list of times.
    """

    def step(self, noise: Tensor, t: Tensor, x: Tensor) -> Any:
        """Return the library's step from time t to the next time in `timesteps`, or to the clean image at -1."""
        later = self.timesteps[self.timesteps < t].tolist()
        next_time = later[0] if later else -1
        # the library divides the chain by this for the stride; a fraction gives any stride exactly
        self.num_inference_steps = Fraction(self.config.num_train_timesteps, int(t) - next_time)
        return super().step(noise, t, x)


def _build_scheduler(shape: DdpmShape, sampling: Sampling) -> Any:
    """Return diffusers' scheduler with its timesteps set; short ones begin at the noisiest step of the chain."""
    # clipped like the others: from pure noise, small errors of a denoiser give clean images that are far off
    clipping = {"thresholding": True, "sample_max_value": 1.0, "algorithm_type": "dpmsolver++"}
    kinds = {"ddpm": DDPMScheduler, "ddim": _Ddim, "dpm++": partial(DPMSolverMultistepScheduler, **clipping)}
    scheduler: Any = kinds[sampling.sampler](**shape.diffusion, timestep_spacing="trailing")
    scheduler.set_timesteps(sampling.steps)
    if (scheduler.timesteps < 0).any():  # by rounding the library has one time too many, before the chain begins
        times = scheduler.timesteps[scheduler.timesteps >= 0]
        if sampling.sampler == "dpm++":  # its noise levels follow from the times
            scheduler.set_timesteps(timesteps=times.tolist())
        scheduler.timesteps = times
    return scheduler


@torch.no_grad()
def draw_images(
    denoiser: UNet,
    labels: NDArray[np.int64],
    sampling: Sampling,
    *,
    seed: int,
    progress: Callable[[int], None] | None = None,
) -> Iterator[Tensor]:
    """Draw one image per label, uint8[b, c, h, h] on the CPU by batches; the same for the same arguments and device.

    Args:
        progress: called after every evaluation with the number of finished images; a batch counts in parts.
    """
    device, shape = next(denoiser.parameters()).device, denoiser.shape
    for start in range(0, len(labels), sampling.batch_size):
        classes = torch.from_numpy(labels[start : start + sampling.batch_size]).to(device)
        random = torch.Generator("cpu").manual_seed(_batch_seed(seed, start))
        x = torch.randn((len(classes), shape.channels, shape.resolution, shape.resolution), generator=random).to(device)
        scheduler = _build_scheduler(shape, sampling)
        generator_kwargs = {} if sampling.sampler == "ddim" else {"generator": random}
        for number, t in enumerate(scheduler.timesteps, 1):
            noise = _predict_noise(denoiser, x, t, classes, sampling.guidance)
            x = scheduler.step(noise, t, x, **generator_kwargs).prev_sample
            if progress is not None:
                progress(start + len(classes) * number // len(scheduler.timesteps))
        yield quantize_images(x).cpu()


def _batch_seed(seed: int, start: int) -> int:
    return int(np.random.SeedSequence((seed, start)).generate_state(1, np.uint64)[0] >> 1)


def _predict_noise(denoiser: UNet, x: Tensor, t: Tensor, classes: Tensor, guidance: float) -> Tensor:
    """Return ε_θ(x, t, y), or with guidance g: ε_θ(x, t) + g (ε_θ(x, t, y) − ε_θ(x, t))."""
    with half_precision(x.device):
        if guidance == 1.0:
            predicted: Tensor = denoiser(x, t, classes).sample.float()
            return predicted
        null_classes = torch.full_like(classes, denoiser.shape.null)
        outputs = denoiser(torch.cat([x, x]), t, torch.cat([classes, null_classes])).sample.float()
    conditional, unconditional = outputs.chunk(2)
    guided: Tensor = unconditional + guidance * (conditional - unconditional)
    return guided


def flatten_parameters(denoiser: UNet) -> NDArray[np.float32]:
    """Return all parameters as one float32[d] for sending."""
    vector: NDArray[np.float32] = torch.nn.utils.parameters_to_vector(denoiser.parameters()).detach().cpu().numpy()
    return vector


def build_denoiser(vector: NDArray[np.float32], shape: DdpmShape) -> UNet:
    """Return the denoiser of these parameters, ready to draw.

    Raises:
        ValueError: for another number of parameters than the shape has.
    """
    denoiser = UNet(shape)
    if (n := denoiser.num_parameters()) != vector.size:
        raise ValueError(f"{vector.size} parameters, expected {n}")
    torch.nn.utils.vector_to_parameters(torch.from_numpy(np.array(vector)), denoiser.parameters())
    denoiser.requires_grad_(False).eval()
    return denoiser
