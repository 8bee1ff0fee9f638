"""Classifiers of MONAI by name, with random weights; MONAI takes many seconds to import, so only a name of it does."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable
from functools import partial
from typing import cast

from torch import Tensor, nn

from wsi_fl.models.cnn import replace_batch_norm
from wsi_fl.types import Images, UsageError, single_line

_PATCH_PX = 16
"""Width of the patches of a vision transformer, as in the examples of Dosovitskiy et al. (ICLR 2021)."""


def build_monai_model(name: str, n_classes: int, shape: Images) -> nn.Module:
    """Build a network of `monai.networks.nets` that classifies images, with random weights and GroupNorm.

    Args:
        name: a function or class of MONAI such as `resnet18` or `DenseNet121`, or `efficientnet-b0` to `-b8` and `-l2`.

    Raises:
        UsageError: when MONAI has no such network, it classifies no images, it needs a package that is not installed,
            or MONAI builds none of this shape.
    """
    builders = _find_builders(n_classes, shape)
    if name not in builders:
        raise UsageError(_describe_unknown(name, list(builders)))
    try:
        model = builders[name]()
    except ImportError as error:
        package = re.search(r"No module named '(\w+)", str(error))
        missing = f"{package[1]}; pip install {package[1]}" if package else single_line(error)
        raise UsageError(f"monai:{name} needs a package that is not installed: {missing}") from None
    except Exception as error:  # each network has its own way to refuse
        description = f"{n_classes} classes and images of {shape.channels} channels and {shape.size_px} px"
        raise UsageError(f"MONAI makes no {name} of {description}: {single_line(error)}") from None
    return replace_batch_norm(model)


def _find_builders(n_classes: int, shape: Images) -> dict[str, Callable[[], nn.Module]]:
    """Return the constructors of every classifier of such images by its names in MONAI, never with published weights.

    Networks that a name does not determine are missing, such as `Classifier`, which needs widths and strides.
    """
    from monai.networks import nets
    from monai.networks.nets.efficientnet import efficientnet_params

    builders: dict[str, Callable[[], nn.Module]] = {}
    images = {"pretrained": False, "spatial_dims": 2, "in_channels": shape.channels}
    bases = (nets.DenseNet, nets.SENet)
    for name, network in vars(nets).items():
        if re.fullmatch(r"resnet\d+", name) and callable(network):
            sizes = {"spatial_dims": 2, "n_input_channels": shape.channels, "num_classes": n_classes}
            builders[name] = partial(network, pretrained=False, **sizes)
        elif isinstance(network, type) and issubclass(network, bases) and network not in bases:
            outputs = "out_channels" if issubclass(network, nets.DenseNet) else "num_classes"
            builders[name] = partial(network, **images, **{outputs: n_classes})
    for name in efficientnet_params:
        builders[name] = partial(_build_efficientnet, model_name=name, **images, num_classes=n_classes)
    builders["ViT"] = partial(_VisionTransformer, n_classes, shape)
    return builders


def _build_efficientnet(**arguments: object) -> nn.Module:
    """Build an EfficientNet whose activation can be traced: the memory-efficient one is no TorchScript."""
    from monai.networks.nets import EfficientNetBN

    model = EfficientNetBN(**arguments)
    model.set_swish(memory_efficient=False)
    return cast(nn.Module, model)


class _VisionTransformer(nn.Module):
    """MONAI's vision transformer, without its unused layers and the hidden states that it returns beside the logits."""

    def __init__(self, n_classes: int, shape: Images) -> None:
        super().__init__()
        from monai.networks.nets import ViT

        sizes = {"img_size": shape.size_px, "patch_size": _PATCH_PX, "spatial_dims": 2, "in_channels": shape.channels}
        self.model = ViT(**sizes, classification=True, num_classes=n_classes, post_activation=None)
        for block in self.model.blocks:
            block.cross_attn = block.norm_cross_attn = nn.Identity()  # parameters without a gradient

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.model(images)[0]
        return logits


def _describe_unknown(name: str, classifiers: list[str]) -> str:
    """Return the refusal of a name that is no classifier of images, with near ones that are."""
    from monai.networks import nets

    fault = f"MONAI has no network {name!r}"
    if hasattr(nets, name):
        fault = f"MONAI's {name} does not classify images, or needs more than its name"
    spellings = {classifier.lower(): classifier for classifier in reversed(classifiers)}
    near = difflib.get_close_matches(name.lower(), spellings, n=len(spellings), cutoff=_SIMILARITY)
    hint = sorted(map(spellings.__getitem__, near), key=classifiers.index)[:3] or _EXAMPLES
    return f"{fault}; use {', '.join(f'monai:{classifier}' for classifier in hint)}"


_SIMILARITY = 0.75
_EXAMPLES = ["resnet18", "DenseNet121", "SEResNet50", "efficientnet-b0"]
