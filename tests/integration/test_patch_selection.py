"""Tests of the choice of patches of a slide, of their pixels and of the overview picture."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import chain

import numpy as np
import pytest
from builders import write_tiff
from conftest import SHARED, refused
from PIL import Image
from test_annotation_formats import asap

from wsi_fl.slides.patching.slide_plan import PlanParams, plan_slide
from wsi_fl.slides.patching.tissue import NoTissueError
from wsi_fl.slides.pictures.qc_thumbnail import draw_overview
from wsi_fl.slides.reading import patch_reader as reading
from wsi_fl.slides.reading.patch_reader import read_patches
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.types import CLASSES, GridSpec, SlideRecord, WsiFlError

CELL = 64
SPEC = GridSpec(size_px=CELL, mpp=1.0, stride_px=CELL)
ROWS, COLUMNS = 8, 10
TISSUE = {(c, r) for c in range(2, 8) for r in range(1, 6)}
TUMOR = {(c, r) for c in range(2, 5) for r in range(2, 5)}


def picture():
    """Return ten by eight cells with tissue in the middle and a distinct grain in each cell."""
    rng = np.random.default_rng(0)
    image = np.full((ROWS * CELL, COLUMNS * CELL, 3), 243, np.uint8)
    for c, r in TISSUE:
        grain = rng.integers(-40, 40, (CELL // 4, CELL // 4, 3)).repeat(4, 0).repeat(4, 1)
        colour = np.array((150, 95, 160) if (c, r) in TUMOR else (205, 150, 190))
        image[r * CELL : (r + 1) * CELL, c * CELL : (c + 1) * CELL] = np.clip(colour + grain, 0, 255)
    return image


IMAGE = picture()


def write_slide(path, image=IMAGE, mpp=1.0):
    return write_tiff(path, [image], mpp)


def outlined(cells, group="metastases", shift=0.0):
    """Return (group, ring) of each cell."""
    corners = {(c, r): [(c, r), (c + 1, r), (c + 1, r + 1), (c, r + 1)] for c, r in sorted(cells)}
    return [(group, [(x * CELL + shift, y * CELL) for x, y in ring]) for ring in corners.values()]


@pytest.fixture
def record(tmp_path):
    path = write_slide(tmp_path / "node.tif")
    outlines = asap(tmp_path / "node.xml", *outlined(TUMOR))
    return SlideRecord(path, "node", "patient", "C1", "annotated", positive=True, annotation=outlines)


@pytest.fixture
def drawn(record, tmp_path):
    """The slide with other outlines."""
    return lambda *groups: replace(record, annotation=asap(tmp_path / "other.xml", *chain(*groups)))


def cells_of(plan, label):
    return {(int(x) // CELL, int(y) // CELL) for x, y in plan.xy_l0[plan.label == CLASSES.index(label)]}


def test_a_plan_holds_every_tissue_cell_in_order_and_the_properties_of_the_slide(record):
    plan = plan_slide(record, SPEC)
    assert plan.tumor_fraction.tolist() == plan.label.tolist()
    assert plan.xy_l0.tolist() == sorted(plan.xy_l0.tolist(), key=lambda xy: (xy[1], xy[0]))
    assert (plan.mpp, plan.size_l0) == (pytest.approx(1.0), (COLUMNS * CELL, ROWS * CELL))
    with Slide(record.path) as slide:
        assert plan.quickhash == slide.quickhash
    (outline,) = plan.outlines_l0
    assert outline.min(0).tolist() == [2 * CELL, 2 * CELL]


@pytest.mark.parametrize(
    ("supervision", "positive", "healthy", "tumor"),
    [
        ("annotated", True, TISSUE - TUMOR, TUMOR),
        ("partial", True, set(), TUMOR),
        ("negative", False, TISSUE, set()),
        ("weak", True, set(), TISSUE),
        ("weak", False, TISSUE, set()),
    ],
)
def test_supervision_decides_which_patches_are_labelled(record, supervision, positive, healthy, tumor):
    annotation = record.annotation if supervision in {"annotated", "partial"} else None
    changed = replace(record, supervision=supervision, positive=positive, annotation=annotation)
    plan = plan_slide(changed, SPEC)
    assert (cells_of(plan, "healthy"), cells_of(plan, "tumor")) == (healthy, tumor)
    assert np.isnan(plan.tumor_fraction).all() == (supervision == "weak")


def test_patches_across_an_outline_are_dropped_or_tumour_by_their_share(drawn):
    crossed = drawn(outlined(TUMOR, shift=0.75 * CELL))
    plan = plan_slide(crossed, SPEC)
    left = {(2, r) for r in (2, 3, 4)}  # a quarter of these is tumour
    assert cells_of(plan, "tumor") == {(c, r) for c in (3, 4, 5) for r in (2, 3, 4)}
    assert cells_of(plan, "healthy") == TISSUE - cells_of(plan, "tumor") - left
    eager = plan_slide(crossed, SPEC, PlanParams(min_tumor=0.2))
    assert cells_of(eager, "tumor") == cells_of(plan, "tumor") | left
    any_share = plan_slide(crossed, SPEC, PlanParams(min_tumor=0.0))
    assert cells_of(any_share, "tumor") == cells_of(eager, "tumor")
    assert cells_of(any_share, "healthy") == cells_of(plan, "healthy")


def test_patches_on_outlines_without_a_group_are_left_out(drawn):
    plan = plan_slide(drawn(outlined(TUMOR), outlined({(6, 5)}, group="None")), SPEC)
    assert cells_of(plan, "healthy") == TISSUE - TUMOR - {(6, 5)}
    healthy = replace(drawn(outlined({(6, 5)}, group="unsure")), supervision="negative", positive=False)
    assert cells_of(plan_slide(healthy, SPEC), "healthy") == TISSUE - {(6, 5)}


def test_slides_that_cannot_be_planned_are_refused_with_their_numbers(record, drawn, tmp_path):
    def fails(record, *words, spec=SPEC, error=WsiFlError, **params):
        refused(lambda: plan_slide(record, spec, PlanParams(**params)), *words, error=error)

    blank = write_slide(tmp_path / "blank.tif", np.full((300, 300, 3), 243, np.uint8))
    fails(replace(record, path=blank), "blank.tif: no tissue found: 0% ", error=NoTissueError)
    bare = replace(record, path=write_slide(tmp_path / "bare.tif", mpp=None))
    fails(bare, "mpp_override = 0.5 in sites/<site>.toml")
    fails(drawn(outlined(TUMOR, shift=1e6)), "none of its tumour outlines is on the slide")
    fails(drawn(), "no tumour is outlined")
    fails(replace(record, annotation=None), "has no annotation")
    fails(replace(record, supervision="negative", positive=False), "labelled negative")
    coarse = GridSpec(4 * CELL, 1.0, 4 * CELL)
    fails(record, "of 6 grid positions none holds 95% tissue (most", spec=coarse, min_tissue=0.95)
    partial = replace(drawn(outlined({(2, 1)}, shift=0.6 * CELL)), supervision="partial")
    words = "30 of 80 grid positions hold 20% tissue, of these 2 are less than 90% tumour"
    fails(partial, words, "28 lie outside on a slide whose supervision is partial", min_tumor=0.9)
    assert len(plan_slide(record, GridSpec(CELL, 0.91, CELL)).label)
    finer = ("node.tif: patches at 0.85 µm", "the slide has 1; set tile.mpp")
    fails(record, *finer, spec=GridSpec(CELL, 0.85, CELL))


@pytest.mark.parametrize(("threads", "batch", "at_once"), [(1, 7, 1000), (3, 1, 3)])
def test_patches_are_read_in_order_with_the_right_pixels(record, monkeypatch, threads, batch, at_once):
    monkeypatch.setattr(reading, "_BATCH", batch)
    monkeypatch.setattr(reading, "_PLAN_PATCHES", at_once)
    xy = plan_slide(record, SPEC).xy_l0
    batches = list(read_patches(record, xy, SPEC, threads=threads))
    sizes = [len(pixels) for _, pixels in batches]
    assert [start for start, _ in batches] == [sum(sizes[:k]) for k in range(len(sizes))]
    pixels = np.concatenate([b for _, b in batches])
    assert max(sizes) <= batch and pixels.dtype == np.uint8
    for (x, y), patch in zip(xy, pixels, strict=True):
        np.testing.assert_array_equal(patch, IMAGE[y : y + CELL, x : x + CELL])


def test_the_overview_shows_chosen_patches_in_the_colour_of_their_label(record):
    plan = plan_slide(record, SPEC)
    chosen = np.arange(len(plan.label)) % 2 == 0

    def shown(chosen):
        return np.asarray(Image.open(io.BytesIO(draw_overview(plan, chosen))).convert("RGB")).astype(int)

    page, bare = shown(chosen), shown(np.zeros(len(chosen), bool))
    assert max(page.shape) < 1200
    np.testing.assert_array_equal(page, shown(np.flatnonzero(chosen)))
    zoom = 1024 / max(plan.tissue.shape) / plan.downsample
    for k, corner in enumerate(plan.xy_l0):
        x, y = ((corner + CELL / 2) * zoom + np.array([0, 46])).astype(int)  # below the heading of a wide slide
        change = (page - bare)[y - 5 : y + 5, x - 5 : x + 5].mean((0, 1))
        if not chosen[k]:
            assert np.abs(change).max() < 1
        elif plan.label[k] == CLASSES.index("tumor"):
            assert change[2] < change[0] - 20  # towards orange
        else:
            assert change[0] < change[2] - 20  # towards blue


@pytest.mark.skipif(not SHARED.exists(), reason="the material beside the project is not there")
@pytest.mark.parametrize("path", sorted((SHARED / "data/slides_odd").glob("*")), ids=lambda p: p.name)
def test_odd_slides_give_patches_or_one_line(path):
    record = SlideRecord(path, path.stem, "p", "S", "weak", positive=False)
    spec = GridSpec(8, 0.499, 8)
    try:
        plan = plan_slide(record, spec)
        pixels = np.concatenate([b for _, b in read_patches(record, plan.xy_l0, spec, threads=2)])
        assert pixels.shape == (4, 8, 8, 3)
    except WsiFlError as error:
        assert str(error).startswith(f"{path.name}: ") and "\n" not in str(error)
