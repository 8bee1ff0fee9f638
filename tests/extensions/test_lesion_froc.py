"""Lesion FROC by hand counts, by the challenge's masks of pixels, and on a simulated archive."""

import json

import numpy as np
import pytest
import shapely
from conftest import refused
from hypothesis import given
from hypothesis import strategies as st
from scipy import ndimage
from skimage import measure
from test_predict import SETTINGS

from wsi_fl.evidence import lesion_froc
from wsi_fl.evidence.lesion_froc import compute_sensitivities, find_lesions, match_detections, select_detections
from wsi_fl.evidence.predicted_lesions import explain_left_out, score_lesions, tabulate_lesions
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.slides.patching.annotations import read_annotations
from wsi_fl.slides.patching.outline_placement import rasterize_area
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.stages.evaluation.predict import write_patch_table
from wsi_fl.stages.prepare.init_study import init_study
from wsi_fl.stages.prepare.tile import tile_slides
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.study.folder import Study
from wsi_fl.system.files import write_json
from wsi_fl.types import WsiFlError


@pytest.mark.parametrize(
    ("lesions", "false_positives", "n_slides", "expected"),
    [
        ([0.9, 0.8], [], 3, [1, 1, 1, 1, 1, 1]),
        ([0.9, 0.8], [0.7] * 50, 1, [1, 1, 1, 1, 1, 1]),
        ([0.0, 0.0], [0.7], 1, [0, 0, 0, 0, 0, 0]),
        ([0.9, 0.6], [0.7], 1, [0.5, 0.5, 1, 1, 1, 1]),
        ([0.9, 0.6, 0.0], [0.7], 1, [1 / 3, 1 / 3, 2 / 3, 2 / 3, 2 / 3, 2 / 3]),
        ([0.9, 0.6, 0.3, 0.0], [0.8, 0.7, 0.5, 0.5], 2, [0.25, 0.25, 0.5, 0.75, 0.75, 0.75]),
        ([0.9, 0.1], [0.5] * 9, 1, [0.5, 0.5, 0.5, 0.5, 0.5, 0.5]),
        ([0.9, 0.5], [0.5] * 4, 1, [0.5 + 0.5 * rate / 4 for rate in (0.25, 0.5, 1, 2, 4)] + [1]),
    ],
)
def test_sensitivities_equal_counts_by_hand(lesions, false_positives, n_slides, expected):
    found = compute_sensitivities(np.array(lesions), np.array(false_positives), n_slides)
    np.testing.assert_allclose(found, expected)


@given(st.integers(0, 10**6))
def test_detections_are_those_of_slow_suppression(seed):
    rng = np.random.default_rng(seed)
    centers, p = rng.integers(0, 12, (40, 2)).astype(float), rng.integers(0, 6, 40) / 5
    rows, left = [], [k for k in np.lexsort([np.arange(40), -p]) if p[k] > 0]
    while left:
        rows.append(left[0])
        left = [k for k in left if np.hypot(*(centers[k] - centers[rows[-1]])) > 2.5]
    assert select_detections(centers, p, 2.5).tolist() == rows


def test_a_lesion_is_found_once_by_its_most_probable_detection():
    lesions = find_lesions(shapely.MultiPolygon([shapely.box(0, 0, 2000, 2000), shapely.box(5000, 0, 5100, 100)]), 0.25)
    assert sorted(lesions.isolated) == [False, True]
    points = np.array([[100, 100], [1000, 1000], [2140, 500], [2160, 500], [5050, 50], [9000, 9000]], float)
    found = match_detections(points, np.array([0.3, 0.9, 0.95, 0.8, 0.7, 0.1]), lesions)
    assert found.lesions.tolist() == [0.95] and found.false_positives.tolist() == [0.8, 0.1]


@pytest.mark.parametrize("seed", range(4))
def test_lesions_are_those_of_the_challenges_mask(seed):
    rng, mpp, downsample = np.random.default_rng(seed), 0.243, 8
    blobs = [shapely.Point(*rng.uniform(800, 5200, 2)).buffer(rng.uniform(60, 420)) for _ in range(12)]
    ring = shapely.Point(7000, 3000).buffer(900).difference(shapely.Point(7000, 3000).buffer(700))
    tumor = shapely.union_all([*blobs, ring, shapely.Point(7000, 3000).buffer(90)])
    lesions = find_lesions(tumor, mpp)
    mask = rasterize_area(tumor, (750, 1050), downsample)
    near = ndimage.distance_transform_edt(~mask) < 75 / (2 * mpp * downsample)
    labels = measure.label(ndimage.binary_fill_holes(near), connectivity=2)
    axes = np.array([region.axis_major_length for region in measure.regionprops(labels)]) * downsample * mpp
    assert len(lesions.areas) == len(axes) > 3
    ours = [lesion_froc._measure_major_axis(area) * mpp for area in lesions.areas]
    np.testing.assert_allclose(np.sort(ours), np.sort(axes), rtol=0.03)
    assert lesions.isolated.sum() == (axes < 275).sum()
    points = rng.uniform(0, [8400, 6000], (2000, 2))
    inside = shapely.STRtree(lesions.areas).query(shapely.points(points), predicate="intersects")[0]
    column, row = (points / downsample).astype(int).T
    assert abs(len(inside) - (labels[row, column] > 0).sum()) < 20


@pytest.fixture(scope="module")
def tiled(archive, tmp_path_factory):
    study = Study(tmp_path_factory.mktemp("froc") / "study")
    init_study(study.root, archive=archive)
    tile_slides(study, site=None, overrides=SETTINGS)
    return study


def predicted_run(study, archive, folder, probability):
    """Write predictions of patches of 16 px at every 16 px for all slides of C1; return the context of their run."""
    for path in sorted((archive / "training" / "center_0").glob("*.tif")):
        with Slide(path) as slide:
            xy = np.stack(np.meshgrid(*(range(0, size, 16) for size in slide.size_l0)), axis=-1).reshape(-1, 2)
            quickhash = slide.quickhash
        outlines = archive / "annotations" / f"{path.stem}.xml"
        tumor = read_annotations(outlines).tumor if outlines.exists() else shapely.MultiPolygon()
        where = folder / "predictions" / "C1" / path.stem
        columns = {"p_tumor": probability(shapely.contains_xy(tumor, *(xy + 8.0).T), xy)}
        where.mkdir(parents=True)
        write_patch_table(where / "patches.csv", xy, 16.0, columns)
        write_json(where / "score.json", {"slide": path.stem, "model": "private", "quickhash": quickhash})
    pipeline = study.load_pipeline("camelyon17", SETTINGS)
    return RunContext.create(study, pipeline, "regular", RunFolder(folder))


def test_a_perfect_detector_of_an_archive_scores_one(tiled, archive, tmp_path):
    with predicted_run(tiled, archive, tmp_path, lambda inside, _: inside * 0.9) as context:
        (row,) = score_lesions([context])
    assert (row["site"], row["slides"], row["normal_slides"], row["lesions"]) == ("C1", 2, 1, 1)
    assert row["left_out"] == {"not of the test part": 2} and row["models"] == ["private"]
    assert row["per_slide"] == row["per_normal_slide"] == [1.0] * 6
    assert next(iter(tabulate_lesions([row]).rows))[:5] == ["C1", "2 (1)", "1 (0)", "per slide", "1.00"]
    assert explain_left_out([row]) == ["C1: left out 2 not of the test part"]


def test_false_positives_of_slides_with_tumour_count_by_one_rule_alone(tiled, archive, tmp_path):
    """Four of them on the slide with tumour, more probable than its lesion, are two per slide."""

    def probability(inside, xy):
        is_false = (xy[:, 1] == 0) & (xy[:, 0] % 48 == 0) & (xy[:, 0] < 4 * 48)
        return np.where(inside, 0.5, 0.9 * (is_false & inside.any()))

    with predicted_run(tiled, archive, tmp_path, probability) as context:
        (row,) = score_lesions([context])
    assert row["per_slide"] == [0.0, 0.0, 0.0, 1.0, 1.0, 1.0]
    assert row["per_normal_slide"] == [1.0] * 6


def test_predictions_that_are_damaged_of_another_slide_or_missing_are_refused(tiled, archive, tmp_path):
    with predicted_run(tiled, archive, tmp_path / "a", lambda inside, _: inside * 1.0) as context:
        for table in (tmp_path / "a").glob("predictions/C1/*/patches.csv"):
            table.write_text(table.read_text().replace(",16,", ",,"))
        refused(lambda: score_lesions([context]), "patches.csv: damaged; predict the slide again", error=WsiFlError)
        for path in (tmp_path / "a").glob("predictions/C1/*/score.json"):
            path.write_text(json.dumps({**json.loads(path.read_text()), "quickhash": "other"}))
        refused(lambda: score_lesions([context]), "not the slide that was predicted", error=WsiFlError)
    with RunContext.create(tiled, context.pipeline, "regular", RunFolder(tmp_path / "b")) as empty:
        refused(lambda: score_lesions([empty]), "has no predicted slides", "wsi-fl predict b", error=WsiFlError)
