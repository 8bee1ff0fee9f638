"""Outlines and masks lie where they were drawn, for any origin and unit of a file."""

import json
from dataclasses import replace

import numpy as np
import pytest
import scan_areas
import shapely
import test_annotation_formats
import tifffile
from builders import refused
from PIL import Image
from scan_areas import BOUNDS, CORNER, SIDE, SIZE
from test_annotation_formats import feature, write_json_file

from wsi_fl.slides.patching.annotations import read_annotations
from wsi_fl.slides.patching.outline_placement import SlideGeometry, rasterize_area
from wsi_fl.slides.patching.slide_plan import PlanParams, plan_slide
from wsi_fl.slides.patching.slide_survey import build_slide_geometry, survey_slide
from wsi_fl.slides.patching.tissue import TissueParams
from wsi_fl.slides.pictures.heatmap import PatchPredictions, write_geojson
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.types import CLASSES, GridSpec, SlideRecord

SPEC = GridSpec(64, 0.5, 64)
DRAWN = (128, 192, 320, 384)
"""Where the tumour is on the scanned area: 3 × 3 patches of the slide's grid, by hand."""
WRITERS = {"SCN": scan_areas.scn, "unwritten tiles": scan_areas.sparse}


def ring(box):
    left, top, right, bottom = box
    return [(left, top), (right, top), (right, bottom), (left, bottom)]


def shift(box, corner=CORNER):
    return tuple(v + corner[k % 2] for k, v in enumerate(box))


def geojson(path, *boxes, **properties):
    return write_json_file(path, [feature(ring(box), **properties) for box in boxes])


QUPATH = {"objectType": "annotation", "classification": {"name": "Tumor", "color": [200, 0, 0]}}


def asap(path, *boxes):
    return test_annotation_formats.asap(path, *(("Tumor", ring(box)) for box in boxes))


@pytest.fixture(scope="module", params=WRITERS)
def slide(request, tmp_path_factory):
    """A slide whose scanned area begins at CORNER."""
    suffix = "scn" if request.param == "SCN" else "tif"
    return WRITERS[request.param](tmp_path_factory.mktemp("slide") / f"x.{suffix}", scan_areas.picture())


def record(slide, annotation=None, **more):
    return SlideRecord(
        slide, "x", "p", "A", "annotated" if annotation else "negative", bool(annotation), annotation, **more
    )


def tumour_patches(plan):
    return {tuple(xy) for xy in plan.xy_l0[plan.label == 1].tolist()}


def find_patches_inside(box):
    """The corners of the patches of which at least half lies in a box, by exact areas."""
    grid = [(x, y) for y in range(0, SIZE[1], 64) for x in range(0, SIZE[0], 64)]
    area = shapely.box(*box)
    return {(x, y) for x, y in grid if area.intersection(shapely.box(x, y, x + 64, y + 64)).area >= 32 * 64}


def test_the_scanned_area_of_a_slide_is_read(slide, tmp_path):
    with Slide(slide) as opened:
        assert opened.size_l0 == SIZE and opened.bounds_l0 == BOUNDS
    with Slide(scan_areas.full(tmp_path / "full.tif", scan_areas.picture())) as opened:
        assert opened.bounds_l0 == (0, 0, *SIZE)
        for wrong in ("-5", "many", "999999"):
            keys = {"x": wrong, "y": "0", "width": "10", "height": "10"}
            opened._properties |= {f"openslide.bounds-{key}": value for key, value in keys.items()}
            assert opened.bounds_l0 == (0, 0, *SIZE)


@pytest.mark.parametrize(
    ("write", "name", "box", "said"),
    [
        (lambda path, box: geojson(path, box, **QUPATH), "q.geojson", DRAWN, ""),
        (lambda path, box: geojson(path, box, object_type="annotation", name="Tumor"), "q3.json", DRAWN, ""),
        (asap, "a.xml", shift(DRAWN), ""),
        (geojson, "plain.geojson", shift(DRAWN), ""),
        # QuPath with --no-crop, or by Bio-Formats
        (lambda path, box: geojson(path, box, **QUPATH), "whole.geojson", shift(DRAWN), "whole slide"),
        (asap, "cropped.xml", DRAWN, "scanned area"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_outlines_lie_where_they_were_drawn(slide, tmp_path, write, name, box, said):
    plan = plan_slide(record(slide, write(tmp_path / name, box)), SPEC)
    assert tumour_patches(plan) == find_patches_inside(shift(DRAWN)) and len(tumour_patches(plan)) == 9
    assert len(plan.notes) == bool(said) and all(said in note and name in note for note in plan.notes)
    assert np.array(plan.outlines_l0).reshape(-1, 2).min(0).tolist() == list(shift(DRAWN)[:2])


def test_a_configured_origin_of_outlines_is_used_and_contrary_evidence_is_noted(slide, tmp_path):
    path = geojson(tmp_path / "q.geojson", (300, 300, 420, 420), **QUPATH)
    for origin, corner in (("bounds", CORNER), ("slide", (0, 0))):
        params = PlanParams(origin=origin)
        if origin == "bounds":
            plan = plan_slide(record(slide, path), SPEC, params)
            assert np.array(plan.outlines_l0).min((0, 1)).tolist() == [300 + corner[0], 300 + corner[1]]
            assert plan.notes == ()
        else:
            notes = read_annotations(path, {}, read_geometry(slide), origin).notes
            assert 'with annotations_origin = "bounds" 100%' in notes[0]


def test_outlines_that_fit_tissue_from_either_corner_are_noted(tmp_path):
    box, tissue = (400, 400, 500, 500), np.ones((100, 100), bool)
    ground = SlideGeometry((1000, 1000), (100, 100, 900, 900), 0.5, 10.0, (100, 100), tissue=tissue)
    found = read_annotations(geojson(tmp_path / "q.geojson", box, **QUPATH), {}, ground)
    assert found.tumor.equals(shapely.box(500, 500, 600, 600)) and "from either corner" in found.notes[0]
    for path, origin in ((asap(tmp_path / "a.xml", box), None), (geojson(tmp_path / "q.json", box, **QUPATH), "slide")):
        sure = read_annotations(path, {}, ground, origin)
        assert sure.tumor.equals(shapely.box(*box)) and sure.notes == ()


def read_geometry(slide):
    with Slide(slide) as opened:
        return build_slide_geometry(opened, TissueParams())


def png(path, shape, box):
    pixels = np.zeros(shape, np.uint8)
    left, top, right, bottom = box
    pixels[top:bottom, left:right] = 255
    Image.fromarray(pixels).save(path)


def survey(slide, masks=""):
    tissue = TissueParams(masks=str(masks))
    return survey_slide(record(slide), SPEC, tissue, patch_px=8, section="tile", reader="auto")


TISSUE = (64, 64, 320, 448)
MASKS = {
    "outlines of QuPath": lambda folder: geojson(folder / "x.geojson", TISSUE, **QUPATH),
    "outlines of the whole slide": lambda folder: geojson(folder / "x.geojson", shift(TISSUE), tissue_id=0),
    "picture of the scanned area": lambda folder: png(folder / "x.png", (SIDE, SIDE), TISSUE),
    "picture of the whole slide": lambda folder: png(folder / "x.png", SIZE[::-1], shift(TISSUE)),
}


@pytest.mark.parametrize("kind", MASKS)
def test_an_imported_mask_lies_where_it_was_drawn(slide, tmp_path, kind):
    MASKS[kind](tmp_path)
    seen = survey(slide, tmp_path)
    rows, columns = np.nonzero(seen.segmentation.mask)
    found = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]) * seen.downsample
    assert (np.abs(found - shift(TISSUE)) <= (1 if "outlines" in kind else 3)).all()
    assert "picture" in kind or seen.notes == ()


@pytest.mark.parametrize("seed", range(6))
def test_outlines_of_tissue_become_the_pixels_whose_centres_they_hold(seed):
    rng = np.random.default_rng(seed)
    circles = [shapely.Point(*rng.uniform(-50, 1150, 2)).buffer(rng.uniform(3, 300)) for _ in range(12)]
    area = shapely.union_all(circles[:9]).difference(shapely.union_all(circles[9:]))
    x, y = np.meshgrid(np.arange(110) * 10.0 + 5, np.arange(90) * 10.0 + 5)
    assert np.array_equal(rasterize_area(area, (90, 110), 10.0), shapely.contains_xy(area, x, y))
    box = shapely.box(80, 80, 160, 160)  # on the borders of pixels
    for tissue, n in ((box, 64), (shapely.box(0, 0, 1100, 900) - box, 9_900 - 64)):
        assert rasterize_area(tissue, (90, 110), 10.0).sum() == n


def test_a_mask_of_another_shape_is_refused(slide, tmp_path):
    png(tmp_path / "x.png", (10, 90), (1, 1, 9, 9))
    refused(lambda: survey(slide, tmp_path), "not of the slide's shape")


def test_a_mask_of_ambiguous_shape_is_placed_on_the_tissue(tmp_path):
    shape, tissue = (100, 100), np.zeros((100, 100), bool)
    tissue[60:80, 60:80] = True
    from wsi_fl.slides.patching.slide_survey import _read_mask

    ground = SlideGeometry((1000, 1000), (500, 500, 900, 900), 0.5, 10.0, shape, tissue=tissue)
    for box, notes in (((60, 60, 80, 80), 0), ((25, 25, 75, 75), 1)):
        png(tmp_path / "x.png", (100, 100), box)
        mask, said = _read_mask(tmp_path / "x.png", ground)
        assert (mask & tissue).sum() / mask.sum() > 0.95 and len(said) == notes
    mask, said = _read_mask(tmp_path / "x.png", ground, "slide")
    assert mask[30, 30] and "annotations_origin" in said[0]


def test_the_qupath_export_of_predict_counts_from_the_scanned_area_and_reads_back(slide, tmp_path):
    boxes = np.array([(512, 448, 576, 512), (576, 448, 640, 512), (704, 640, 768, 704)])
    heat = PatchPredictions(boxes, CLASSES, np.array([[0.1, 0.9], [0.2, 0.8], [0.3, 0.7]]))
    path = tmp_path / "tumor.geojson"
    with Slide(slide) as opened:
        write_geojson(path, heat, [(0, 0, 0), (200, 0, 0)], "run/A/x", opened.bounds_l0[:2])
    rings = [feature["geometry"]["coordinates"][0] for feature in json.loads(path.read_text())["features"]]
    corners = np.concatenate([np.array(one) for one in rings])
    assert corners.min(0).tolist() == [128, 192] and corners.max(0).tolist() == [384, 448]  # as QuPath shows it
    found = read_annotations(path, {}, read_geometry(slide))
    assert found.tumor.equals(shapely.union_all(shapely.box(*boxes.T))) and found.omissions == {"tile": 3}
    assert found.notes == ("tumor.geojson: left out as no outlined areas: 3 tiles",)


@pytest.fixture(scope="module")
def full_slide(tmp_path_factory):
    """A slide that was scanned from edge to edge, with tissue from (448, 320) to (832, 704)."""
    return scan_areas.full(tmp_path_factory.mktemp("whole") / "x.tif", scan_areas.picture())


PLACE = np.array(shift(DRAWN), float)


@pytest.mark.parametrize(
    ("box", "unit"),
    [
        (PLACE * 0.0005, "millimetres"),
        (PLACE * 0.0005 + 20, "millimetres or degrees"),  # from the corner of a frame of reference
        (PLACE / np.tile(SIZE, 2), "fractions of the slide"),
        (PLACE * [1e-3, -1e-3, 1e-3, -1e-3], "degrees"),
        (PLACE * 0.5, "in µm"),
        (PLACE / 4, "in pixels of level 1"),
        (PLACE / 2, "of half the magnification"),
        (PLACE * [1, -1, 1, -1], "y counted upwards from 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_outlines_in_another_unit_are_refused_by_its_name(full_slide, tmp_path, box, unit):
    path = geojson(tmp_path / "a.geojson", box.tolist(), **QUPATH)
    tissue = np.zeros(SIZE[::-1], bool)
    tissue[320:704, 448:832] = True
    ground = SlideGeometry(SIZE, (0, 0, *SIZE), 0.5, 1.0, SIZE[::-1], (1.0, 4.0), tissue)
    refused(lambda: read_annotations(path, {}, ground), "a.geojson", unit, "export it in level-0 pixels")
    if "level" not in unit:
        refused(lambda: plan_slide(record(full_slide, path), SPEC), unit)


@pytest.mark.parametrize(
    ("box", "reading"),
    [((100, 700, 300, 900), "with x and y exchanged"), ((700, 852, 900, 1052), "with y counted upwards from the edge")],
)
def test_flipped_axes_are_named_and_accepted_with_a_configured_origin(tmp_path, box, reading):
    tissue = np.zeros(SIZE[::-1], bool)
    tissue[100:300, 700:900] = True
    ground = SlideGeometry(SIZE, (0, 0, *SIZE), 0.5, 1.0, SIZE[::-1], tissue=tissue)
    path = geojson(tmp_path / "a.geojson", box, **QUPATH)
    refused(lambda: read_annotations(path, {}, ground), "only 0% of what it outlines", f"would if it were {reading};")
    sure = read_annotations(path, {}, ground, "slide")
    assert sure.tumor.equals(shapely.box(*box)) and reading in sure.notes[0]


def test_outlines_of_another_slide_or_beyond_the_edge_are_reported(full_slide, tmp_path):
    beside = geojson(tmp_path / "beside.geojson", (10, 800, 200, 1100), (460, 340, 500, 380), **QUPATH)
    found = plan_slide(record(full_slide, beside), SPEC)
    assert any("is it of another slide?" in note for note in found.notes)
    beyond = geojson(tmp_path / "beyond.geojson", (448, 320, 832, 704), (900, 0, 1500, 100), **QUPATH)
    (note,) = plan_slide(record(full_slide, beyond), SPEC).notes
    assert (
        note
        == f"beyond.geojson: {(1500 - 1024) * 100 / (384**2 + 60000):.0%} of what it outlines lies outside the slide"
    )


def test_a_positive_slide_without_a_tumor_patch_is_reported(full_slide, tmp_path):
    small = geojson(tmp_path / "small.geojson", (520, 460, 540, 480), **QUPATH)
    plan = plan_slide(record(full_slide, small), SPEC)
    assert (plan.label == 0).all()
    (note,) = plan.notes
    assert note.startswith("labelled tumour and outlined, but none of its") and "10% of a patch" in note


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_a_tiled_tiff_with_an_orientation_tag_is_noted_as_not_rotated(tmp_path, orientation):
    tag = [(274, 3, 1, orientation, True)]
    tiled, strips = tmp_path / "tiled.tif", tmp_path / "strips.tif"
    resolution = {"resolution": (20_000, 20_000), "resolutionunit": "CENTIMETER"}
    for path, how in ((tiled, {"tile": (128, 128)}), (strips, {})):
        pixels = scan_areas.picture()[:384]
        tifffile.imwrite(path, pixels, photometric="rgb", metadata=None, extratags=tag, **resolution, **how)
    with Slide(tiled) as lying, Slide(strips) as turned:
        assert lying.size_l0 == (512, 384) and turned.size_l0 == ((384, 512) if orientation > 4 else (512, 384))
    (*notes,) = plan_slide(record(tiled), SPEC).notes
    assert len(notes) == (orientation > 1) and all(f"TIFF orientation {orientation}" in note for note in notes)
    assert plan_slide(record(strips), SPEC).notes == ()


def test_correctly_placed_outlines_raise_no_note(full_slide, tmp_path):
    for name, box in (
        ("tissue", (448, 320, 832, 704)),
        ("strokes", (400, 280, 900, 760)),
        ("cell", (600, 500, 612, 512)),
    ):
        path = geojson(tmp_path / f"{name}.geojson", box, **QUPATH)
        ground = read_geometry(full_slide)
        seen = survey(full_slide).slide_geometry
        for one in (ground, seen, replace(seen, tissue=None)):
            assert read_annotations(path, {}, one).notes == ()
