"""The sections of a pipeline on slides: how they are read and become patches, mosaics and features."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator

from wsi_fl.study.toml import EncoderName, Section

_Artifact = Literal["pen", "black", "blur"]
_DEFAULT_SHARES: dict[str, float] = {"pen": 0.05, "black": 0.05, "blur": 0.4}
"""Default of the largest share of a patch that an artifact may cover, by artifact (docs/how-to/prepare-data.md)."""
_TissueMethod = Literal["auto", "saturation", "density", "texture"]


class SlideSettings(Section):
    """How slides are read."""

    without_effect = ("",)
    reader: Literal["auto", "native", "openslide"] = "auto"
    """Decoder of the pixels. `native` decodes a slide's own tiles, `openslide` uses OpenSlide for everything, and
    `auto` decodes natively where the pixels are identical to OpenSlide's."""
    test_fraction: float = Field(0.2, ge=0, lt=1)
    """Share of patients that `tile`, `mosaic` and `import` hold out for testing, where the site prescribes no split."""


class TileSettings(Section):
    """How `tile` cuts slides into labelled patches."""

    without_effect = ("",)
    size_px: int = Field(512, ge=8, le=16_384)
    """Width and height of a patch, in pixels."""
    mpp: float = Field(0.5, ge=0.01, le=1000)
    """Resolution of a patch, in µm per pixel."""
    stride_px: int | None = Field(None, ge=1, le=1_000_000)
    """Distance from one patch to the next, in pixels of the patch. By default it equals `size_px`, so patches do not
    overlap."""
    min_tissue: float = Field(0.2, ge=0, le=1)
    """Smallest share of tissue in a patch that is kept."""
    min_tumor: float = Field(0.5, ge=0, le=1)
    """Smallest share of a patch inside the outlines of tumour with which it is tumour; with 0 any share above 0.
    Patches with less are dropped, since they are not healthy either."""
    groups: dict[str, Literal["tumor", "hole", "unsure", "ignored"]] = Field({})
    """Meaning of annotation groups, such as {DCIS = "tumor", stroma = "ignored"}: tumour, holes in it, uncertain
    regions, or regions to ignore. The names of Camelyon, ASAP and QuPath are built in."""
    balance: bool = True
    """Whether a site keeps equally many patches of each label. The choice depends on all of the site's slides, so a
    privacy guarantee that must cover tiling needs `false`, and no `max_per_site`."""
    max_per_slide: int | None = Field(None, ge=1, le=1_000_000_000)
    """Largest number of patches of one slide, drawn at random. By default there is no limit."""
    max_per_site: int = Field(0, ge=0, le=1_000_000_000)
    """Largest number of patches of a site, for training and test together, drawn at random as equally as possible from
    each patient and each slide of a patient, at least one of each label with `balance`; 0 is no limit. The choice
    depends on all of the site's slides, as with `balance`."""
    qc: dict[_Artifact, Annotated[float, Field(ge=0, le=1)]] = Field({})
    """Artifacts for which patches are excluded, with the largest share of a patch that each may cover: marker ink
    (pen), regions that were not scanned (black), and blur. A list, ["pen", "blur"], takes the default shares: 0.05 of
    pen and black, 0.4 of blur. By default no artifact is detected. Others, such as folds, are left out by masks of
    tissue without them (`tissue.method`)."""

    @field_validator("qc", mode="before")
    @classmethod
    def _expand_artifact_list(cls, value: object) -> object:
        """Return the default shares of a list of artifacts."""
        if not isinstance(value, list):
            return value
        return {str(artifact): _DEFAULT_SHARES.get(str(artifact), 1.0) for artifact in value}


class TissueSettings(Section):
    """How `tile`, `mosaic` and `predict` separate tissue from background."""

    without_effect = ("",)
    method: str = "auto"
    """Tissue detector: `saturation` suits ordinary stains, `density` (optical density) pale stains and
    immunohistochemistry, and `texture` tissue that hardly absorbs light. `auto` takes density where saturation would
    miss more than 5 % of the tissue; `tile` prints on how many slides. Or the path of a folder with masks, such as
    masks/C1: SLIDE.geojson with outlines in level-0 pixels (QuPath, TRIDENT's `contours_geojson`), or SLIDE.png over
    the whole slide or its scanned area, white on tissue. A slide without a mask is excluded."""

    @field_validator("method")
    @classmethod
    def _check_method(cls, method: str) -> str:
        if method not in get_args(_TissueMethod) and "/" not in method:
            raise ValueError(f"use {', '.join(map(repr, get_args(_TissueMethod)))}, or a folder of masks, 'masks/C1'")
        return method

    @property
    def mask_folder(self) -> str | None:
        """The folder of tissue masks; None where tissue is detected."""
        return self.method if self.method not in get_args(_TissueMethod) else None


class StoreSettings(Section):
    """How a patch store holds pixels."""

    without_effect = ("",)
    pixels: str = Field("native", pattern=r"^(raw|native|none|jpeg:([1-9][0-9]?|100))$")
    """Encoding of pixels. `native` copies the slide's JPEG streams where all patches of a slide are whole tiles, and
    stores raw pixels elsewhere; `raw` stores raw pixels; `jpeg:90` re-encodes them and loses detail; `none` stores
    positions only and reads pixels from the slide when they are needed."""


class MosaicSettings(Section):
    """How `mosaic` represents a slide by the features of a few patches (Yottixel, 2020)."""

    without_effect = ("",)
    size_px: int = Field(1000, ge=8, le=16_384)
    """Width and height of a patch, in pixels."""
    mpp: float = Field(0.5, ge=0.01, le=1000)
    """Resolution of a patch, in µm per pixel."""
    min_tissue: float = Field(0.7, ge=0, le=1)
    """Smallest share of a patch that must be tissue."""
    clusters: int = Field(9, ge=1, le=10_000)
    """Number of clusters of a slide's patches by colour."""
    fraction: float = Field(0.05, gt=0, le=1)
    """Share of each colour cluster that is kept, spread over the slide."""
    encoder: EncoderName = "densenet121"
    """Name of the encoder: a preset of `wsi-fl encoders`, or any timm model, whose pooled output is the feature
    vector."""
    weights: str | None = None
    """Path of a file with the encoder's weights: safetensors, or a .bin, .pt or .pth that holds tensors only. By
    default the published weights, downloaded by name."""
    input_px: int | None = Field(None, ge=32, le=4096)
    """Size to which patches are resized for the encoder, in pixels. By default they are not resized, unless the encoder
    has a fixed input size."""


class FeatureSettings(Section):
    """How `features` encodes every patch of a patch store. The default of each key is that of [mosaic]."""

    without_effect = ("",)
    encoder: EncoderName | None = None
    """Name of the encoder: a preset of `wsi-fl encoders`, or any timm model. By default `mosaic.encoder`."""
    weights: str | None = None
    """Path of a file with the encoder's weights. By default `mosaic.weights`, for the same encoder."""
    input_px: int | None = Field(None, ge=32, le=4096)
    """Size to which patches are resized for the encoder, in pixels. By default `mosaic.input_px`, if the encoder is
    the same."""
