"""Losses of a batch, computed row by row.

Clipping bounds a row's part in the sum only where the gradient of every other row is the same without it. This holds
for a plain mean over the rows; it does not for a mean weighted by the rest of the batch, a loss of pairs or a loss with
statistics of the batch.

A loss of wsi-fl's own is marked as a mean of rows. Of a caller's losses, one call of a usual mean loss without weights
is recognized by observing the call. Any other loss is computed for every row separately, with the output of that row
and that row of each tensor with as many rows as the batch. So a row's gradient is a function of that row for any loss.
A loss with another gradient in the batch ties rows together, and is refused.

Not detected: values computed from the batch before, outside the loss. A number that changes from one batch to the next
is refused; in the first batch it cannot be, nor can weights of rows, which look like data of the rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from wsi_fl.privacy.captures import collect_numbers, select_row
from wsi_fl.types import UsageError, WsiFlError, single_line

LossOf = Callable[[Tensor], Tensor]
"""Outputs [b, …] → the mean of per-example losses."""

_Constants = dict[tuple[str, ...], tuple[float, ...]]
"""Numbers in a loss, by the functions that it calls."""

_UNUSABLE_LOSS = "loss cannot be used with differential privacy"
_RTOL, _ATOL = 1e-3, 1e-6
"""Tolerances relative to a row's gradient and to the longest: far above round-off."""
_MAX_CLASS_WEIGHTS = 1024
"""Most numbers of a tensor of class weights."""

_PLAIN_LOSSES = (
    functional.cross_entropy,
    functional.mse_loss,
    functional.l1_loss,
    functional.smooth_l1_loss,
    functional.huber_loss,
    functional.binary_cross_entropy_with_logits,
)
"""Losses with a mean over rows, without weights, labels to ignore and smoothing."""
_ROW_CHOICES = (Tensor.__getitem__, Tensor.index_select, torch.index_select)
_SELECTIONS = (
    *_ROW_CHOICES,
    *(getattr(Tensor, name) for name in ("to", "long", "int", "float", "double", "bool", "detach", "clone")),
    *(getattr(Tensor, name) for name in ("cpu", "cuda")),
)
"""Functions that select rows of a tensor, or change its type."""
_ROWLESS_PROPERTIES = (
    *(getattr(Tensor, name).__get__ for name in ("dtype", "device", "requires_grad", "is_cuda", "ndim")),
    *(Tensor.dim, Tensor.is_floating_point),
)
"""Properties independent of rows and of their number."""


def is_mean_of_rows(loss_of: LossOf) -> bool:
    """Return whether a loss is wsi-fl's own and marked as the mean of losses of single rows."""
    return type(loss_of).__module__.startswith("wsi_fl.") and bool(getattr(loss_of, "is_mean_of_rows", False))


class RowwiseLoss:
    """A caller's loss as the mean of its values for single rows.

    Args:
        loss_of: the caller's loss.
        constants: numbers in the loss so far, by the functions that it called; they may not change.
        weights: the model's trained parameters, on which a loss may depend by the outputs alone.
    """

    def __init__(self, loss_of: LossOf, constants: _Constants, weights: Sequence[Tensor] = ()) -> None:
        self._loss_of, self._constants, self._weights = loss_of, constants, weights

    def __call__(self, outputs: Tensor, rows: Sequence[int] | None = None) -> Tensor:
        """Return the mean loss of outputs [b, …], with gradients of these rows only, or of all.

        Raises:
            UsageError: when the loss of a row depends on the other rows.
            WsiFlError: of the loss itself.
            OutOfMemoryError: of PyTorch.
        """
        calls = _CallRecorder(outputs)
        try:
            with calls:
                loss = self._loss_of(outputs)
        except (WsiFlError, torch.OutOfMemoryError):
            raise
        except Exception as error:  # any error of a custom loss
            raise UsageError(f"{_UNUSABLE_LOSS}: it cannot be computed ({single_line(error)[:200]})") from error
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            raise UsageError(f"{_UNUSABLE_LOSS}: it must be one number, the mean over the rows; use .mean()")
        if calls.plain_result is loss and select_row(self._loss_of, 0, len(outputs)) is self._loss_of:
            return loss
        places = list(range(len(outputs)) if rows is None else rows)
        if not places:
            return loss.detach()
        try:
            gradients = self._gradients_of_rows(outputs, places, per_class=False)
        except UsageError:
            if outputs.dim() != 2 or len(outputs) != outputs.shape[1]:
                raise
            gradients = self._gradients_of_rows(outputs, places, per_class=True)
        product = (outputs[places] * gradients).sum() / len(outputs)  # its gradients are these
        return loss.detach() + (product - product.detach())

    def _gradients_of_rows(self, outputs: Tensor, rows: list[int], *, per_class: bool) -> Tensor:
        # return the gradients [m, …] of these rows' losses; refuse ones that differ in the batch or a second pass
        constants = dict(self._constants)
        gradients = torch.cat([self._gradient_of_row(outputs, row, constants, per_class) for row in rows])
        if not _are_close(self._gradient_of_row(outputs, rows[0], constants, per_class), gradients[:1]):
            raise UsageError(f"{_UNUSABLE_LOSS}: it changes from one time to the next (a memory, or random numbers)")
        self._require_mean(outputs, rows, gradients)
        self._constants.update(constants)
        return gradients

    def _gradient_of_row(self, outputs: Tensor, row: int, constants: _Constants, per_class: bool) -> Tensor:
        # return [1, …], the gradient of the loss of a row alone by its output; refuse other constants than before
        with torch.enable_grad():
            output = outputs[row : row + 1].detach().requires_grad_()
            view = _SingleRowView(output, row, len(outputs), per_class)
            loss_of = select_row(self._loss_of, row, len(outputs), per_class=per_class)
            try:
                with view:
                    loss = loss_of(output)
                (gradient,) = torch.autograd.grad(loss.sum(), output, materialize_grads=True)
            except Exception as error:  # any error of a custom loss
                raise UsageError(
                    f"{_UNUSABLE_LOSS}: it cannot be computed of one row alone ({single_line(error)[:200]})"
                ) from None
        is_single, present = len(outputs) == 1, tuple(view.numbers)
        if not is_single:  # in a batch of one, numbers of the row look like constants
            present += tuple(collect_numbers(self._loss_of))
        numbers = constants.setdefault((*view.functions, str(is_single)), present)
        if numbers != present:
            changes = [(a, b) for a, b in zip(numbers, present, strict=False) if a != b]
            change = f"was {changes[0][0]:g} and is {changes[0][1]:g}" if changes else "is not there"
            raise UsageError(f"{_UNUSABLE_LOSS}: a number in it {change} in another batch; make it a constant")
        return gradient

    def _require_mean(self, outputs: Tensor, rows: list[int], gradients: Tensor) -> None:
        # refuse a loss whose gradients in the batch are not those of single rows, divided by their number
        with torch.enable_grad():
            batch = outputs.detach().requires_grad_()
            loss = self._loss_of(batch)
            batch_gradient, *weight_gradients = torch.autograd.grad(
                loss.sum(), (batch, *self._weights), allow_unused=True
            )
        if any(gradient is not None for gradient in weight_gradients):
            raise UsageError(
                f"{_UNUSABLE_LOSS}: it depends on the model's weights not only by the outputs (a penalty, or the model "
                "called again), and that gradient has no bound; use weight_decay of the optimizer, or torch.no_grad()"
            )
        in_batch = torch.zeros_like(batch) if batch_gradient is None else batch_gradient
        finite = batch.detach()[rows].flatten(1).isfinite().all(1)  # other rows have no part in the sum
        in_batch, gradients = in_batch[rows][finite], gradients[finite]
        if _are_close(in_batch * len(outputs), gradients):
            return
        if _are_close(in_batch, gradients):
            raise UsageError(
                f"{_UNUSABLE_LOSS}: it does not divide by the number of rows in the batch; use the mean of the losses "
                "of all its rows, .mean()"
            )
        raise UsageError(
            f"{_UNUSABLE_LOSS}: a row's gradient depends on the other rows of its batch, as weights or statistics "
            "of the batch make it; use the mean of losses of single rows"
        )


def loss_of_rows(loss_of: LossOf, outputs: Tensor, rows: Sequence[int]) -> Tensor:
    """Return the loss of outputs [b, …] with gradients of these rows only."""
    return loss_of(outputs, rows) if isinstance(loss_of, RowwiseLoss) else loss_of(outputs)


def _are_close(gradients: Tensor, expected: Tensor) -> bool:
    """Return whether gradients [b, …] of rows are the same but for round-off."""
    if gradients.shape != expected.shape:
        return False
    if torch.equal(gradients.isnan(), expected.isnan()):
        gradients, expected = gradients.nan_to_num(), expected.nan_to_num()
    lengths = expected.flatten(1).norm(dim=1)
    longest = float(lengths.max()) if len(lengths) else 0.0
    return bool(((gradients - expected).flatten(1).norm(dim=1) <= _RTOL * lengths + _ATOL * longest).all())


def _collect_tensors(tree: Any) -> list[Tensor]:
    return [value for value in tree_leaves(tree) if isinstance(value, Tensor)]


class _CallRecorder(TorchFunctionMode):
    """Record whether a loss is one call of a plain mean loss on the outputs.

    Any other use of a tensor's content (a list, an array, an order, a length of it), or a new tensor, is a difference.
    """

    def __init__(self, outputs: Tensor) -> None:
        super().__init__()
        self._outputs: dict[int, Tensor] = {id(outputs): outputs}  # and columns of them
        self._b, self._differs = len(outputs), False
        self._result: Tensor | None = None

    @property
    def plain_result(self) -> Tensor | None:
        """The result of the only call; None where there was another."""
        return None if self._differs else self._result

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        tensors = _collect_tensors((args, kwargs))
        if not isinstance(result, Tensor):
            self._differs |= bool(tensors) and func not in _ROWLESS_PROPERTIES
        elif not any(id(value) in self._outputs for value in tensors):
            mixes = func in _ROW_CHOICES and _selects_within_batch(args, self._b)
            self._differs |= mixes or func not in _SELECTIONS
        elif _is_column(func, args):
            self._outputs[id(result)] = result
        elif self._result is None and func in _PLAIN_LOSSES and self._is_mean(func, args, kwargs):
            self._result = result
        else:
            self._differs = True
        return result

    def _is_mean(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> bool:
        if len(args) > 2 or set(kwargs) - {"input", "target", "reduction", "weight", *_DEFAULT_ARGUMENTS}:
            return False
        named = {**dict(zip(("input", "target"), args, strict=False)), **kwargs}
        outputs, target = named.get("input"), named.get("target")
        usual = {key: value for key, value in _DEFAULT_ARGUMENTS.items() if key in named and named[key] != value}
        if usual or named.get("weight") is not None or named.get("reduction", "mean") != "mean":
            return False
        if (
            not isinstance(outputs, Tensor)
            or id(outputs) not in self._outputs
            or not isinstance(target, Tensor)
            or target.requires_grad  # weights, which have a gradient in every row
        ):
            return False
        # outputs of one dimension are one row of as many classes as the batch has rows
        if func is functional.cross_entropy and outputs.dim() < 2:
            return False
        if target.shape == outputs.shape:
            return True
        classes = func is functional.cross_entropy and target.shape == (len(outputs), *outputs.shape[2:])
        return classes and not bool((target == _IGNORED).any())


_IGNORED = -100
_DEFAULT_ARGUMENTS: Mapping[str, Any] = {
    "ignore_index": _IGNORED,
    "label_smoothing": 0.0,
    "size_average": None,
    "reduce": None,
    "pos_weight": None,
}
"""Arguments of plain losses and their default values."""


def _selects_within_batch(args: Sequence[Any], b: int, row: int | None = None) -> bool:
    """Return whether a call selects some rows within the batch, not all in order, nor a single row by its place."""
    if len(args) < 2 or not isinstance(args[0], Tensor) or not args[0].ndim or len(args[0]) != b:
        return False
    rows = args[-1][0] if isinstance(args[-1], tuple) and args[-1] else args[-1]
    if isinstance(rows, slice):
        return rows.indices(b) != (0, b, 1)
    if isinstance(rows, Tensor):
        return not (rows.shape == (b,) and bool((rows.cpu() == torch.arange(b)).all()))
    # all in their order, or the row's own place
    allowed = (np.arange(b), np.array([-1 if row is None else row]))
    return not (isinstance(rows, list | np.ndarray) and any(np.array_equal(rows, places) for places in allowed))


def _is_column(func: Any, args: Sequence[Any]) -> bool:
    """Return whether a call takes columns of outputs [b, k], or drops an axis of length 1 but the first."""
    if func in (Tensor.squeeze, torch.squeeze):
        return len(args) == 2 and args[1] in (1, -1) and args[0].dim() > 1
    if func is not Tensor.__getitem__ or not isinstance(args[1], tuple):
        return False
    first, *columns = args[1]
    return isinstance(first, slice) and first == slice(None) and all(isinstance(k, int | slice) for k in columns)


class _SingleRowView(TorchFunctionMode):
    """Give a loss one row: its output, and that row of every tensor or array with as many rows as the batch.

    Row selections pass unchanged, so that `y[rows]` is a tensor of the batch before its row is taken.
    """

    def __init__(self, output: Tensor, row: int, b: int, per_class: bool) -> None:
        super().__init__()
        self._row, self._b, self._per_class = row, b, per_class
        self._computed: dict[int, Tensor] = {id(output): output}  # from the row alone
        self._labels: dict[int, Tensor] = {}  # whole numbers that were made fractions
        self.functions: list[str] = []
        self.numbers: list[float] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = _collect_tensors((args, kwargs))
        is_selection = func in _SELECTIONS and not any(id(value) in self._computed for value in tensors)
        if not tensors or (
            is_selection and not (func in _ROW_CHOICES and _selects_within_batch(args, self._b, self._row))
        ):
            result = func(*args, **kwargs)
            if func in _ROW_CHOICES and isinstance(args[-1], list | np.ndarray) and len(args[-1]) == 1:
                self._computed |= {id(value): value for value in _collect_tensors(result)}  # the row's, by its place
            if func not in _ROW_CHOICES and any(map(self._are_labels, tensors)):
                self._labels |= {id(value): value for value in _collect_tensors(result)}  # of another type
            return result
        args, kwargs = tree_map(self._select_row, (args, kwargs))
        result = func(*args, **kwargs)
        if not is_selection:
            self.functions.append(getattr(func, "__name__", str(func)))
        self._computed |= {id(value): value for value in _collect_tensors(result)}
        return result

    def _are_labels(self, value: Tensor) -> bool:
        return not value.is_floating_point() or id(value) in self._labels

    def _select_row(self, value: Any) -> Any:
        if isinstance(value, float):
            self.numbers.append(value)
        if not isinstance(value, Tensor | np.ndarray) or isinstance(value, nn.Parameter) or not value.ndim:
            if isinstance(value, Tensor) and id(value) not in self._computed and not value.ndim:
                self.numbers.append(float(value))
            return value
        if id(value) in self._computed:
            return value
        per_class = self._per_class and isinstance(value, Tensor) and value.is_floating_point()
        if len(value) == self._b and not (per_class and value.ndim == 1):
            return value[self._row : self._row + 1]
        if isinstance(value, Tensor) and self._are_labels(value) and self._b in value.shape:
            return value.narrow(value.shape.index(self._b), self._row, 1)  # labels, one after the other
        if self._b > 1 and len(value) == 1:
            return value  # the row's number, of an array or a list; constants are in `numbers_of`
        if isinstance(value, Tensor) and value.is_floating_point() and value.numel() <= _MAX_CLASS_WEIGHTS:
            self.numbers += value.flatten().tolist()
        return value
