"""Independence of the rows of a batch in a model, by the origin of its modules or by construction.

A row may add at most C to the clipped sum of a batch, so its gradient must not depend on the other rows. A model has
one of three origins:

- *built-in*: every module is one of PyTorch's row-wise layers, or wsi-fl's own. Fast engines compute the gradients,
  after a measurement on two real rows: a softmax can run over the batch, an axis can be mistaken for another.
- *library*: other modules are from timm, torchvision or MONAI. They are measured likewise, and every step checks that a
  forward pass changed no state.
- *custom*: some module has another author. The model never gets two units at a time: a row's gradient is a function of
  that row by construction. A snapshot of the model is restored between rows, so that none leaves state for the next.

A norm over the batch is refused in any case, trained, frozen or without parameters. Not detected: state outside the
model, such as global variables, with a later effect.
"""

from __future__ import annotations

import random
import threading
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from inspect import getattr_static
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules import activation, conv, dropout, flatten, fold, padding, pixelshuffle, pooling, upsampling
from torch.nn.modules import module as module_api
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.modules.instancenorm import _InstanceNorm
from torch.nn.parameter import is_lazy

from wsi_fl.types import UsageError

_ModelOrigin = Literal["built-in", "library", "custom"]

UNTRAINABLE = "model cannot be trained with differential privacy"

_OWN_PACKAGE = "wsi_fl.models."
_LIBRARIES = ("timm.", "torchvision.", "monai.")
_TRUSTED_PACKAGES = (_OWN_PACKAGE, "torch.", *_LIBRARIES)
_SEQUENCE_FIRST = ("MultiheadAttention",)
"""Layers whose first axis need not be the batch."""

_ROWWISE_LAYERS: frozenset[type[nn.Module]] = frozenset(
    {
        kind
        for kinds in (activation, conv, dropout, flatten, fold, padding, pixelshuffle, pooling, upsampling)
        for kind in vars(kinds).values()
        if isinstance(kind, type)
        and issubclass(kind, nn.Module)
        and kind.__module__ == kinds.__name__
        and not kind.__name__.startswith(("_", "Lazy", *_SEQUENCE_FIRST))
    }
    | {nn.Linear, nn.Identity, nn.Sequential, nn.ModuleList, nn.ModuleDict}
    | {nn.GroupNorm, nn.LayerNorm, nn.RMSNorm, nn.LocalResponseNorm}
    | {nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d}  # those with statistics are refused before
)
"""Row-wise layers without state and without random numbers except in dropout, which is off."""

_HOOK_ATTRIBUTES = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL_HOOKS = tuple(f"_global{hooks}" for hooks in _HOOK_ATTRIBUTES)


def model_origin(model: nn.Module) -> _ModelOrigin:
    """Return the origin of a model's modules, on which the check of independence depends.

    Raises:
        UsageError: when a module normalises over the batch, or keeps statistics of it.
    """
    for name, part in model.named_modules():
        if isinstance(part, _NormBase) and not (isinstance(part, _InstanceNorm) and part.running_mean is None):
            raise UsageError(
                f"{UNTRAINABLE}: {type(part).__name__}{f' ({name})' if name else ''} has statistics of the batch, "
                "whether it is trained or not; use GroupNorm"
            )
        if any(map(is_lazy, part.parameters(recurse=False))):
            raise UsageError(
                f"{UNTRAINABLE}: {type(part).__name__}{f' ({name})' if name else ''} has no weights yet; call the "
                "model once on public rows of the same shape, such as zeros, before the optimizer is made"
            )
    hooked = any(p._backward_hooks or getattr(p, "_post_accumulate_grad_hooks", None) for p in model.parameters())
    if hooked or any(map(_is_changed, model.modules())) or any(getattr(module_api, hooks) for hooks in _GLOBAL_HOOKS):
        return "custom"
    other_parts = [part for part in model.modules() if type(part) not in _ROWWISE_LAYERS]
    if not all(type(part).__module__.startswith((_OWN_PACKAGE, *_LIBRARIES)) for part in other_parts):
        return "custom"
    if any(map(_moves_rows, model.modules())):
        return "custom"
    parts = {id(part) for part in model.modules()}
    if not all(_is_trusted(value, parts) for part in other_parts for value in vars(part).values()):
        return "custom"
    return "built-in" if all(type(part).__module__.startswith(_OWN_PACKAGE) for part in other_parts) else "library"


def _is_changed(part: nn.Module) -> bool:
    """Return whether a module has hooks, or it or its class another `forward`."""
    forward = getattr(getattr_static(type(part), "forward"), "__module__", None)
    changed = _is_in_packages(type(part).__module__, _TRUSTED_PACKAGES) and not _is_in_packages(
        forward, _TRUSTED_PACKAGES
    )
    return changed or "forward" in vars(part) or any(getattr(part, hooks, None) for hooks in _HOOK_ATTRIBUTES)


def _moves_rows(part: nn.Module) -> bool:
    """Return whether a layer moves the axis of rows, so that later layers may mix rows."""
    if isinstance(part, nn.Flatten):
        return part.start_dim == 0
    if isinstance(part, nn.Unflatten):
        return part.dim == 0
    dims = getattr(part, "dims", (0,)) if type(part).__name__ == "Permute" else (0,)
    return not dims or dims[0] != 0


def _is_in_packages(name: str | None, packages: tuple[str, ...]) -> bool:
    """Return whether a module of Python lies in one of these packages."""
    return f"{name}.".startswith(packages)


def _is_trusted(value: object, modules: set[int], depth: int = 0) -> bool:
    """Return whether an attribute is data, a module of these ids, or code of PyTorch, a library or wsi-fl."""
    if value is None or type(value) in (bool, int, float, str):  # the usual case
        return True
    parts: tuple[object, ...] | None = None
    if isinstance(value, partial):
        parts = value.func, value.args, value.keywords
    elif isinstance(value, MethodType):
        parts = value.__func__, value.__self__
    elif isinstance(value, Mapping):
        parts = tuple(value.values())
    elif type(value) in (list, tuple, set, frozenset):
        parts = tuple(value)  # type: ignore[arg-type]
    if parts is not None:
        return depth < _MAX_DEPTH and all(_is_trusted(part, modules, depth + 1) for part in parts)
    if isinstance(value, nn.Module):
        return id(value) in modules
    if isinstance(value, BuiltinFunctionType | ModuleType):
        return True
    if isinstance(value, torch.jit.ScriptFunction):
        return False
    origin = value.__module__ if isinstance(value, FunctionType | type) else type(value).__module__
    return _is_in_packages(origin, (*_TRUSTED_PACKAGES, "builtins.", "enum.", "numpy."))


def train_without_dropout(model: nn.Module) -> None:
    """Set training mode where a module has parameters. Dropout has none; its random mask would need to be secret."""
    for part in model.modules():
        part.training = any(True for _ in part.parameters(recurse=False))


class ModelSnapshot:
    """A snapshot of a model's state before a step, restored so that no row affects the next.

    Args:
        attributes: whether modules are custom, and may hold more than parameters and buffers.
    """

    def __init__(self, model: nn.Module, *, attributes: bool) -> None:
        self._model, self._attributes = model, attributes
        self._saved = [(part, dict(vars(part))) for part in model.modules()] if attributes else []
        self._contents_before, self._random_before = self._digest_contents(), _random_states()

    def restore(self) -> None:
        """Restore the attributes, which may hold outputs of the last row."""
        for part, saved in self._saved:
            present = vars(part)
            if len(present) != len(saved) or any(present.get(key, saved) is not saved[key] for key in saved):
                present.clear()
                present.update(saved)

    def require_unchanged(self, forward: Callable[[], object]) -> None:
        """Refuse a model in which rows left state, after its attributes were restored.

        Args:
            forward: computes a forward pass again. Generators belong to the whole process, so with other threads
                running this decides who drew from them.

        Raises:
            UsageError: naming what changed, or that random numbers were drawn.
        """
        if _random_states() != self._random_before and self._is_random(forward):
            raise UsageError(f"{UNTRAINABLE}: it draws random numbers in training; set its dropout to 0")
        contents = self._digest_contents()
        for name in self._contents_before.keys() | contents.keys():
            if self._contents_before.get(name) != contents.get(name):
                raise UsageError(
                    f"{UNTRAINABLE}: a forward pass changes its {name}, which stores rows without noise; make it a "
                    "constant, or if it depends on the rows' shape alone call the model once on zeros before"
                )

    def _is_random(self, forward: Callable[[], object]) -> bool:
        """Return whether each of several forward passes draws random numbers; True without other threads."""
        if threading.active_count() == 1:
            return True
        for _ in range(_FORWARD_PASSES):
            state = _random_states()
            with torch.no_grad():
                forward()
            self.restore()
            if _random_states() == state:
                return False
        return True

    def _digest_contents(self) -> dict[str, object]:
        contents: dict[str, object] = {}
        for name, part in self._model.named_modules():
            prefix = f"{name}." if name else ""
            for key, tensor in (*part._parameters.items(), *part._buffers.items()):
                contents[prefix + key] = _content_key(tensor)
            if self._attributes:
                values = {key: value for key, value in vars(part).items() if key not in _MODULE_ATTRIBUTES}
                contents |= {prefix + key: _content_key(value) for key, value in values.items()}
        return contents


_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
_FORWARD_PASSES = 20
"""Forward passes of one row; another thread seldom draws random numbers during all of them."""


def _content_key(value: object, depth: int = 0) -> object:
    """Return a key of a value that changes when the value is changed in place."""
    content: object = id(value)
    if isinstance(value, Tensor):
        content = id(value), 0 if value.is_inference() else value._version, _tensor_checksum(value)
    elif isinstance(value, np.ndarray):
        content = id(value), hash(value.tobytes())
    elif value is None or isinstance(value, str | bytes | bytearray | array | int | float):
        content = repr(value)
    elif depth > _MAX_DEPTH or isinstance(value, nn.Module | type | FunctionType | BuiltinFunctionType | MethodType):
        pass
    elif isinstance(value, Mapping):
        content = [(id(key), _content_key(item, depth + 1)) for key, item in value.items()]
    elif isinstance(value, list | tuple | set | frozenset | deque):
        content = [_content_key(item, depth + 1) for item in value]
    else:
        slots = [name for kind in type(value).__mro__ for name in _as_strings(vars(kind).get("__slots__", ()))]
        attributes = {name: getattr(value, name, None) for name in slots} | getattr(value, "__dict__", {})
        content = id(value), _content_key(attributes, depth + 1)
    return content


_MAX_DEPTH = 4


def _as_strings(names: str | Iterable[str]) -> Iterable[str]:
    return (names,) if isinstance(names, str) else names


@torch.no_grad()
def _tensor_checksum(tensor: Tensor) -> object:
    """Return a sum of a tensor's bits, since writing by `.data` leaves its version unchanged."""
    if tensor.layout != torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        return None
    numbers = torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor
    kind = _INTEGER_TYPES[numbers.element_size()]
    bits = numbers.detach().contiguous().flatten().view(kind)
    return int(bits.sum(dtype=torch.int64))


_INTEGER_TYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _random_states() -> object:
    """Return the states of all generators available to a model without its own seed."""
    on_gpu = torch.cuda.get_rng_state() if torch.cuda._initialized else None
    of_torch = [state.numpy().tobytes() for state in (torch.get_rng_state(), on_gpu) if state is not None]
    name, keys, *generator_state = np.random.get_state()  # noqa: NPY002 custom code may draw from it
    return of_torch, random.getstate(), name, np.asarray(keys).tobytes(), generator_state
