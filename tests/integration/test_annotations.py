"""Tests of annotation outlines in `tile`, `predict`, `mosaic` and the archive layouts."""

import csv
import json
import shutil

import numpy as np
import pytest
import scan_areas
from file_changes import edit, site_file
from scan_areas import CORNER
from test_annotation_formats import feature
from test_annotation_placement import ring
from test_predict import trained_on

from wsi_fl.slides.layouts import read_site
from wsi_fl.slides.layouts.common import Sources
from wsi_fl.stages.evaluation.predict import predict
from wsi_fl.stages.prepare.build_bags import make_mosaics
from wsi_fl.stages.prepare.init_study import init_study
from wsi_fl.stages.prepare.tile import render_tile_lines, tile_slides
from wsi_fl.stages.runtime.console import TextLine
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import Study

SETTINGS = ["tile.size_px=64", "tile.mpp=0.5", "tile.balance=false", "slides.test_fraction=0"]
PLAIN = {"objectType": "annotation", "classification": {"name": "Tumor"}}


def box(*corners, **properties):
    return feature(ring(corners), **PLAIN | properties)


def make_outlined_study(root, write, outlines, label="positive"):
    """Make a study of one site with outlines for each slide."""
    (root / "slides").mkdir(parents=True)
    rows = ["slide,patient,site,label,annotation"]
    for name, features in outlines.items():
        path = write(root / "slides" / f"{name}.{'scn' if write is scan_areas.scn else 'tif'}", scan_areas.picture())
        (root / f"{name}.geojson").write_text(json.dumps(features))
        rows.append(f"{path.name},p{name},A,{label},{name}.geojson")
    (root / "slides.csv").write_text("\n".join(rows) + "\n")
    init_study(root / "study", archive=root)
    return Study(root / "study")


def tile_study(study, *more):
    (row,) = tile_slides(study, site="A", overrides=[*SETTINGS, *more])["sites"]
    return row


def read_notes(row):
    return {note["slide"]: note["note"] for note in row["notes"]}


def test_tile_stores_the_tumour_drawn_in_qupath_and_reports_slides_left_out(tmp_path):
    drawn = box(128, 192, 320, 384)
    cells = [box(70 + 10 * k, 70, 75 + 10 * k, 75, objectType="cell") for k in range(3)]
    study = make_outlined_study(tmp_path, scan_areas.scn, {"a": [drawn, *cells], "b": [drawn]})
    document = tile_slides(study, site="A", overrides=SETTINGS)
    (row,) = document["sites"]
    assert row["tumor"] == 2 * 9 and row["failed"] == []
    assert read_notes(row) == {"a": "a.geojson: left out as no outlined areas: 3 cells"}
    assert any("3 cells" in line.text for line in render_tile_lines(document) if isinstance(line, TextLine))
    assert read_notes(tile_study(study)) == read_notes(row)  # by the plan that was kept
    with PatchStore(study.store_path("A")) as store:
        found = store.table.xy_l0[store.table.label == 1]
    assert found.min(0).tolist() == [128 + CORNER[0], 192 + CORNER[1]]


def test_a_site_file_sets_the_origin_of_its_outlines(tmp_path):
    drawn = box(448, 320, 640, 512)  # from the corner of the scanned area it would lie beside the tissue
    study = make_outlined_study(tmp_path, scan_areas.sparse, {"a": [drawn]})
    assert tile_study(study)["tumor"] == 9 and "annotations_origin" in read_notes(tile_study(study))["a"]
    edit(site_file(study, "A"), more='annotations_origin = "slide"\n')
    row = tile_study(study)
    assert row["tumor"] == 9 and row["notes"] == []
    edit(site_file(study, "A"), '"slide"', '"bounds"')
    row = tile_study(study)
    assert row["tumor"] == 0 and "with annotations_origin = " in read_notes(row)["a"]


def shift_box(feature):
    ring = np.array(feature["geometry"]["coordinates"][0]) + CORNER
    return feature | {"geometry": {"type": "Polygon", "coordinates": [ring.tolist()]}}


def test_tumour_patches_that_the_sample_omits_are_reported(tmp_path):
    outlines = {name: [shift_box(box(64, 64, 320, 448))] for name in "abc"}
    row = tile_study(make_outlined_study(tmp_path, scan_areas.full, outlines), "tile.max_per_slide=1")
    lost = {slide for slide, note in read_notes(row).items() if "is in the sample of the store" in note}
    assert len(lost) == row["healthy"] == 3 - row["tumor"] > 0


def test_a_positive_slide_with_unusable_outlines_is_excluded_with_the_reason(tmp_path):
    outlines = {"bad": [box(128, 192, 320, 384, objectType="detection")], "good": [shift_box(box(128, 192, 320, 384))]}
    (failed,) = tile_study(make_outlined_study(tmp_path, scan_areas.full, outlines))["failed"]
    assert failed["slide"] == "bad" and "left out as no outlined areas: 1 detection" in failed["reason"]
    assert "no tumour is outlined on the slide" in failed["reason"] and "\n" not in failed["reason"]


@pytest.mark.parametrize(("layout", "healthy"), [("camelyon16", "normal_001"), ("camelyon17", "patient_000_node_0")])
def test_outlines_of_a_healthy_slide_are_checked_in_camelyons_layouts(tmp_path, layout, healthy):
    (tmp_path / f"{healthy}.tif").touch()
    (tmp_path / "outlines").mkdir()
    (tmp_path / "stages.csv").write_text(f"patient,stage\n{healthy}.tif,negative\n")
    sources = Sources("A", "A", [str(tmp_path / "*.tif")], tmp_path / "outlines", tmp_path / "stages.csv")
    ((without,), _) = read_site(layout, sources)
    (tmp_path / "outlines" / f"{healthy}.xml").touch()
    ((record,), _) = read_site(layout, sources)
    assert without.annotation is None and record.annotation.stem == healthy
    assert record.supervision == without.supervision == "negative" and not record.positive


@pytest.fixture
def trained_run(archive, tmp_path_factory, tmp_path):
    study, run = trained_on(archive, tmp_path_factory.getbasetemp() / "trained")
    shutil.copytree(study.root, tmp_path / "study", ignore=shutil.ignore_patterns("predictions"))
    return Study(tmp_path / "study"), run


@pytest.mark.parametrize(("origin", "corner"), [("", CORNER), ("slide", (0, 0))])
def test_outlines_written_by_predict_open_at_their_place_in_qupath(trained_run, tmp_path, origin, corner):
    study, run = trained_run
    edit(site_file(study, "C1"), more=f'annotations_origin = "{origin}"\n' if origin else "")
    slide = scan_areas.scn(tmp_path / "x.scn", scan_areas.picture())
    (row,) = predict(study, run, site="C1", slides=[slide], out=tmp_path / "out")["slides"]
    features = json.loads((study.root / row["geojson"]).read_text())["features"]
    tiles = [one["geometry"]["coordinates"][0] for one in features if one["properties"]["objectType"] == "tile"]
    with (study.root / row["csv"]).open(newline="") as file:
        corners = [(int(one["x_l0"]), int(one["y_l0"])) for one in csv.DictReader(file)]
    assert [tuple(ring[0]) for ring in tiles] == [(x - corner[0], y - corner[1]) for x, y in corners]
    assert min(corners)[0] >= CORNER[0]  # patches.csv counts as OpenSlide does
    for one in features:
        inside = np.array(one["geometry"]["coordinates"][0]) - CORNER + corner
        assert inside.min() >= 0 and inside.max() <= scan_areas.SIDE


def test_a_mosaic_lies_within_the_mask_and_names_the_mask(tmp_path, tiny_weights):
    study = make_outlined_study(tmp_path, scan_areas.scn, {"a": []}, label="negative")
    (tmp_path / "masks").mkdir()
    cell = box(1, 1, 5, 5, objectType="cell")
    (tmp_path / "masks/a.geojson").write_text(json.dumps([box(64, 64, 320, 448), cell]))
    settings = {"size_px": 32, "mpp": 0.5, "encoder": "test_efficientnet", "weights": tiny_weights}
    overrides = [f"mosaic.{key}={value}" for key, value in settings.items()]
    (row,) = make_mosaics(study, site="A", overrides=[*overrides, f'tissue.method="{tmp_path / "masks"}"'])["sites"]
    assert row["notes"] == [{"slide": "a", "note": "a.geojson: left out as no outlined areas: 1 cell"}]
