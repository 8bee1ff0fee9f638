"""Measure that a model treats rows independently, and that an engine's per-example gradients are those of single rows.

Clipping is meaningless where they differ. A measurement on two rows finds a layer's constant behaviour, not behaviour
for particular rows. So custom models go one row at a time whatever is measured; their measurement serves to refuse
them in one line where training would compute something else.
"""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn
from torch.nn import functional

from wsi_fl.privacy.gradients import ENGINES, default_engine
from wsi_fl.privacy.row_independence import UNTRAINABLE, ModelSnapshot, model_origin, train_without_dropout
from wsi_fl.privacy.rowwise_loss import LossOf
from wsi_fl.types import UsageError

ROW_BY_ROW = "singly"
"""The method for custom models: a backward pass for each row."""

_GRADIENT_RTOL, _GRADIENT_ATOL, _NORM_RTOL = 1e-2, 1e-5, 1e-3
"""Tolerances of a parameter's gradient, of the whole, and of the norm: far above round-off, far below an error."""
_OUTPUT_RTOL, _OUTPUT_ATOL = 1e-3, 1e-5
"""Tolerances relative to a row's outputs, and to the largest."""


def check_per_example_gradients(model: nn.Module, input_shape: tuple[int, ...], n_classes: int) -> str:
    """Return the method for a model's clipped sums, measured on a copy of the model and two random rows.

    It is an engine with the gradients of single examples, or "singly", a backward pass for each row, where the model is
    custom or no engine agrees. `input_shape` is the shape of one example, such as channels, height and width.

    Raises:
        UsageError: when the model does not map such rows to logits, ties the rows of a batch together, draws random
            numbers, or has parameters that the loss does not use.
    """
    model_origin(model)
    shape = "×".join(map(str, input_shape))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        probe = _generic_copy(model)
        x, y = torch.randn(2, *input_shape), torch.arange(2) % n_classes
        state = torch.get_rng_state()
        try:
            logits = probe(x)
        except Exception as error:  # any error of a custom architecture
            raise UsageError(f"model cannot take images of {shape}: {_first_line(error)}") from None
        if not isinstance(logits, Tensor) or logits.shape != (2, n_classes):
            raise UsageError(f"model does not map images of {shape} to {n_classes} logits each")
        if not torch.equal(state, torch.get_rng_state()) or not torch.equal(logits, probe(x)):
            raise UsageError(f"{UNTRAINABLE}: it draws random numbers in training; set its dropout to 0")
        return _measure_engine(
            model, probe, x, lambda out: functional.cross_entropy(out, y[: len(out)]), None, strict=True
        )


def select_engine(model: nn.Module, x: Tensor, unit: Tensor | None, engine: str | None = None) -> str | None:
    """Return the method for a model's clipped sums, "ghost", "hooks" or "singly", measured on real rows.

    None where there are no two units of finite numbers to measure it on, or no memory for them.

    Args:
        x: [b, …].
        unit: int64[b], the patient of each row where units are patients; None where units are rows.
        engine: the engine to try first; None for the model's default.

    Raises:
        UsageError: when the model cannot take the rows, or ties those of two units together.
    """
    model_origin(model)
    units = torch.arange(len(x)) if unit is None else unit.cpu()
    pair = _find_pair(x, units)
    if pair is None:
        return None
    rows = torch.cat([(units == k).nonzero().flatten()[:_MAX_PATIENT_ROWS] for k in pair])
    other_rows = [k for k in range(len(x)) if k not in rows.tolist()]
    other_rows = other_rows[: max(0, _MAX_NUMBERS // max(1, x[0].numel()) - len(rows))]
    sample, neighbours, units = x[rows.to(x.device)].detach().cpu(), x[other_rows].detach().cpu(), units[rows]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        try:
            probe = _generic_copy(model)
        except Exception:  # it cannot be copied, and is measured itself
            probe, sample, neighbours = model, sample.to(x.device), neighbours.to(x.device)
        try:
            return _measure_engine(
                model,
                probe,
                sample,
                _smooth_loss,
                None if unit is None else units,
                engine=engine,
                neighbours=neighbours,
            )
        except torch.OutOfMemoryError:
            return None


_MAX_PATIENT_ROWS, _MAX_UNITS, _MAX_NUMBERS = 2, 64, 1 << 24
"""Most rows of a patient, units of a batch, and numbers in a measurement."""


def _find_pair(x: Tensor, unit: Tensor) -> tuple[int, int] | None:
    """Return two units of finite rows, with different first rows where possible; None without two such units."""
    starts: list[tuple[int, Tensor]] = []
    for k in list(dict.fromkeys(unit.tolist()))[:_MAX_UNITS]:
        rows = x[(unit == k).nonzero().flatten()[:_MAX_PATIENT_ROWS].to(x.device)]
        if bool(rows.isfinite().all()):
            starts.append((k, rows[0]))
        if len(starts) > 1 and not torch.equal(starts[0][1], starts[-1][1]):
            return starts[0][0], starts[-1][0]
    return (starts[0][0], starts[1][0]) if len(starts) > 1 else None


def _smooth_loss(outputs: Tensor) -> Tensor:
    """Return the mean over rows of a loss that depends on every output."""
    flat = outputs.flatten(1)
    slope = torch.linspace(-1.0, 1.0, flat.shape[1], device=flat.device, dtype=flat.dtype)
    return (flat * slope + flat.square() / 2).mean(1).mean()


def _measure_engine(
    model: nn.Module,
    probe: nn.Module,
    x: Tensor,
    loss_of: LossOf,
    unit: Tensor | None,
    *,
    engine: str | None = None,
    strict: bool = False,
    neighbours: Tensor | None = None,
) -> str:
    # return the method for `model`, measured on a copy and the rows x of two units, among further `neighbours`
    custom = model_origin(model) == "custom"
    shape = "×".join(map(str, x.shape[1:]))
    units = torch.arange(len(x)) if unit is None else unit
    memory = ModelSnapshot(probe, attributes=custom)
    try:
        with torch.no_grad():
            batch = x if neighbours is None or not custom else torch.cat([x, neighbours])
            batch_outputs = _require_tensor(probe(batch))
            if len(batch_outputs) == len(batch):
                batch_outputs = batch_outputs[: len(x)]
            single = torch.cat([_require_tensor(probe(x[units == k])) for k in dict.fromkeys(units.tolist())])
            memory.restore()
            memory.require_unchanged(lambda: probe(x[:1]))
        singly = {} if unit is not None else _gradients_by_row(probe, x, loss_of)
    except (UsageError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise UsageError(f"{UNTRAINABLE} on rows of {shape}: {_first_line(error)}") from None
    if len(batch_outputs) != len(x) or not are_rows_equal(batch_outputs, single):
        raise UsageError(
            f"{UNTRAINABLE}: it ties the rows of a batch together: its outputs for a row of {shape} depend on the "
            "other rows"
        )
    if unused := [name for name, g in singly.items() if g is None and strict]:
        raise UsageError(f"{UNTRAINABLE}: the loss does not depend on {unused[0]}; freeze it")
    if unit is not None or custom or engine == ROW_BY_ROW:
        return ROW_BY_ROW
    for candidate in dict.fromkeys((engine or default_engine(model), "hooks")):
        if candidate in ENGINES and _find_mismatch(candidate, probe, x, loss_of, singly) is None:
            return candidate
    return ROW_BY_ROW


def _require_tensor(outputs: object) -> Tensor:
    if not isinstance(outputs, Tensor):
        raise UsageError(f"{UNTRAINABLE}: it must return one tensor, not a {type(outputs).__name__}")
    return outputs


def are_rows_equal(outputs: Tensor, expected: Tensor) -> bool:
    """Return whether outputs [b, …] agree up to round-off, with infinities and NaN in the same places."""
    if outputs.shape != expected.shape:
        return False
    outputs, expected = outputs.flatten(1).double(), expected.flatten(1).double()
    finite = expected.isfinite()
    if not torch.equal(finite, outputs.isfinite()):
        return False
    outputs, expected = outputs.where(finite, 0.0), expected.where(finite, 0.0)
    largest = float(expected.abs().max()) if expected.numel() else 0.0
    distance = (outputs - expected).norm(dim=1)
    return bool((distance <= _OUTPUT_RTOL * expected.norm(dim=1) + _OUTPUT_ATOL * largest).all())


def _generic_copy(model: nn.Module) -> nn.Module:
    """Return a copy on the CPU in training mode, its constant weights replaced: they may hide other gradients."""
    model = copy.deepcopy(model).cpu()
    train_without_dropout(model)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.numel() and parameter.min() == parameter.max():  # a layer scale of 10⁻⁶, a gain of 0
                parameter.uniform_(0.5, 1.5)
                if parameter.dim() > 1:  # a matrix that preserves the scale of its input
                    parameter.div_(parameter[0].numel())
    return model


def _gradients_by_row(model: nn.Module, x: Tensor, loss_of: LossOf) -> dict[str, Tensor | None]:
    """Return per-example gradients [b, …] by parameter, from b passes of one example each; None for an unused one."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    rows = []
    for k in range(len(x)):
        outputs = model(x[k : k + 1])
        blank = outputs.new_zeros(len(x), *outputs.shape[1:])
        loss = loss_of(torch.cat([blank[:k], outputs, blank[k + 1 :]])) * len(x)
        rows.append(torch.autograd.grad(loss, list(parameters.values()), allow_unused=True))
    return {
        name: None
        if all(g is None for g in row_gradients)
        else torch.stack([p.new_zeros(p.shape) if g is None else g for g in row_gradients])
        for (name, p), row_gradients in zip(parameters.items(), zip(*rows, strict=True), strict=True)
    }


def _find_mismatch(
    engine: str, model: nn.Module, x: Tensor, loss_of: LossOf, singly: dict[str, Tensor | None]
) -> str | None:
    """Return the error in the sums and norms of an engine, in words; None where they are right."""
    c, reported_norms = torch.linspace(1.0, 0.25, len(x)), []

    def fix_weights(norms: Tensor) -> Tensor:
        reported_norms.append(norms)
        return c

    try:
        sums, _ = ENGINES[engine](copy.deepcopy(model), x, loss_of, fix_weights)
    except Exception as error:
        return _first_line(error)
    lengths = [g.reshape(len(g), -1).norm(dim=1) for g in singly.values() if g is not None]
    norms = torch.stack(lengths).norm(dim=0)
    for (name, row_gradients), total in zip(singly.items(), sums, strict=True):
        if row_gradients is None:
            continue
        if total is None:
            return f"{engine} finds no per-example gradients of {name}"
        expected = torch.einsum("n,n...->...", c.to(row_gradients), row_gradients)
        tolerance = _GRADIENT_RTOL * float(expected.norm()) + _GRADIENT_ATOL * float(norms.norm())
        if total.shape != expected.shape or not float((total - expected).norm()) <= tolerance:
            return f"{engine}: per-example gradients of {name} are wrong"
    if not torch.allclose(reported_norms[0].double(), norms.double(), rtol=_NORM_RTOL):
        return f"{engine}: norms of per-example gradients are wrong"
    return None


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).strip().splitlines()[0]
