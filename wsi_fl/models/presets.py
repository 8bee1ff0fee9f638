"""Presets of published encoders.

`docs/how-to/prepare-data.md` has the table, with the sources of all facts and the assumed ones.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from math import isclose
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from wsi_fl.plugins import PluginTable

if TYPE_CHECKING:
    from torch import nn

Pooling = Literal["class token", "class token and mean of patches", "the model's own pooling"]
_Rgb = tuple[float, float, float]

HUB_FILES = ("model.safetensors", "pytorch_model.bin")
"""File names of weights on the hub, in order of preference."""

_MPP_TOLERANCE = 0.2  # most groups use 256 px at 0.5 µm/px, resized to 224, with encoders of 0.5 µm/px


@dataclass(frozen=True)
class Transform:
    """Preprocessing of a patch's pixels for a model.

    Attributes:
        mean, sd: per channel, of values from 0 to 1.
        px: width and height of the model's input; None for those of the patches.
        interpolation: method of resizing.
        resize_px: size of resized patches before a centre crop to `px`; None for `px`.
    """

    mean: _Rgb
    sd: _Rgb
    px: int | None
    interpolation: str
    resize_px: int | None = None

    @property
    def parts(self) -> tuple[str, ...]:
        """Return mean, sd and resizing in words."""
        if self.px is None:
            size = "not resized"
        elif self.resize_px in {None, self.px}:
            size = f"{self.interpolation} to {self.px} px"
        else:
            size = f"{self.interpolation} to {self.resize_px} px, the middle {self.px} px"
        return f"mean {_format_rgb(self.mean)}", f"sd {_format_rgb(self.sd)}", size

    def resize_shape(self, size_px: int | None) -> tuple[int | None, int | None, str]:
        """Return the side after resizing and after cropping, and how patches of a size are resized, "" where not."""
        resized_px = self.resize_px or self.px or size_px
        return resized_px, self.px or size_px, "" if resized_px == size_px else self.interpolation

    def makes_same_images(self, other: Transform, size_px: int | None) -> bool:
        """Return whether another transform makes the same images of patches of a size."""
        colours = ((*self.mean, *self.sd), (*other.mean, *other.sd))
        is_same = all(isclose(a, b, abs_tol=1e-4) for a, b in zip(*colours, strict=True))
        return is_same and self.resize_shape(size_px) == other.resize_shape(size_px)


def _format_rgb(values: _Rgb) -> str:
    return " ".join(f"{value:g}" for value in values)


@dataclass(frozen=True)
class Preset:
    """Facts of one published encoder.

    Attributes:
        architecture: timm's name, or any with `build`.
        n_features: d.
        n_parameters: of the model as built here.
        hub_id: of its weights on the Hugging Face hub; "" without.
        hub_files: possible names of its file of weights there, in order of preference.
        mpp: µm per pixel of its training patches; empty where not published.
        pooling: from tokens to features. A vision transformer has a class token; a convolutional network has its own
            pooling.
        arguments: of the architecture.
        swiglu: whether its MLPs are SwiGLU instead of those of timm's architecture.
        build: builds an encoder that is not in timm, from a file of weights or from its own (None): a module from
            normalised images float32[b, 3, px, px] to features float32[b, d] with its own pooling.
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
    hub_files: tuple[str, ...] = HUB_FILES

    @property
    def parts(self) -> tuple[str, ...]:
        """Return preprocessing, pooling and resolution in words."""
        return (*self.transform.parts, self.pooling, *([f"trained at {self.mpp_text}"] if self.mpp else []))

    @property
    def memory_bytes(self) -> int:
        """Return the estimated memory with a batch of patches: weights in float32, twice while they are read."""
        return 2 * 4 * self.n_parameters + (1 << 30)

    @property
    def mpp_text(self) -> str:
        return f"{', '.join(f'{value:g}' for value in self.mpp)} µm/px" if self.mpp else "not stated"


_IMAGENET = Transform((0.485, 0.456, 0.406), (0.229, 0.224, 0.225), 224, "bilinear")
_IMAGENET_BICUBIC = replace(_IMAGENET, interpolation="bicubic")
_HALF = Transform((0.5, 0.5, 0.5), (0.5, 0.5, 0.5), 224, "bilinear")
_GIGAPATH = replace(_IMAGENET_BICUBIC, resize_px=256)
_BIOPTIMUS = Transform((0.707223, 0.578729, 0.703617), (0.211883, 0.230117, 0.177517), 224, "bicubic")
_LUNIT = Transform((0.70322989, 0.53606487, 0.66096631), (0.21716536, 0.26081574, 0.20723464), 224, "bicubic", 248)
_GENBIO = Transform((0.697, 0.575, 0.728), (0.188, 0.240, 0.187), 224, "bilinear")
_HIBOU = Transform((0.7068, 0.5755, 0.722), (0.195, 0.2316, 0.1816), 224, "bicubic")

_VIT_S16, _VIT_B16, _VIT_L16 = (f"vit_{size}_patch16_224" for size in ("small", "base", "large"))
_VIT_L14, _VIT_G14 = (f"vit_{size}_patch14_dinov2" for size in ("large", "giant"))
_VIT_B14_REG, _VIT_L14_REG, _VIT_G14_REG = (f"vit_{size}_patch14_reg4_dinov2" for size in ("base", "large", "giant"))
"""timm's names of vision transformers: size, side of a token's patch, and whether with registers."""
_APACHE, _NO_DERIVATIVES, _ON_CARD = "Apache 2.0", "CC BY-NC-ND 4.0", "see the model card"
_ALL_MPP = (0.25, 0.5, 1.0, 2.0)
_CLASS_AND_MEAN: Pooling = "class token and mean of patches"
_224: dict[str, object] = {"img_size": 224}
_SCALED = {**_224, "init_values": 1e-5}
_WIDE = {"mlp_ratio": 5.33334}
_GENBIO_SIZE = {"embed_dim": 1536, "depth": 40, "num_heads": 24, "mlp_ratio": 8 / 3}
_FLASH = {**_SCALED, "mlp_ratio": 2048 / 384}
_UNI2 = {"embed_dim": 1536, "depth": 24, "num_heads": 24, "reg_tokens": 8, "no_embed_class": True}


def _virchow_preset(n_parameters: int, hub_id: str, licence: str, mpp: tuple[float, ...], **more: Any) -> Preset:
    arguments, name = {**_SCALED, "mlp_ratio": 5.3375, **more}, "vit_huge_patch14_224"
    return Preset(
        name, 2560, n_parameters, _IMAGENET_BICUBIC, hub_id, licence, mpp, _CLASS_AND_MEAN, arguments, swiglu=True
    )


def _giant_preset(hub_id: str, licence: str, transform: Transform = _BIOPTIMUS, **more: Any) -> Preset:
    return Preset(_VIT_G14_REG, 1536, 1134774272, transform, hub_id, licence, arguments=_SCALED, **more)


def _kaiko_preset(name: str, n_features: int, n_parameters: int, on_hub: str = "", **arguments: Any) -> Preset:
    hub_id, licence = f"1aurent/{on_hub or name}.kaiko_ai_towards_large_pathology_fms", "Kaiko non-commercial"
    return Preset(name, n_features, n_parameters, _HALF, hub_id, licence, _ALL_MPP, arguments=arguments)


def _lunit_preset(name: str, n_parameters: int) -> Preset:
    hub_id, licence = f"1aurent/{name}.lunit_dino", "Lunit, research only"
    return Preset(name, 384, n_parameters, _LUNIT, hub_id, licence, (0.25, 0.5))


def _hibou_preset(name: str, n_features: int, n_parameters: int, hub_id: str, mlp_ratio: float) -> Preset:
    arguments = {**_224, "mlp_ratio": mlp_ratio}
    return Preset(name, n_features, n_parameters, _HIBOU, hub_id, _APACHE, (), arguments=arguments, swiglu=True)


def _build_genbio(weights: Path | None) -> nn.Module:
    from wsi_fl.models.genbio import build_genbio  # and with it PyTorch

    return build_genbio(weights)


_OWKIN = "Owkin non-commercial"
_BUILTIN_PRESETS = {
    "gigapath-flash": Preset(
        _VIT_S16, 384, 21681024, _GIGAPATH, "prov-gigapath/prov-gigapath-flash", _APACHE, arguments=_FLASH, swiglu=True
    ),
    "kaiko-vits8": _kaiko_preset("vit_small_patch8_224", 384, 21670272),
    "kaiko-vits16": _kaiko_preset(_VIT_S16, 384, 21665664),
    "lunit-vits8": _lunit_preset("vit_small_patch8_224", 21670272),
    "lunit-vits16": _lunit_preset(_VIT_S16, 21665664),
    "uni": Preset(_VIT_L16, 1024, 303350784, _IMAGENET, "MahmoodLab/UNI", _NO_DERIVATIVES, arguments=_SCALED),
    "uni2-h": Preset(
        *("vit_giant_patch14_224", 1536, 681394176, _IMAGENET, "MahmoodLab/UNI2-h", _NO_DERIVATIVES),
        arguments=_SCALED | _WIDE | _UNI2,
        swiglu=True,
    ),
    "virchow": _virchow_preset(631229184, "paige-ai/Virchow", _APACHE, (0.5,)),
    "virchow2": _virchow_preset(631239424, "paige-ai/Virchow2", _NO_DERIVATIVES, _ALL_MPP, reg_tokens=4),
    "h-optimus-0": _giant_preset("bioptimus/H-optimus-0", _APACHE),
    "h-optimus-1": _giant_preset("bioptimus/H-optimus-1", _ON_CARD),
    "h0-mini": Preset(
        *(_VIT_B14_REG, 1536, 85739520, _BIOPTIMUS, "bioptimus/H0-mini", _ON_CARD),
        pooling=_CLASS_AND_MEAN,
        arguments=_224 | _WIDE,
        swiglu=True,
    ),
    "gigapath": Preset(
        *(_VIT_G14, 1536, 1134953984, _GIGAPATH, "prov-gigapath/prov-gigapath", _ON_CARD),
        arguments={**_SCALED, "patch_size": 16, **_WIDE},
    ),
    "phikon": Preset(_VIT_B16, 768, 85798656, _IMAGENET, "owkin/phikon", _OWKIN),
    "phikon-v2": Preset(_VIT_L16, 1024, 303350784, _IMAGENET_BICUBIC, "owkin/phikon-v2", _OWKIN, arguments=_SCALED),
    "kaiko-vitb8": _kaiko_preset("vit_base_patch8_224", 768, 85807872),
    "kaiko-vitb16": _kaiko_preset(_VIT_B16, 768, 85798656),
    "kaiko-vitl14": _kaiko_preset(_VIT_L14_REG, 1024, 304370688, "vit_large_patch14_reg4_224", dynamic_img_size=True),
    "hibou-b": _hibou_preset(_VIT_B14_REG, 768, 85739520, "histai/hibou-b", 5.33334),
    "hibou-l": _hibou_preset(_VIT_L14_REG, 1024, 303657216, "histai/hibou-L", 5.34375),
    "midnight-12k": Preset(
        _VIT_G14, 3072, 1134769664, _HALF, "kaiko-ai/midnight", "MIT", _ALL_MPP, _CLASS_AND_MEAN, arguments=_224
    ),
    "openmidnight": _giant_preset(
        "SophontAI/OpenMidnight", _ON_CARD, _IMAGENET, mpp=(), hub_files=("teacher_checkpoint_load.pt",)
    ),
    "gpfm": Preset(
        _VIT_L14, 1024, 303227904, _IMAGENET_BICUBIC, "majiabo/GPFM", "MIT", arguments=_SCALED, hub_files=("GPFM.pth",)
    ),
    "mstar": Preset(_VIT_L16, 1024, 303350784, _IMAGENET_BICUBIC, "Wangyh/mSTAR", _ON_CARD, arguments=_SCALED),
    "genbio-pathfm": Preset(
        *("vit_7b_patch16_dinov3", 4608, 1133686784, _GENBIO, "genbio-ai/genbio-pathfm"),
        licence="GenBio AI Community, non-commercial",
        mpp=(),
        pooling="the model's own pooling",
        arguments={**_224, "in_chans": 1, "global_pool": "token", **_GENBIO_SIZE},
        build=_build_genbio,
        hub_files=("model.pth",),
    ),
}


def _resize_preset(name: str, resize_px: int | None) -> Preset:
    preset = _BUILTIN_PRESETS[name]
    return replace(preset, transform=replace(preset.transform, resize_px=resize_px))


# the same weights with the cropping of other versions of slide2vec
_BUILTIN_PRESETS |= {
    f"{name}-uncropped": _resize_preset(name, None)
    for name in ("gigapath", "gigapath-flash", "lunit-vits8", "lunit-vits16")
} | {"mstar-cropped": _resize_preset("mstar", 248)}

PRESETS = PluginTable("wsi_fl.encoders", _BUILTIN_PRESETS, Preset)
"""Presets by name; other packages add theirs as entry points of `wsi_fl.encoders`."""

_OTHER_NAMES = {
    "univ1": "uni",
    **dict.fromkeys(("univ2", "uni2"), "uni2h"),
    **dict.fromkeys(("lunit", "lunitvitsmallpatch8dino"), "lunitvits8"),
    "lunitvitsmallpatch16dino": "lunitvits16",
    "midnight": "midnight12k",
    "phikonv1": "phikon",
    "provgigapath": "gigapath",
    "virchowv1": "virchow",
    "virchowv2": "virchow2",
}
"""Names in other tools → names here, without punctuation."""


def find_preset(name: str) -> str | None:
    """Return the preset for another tool's name of an encoder; None without one.

    Example:
        >>> [find_preset(name) for name in ("uni_v1", "mahmood-uni-77ffbca1", "UNI2", "hoptimus0", "conch")]
        ['uni', 'uni', 'uni2-h', 'h-optimus-0', None]
    """
    bare = _strip_punctuation(re.sub("^mahmood-|-[0-9a-f]{8}$", "", name.lower()))
    return next((preset for preset in PRESETS if _strip_punctuation(preset) == _OTHER_NAMES.get(bare, bare)), None)


def match_variants(
    name: str, size_px: int | None, input_px: int | None, transform: Mapping[str, Any] | None
) -> list[str]:
    """Return the presets with the weights of a preset that make the same images of patches, the published one first.

    Args:
        size_px: side of the patches.
        input_px: side of the images that the network saw, where stated.
        transform: how they were made, as slide2vec states it: normalize (mean, std), resize (size, interpolation) and
            center_crop (size); without it no whole patch was resized, where presets differ in that.

    Example:
        >>> match_variants("gigapath", 256, 224, None), match_variants("lunit-vits8", 224, 224, None)
        (['gigapath'], ['lunit-vits8', 'lunit-vits8-uncropped'])
    """
    hub_id = PRESETS[name].hub_id
    variants = [other for other, preset in PRESETS.items() if hub_id and preset.hub_id == hub_id and other != name]
    names = [name, *variants]
    if transform is None:
        names = [other for other in names if input_px in {None, PRESETS[other].transform.px}]
        shapes = {other: PRESETS[other].transform.resize_shape(size_px) for other in names}
        is_alone = len(names) == 1
        return [other for other, (side, px, _) in shapes.items() if is_alone or side != px or side == size_px]
    stated = _read_transform(transform, size_px)
    return [other for other in names if stated and PRESETS[other].transform.makes_same_images(stated, size_px)]


def _read_transform(stated: Mapping[str, Any], size_px: int | None) -> Transform | None:
    """Return a transform as slide2vec states it; None for what is none."""
    try:
        mean, sd = (_read_rgb(stated["normalize"][key]) for key in ("mean", "std"))
        resize, crop = stated.get("resize"), stated.get("center_crop")
        resize_px = int(resize["size"][0]) if resize else size_px
        px = int(crop["size"][0]) if crop else resize_px
        return Transform(mean, sd, px, str(resize["interpolation"]) if resize else "", resize_px)
    except (KeyError, TypeError, ValueError, IndexError):
        return None


def _read_rgb(values: Any) -> _Rgb:
    red, green, blue = map(float, values)
    return red, green, blue


_UNSUPPORTED = {
    "conch": "has attention pooling of its own",
    **dict.fromkeys(("titan", "prism"), "makes one vector of a whole slide"),
    **dict.fromkeys(("musk", "ctranspath"), "has an architecture of its own"),
    "keep": "has a projection of its own",
    "rudolfv2": "runs code of its authors",
    "distillpath": "has a crop that could not be verified",
}
"""Reasons why encoders are not presets, by the prefix of their names."""


def suggest_encoder(name: str) -> str | None:
    """Return advice for the unknown name of an encoder; None without any.

    Example:
        >>> suggest_encoder("UNI2"), suggest_encoder("conch_v15").split(";")[0]
        ("did you mean 'uni2-h'?", 'it has attention pooling of its own, so it is no preset')
    """
    if preset := find_preset(name):
        return f"did you mean {preset!r}?"
    reason = next(
        (text for prefix, text in _UNSUPPORTED.items() if _strip_punctuation(name.lower()).startswith(prefix)), None
    )
    advice = "extract its features with TRIDENT, slide2vec or STAMP, then `wsi-fl import --format trident`"
    return reason and f"it {reason}, so it is no preset; {advice}"


def _strip_punctuation(name: str) -> str:
    return re.sub("[^a-z0-9]", "", name)


def resolution_warning(name: str, size_px: int, mpp: float) -> str | None:
    """Return a warning for patches of a resolution unlike the encoder's training; None where fine or unknown.

    Example:
        >>> resolution_warning("uni", 224, 0.25)
        'uni was trained at 0.5 µm/px; patches of 224 px at 0.25 µm/px show it 0.25 µm/px'
        >>> resolution_warning("uni", 448, 0.25) is resolution_warning("resnet50", 64, 9) is None
        True
    """
    preset = PRESETS.get(name)
    if preset is None or not preset.mpp:
        return None
    target_px = preset.transform.resize_px or preset.transform.px
    shown_mpp = mpp * size_px / target_px if target_px else mpp
    if any(abs(shown_mpp / trained_mpp - 1) <= _MPP_TOLERANCE for trained_mpp in preset.mpp):
        return None
    patches = f"patches of {size_px} px at {mpp:g} µm/px"
    return f"{name} was trained at {preset.mpp_text}; {patches} show it {shown_mpp:.3g} µm/px"
