"""Encoders that groups already have: one table of facts.

`docs/encoders.md` has the table. It says where the facts were read, and which are assumed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from wsi_fl.plugins import Table

if TYPE_CHECKING:
    from torch import nn

Pooling = Literal["class token", "class token and mean of patches", "the model's own pooling"]
Rgb = tuple[float, float, float]

HUB_FILES = ("model.safetensors", "pytorch_model.bin")
"""What weights are called on the hub, in the order in which they are wanted."""

_IMAGENET: tuple[Rgb, Rgb] = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_HALF: tuple[Rgb, Rgb] = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
_BIOPTIMUS: tuple[Rgb, Rgb] = ((0.707223, 0.578729, 0.703617), (0.211883, 0.230117, 0.177517))
_LUNIT: tuple[Rgb, Rgb] = ((0.70322989, 0.53606487, 0.66096631), (0.21716536, 0.26081574, 0.20723464))
_HIBOU: tuple[Rgb, Rgb] = ((0.7068, 0.5755, 0.722), (0.195, 0.2316, 0.1816))

_NO_DERIVATIVES = "CC BY-NC-ND 4.0"
_OWKIN, _KAIKO, _LUNIT_LICENCE = "Owkin non-commercial", "Kaiko non-commercial", "Lunit, research only"
_ON_CARD = "see the model card"
_GIB, _BYTES, _COPIES = 1 << 30, 4, 2
"""Weights are single precision; while they are read they are there twice."""
_EVERY_MPP = (0.25, 0.5, 1.0, 2.0)


@dataclass(frozen=True)
class Transform:
    """What is done to the pixels of a patch before a model sees them.

    Attributes:
        mean, sd: per channel, of values from 0 to 1.
        px: width and height of what the model sees; None takes patches as they are.
        interpolation: by which patches are resized.
        resize_px: patches are resized to it and the middle `px` are kept; None stands for `px`.
    """

    mean: Rgb
    sd: Rgb
    px: int | None
    interpolation: str
    resize_px: int | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """In words: mean, sd, and how patches get their size."""
        if self.px is None:
            size = "not resized"
        elif self.resize_px in {None, self.px}:
            size = f"{self.interpolation} to {self.px} px"
        else:
            size = f"{self.interpolation} to {self.resize_px} px, the middle {self.px} px"
        return f"mean {_said(self.mean)}", f"sd {_said(self.sd)}", size

    def mpp_seen(self, size_px: int, mpp: float) -> float:
        """Return the µm per pixel of what the model sees of patches of this size and resolution."""
        to = self.resize_px or self.px
        return mpp * size_px / to if to else mpp


def _said(values: Rgb) -> str:
    return " ".join(f"{value:g}" for value in values)


@dataclass(frozen=True)
class Preset:
    """Facts of one published encoder.

    Attributes:
        architecture: timm's name, or any where `build` makes it.
        n_features: d.
        n_parameters: of the model as it is built here.
        hub_id: of its weights on the Hugging Face hub; "" where they are not there.
        licence: of the weights; who uses them keeps to it.
        mpp: µm per pixel of the patches that it was trained on; empty where the authors do not say.
        pooling: how its tokens become features. A vision transformer has a class token; a convolutional network has its
            own pooling.
        arguments: of the architecture.
        swiglu: whether its MLPs are SwiGLU where timm's architecture has others.
        build: makes an encoder that timm has not, from a file of weights or from its own (None): a module from
            normalised images float32[b, 3, px, px] to features float32[b, d] where the pooling is its own.
    """

    architecture: str
    n_features: int
    n_parameters: int
    transform: Transform
    hub_id: str
    licence: str
    mpp: tuple[float, ...] = (0.5,)
    pooling: Pooling = "class token"
    arguments: Mapping[str, Any] = field(default_factory=dict)
    swiglu: bool = False
    build: Callable[[Path | None], nn.Module] | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """What tells it apart besides its name and weights, in words."""
        return (*self.transform.parts, self.pooling, *([f"trained at {self.said_mpp}"] if self.mpp else []))

    @property
    def needed_bytes(self) -> int:
        """Estimate of the memory that it takes with a batch of patches."""
        return _COPIES * _BYTES * self.n_parameters + _GIB

    @property
    def said_mpp(self) -> str:
        return f"{', '.join(f'{one:g}' for one in self.mpp)} µm/px" if self.mpp else "not stated"


def _to_224(colours: tuple[Rgb, Rgb], interpolation: str, resize_px: int | None = None) -> Transform:
    return Transform(*colours, 224, interpolation, resize_px)


_BOTH: Pooling = "class token and mean of patches"
_SCALED = {"img_size": 224, "init_values": 1e-5}


def _virchow(hub_id: str, licence: str, n_parameters: int, mpp: tuple[float, ...], **more: Any) -> Preset:
    arguments = {**_SCALED, "mlp_ratio": 5.3375, **more}
    transform = _to_224(_IMAGENET, "bicubic")
    return Preset(
        "vit_huge_patch14_224", 2560, n_parameters, transform, hub_id, licence, mpp, _BOTH, arguments, True
    )


def _h_optimus(hub_id: str, licence: str) -> Preset:
    transform = _to_224(_BIOPTIMUS, "bilinear")
    name = "vit_giant_patch14_reg4_dinov2"
    return Preset(name, 1536, 1134774272, transform, hub_id, licence, arguments=_SCALED)


def _kaiko(
    architecture: str, n_features: int, n_parameters: int, on_hub: str | None = None, **arguments: Any
) -> Preset:
    hub_id = f"1aurent/{on_hub or architecture}.kaiko_ai_towards_large_pathology_fms"
    transform = _to_224(_HALF, "bilinear")
    return Preset(
        architecture, n_features, n_parameters, transform, hub_id, _KAIKO, _EVERY_MPP, arguments=arguments
    )


def _lunit(architecture: str, n_parameters: int) -> Preset:
    transform = _to_224(_LUNIT, "bicubic")
    hub_id = f"1aurent/{architecture}.lunit_dino"
    return Preset(architecture, 384, n_parameters, transform, hub_id, _LUNIT_LICENCE, (0.25, 0.5))


def _hibou(architecture: str, n_features: int, n_parameters: int, hub_id: str, mlp_ratio: float) -> Preset:
    transform = _to_224(_HIBOU, "bicubic")
    arguments = {"img_size": 224, "mlp_ratio": mlp_ratio}
    return Preset(
        architecture,
        n_features,
        n_parameters,
        transform,
        hub_id,
        "Apache 2.0",
        (),
        "class token",
        arguments,
        True,
    )


_OWN = {
    "uni": Preset(
        "vit_large_patch16_224",
        1024,
        303350784,
        _to_224(_IMAGENET, "bilinear"),
        "MahmoodLab/UNI",
        _NO_DERIVATIVES,
        arguments=_SCALED,
    ),
    "uni2-h": Preset(
        "vit_giant_patch14_224",
        1536,
        681394176,
        _to_224(_IMAGENET, "bilinear"),
        "MahmoodLab/UNI2-h",
        _NO_DERIVATIVES,
        arguments={
            **_SCALED,
            "embed_dim": 1536,
            "depth": 24,
            "num_heads": 24,
            "mlp_ratio": 5.33334,
            "reg_tokens": 8,
            "no_embed_class": True,
        },
        swiglu=True,
    ),
    "virchow": _virchow("paige-ai/Virchow", "Apache 2.0", 631229184, (0.5,)),
    "virchow2": _virchow("paige-ai/Virchow2", _NO_DERIVATIVES, 631239424, _EVERY_MPP, reg_tokens=4),
    "h-optimus-0": _h_optimus("bioptimus/H-optimus-0", "Apache 2.0"),
    "h-optimus-1": _h_optimus("bioptimus/H-optimus-1", _ON_CARD),
    "h0-mini": Preset(
        "vit_base_patch14_reg4_dinov2",
        1536,
        85739520,
        _to_224(_BIOPTIMUS, "bicubic"),
        "bioptimus/H0-mini",
        _ON_CARD,
        pooling=_BOTH,
        arguments={"img_size": 224, "mlp_ratio": 5.33334},
        swiglu=True,
    ),
    "gigapath": Preset(
        "vit_giant_patch14_dinov2",
        1536,
        1134953984,
        _to_224(_IMAGENET, "bicubic", 256),
        "prov-gigapath/prov-gigapath",
        _ON_CARD,
        arguments={**_SCALED, "patch_size": 16, "mlp_ratio": 5.33334},
    ),
    "phikon": Preset(
        "vit_base_patch16_224", 768, 85798656, _to_224(_IMAGENET, "bilinear"), "owkin/phikon", _OWKIN
    ),
    "phikon-v2": Preset(
        "vit_large_patch16_224",
        1024,
        303350784,
        _to_224(_IMAGENET, "bicubic"),
        "owkin/phikon-v2",
        _OWKIN,
        arguments=_SCALED,
    ),
    "kaiko-vits8": _kaiko("vit_small_patch8_224", 384, 21670272),
    "kaiko-vits16": _kaiko("vit_small_patch16_224", 384, 21665664),
    "kaiko-vitb8": _kaiko("vit_base_patch8_224", 768, 85807872),
    "kaiko-vitb16": _kaiko("vit_base_patch16_224", 768, 85798656),
    "kaiko-vitl14": _kaiko(
        "vit_large_patch14_reg4_dinov2",
        1024,
        304370688,
        "vit_large_patch14_reg4_224",
        dynamic_img_size=True,
    ),
    "lunit-vits8": _lunit("vit_small_patch8_224", 21670272),
    "lunit-vits16": _lunit("vit_small_patch16_224", 21665664),
    "hibou-b": _hibou("vit_base_patch14_reg4_dinov2", 768, 85739520, "histai/hibou-b", 5.33334),
    "hibou-l": _hibou("vit_large_patch14_reg4_dinov2", 1024, 303657216, "histai/hibou-L", 5.34375),
    "midnight-12k": Preset(
        "vit_giant_patch14_dinov2",
        3072,
        1134769664,
        _to_224(_HALF, "bilinear"),
        "kaiko-ai/midnight",
        "MIT",
        _EVERY_MPP,
        _BOTH,
        {"img_size": 224},
    ),
}

PRESETS = Table("wsi_fl.encoders", _OWN, Preset)
"""By the name that an encoder is asked for; another package adds its own as entry points of `wsi_fl.encoders`."""

_OTHER_NAMES = {"univ1": "uni", "univ2": "uni2h", "uni2": "uni2h", "midnight": "midnight12k"}
"""What other tools call them, where that is another word."""


def preset_called(name: str) -> str | None:
    """Return the preset that another tool's name of an encoder stands for; None where it stands for none.

    Example:
        >>> [preset_called(name) for name in ("uni_v1", "mahmood-uni-77ffbca1", "UNI2", "hoptimus0", "conch")]
        ['uni', 'uni', 'uni2-h', 'h-optimus-0', None]
    """
    bare = _letters(re.sub("^mahmood-|-[0-9a-f]{8}$", "", name.lower()))
    return next((one for one in PRESETS if _letters(one) == _OTHER_NAMES.get(bare, bare)), None)


_NOT_HERE = {
    "conch": "has attention pooling of its own",
    "titan": "makes one vector of a whole slide",
    "prism": "makes one vector of a whole slide",
    "musk": "has an architecture of its own",
    "ctranspath": "has an architecture of its own",
    "keep": "has a projection of its own",
    "gpfm": "has weights under names of their own",
    "mstar": "has weights under names of their own",
}
"""Encoders that are no presets, by the letters that their names begin with."""


def instead_of(name: str) -> str | None:
    """Say in words what to do where no encoder has this name; None where nobody knows.

    Example:
        >>> instead_of("UNI2"), instead_of("conch_v15").split(";")[0]
        ("did you mean 'uni2-h'?", 'it has attention pooling of its own, so it is no preset')
    """
    if meant := preset_called(name):
        return f"did you mean {meant!r}?"
    why = next((said for one, said in _NOT_HERE.items() if _letters(name.lower()).startswith(one)), None)
    advice = "extract its features with TRIDENT or STAMP, then `wsi-fl import --format trident`"
    return why and f"it {why}, so it is no preset; {advice}"


def _letters(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name)


def warning_of(name: str, size_px: int, mpp: float) -> str | None:
    """Say that patches show an encoder another resolution than it was trained on; None where not, or unknown.

    Example:
        >>> warning_of("uni", 224, 0.25)
        'uni was trained at 0.5 µm/px; patches of 224 px at 0.25 µm/px show it 0.25 µm/px'
        >>> warning_of("uni", 448, 0.25) is warning_of("resnet50", 64, 9) is None
        True
    """
    preset = PRESETS.get(name)
    if preset is None or not preset.mpp:
        return None
    seen = preset.transform.mpp_seen(size_px, mpp)
    if any(abs(seen / one - 1) <= _NEAR for one in preset.mpp):
        return None
    return f"{name} was trained at {preset.said_mpp}; patches of {size_px} px at {mpp:g} µm/px show it {seen:.3g} µm/px"


_NEAR = 0.2
"""256 px at 0.5 µm/px, reduced to 224, are what most groups give to encoders of 0.5 µm/px."""
