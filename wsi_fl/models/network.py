"""From the pixels of patches to their features: transform, model and pooling as one module that moves as one."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

from wsi_fl.models.presets import PRESETS, Pooling, Preset, Transform, instead_of
from wsi_fl.types import UsageError

_CLASS, _BOTH = "class token", "class token and mean of patches"


class Network(nn.Module):
    """Maps patches uint8[b, h, w, 3] to features float[b, d].

    Args:
        model: a timm model without classifier.
        pooling: what is made of the tokens of a patch; None takes what the model itself pools.

    Attributes:
        pooling: what is made of the tokens or maps of a patch, in words.
    """

    def __init__(self, model: nn.Module, transform: Transform, pooling: Pooling | None = None) -> None:
        super().__init__()
        self.model, self.transform = model, transform
        named = getattr(model, "global_pool", "")
        own = f"pooling {named}" if isinstance(named, str) and named else "the model's own pooling"
        self.pooling = pooling or own
        for name, values in (("mean", transform.mean), ("sd", transform.sd)):
            self.register_buffer(name, torch.tensor(values).view(1, -1, 1, 1), persistent=False)

    def forward(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return features [b, d] of uint8[b, h, w, 3] on the module's own device."""
        return self.of_images(pixels.permute(0, 3, 1, 2).float().div_(255))

    def of_images(self, images: torch.Tensor) -> torch.Tensor:
        """Return features [b, d] of images float32[b, 3, h, w] in [0, 1], which may be overwritten."""
        images = self._normalised(images)
        if self.pooling not in {_CLASS, _BOTH}:
            pooled: torch.Tensor = self.model(images)
            return pooled
        tokens: torch.Tensor = self.model.forward_features(images)  # type: ignore[operator]
        first = tokens[:, 0]
        if self.pooling == _CLASS:
            return first
        patches = tokens[:, self.model.num_prefix_tokens :]
        return torch.cat([first, patches.mean(1)], 1)

    def prepared(self, pixels: torch.Tensor) -> torch.Tensor:
        """Return float32[b, 3, h, w], resized and normalised, of uint8[b, h, w, 3]."""
        return self._normalised(pixels.permute(0, 3, 1, 2).float().div_(255))

    def _normalised(self, images: torch.Tensor) -> torch.Tensor:
        how = self.transform
        size = how.resize_px or how.px
        if size and images.shape[-2:] != (size, size):
            images = functional.interpolate(images, (size, size), mode=how.interpolation, antialias=True)
            images = images.clamp_(0, 1)
        if size and how.px and how.px < size:
            first = (size - how.px) // 2
            images = images[..., first : first + how.px, first : first + how.px]
        return images.sub_(self.mean).div_(self.sd)  # type: ignore[arg-type]


def preset_model(preset: Preset) -> nn.Module:
    """Return the architecture of a preset on PyTorch's meta device: its names and shapes, without memory."""
    import timm
    from timm.layers import SwiGLUPacked

    gated = {"mlp_layer": SwiGLUPacked, "act_layer": nn.SiLU} if preset.swiglu else {}
    with torch.device("meta"):
        model: nn.Module = timm.create_model(
            preset.architecture, pretrained=False, num_classes=0, **preset.arguments, **gated
        )
    return model


def timm_model(name: str) -> nn.Module:
    """Return any timm model without classifier; its random weights are to be replaced.

    Raises:
        UsageError: for a name that timm does not know.
    """
    import timm

    try:
        model: nn.Module = timm.create_model(name, pretrained=False, num_classes=0)
    except Exception as error:  # each architecture has its own way to refuse
        if advice := instead_of(name):
            raise UsageError(f"encoder = {name!r}: {advice}") from None
        reason = (str(error) or type(error).__name__).strip().splitlines()[0]
        near = timm.list_models(f"*{name.split('.', maxsplit=1)[0]}*")[:3]
        hint = f"; near: {', '.join(near)}" if near else ""
        raise UsageError(
            f"encoder = {name!r}: timm makes no such model ({reason}){hint}; presets are {', '.join(PRESETS)}"
        ) from None
    return model


def timm_transform(model: nn.Module, input_px: int | None) -> Transform:
    """Return what timm says of a model's input, at the size that was asked for.

    Args:
        input_px: patches are resized to it; None takes them as they are, or to the model's only size.

    Raises:
        UsageError: when the model takes another size alone.
    """
    from timm.data import resolve_model_data_config

    data = resolve_model_data_config(model)
    interpolation = data["interpolation"] if data["interpolation"] in {"bilinear", "bicubic"} else "bicubic"
    if getattr(model, "pretrained_cfg", {}).get("fixed_input_size"):
        input_px = only_px(int(data["input_size"][-1]), input_px)
    return Transform(tuple(data["mean"]), tuple(data["std"]), input_px, interpolation)


def only_px(only: int, wanted: int | None) -> int:
    """Return the only size that an encoder takes.

    Raises:
        UsageError: when another is wanted.
    """
    if wanted not in {None, only}:
        raise UsageError(f"input_px = {wanted}: this encoder takes patches of {only} px alone; leave it out")
    return only


def own_px(model: nn.Module) -> int:
    """Return the size of images that timm gives a model."""
    from timm.data import resolve_model_data_config

    return int(resolve_model_data_config(model)["input_size"][-1])
