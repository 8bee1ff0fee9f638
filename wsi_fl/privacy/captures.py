"""Values captured by a loss besides tensors: labels in NumPy arrays, pandas tables and lists.

Computations on tensors can be observed (`torch.overrides`), computations on these values cannot. So the loss of one row
gets that row of each of them: in its closure, its defaults, its arguments, its attributes and the global names it uses,
and likewise in functions of the same file that it calls.
"""

from __future__ import annotations

import copy
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import partial
from types import CellType, FunctionType, MethodType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

_MAX_DEPTH, _MAX_ENTRIES = 6, 256
"""Depth to which captured values are followed, and the largest table that is searched."""


def select_row(function: Callable[..., Tensor], row: int, b: int, *, per_class: bool = False) -> Callable[..., Tensor]:
    """Return a loss with this row in the place of every captured value of b rows; the loss itself without one.

    Args:
        function: the caller's loss.
        b: rows of the batch.
        per_class: whether a sequence of b numbers with fractions has one for each class.
    """
    narrowed: Callable[..., Tensor] = function
    if b > 1:
        narrowed = _RowSelector(row, b, per_class, _module_name(function)).select(function)
    return narrowed


class _RowSelector:
    """Select one row of every captured value of b rows; other values are returned unchanged."""

    def __init__(self, row: int, b: int, per_class: bool, module: str | None) -> None:
        self._row, self._b, self._per_class, self._module = row, b, per_class, module

    def select(self, value: Any, depth: int = 0) -> Any:
        if self._has_rows(value):
            rows = slice(self._row, self._row + 1)
            return value.iloc[rows] if hasattr(value, "iloc") else value[rows]
        narrow: Callable[[Any, int], Any] = self._select_in_object
        if isinstance(value, partial):
            narrow = self._select_in_partial
        elif isinstance(value, MethodType):
            narrow = self._select_in_method
        elif type(value) is dict and len(value) <= _MAX_ENTRIES:
            narrow = self._select_in_values
        elif isinstance(value, np.ndarray) and value.dtype.kind in "biu" and self._b in value.shape:
            return value.take([self._row], axis=value.shape.index(self._b))  # labels, one after the other
        elif isinstance(value, list | tuple) and len(value) <= _MAX_ENTRIES:
            narrow = self._select_in_sequence
        elif isinstance(value, torch.jit.ScriptFunction | torch.jit.ScriptModule):
            narrow = self._wrap_script
        elif depth and _module_name(value) != self._module and not _is_record(value):
            return value
        elif isinstance(value, FunctionType):
            narrow = self._select_in_function
        return narrow(value, depth) if depth <= _MAX_DEPTH else value

    def _has_rows(self, value: Any) -> bool:
        is_table = hasattr(value, "iloc")
        if (
            not is_table
            and type(value) not in (list, tuple, array)
            and not (isinstance(value, np.ndarray) and value.ndim)
        ):
            return False
        if len(value) != self._b:
            return False
        return is_table or not (self._per_class and isinstance(value[0], float))

    def _select_in_partial(self, value: partial[Any], depth: int) -> partial[Any]:
        originals = (value.func, *value.args)
        replacements: list[Any] = [self.select(part, depth + 1) for part in originals]
        keywords = self._select_in_values(value.keywords, depth)
        if keywords is value.keywords and _are_same(replacements, originals):
            return value
        return partial(replacements[0], *replacements[1:], **keywords)

    def _select_in_method(self, value: MethodType, depth: int) -> MethodType:
        holder = self.select(value.__self__, depth + 1)
        return value if holder is value.__self__ else MethodType(value.__func__, holder)

    def _select_in_values(self, values: Mapping[str, Any], depth: int) -> Mapping[str, Any]:
        narrowed = {key: self.select(value, depth + 1) for key, value in values.items()}
        return values if _are_same(list(narrowed.values()), list(values.values())) else narrowed

    def _select_in_sequence(self, values: Sequence[Any], depth: int) -> Sequence[Any]:
        narrowed = [self.select(value, depth + 1) for value in values]
        if _are_same(narrowed, values):
            return values
        make: Callable[[list[Any]], Any] = getattr(type(values), "_make", type(values))  # of a namedtuple
        sequence: Sequence[Any] = make(narrowed)
        return sequence

    def _wrap_script(self, function: Callable[..., Any], depth: int) -> Callable[..., Any]:
        """Return a compiled function that gets the row, since its calls cannot be observed."""

        def call_with_row(*args: Any, **kwargs: Any) -> Any:
            return function(
                *map(self._select_in_tensor, args), **{k: self._select_in_tensor(v) for k, v in kwargs.items()}
            )

        return call_with_row

    def _select_in_tensor(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or isinstance(value, nn.Parameter):
            return value
        with torch._C.DisableTorchFunction():  # or a length were that of one row
            has_rows = value.ndim and len(value) == self._b
            return value[self._row : self._row + 1] if has_rows else value

    def _select_in_function(self, function: FunctionType, depth: int) -> FunctionType:
        cells = dict(enumerate(function.__closure__ or ()))
        contents = {str(k): cell.cell_contents for k, cell in cells.items() if _is_filled(cell)}
        names = {name: function.__globals__[name] for name in _global_names(function) if name in function.__globals__}
        defaults = {str(k): value for k, value in enumerate(function.__defaults__ or ())}
        parts = (contents, names, defaults, function.__kwdefaults__ or {})
        replacements = [self._select_in_values(part, depth) for part in parts]
        if _are_same(replacements, parts):
            return function
        contents, names, defaults, keywords = map(dict, replacements)
        closure = tuple(CellType(contents[str(k)]) if str(k) in contents else cell for k, cell in cells.items())
        narrowed = FunctionType(
            function.__code__,
            {**function.__globals__, **names},
            function.__name__,
            tuple(defaults.values()) or None,
            closure or None,
        )
        narrowed.__kwdefaults__ = keywords or None
        return narrowed

    def _select_in_object(self, value: Any, depth: int) -> Any:
        attributes = getattr(value, "__dict__", None)
        if attributes is None or isinstance(value, Tensor | type):
            return value
        narrowed = self._select_in_values(attributes, depth)
        if narrowed is attributes:
            return value
        other = copy.copy(value)
        vars(other).update(narrowed)
        return other


def collect_numbers(function: Any, depth: int = 0) -> list[float]:
    """Return the numbers with fractions in the closure, defaults, arguments and buffers of a loss.

    These are plain numbers and tensors of a single number, also in functions captured there.
    """
    contents: list[Any] = []
    if isinstance(function, partial):
        contents = [function.func, *function.args, *function.keywords.values()]
    elif isinstance(function, FunctionType):
        contents = [cell.cell_contents for cell in function.__closure__ or () if _is_filled(cell)]
        contents += [*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()]
    elif isinstance(function, nn.Module) and not any(True for _ in function.parameters()):
        contents = list(function.buffers())
    numbers: list[float] = []
    for value in contents if depth <= _MAX_DEPTH else ():
        is_number = isinstance(value, float) or (
            isinstance(value, Tensor) and value.numel() == 1 and not value.requires_grad and value.isreal().all()
        )
        numbers += [float(value)] if is_number else collect_numbers(value, depth + 1)
    return numbers


def _is_record(value: Any) -> bool:
    """Return whether an object is a record of values: a namespace or a dataclass."""
    return isinstance(value, SimpleNamespace) or (is_dataclass(value) and not isinstance(value, type))


def _module_name(value: Any) -> str:
    """Return the name of the module in which a function, or the class of an object, was defined."""
    if isinstance(value, partial):
        return _module_name(value.func)
    if isinstance(value, MethodType):
        return _module_name(value.__func__)
    if isinstance(value, FunctionType):
        return str(value.__globals__.get("__name__", ""))
    return type(value).__module__


def _are_same(values: Sequence[Any], others: Sequence[Any]) -> bool:
    return all(a is b for a, b in zip(values, others, strict=True))


def _is_filled(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018 asked for the error
    except ValueError:
        return False
    return True


def _global_names(function: FunctionType) -> set[str]:
    """Return the global names used by a function and by functions within it."""
    codes, names = [function.__code__], set[str]()
    while codes:
        code = codes.pop()
        names |= set(code.co_names)
        codes += [part for part in code.co_consts if isinstance(part, type(code))]
    return names
