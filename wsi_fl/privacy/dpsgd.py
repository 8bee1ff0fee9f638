"""DP-SGD (Abadi et al., 2016) by Opacus: Poisson batches, clipped per-example gradients, Gaussian noise.

The mean gradient is (Σ clip(g_i, C) + N(0, σ²C² I)) / B with the public constant B, never the size of the
batch that came out (ProxyFL, eq. 7). Noise and batches draw on entropy of the operating system.
"""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import isfinite
from typing import Any

import numpy as np
import torch
from opacus import GradSampleModule
from opacus.optimizers import DPOptimizer
from opacus.validators import ModuleValidator
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from wsi_fl.types import UsageError, WsiFlError

_UNTRAINABLE = "model cannot be trained with differential privacy"
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
        reason = _one_line(problems[0]).split(". ")[0]
        raise UsageError(f"{_UNTRAINABLE}: {reason}")


class _OutOfPlace(TorchFunctionMode):
    """Computes `x += y` as `x = x + y`: autograd forbids the former on what Opacus's hooks return."""

    _INSTEAD: Mapping[Any, Any] = {
        Tensor.add_: Tensor.add,
        Tensor.sub_: Tensor.sub,
        Tensor.mul_: Tensor.mul,
        Tensor.div_: Tensor.div,
    }

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        computed = isinstance(args[0], Tensor) and args[0].grad_fn is not None if args else False
        return (self._INSTEAD.get(func, func) if computed else func)(*args, **(kwargs or {}))


def _contiguous(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(x.contiguous() if isinstance(x, Tensor) else x for x in inputs)


def _per_example(model: nn.Module) -> GradSampleModule:
    """The model, its backward pass leaving each parameter's `grad_sample` [b, …] of a mean loss."""
    for module in model.modules():
        if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
            # Opacus's unfold misreads the strides of any other layout, and says nothing
            module.register_forward_pre_hook(_contiguous)
    return GradSampleModule(model, batch_first=True, loss_reduction="mean")


@contextmanager
def _quiet_hooks() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Full backward hook is firing", UserWarning)
        yield


def check_per_example_gradients(model: nn.Module, input_shape: tuple[int, int, int], n_classes: int) -> None:
    """Compares the per-example gradients of a copy of the model with those of one example at a time.

    Clipping means nothing where they differ, and an architecture from elsewhere may do what Opacus's hooks do
    not see: use parameters outside their module, operate in place, tie the examples of a batch together.

    Args:
        input_shape: channels, height and width of an image.
        n_classes: length of the logits.

    Raises:
        UsageError: when the model does not map such images to logits, or the gradients differ.
    """
    check_trainable(model)
    shape = "×".join(map(str, input_shape))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        probe = _generic_copy(model)
        x, y = torch.randn(2, *input_shape), torch.arange(2) % n_classes
        try:
            logits = probe(x)
        except Exception as error:  # whatever somebody's architecture raises
            raise UsageError(f"model cannot take images of {shape}: {_one_line(error)}") from None
        if not isinstance(logits, Tensor) or logits.shape != (2, n_classes):
            raise UsageError(f"model does not map images of {shape} to {n_classes} logits each")
        try:
            singly = _gradients_singly(probe, x, y)
            together = _gradients_together(probe, x, y)
        except Exception as error:
            raise UsageError(f"{_UNTRAINABLE} on images of {shape}: {_one_line(error)}") from None
    total = float(torch.stack([gradient.norm() for gradient in singly.values()]).norm())
    for name, wanted in singly.items():
        found = together[name]
        if found is None:
            raise UsageError(f"{_UNTRAINABLE}: Opacus finds no per-example gradients of {name}")
        tolerance = _GRADIENT_RTOL * float(wanted.norm()) + _GRADIENT_ATOL * total
        if found.shape != wanted.shape or not float((found - wanted).norm()) <= tolerance:
            raise UsageError(f"{_UNTRAINABLE}: Opacus's per-example gradients of {name} are wrong")


_GRADIENT_RTOL, _GRADIENT_ATOL = 1e-2, 1e-5
"""Of a parameter's gradient, and of the whole: far above round-off, far below the effect of a mistake."""


def _generic_copy(model: nn.Module) -> nn.Module:
    """A copy on the CPU without dropout, and without constant weights, which may hide other gradients."""
    model = copy.deepcopy(model).cpu()
    for module in model.modules():  # Opacus looks at those in training mode alone; dropout has no parameters
        module.training = any(True for _ in module.parameters(recurse=False))
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() and parameter.min() == parameter.max():  # a layer scale of 10⁻⁶, a gain of 0
                parameter.uniform_(0.5, 1.5)
    return model


def _gradients_singly(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """[b, …] by parameter, from b passes."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = []
    for k in range(len(x)):
        loss = functional.cross_entropy(model(x[k : k + 1]), y[k : k + 1])
        rows.append(torch.autograd.grad(loss, list(parameters.values()), materialize_grads=True))
    return {name: torch.stack(g) for name, g in zip(parameters, zip(*rows, strict=True), strict=True)}


def _gradients_together(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor | None]:
    """[b, …] by parameter, as a step of DPTrainer takes them."""
    wrapped = _per_example(model)
    with _OutOfPlace():
        logits = wrapped(x)
    with _quiet_hooks():
        torch.autograd.backward(functional.cross_entropy(logits, y))
    return {name: getattr(p, "grad_sample", None) for name, p in model.named_parameters()}


def _one_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]


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
        self._model = _per_example(model)
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
            with _OutOfPlace():
                logits = self._model(x)
            value = loss_of(logits)
            with _quiet_hooks():
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
