"""The sections of a pipeline that say what is made of slides: patches, mosaics, features."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, field_validator

from wsi_fl.study.toml import Section

Fault = Literal["pen", "black", "fold", "bubble", "blur"]
USUAL_SHARES: dict[str, float] = {"pen": 0.05, "black": 0.05, "fold": 0.25, "bubble": 0.25, "blur": 0.4}
"""How much of a patch may be at fault where only the fault is named; docs/quality.md says what that finds."""
_TissueMethod = Literal["auto", "saturation", "density", "texture"]


class Slides(Section):
    """How slides are read."""

    without_effect = ("",)
    reader: Literal["auto", "native", "openslide"] = "auto"
    """What decodes the pixels. `native` decodes a slide's own JPEG tiles, `openslide` leaves everything to OpenSlide,
    and `auto` decodes natively where that gives the same pixels as OpenSlide."""
    test_fraction: float = Field(0.2, ge=0, lt=1)
    """Share of patients that are held out for testing by `tile`, `mosaic` and `import`, where the site prescribes no
    split."""


class Tile(Section):
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
    """Smallest share of a patch that must be tissue; patches with less are left out."""
    groups: dict[str, Literal["tumor", "hole", "unsure", "ignored"]] = Field({})
    """What annotation groups outline, such as {DCIS = "tumor", stroma = "ignored"}: tumour, holes in it, what is not
    sure, or nothing that counts. The names that Camelyon, ASAP and QuPath use are known."""
    balance: bool = True
    """Whether a site keeps equally many patches of each label. The choice looks at all of the site's slides, so a
    guarantee that must also cover tiling needs `false`."""
    max_per_slide: int | None = Field(None, ge=1, le=1_000_000_000)
    """Largest number of patches that are kept of one slide, drawn at random. By default there is no limit."""
    qc: dict[Fault, Annotated[float, Field(ge=0, le=1)]] = Field({})
    """Faults for which patches are set aside, and the largest share of a patch that may be at fault: ink of a marker,
    places that were not scanned, folds, air bubbles, and what is out of focus. A list, ["pen", "blur"], takes the usual
    shares: 0.05 of pen and black, 0.25 of folds and bubbles, 0.4 of blur. By default nothing is looked for."""
    segmenter: str | None = None
    """Path of a safetensors file with a torchvision segmentation model of your own, which tells those faults of
    `tile.qc` that it knows. Its header says what it is (docs/quality.md). By default all faults are told by classical
    measures."""

    @field_validator("qc", mode="before")
    @classmethod
    def _with_usual_shares(cls, asked: object) -> object:
        """Return what a list of faults stands for."""
        if not isinstance(asked, list):
            return asked
        return {str(fault): USUAL_SHARES.get(fault, 1.0) for fault in asked}


class Tissue(Section):
    """How tissue is told from background, by `tile`, `mosaic` and `predict`."""

    without_effect = ("",)
    method: str = "auto"
    """What tells tissue: `saturation` suits ordinary stains, `density` (of light that is absorbed) pale ones and
    immunohistochemistry, and `texture` tissue that hardly absorbs light. `auto` takes density where saturation would
    miss more than a twentieth of it; `tile` says on how many slides. Or the path of a folder with masks that others
    made, such as masks/C1: SLIDE.geojson with outlines in level-0 pixels (QuPath, TRIDENT's `contours_geojson`), or
    SLIDE.png over the whole slide, white on tissue. A slide without one is set aside."""

    @field_validator("method")
    @classmethod
    def _known_or_folder(cls, method: str) -> str:
        if method not in get_args(_TissueMethod) and "/" not in method:
            raise ValueError(
                f"use {', '.join(map(repr, get_args(_TissueMethod)))}, or a folder of masks, 'masks/C1'"
            )
        return method

    @property
    def masks(self) -> str | None:
        """The folder of masks that others made; None to find tissue here."""
        return self.method if self.method not in get_args(_TissueMethod) else None


class Store(Section):
    """How a patch store keeps pixels."""

    without_effect = ("",)
    pixels: str = Field("native", pattern=r"^(raw|native|none|jpeg:([1-9][0-9]?|100))$")
    """How pixels are stored. `native` keeps the slide's own JPEG streams where all patches of a slide are whole tiles
    of it, and raw pixels elsewhere; `raw` keeps them as read everywhere; `jpeg:90` encodes them anew and loses detail;
    `none` keeps positions alone and reads pixels from the slide whenever they are needed."""


class Mosaic(Section):
    """How `mosaic` turns a slide into a bag of features of a few representative patches (Yottixel, 2020)."""

    without_effect = ("",)
    size_px: int = Field(1000, ge=8, le=16_384)
    """Width and height of a patch, in pixels."""
    mpp: float = Field(0.5, ge=0.01, le=1000)
    """Resolution of a patch, in µm per pixel."""
    min_tissue: float = Field(0.7, ge=0, le=1)
    """Smallest share of a patch that must be tissue."""
    clusters: int = Field(9, ge=1, le=10_000)
    """Number of groups into which the patches of a slide are sorted by colour."""
    fraction: float = Field(0.05, gt=0, le=1)
    """Share of each colour group that is kept, spread over the slide."""
    encoder: str = "densenet121"
    """Name of the encoder: a preset of `wsi-fl encoders`, or any timm model, whose pooled output is the feature."""
    weights: str | None = None
    """Path of a file with the encoder's weights: safetensors, or a .bin, .pt or .pth that holds tensors alone. By
    default the published weights, fetched by name."""
    input_px: int | None = Field(None, ge=32, le=4096)
    """Size to which patches are resized for the encoder, in pixels. By default they stay as read, unless the encoder
    takes one size alone."""


class Features(Section):
    """How `features` encodes every patch of a patch store. A key that is not set is taken from [mosaic]."""

    without_effect = ("",)
    encoder: str | None = None
    """Name of the encoder: a preset of `wsi-fl encoders`, or any timm model. By default `mosaic.encoder`."""
    weights: str | None = None
    """Path of a file with the encoder's weights. By default `mosaic.weights`, for the same encoder."""
    input_px: int | None = Field(None, ge=32, le=4096)
    """Size to which patches are resized for the encoder, in pixels. By default `mosaic.input_px`, if the encoder is
    the same."""
