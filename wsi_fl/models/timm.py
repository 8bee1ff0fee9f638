"""Any timm architecture, its BatchNorm replaced and its activations taken out of place."""

from __future__ import annotations

from typing import Any

import timm
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from wsi_fl.models.norm import FrozenNorm, group_norm
from wsi_fl.types import UsageError


def timm_model(name: str, n_classes: int, in_channels: int) -> nn.Module:
    """The architecture with fresh weights, ready for per-example gradients."""
    what = f"{n_classes} classes and {in_channels} channels"
    return without_batch_norm(created(name, what, num_classes=n_classes, in_chans=in_channels))


def created(name: str, what: str, **arguments: Any) -> Any:
    """Return a timm model with fresh weights, as timm makes it.

    Args:
        what: is asked for, in words.

    Raises:
        UsageError: when timm has no such model, or makes none like that.
    """
    try:
        return timm.create_model(name, pretrained=False, **arguments)
    except Exception as error:  # each architecture has its own way to refuse
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        if timm.is_model(name):
            raise UsageError(f"timm makes no {name} of {what}: {reason}") from None
        near = timm.list_models(f"*{name}*")[:3]
        hint = f"; near: {', '.join(near)}" if near else ""
        raise UsageError(f"timm knows no model {name!r} ({reason}){hint}") from None


def without_batch_norm(model: nn.Module, *, frozen: bool = False) -> nn.Module:
    """Replaces every 2-d BatchNorm by GroupNorm (timm's fused norm-act layers included), in place.

    Args:
        frozen: replaces every BatchNorm by its frozen form instead, with its own statistics, gain and bias.
    """
    for name, child in list(model.named_children()):
        if isinstance(child, _BatchNorm if frozen else nn.BatchNorm2d):
            norm = FrozenNorm(child) if frozen else group_norm(child.num_features)
            after = [getattr(child, part) for part in ("drop", "act") if hasattr(child, part)]
            setattr(model, name, nn.Sequential(norm, *after) if after else norm)
        else:
            without_batch_norm(child, frozen=frozen)
    for module in model.modules():
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]
    return model
