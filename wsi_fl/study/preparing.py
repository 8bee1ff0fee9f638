"""The sections of a pipeline that say what is made of slides: patches, mosaics, features."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from wsi_fl.study.toml import MOST_SEED, Section


class Slides(Section):
    """How slides are read."""

    without_effect = ("",)
    reader: Literal["auto", "native", "openslide"] = "auto"
    """What decodes the pixels. `native` decodes a slide's own JPEG tiles, `openslide` leaves everything to OpenSlide,
    and `auto` decodes natively where that gives the same pixels as OpenSlide."""


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
    min_tumor: float = Field(0.5, gt=0, le=1)
    """Smallest share of a patch that must lie inside a tumour outline for the patch to be labelled tumour."""
    tumor_groups: list[str] | None = None
    """Names of the annotation groups that outline tumour. By default `metastases`, `metastasis`, `tumor`, `tumour`,
    `_0` and `_1`, which Camelyon, ASAP and QuPath use."""
    hole_groups: list[str] | None = None
    """Names of the annotation groups that outline holes in a tumour. By default the names that Camelyon, ASAP and
    QuPath use."""
    ignored_groups: list[str] = Field([])
    """Names of annotation groups that say nothing about tumour and are passed over."""
    balance: bool = True
    """Whether a site keeps equally many patches of each label. The choice looks at all of the site's slides, so a
    guarantee that must also cover tiling needs `false`."""
    max_per_slide: int | None = Field(None, ge=1, le=1_000_000_000)
    """Largest number of patches that are kept of one slide, drawn at random. By default there is no limit."""
    qc: list[Literal["pen", "black", "fold", "bubble", "blur"]] = Field([])
    """Faults for which patches are set aside: ink of a marker, places that were not scanned, folds, air bubbles, and
    what is out of focus. By default nothing is looked for. Thresholds are in `[quality]`."""
    test_fraction: float = Field(0.2, ge=0, lt=1)
    """Share of patients that are held out for testing where the site prescribes no split."""
    seed: int = Field(0, ge=0, le=MOST_SEED)
    """Seed of the random choices of `tile`: the test patients and the patches that are kept."""


class Quality(Section):
    """How much of a patch may be at fault before `tile.qc` sets it aside."""

    without_effect = ("",)
    max_pen: float = Field(0.05, ge=0, le=1)
    """Largest share of a patch that may be ink."""
    max_black: float = Field(0.05, ge=0, le=1)
    """Largest share of a patch that may be black."""
    max_fold: float = Field(0.25, ge=0, le=1)
    """Largest share of a patch that may be a fold: tissue that absorbs 1.6 times as much light as the slide's usual
    tissue."""
    max_bubble: float = Field(0.25, ge=0, le=1)
    """Largest share of a patch that may lie within a closed grey rim, as air bubbles have."""
    max_blur: float = Field(0.4, ge=0, le=1)
    """Largest share of a patch's tissue that may be out of focus."""
    min_sharpness: float = Field(0.35, ge=0, le=10)
    """Tissue is out of focus where it has less fine detail than this for each of coarse detail, at 2 µm per pixel.
    Sharp tissue has 0.5 to 2, tissue blurred by a Gaussian of 2 µm 0.13 to 0.28."""
    segmenter: str | None = None
    """Path of a safetensors file with a torchvision segmentation model of your own, which tells those faults of
    `tile.qc` that it knows. Its header says what it is (docs/quality.md). By default all faults are told by classical
    measures."""


class Tissue(Section):
    """How tissue is told from background, by `tile`, `mosaic` and `predict`."""

    without_effect = ("",)
    method: Literal["auto", "saturation", "density", "texture"] = "auto"
    """What tells tissue: `saturation` suits ordinary stains, `density` (of light that is absorbed) pale ones and
    immunohistochemistry, and `texture` tissue that hardly absorbs light. `auto` takes density where saturation would
    miss more than a twentieth of it; `tile` says on how many slides."""
    masks: str | None = None
    """Folder with masks that others made: SLIDE.geojson with outlines in level-0 pixels (QuPath, TRIDENT's
    `contours_geojson`), or SLIDE.png over the whole slide, white on tissue. A slide without one is set aside."""


class Store(Section):
    """How a patch store keeps pixels."""

    without_effect = ("",)
    pixels: str = Field("raw", pattern=r"^(raw|native|none|jpeg:([1-9][0-9]?|100))$")
    """How pixels are stored. `raw` keeps them as read; `native` keeps the slide's own JPEG streams where all patches
    of a slide are whole tiles of it, and raw pixels elsewhere; `jpeg:90` encodes them anew and loses detail; `none`
    keeps positions alone and reads pixels from the slide whenever they are needed."""


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
    batch_size: int = Field(32, ge=1, le=100_000)
    """Number of patches that go through the encoder together."""
    test_fraction: float = Field(0.2, ge=0, lt=1)
    """Share of patients that are held out for testing where the site prescribes no split."""
    seed: int = Field(0, ge=0, le=MOST_SEED)
    """Seed of the grouping by colour and of the choice of test patients."""


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
    batch_size: int | None = Field(None, ge=1, le=100_000)
    """Number of patches that go through the encoder together. By default `mosaic.batch_size`."""
