"""DP-SGD (Abadi et al., 2016) by Opacus: Poisson batches, clipped per-example gradients, Gaussian noise.

The mean gradient is (Σ clip(g_i, C) + N(0, σ²C² I)) / B with the public constant B, never the size of the
batch that came out (ProxyFL, eq. 7). Noise and batches draw on entropy of the operating system.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from math import isfinite

import numpy as np
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.validators import ModuleValidator
from torch import Tensor, nn

from wsi_fl.types import UsageError, WsiFlError

_TWISTER_START, _TWISTER_WORDS = 24, 624
"""Where the words of a CPU generator lie in its state: each in eight bytes, after three fields."""


def entropy_generator(
    device: torch.device | str = "cpu", insecure_seed: int | None = None
) -> torch.Generator:
    """Seeded by the operating system; `insecure_seed` is for tests alone and voids the guarantee."""
    generator = torch.Generator(device)
    seed = int.from_bytes(os.urandom(8), "little") if insecure_seed is None else insecure_seed
    generator.manual_seed(seed % 2**63)
    if insecure_seed is None and generator.device.type == "cpu":
        # PyTorch's Mersenne Twister takes 32 bits of a seed, few enough to try them all against a release.
        state = generator.get_state()
        words = np.frombuffer(os.urandom(4 * _TWISTER_WORDS), "<u4").astype(np.uint64)
        state.numpy()[_TWISTER_START : _TWISTER_START + words.nbytes] = words.view(np.uint8)
        generator.set_state(state)
    return generator


def poisson_rows(n: int, sample_rate: float, generator: torch.Generator) -> Tensor:
    """int64[b]: each of n rows independently with probability `sample_rate`; may be empty."""
    chosen = torch.rand(n, generator=generator, dtype=torch.float64) < sample_rate
    return chosen.nonzero().flatten()


def check_trainable(model: nn.Module) -> None:
    """Refuses models whose per-example gradients are not defined, BatchNorm above all."""
    problems = ModuleValidator.validate(model, strict=False)
    if problems:
        reason = str(problems[0]).splitlines()[0]
        raise UsageError(f"model cannot be trained with differential privacy: {reason}")


class DPTrainer:
    """A model and its optimizer, stepping with differential privacy.

    Args:
        model: without BatchNorm; its trained parameters all take part in the loss.
        optimizer: over the model's parameters; DP-Adam is Adam on the noisy gradient.
        sigma: noise multiplier; 0 switches the noise off.
        clip: bound C on per-example gradients; infinity switches clipping off, without noise only.
        batch_size: the divisor B.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        sigma: float,
        clip: float,
        batch_size: int,
    ) -> None:
        check_trainable(model)
        if sigma > 0 and not isfinite(clip):
            raise UsageError(f"noise is a multiple of privacy.clip, which cannot be {clip:g}")
        self._model = GradSampleModule(model, batch_first=True, loss_reduction="mean")
        self._optimizer = DPOptimizer(
            optimizer,
            noise_multiplier=sigma,
            max_grad_norm=min(clip, torch.finfo(torch.float32).max),  # Opacus would take 0 · ∞ for the noise
            expected_batch_size=batch_size,
            loss_reduction="mean",
        )
        self._parameters = [p for p in model.parameters() if p.requires_grad]

    def step(self, x: Tensor, loss_of: Callable[[Tensor], Tensor], generator: torch.Generator) -> float:
        """One step on the batch x[b, …], of pure noise when b = 0. Returns the mean loss (NaN when b = 0).

        Args:
            loss_of: maps logits [b, classes] to the mean of per-example losses.
            generator: source of the noise, on the model's device.
        """
        self._optimizer.generator = generator
        self._optimizer.zero_grad()
        loss = float("nan")
        if len(x):
            value = loss_of(self._model(x))
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
                torch.autograd.backward(value)
            loss = float(value.detach())
            missing = sum(getattr(p, "grad_sample", None) is None for p in self._parameters)
            if missing:
                raise WsiFlError(f"{missing} parameters got no gradient; freeze what the loss does not use")
        else:
            for parameter in self._parameters:
                parameter.grad_sample = parameter.new_zeros((0, *parameter.shape))  # type: ignore[attr-defined]
        self._optimizer.step()
        self._optimizer.zero_grad()
        return loss
