"""Any timm architecture, its BatchNorm replaced by GroupNorm and its activations taken out of place."""

from __future__ import annotations

import timm
from torch import nn

from wsi_fl.models.norm import group_norm
from wsi_fl.types import UsageError


def timm_model(name: str, n_classes: int, in_channels: int) -> nn.Module:
    """The architecture with fresh weights, ready for per-example gradients."""
    try:
        model: nn.Module = timm.create_model(
            name, pretrained=False, num_classes=n_classes, in_chans=in_channels
        )
    except Exception as error:  # each architecture has its own way to refuse
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        if timm.is_model(name):
            what = f"{n_classes} classes and {in_channels} channels"
            raise UsageError(f"timm makes no {name} of {what}: {reason}") from None
        near = timm.list_models(f"*{name}*")[:3]
        hint = f"; near: {', '.join(near)}" if near else ""
        raise UsageError(f"timm knows no model {name!r} ({reason}){hint}") from None
    return without_batch_norm(model)


def without_batch_norm(model: nn.Module) -> nn.Module:
    """Replaces every 2-d BatchNorm by GroupNorm (timm's fused norm-act layers included), in place."""
    for name, child in list(model.named_children()):
        if isinstance(child, nn.BatchNorm2d):
            norm = group_norm(child.num_features)
            after = [getattr(child, part) for part in ("drop", "act") if hasattr(child, part)]
            setattr(model, name, nn.Sequential(norm, *after) if after else norm)
        else:
            without_batch_norm(child)
    for module in model.modules():
        if getattr(module, "inplace", False) is True:
            module.inplace = False  # type: ignore[assignment]
    return model
