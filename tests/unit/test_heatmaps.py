"""Heatmaps have distinct class colors, a complete legend, and colors at the places of patches."""

import io
import json

import numpy as np
import pytest
from PIL import Image

from wsi_fl.report import figures
from wsi_fl.report.formatting import format_number
from wsi_fl.slides.pictures import heatmap, qc_thumbnail
from wsi_fl.slides.pictures.drawing import distinct_colors, load_font, wrap_rows
from wsi_fl.slides.pictures.heatmap import Caption, PatchPredictions, draw_heatmap, patch_boxes, write_geojson
from wsi_fl.stages.evaluation.predict import choose_colors
from wsi_fl.types import GridSpec

LEAST_APART = 100
"""Of two colours, in the weighted distance that `distinct_colors` uses; Okabe and Ito's are 132 apart."""


def heat_of(n_classes, *, n=60, name="subtype number"):
    left = np.stack(np.meshgrid(np.arange(10), np.arange(n // 10)), -1).reshape(-1, 2) * 400
    said = np.eye(n_classes)[np.arange(n) % n_classes] * 0.8 + 0.2 / n_classes
    return PatchPredictions(np.concatenate([left, left + 400], 1), tuple(f"{name} {k}" for k in range(n_classes)), said)


def color_distance(colors):
    values = np.array(colors)
    distance = ((values[:, None] - values) ** 2 @ [2, 4, 3]) ** 0.5
    return distance[~np.eye(len(values), dtype=bool)].min()


@pytest.mark.parametrize("n", [3, 6, 7, 14, 30])
def test_no_two_classes_have_colours_that_look_alike(n):
    colors = choose_colors([str(k) for k in range(n)])
    assert len(colors) == n and color_distance(colors) >= LEAST_APART
    assert colors[:6] == choose_colors(list("abcdefgh"))[: min(n, 6)]  # and those of few stay what they were


def test_groups_of_a_mosaic_have_colours_of_their_own():
    assert color_distance([qc_thumbnail._group_color(k) for k in range(24)]) > 60


@pytest.mark.parametrize("n", [7, 13])
def test_qupath_gets_a_colour_for_every_class(tmp_path, n):
    heat = heat_of(n)
    write_geojson(tmp_path / "x.geojson", heat, choose_colors(heat.classes), "run/site/slide")
    features = json.loads((tmp_path / "x.geojson").read_text())["features"]
    classes = [one["properties"]["classification"] for one in features]
    assert len({(one["name"], *one["color"]) for one in classes}) == n
    assert len({tuple(one["color"]) for one in classes}) == n


@pytest.mark.parametrize(
    "name", ["a", "subtype number", "a carcinoma whose name takes more than the width of a page " * 2]
)
@pytest.mark.parametrize("n", [2, 3, 6, 14])
def test_the_legend_lies_on_the_page_and_beside_the_scale_bar(n, name):
    heat, width = heat_of(n, name=name), 860
    places = heatmap._place_outlines(heat, width)
    assert len(places) == len(heat.region_classes) and len({place[:2] for place in places}) == len(places)
    for row, x, text in places:
        end = x + heatmap._LINE_PX + load_font().getlength(text)
        assert end <= (width * 5 / 6 - heatmap._MARGIN_PX if row == 0 else width - heatmap._MARGIN_PX)


def test_a_page_grows_by_the_rows_of_its_legend():
    heights = []
    for n in (2, 14):
        heat = heat_of(n)
        thumbnail = np.full((120, 200, 3), 230, np.uint8)
        page = draw_heatmap(thumbnail, 20.0, 0.25, heat, choose_colors(heat.classes), Caption("s", "r", "1", "d"))
        heights.append(Image.open(io.BytesIO(page)).height)
    rows = 1 + heatmap._place_outlines(heat_of(14), 1200)[-1][0]
    assert rows > 3 and heights[1] - heights[0] == (rows - 1) * heatmap._ROW_PX


def test_legend_items_wrap_where_a_row_ends():
    assert wrap_rows([10, 10, 10], [20]) == [(0, 0.0), (0, 10.0), (1, 0.0)]
    assert wrap_rows([99], [20]) == [(0, 0.0)] and wrap_rows([], [20]) == []  # what is alone stays
    assert distinct_colors(((1, 2, 3), (4, 5, 6)), 1) == ((1, 2, 3),)


@pytest.mark.parametrize("size", [(60_000, 40_000), (900, 90_000), (90_000, 900)])
@pytest.mark.parametrize("mpp", [0.2308, 0.2525])
def test_colours_lie_where_their_patches_lie_to_the_last_corner(size, mpp):
    """A patch in the far corner, whose step is no whole number of pixels, is coloured within a pixel of its place."""
    spec = GridSpec(224, 0.5, 224)
    step = spec.size_px * spec.mpp / mpp
    cell = np.array([[int(side // step) - 1 for side in size]])
    boxes = patch_boxes(np.round(cell * step).astype(np.int64), spec, mpp, size)
    zoom = 1000 / max(size)
    shape = [max(1, round(side * zoom)) for side in size]
    plain = Image.new("RGB", (shape[0], shape[1]), (255, 255, 255))
    tinted = np.asarray(heatmap._tint_patches(plain, PatchPredictions(boxes, ("a", "b"), np.array([[0.1, 0.9]])), zoom))
    rows, columns = np.nonzero((tinted != 255).any(2))
    exact = np.concatenate([cell[0] * step, (cell[0] + 1) * step]) * zoom
    drawn = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1])
    assert np.abs(drawn - exact).max() <= 1


@pytest.mark.parametrize("stride", [256, 128])
def test_patches_off_the_grid_have_boxes_of_their_size(stride):
    """CLAM counts from the corner of each piece of tissue, and patches of other tools are whole pixels apart."""
    xy = np.array([[150, 100], [406, 100], [662, 355], [51_200, 40_960]])
    boxes = patch_boxes(xy, GridSpec(256, 0.5, stride), 0.5, (90_000, 90_000))
    assert boxes.tolist() == np.concatenate([xy, xy + 256], axis=1).tolist()
    boxes = patch_boxes(xy, GridSpec(256, 0.5, stride), 0.4999, (90_000, 90_000))
    assert np.abs(boxes[:, 2:] - xy - 256).max() <= 1


@pytest.mark.parametrize("names", [("luad", "Luad", "lusc"), ("pT1", "PT1", "x"), ("a", "A", "B")])
def test_classes_that_differ_in_capitals_stay_distinct_in_qupath(tmp_path, names):
    boxes = np.array([[k * 9, 0, k * 9 + 9, 9] for k in range(3)])
    write_geojson(
        tmp_path / "x.geojson",
        PatchPredictions(boxes, names, np.eye(3) * 0.9 + 0.03),
        choose_colors(names),
        "run/site/slide",
    )
    features = json.loads((tmp_path / "x.geojson").read_text())["features"]
    assert len({one["id"] for one in features if "id" in one}) == 3
    assert {one["properties"]["classification"]["name"] for one in features} == set(names)
    assert all(len(one["properties"]["measurements"]) == 3 for one in features)


@pytest.mark.parametrize(("values", "mean"), [([[None] * 2] * 2, "–"), ([[0.5, None], [None, 0.7]], "0.600")])
def test_a_matrix_of_unknown_scores_is_described_as_unknown(values, mean):
    assert figures.plot_matrix(values, (0, 1), "AUROC").alt == f"AUROC: 2 models by 2 test parts, mean {mean}."


@pytest.mark.parametrize(
    ("value", "text"), [(-0.0001, "0.000"), (-0.0, "0.000"), (-0.0006, "−0.001"), (-1200.0, "−1,200.000")]
)
def test_zero_is_formatted_without_a_minus_sign(value, text):
    assert format_number(value) == text
