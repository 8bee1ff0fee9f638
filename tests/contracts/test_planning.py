"""From a slide and its record to the patches to keep, their pixels and a picture."""

from __future__ import annotations

import io
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import tifffile
from PIL import Image

from wsi_fl.slides.patching.patches import PlanParams, plan_slide
from wsi_fl.slides.patching.tissue import NoTissueError
from wsi_fl.slides.pictures.overview import draw_overview
from wsi_fl.slides.reading import sweep as reading
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.slides.reading.sweep import _Sweep, read_patches
from wsi_fl.types import CLASSES, GridSpec, SlideRecord, WsiFlError

SHARED = Path(__file__).parents[2].parent / "shared" / "data"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="the material beside the project is not there")

CELL = 64
SPEC = GridSpec(size_px=CELL, mpp=1.0, stride_px=CELL)
ROWS, COLUMNS = 8, 10
TISSUE = {(c, r) for c in range(2, 8) for r in range(1, 6)}
TUMOR = {(c, r) for c in range(2, 5) for r in range(2, 5)}


def picture():
    """Ten by eight cells: tissue in the middle, each cell with a grain of its own."""
    rng = np.random.default_rng(0)
    image = np.full((ROWS * CELL, COLUMNS * CELL, 3), 243, np.uint8)
    for c, r in TISSUE:
        grain = rng.integers(-40, 40, (CELL // 4, CELL // 4, 3)).repeat(4, 0).repeat(4, 1)
        colour = np.array((150, 95, 160) if (c, r) in TUMOR else (205, 150, 190))
        image[r * CELL : (r + 1) * CELL, c * CELL : (c + 1) * CELL] = np.clip(colour + grain, 0, 255)
    return image


IMAGE = picture()


def write_slide(path, image=IMAGE, mpp=1.0):
    tags = {"resolution": (1e4 / mpp, 1e4 / mpp), "resolutionunit": "CENTIMETER"} if mpp else {}
    with tifffile.TiffWriter(path) as tif:
        tif.write(image, tile=(64, 64), photometric="rgb", compression="zlib", metadata=None, **tags)
    return path


def write_outlines(path, cells, group="metastases", shift=0.0):
    body = ""
    for c, r in sorted(cells):
        corners = [(c, r), (c + 1, r), (c + 1, r + 1), (c, r + 1)]
        points = "".join(
            f'<Coordinate Order="{k}" X="{x * CELL + shift}" Y="{y * CELL}" />'
            for k, (x, y) in enumerate(corners)
        )
        body += f'<Annotation PartOfGroup="{group}"><Coordinates>{points}</Coordinates></Annotation>'
    path.write_text(f"<ASAP_Annotations><Annotations>{body}</Annotations></ASAP_Annotations>")
    return path


@pytest.fixture
def record(tmp_path):
    path = write_slide(tmp_path / "node.tif")
    outlines = write_outlines(tmp_path / "node.xml", TUMOR)
    return SlideRecord(path, "node", "patient", "C1", "annotated", positive=True, annotation=outlines)


def cells_of(plan, label):
    return {(int(x) // CELL, int(y) // CELL) for x, y in plan.xy_l0[plan.label == CLASSES.index(label)]}


def test_a_plan_holds_every_tissue_cell_in_order_and_what_the_slide_says(record):
    plan = plan_slide(record, SPEC)
    assert plan.tumor_fraction.tolist() == plan.label.tolist()
    assert plan.xy_l0.tolist() == sorted(plan.xy_l0.tolist(), key=lambda xy: (xy[1], xy[0]))
    assert (plan.mpp, plan.size_l0) == (pytest.approx(1.0), (COLUMNS * CELL, ROWS * CELL))
    with Slide(record.path) as slide:
        assert plan.quickhash == slide.quickhash
    assert len(plan.outlines_l0) == 1
    assert plan.outlines_l0[0].min(0).tolist() == [2 * CELL, 2 * CELL]


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
def test_supervision_decides_what_is_labelled(record, supervision, positive, healthy, tumor):
    outlined = supervision in {"annotated", "partial"}
    changed = replace(
        record, supervision=supervision, positive=positive, annotation=record.annotation if outlined else None
    )
    plan = plan_slide(changed, SPEC)
    assert (cells_of(plan, "healthy"), cells_of(plan, "tumor")) == (healthy, tumor)
    assert np.isnan(plan.tumor_fraction).all() == (supervision == "weak")


def test_patches_that_cross_an_outline_are_dropped_or_tumour_by_their_share(record, tmp_path):
    outlines = write_outlines(tmp_path / "shifted.xml", TUMOR, shift=0.75 * CELL)
    plan = plan_slide(replace(record, annotation=outlines), SPEC)
    left = {(2, r) for r in (2, 3, 4)}  # a quarter of these is tumour
    assert cells_of(plan, "tumor") == {(c, r) for c in (3, 4, 5) for r in (2, 3, 4)}
    assert cells_of(plan, "healthy") == TISSUE - cells_of(plan, "tumor") - left
    eager = plan_slide(replace(record, annotation=outlines), SPEC, PlanParams(min_tumor=0.2))
    assert cells_of(eager, "tumor") == cells_of(plan, "tumor") | left


def test_patches_on_outlines_without_a_group_are_left_out(record, tmp_path):
    path = write_outlines(tmp_path / "mixed.xml", TUMOR)
    unsure = write_outlines(tmp_path / "unsure.xml", {(6, 5)}, group="None").read_text()
    drawn = unsure.split("<Annotations>")[1].split("</Annotations>")[0]
    path.write_text(path.read_text().replace("</Annotations>", drawn + "</Annotations>"))
    plan = plan_slide(replace(record, annotation=path), SPEC)
    assert cells_of(plan, "healthy") == TISSUE - TUMOR - {(6, 5)}


def test_finer_patches_than_the_slide_are_refused(record):
    assert len(plan_slide(record, GridSpec(CELL, 0.91, CELL)).label)
    said = r"^node\.tif: patches at 0.85 µm .* the slide has 1; set tile\.mpp"
    with pytest.raises(WsiFlError, match=said):
        plan_slide(record, GridSpec(CELL, 0.85, CELL))


def failure(record, spec=SPEC, params=None):
    with pytest.raises(WsiFlError) as caught:
        plan_slide(record, spec, params)
    assert "\n" not in str(caught.value)
    return caught.value


def test_nothing_to_keep_is_an_error_with_its_numbers(record, tmp_path):
    error = failure(record, GridSpec(4 * CELL, 1.0, 4 * CELL), PlanParams(min_tissue=0.95))
    assert "of 6 grid positions none holds 95% tissue (most" in str(error)
    outlines = write_outlines(tmp_path / "half.xml", {(2, 1)}, shift=0.6 * CELL)
    partial = replace(record, supervision="partial", annotation=outlines)
    said = str(failure(partial, params=PlanParams(min_tumor=0.9)))
    assert "30 of 80 grid positions hold 20% tissue, of these 2 are less than 90% tumour" in said
    assert "28 lie outside on a slide whose supervision is partial" in said


def test_slides_that_cannot_be_planned_say_why(record, tmp_path):
    blank = write_slide(tmp_path / "blank.tif", np.full((300, 300, 3), 243, np.uint8))
    error = failure(replace(record, path=blank))
    assert isinstance(error, NoTissueError) and str(error).startswith("blank.tif: no tissue found: 0% ")
    bare = replace(record, path=write_slide(tmp_path / "bare.tif", mpp=None))
    assert "mpp_override = 0.5 in sites/<site>.toml" in str(failure(bare))
    away = write_outlines(tmp_path / "away.xml", TUMOR, shift=1e6)
    empty = write_outlines(tmp_path / "empty.xml", set())
    assert "none of its tumour outlines is on the slide" in str(failure(replace(record, annotation=away)))
    assert "no tumour is outlined" in str(failure(replace(record, annotation=empty)))
    assert "has no annotation" in str(failure(replace(record, annotation=None)))
    assert "labelled negative" in str(failure(replace(record, supervision="negative", positive=False)))


@pytest.mark.parametrize(("threads", "batch", "at_once"), [(1, 7, 1000), (3, 1, 3)])
def test_patches_come_in_order_with_their_own_pixels(record, monkeypatch, threads, batch, at_once):
    monkeypatch.setattr(reading, "_BATCH", batch)
    monkeypatch.setattr(reading, "_AT_ONCE", at_once)
    xy = plan_slide(record, SPEC).xy_l0
    batches = list(read_patches(record, xy, SPEC, threads=threads))
    sizes = [len(pixels) for _, pixels in batches]
    assert [start for start, _ in batches] == [sum(sizes[:k]) for k in range(len(sizes))]
    assert max(sizes) <= batch
    pixels = np.concatenate([b for _, b in batches])
    assert pixels.dtype == np.uint8
    for (x, y), patch in zip(xy, pixels, strict=True):
        np.testing.assert_array_equal(patch, IMAGE[y : y + CELL, x : x + CELL])


def test_reading_runs_only_a_little_ahead(record, monkeypatch):
    """A slow consumer is not overrun, so memory is bounded."""
    begun = []
    original = _Sweep.fill

    def fill(self, number):
        begun.append(number)
        return original(self, number)

    monkeypatch.setattr(_Sweep, "fill", fill)
    monkeypatch.setattr(reading, "_BATCH", 1)
    xy = np.zeros((60, 2), np.int64)
    for consumed, _ in enumerate(read_patches(record, xy, SPEC, threads=2), 1):
        time.sleep(0.002)
        assert len(begun) <= consumed + 3
    assert len(begun) == 60


def test_leaving_early_or_failing_leaves_no_thread_behind(record, tmp_path):
    xy = np.zeros((500, 2), np.int64)
    before = threading.active_count()
    patches = read_patches(record, xy, SPEC, threads=3)
    next(patches)
    patches.close()
    broken = write_slide(tmp_path / "broken.tif")
    with tifffile.TiffFile(broken) as tif:
        offset, n = tif.pages[0].dataoffsets[0], tif.pages[0].databytecounts[0]
    with broken.open("r+b") as file:
        file.seek(offset)
        file.write(b"\xff" * n)
    with pytest.raises(WsiFlError, match=r"broken\.tif: cannot be read at"):
        list(read_patches(replace(record, path=broken), xy, SPEC, threads=3))
    assert threading.active_count() == before


def shown(png):
    return np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)


def centre_of(page, plan, xy):
    """The colour in the middle of a patch on an overview page of this wide slide."""
    zoom = 1024 / max(plan.tissue.shape) / plan.downsample
    x, y = ((v + CELL / 2) * zoom for v in xy)
    return page[int(y) + 46 - 5 : int(y) + 46 + 5, int(x) - 5 : int(x) + 5].mean((0, 1))


def test_the_overview_shows_chosen_patches_in_the_colour_of_their_label(record):
    plan = plan_slide(record, SPEC)
    chosen = np.arange(len(plan.label)) % 2 == 0
    png = draw_overview(plan, chosen)
    assert png.startswith(b"\x89PNG")
    page = shown(png)
    assert max(page.shape) < 1200
    np.testing.assert_array_equal(page, shown(draw_overview(plan, np.flatnonzero(chosen))))
    bare = shown(draw_overview(plan, np.zeros(len(chosen), bool)))
    for k, xy in enumerate(plan.xy_l0):
        change = centre_of(page, plan, xy) - centre_of(bare, plan, xy)
        if not chosen[k]:
            assert np.abs(change).max() < 1
        elif plan.label[k] == CLASSES.index("tumor"):
            assert change[2] < change[0] - 20  # towards orange
        else:
            assert change[0] < change[2] - 20  # towards blue


@needs_shared
@pytest.mark.parametrize("path", sorted((SHARED / "slides_odd").glob("*")), ids=lambda p: p.name)
def test_odd_slides_give_patches_or_one_line(path):
    record = SlideRecord(path, path.stem, "p", "S", "weak", positive=False)
    spec = GridSpec(8, 0.499, 8)
    try:
        plan = plan_slide(record, spec)
        pixels = np.concatenate([b for _, b in read_patches(record, plan.xy_l0, spec, threads=2)])
        assert pixels.shape == (4, 8, 8, 3)
    except WsiFlError as error:
        assert str(error).startswith(f"{path.name}: ")
        assert "\n" not in str(error)
