"""Outlines of several tools as areas, and their exact share of patches."""

import json
from pathlib import Path

import numpy as np
import pytest
import shapely
from conftest import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from shapely import affinity

from wsi_fl.slides.patching.annotations import read_annotations, share_inside
from wsi_fl.types import WsiFlError

SHARED = Path(__file__).parents[2].parent / "shared" / "data" / "annotations"
needs_shared = pytest.mark.skipif(not SHARED.exists(), reason="the material beside the project is not there")
SQUARE = [(0, 0), (100, 0), (100, 100), (0, 100)]
INNER = [(20, 20), (60, 20), (60, 60), (20, 60)]


def asap(path, *outlines):
    """An ASAP file of (group, ring) pairs."""
    body = ""
    for group, ring in outlines:
        points = "".join(f'<Coordinate Order="{k}" X="{x}" Y="{y}" />' for k, (x, y) in enumerate(ring))
        body += f'<Annotation Name="a" Type="Polygon" PartOfGroup="{group}">'
        body += f"<Coordinates>{points}</Coordinates></Annotation>"
    groups = '<AnnotationGroups><Group Name="metastases" PartOfGroup="None" /></AnnotationGroups>'
    body = f"<ASAP_Annotations><Annotations>{body}</Annotations>{groups}</ASAP_Annotations>"
    path.write_text(f'<?xml version="1.0"?>{body}')
    return path


def write_json_file(path, document):
    path.write_text(json.dumps(document))
    return path


def feature(ring, *, holes=(), **properties):
    outline = {"type": "Polygon", "coordinates": [[*map(list, r), list(r[0])] for r in (ring, *holes)]}
    return {"type": "Feature", "geometry": outline, "properties": properties}


@pytest.mark.parametrize(
    ("tumor", "hole"),
    [("metastases", "normal"), ("_0", "_2"), ("_1", "_2"), ("Tumor", "Exclusion"), ("tumor", "NORMAL")],
)
def test_holes_are_cut_out_of_outlines_in_any_order_of_the_file(tmp_path, tumor, hole):
    first = read_annotations(asap(tmp_path / "a.xml", (hole, INNER), (tumor, SQUARE)))
    last = read_annotations(asap(tmp_path / "b.xml", (tumor, SQUARE), (hole, INNER)))
    assert first.tumor.area == last.tumor.area == 10_000 - 1_600 and last.groups == {tumor: 1, hole: 1}


def test_polygon_points_are_read_by_their_order_attribute(tmp_path):
    path = asap(tmp_path / "a.xml", ("metastases", SQUARE))
    text = path.read_text().replace('Order="1"', 'Order="x"').replace('Order="2"', 'Order="1"')
    path.write_text(text.replace('Order="x"', 'Order="2"'))
    assert read_annotations(path).tumor.area == 5_000  # now a bow tie


def test_an_outline_without_a_group_is_unsure_beside_named_groups_and_tumor_otherwise(tmp_path):
    away = [(x + 500, y) for x, y in SQUARE]
    mixed = read_annotations(asap(tmp_path / "mixed.xml", ("Tumor", SQUARE), ("None", away)))
    assert (mixed.tumor.area, mixed.unsure.area) == (10_000, 10_000)
    assert share_inside(mixed.unsure, np.array([[500, 0], [0, 0]]), 50.0).tolist() == [1, 0]
    alone = read_annotations(asap(tmp_path / "alone.xml", ("None", away)))
    assert (alone.tumor.area, alone.unsure.area) == (10_000, 0)


@pytest.mark.parametrize("name", ["None", "none"])
def test_a_meaning_that_is_set_for_outlines_without_a_group_holds_in_files_of_such_alone(tmp_path, name):
    xml = asap(tmp_path / "a.xml", ("None", SQUARE))
    geojson = write_json_file(tmp_path / "a.geojson", feature(SQUARE, objectType="annotation"))
    for path in (xml, geojson):
        found = read_annotations(path, {name: "unsure"})
        assert (found.tumor.area, found.unsure.area) == (0, 10_000)
        assert read_annotations(path, {name: "ignored"}).tumor.area == 0
        assert read_annotations(path, {"stroma": "ignored"}).tumor.area == 10_000


def test_unknown_groups_are_listed_unless_named(tmp_path):
    path = asap(tmp_path / "a.xml", ("dcis", SQUARE), ("stroma", INNER), ("Tumor", INNER))
    words = "a.xml: unknown annotation groups dcis, stroma; "
    refused(lambda: read_annotations(path), words, error=WsiFlError)
    named = read_annotations(path, {"DCIS": "tumor", "stroma": "ignored"})
    assert named.tumor.area == 10_000
    otherwise = {"dcis": "tumor", "stroma": "hole", "tumor": "ignored"}
    assert read_annotations(path, otherwise).tumor.area == 8_400


TUMOR = {"classification": {"name": "Tumor"}}
POLYGON = feature(SQUARE)["geometry"]


@pytest.mark.parametrize(
    "document",
    [
        {"type": "FeatureCollection", "features": [feature(SQUARE, **TUMOR)]},
        [feature(SQUARE, classification={"names": ["tumor", "Positive"]})],
        [feature(SQUARE, objectType="annotation", classification={"name": "TUMOR", "colorRGB": -3670016})],
        feature(SQUARE, classification="tumour"),
        feature(SQUARE, name="Metastasis"),
        feature(SQUARE, classification='{"name": "Tumor", "color": [27, 158, 119]}'),
        feature(SQUARE, objectType="annotation", classification_name="Tumor", name="Annotation 1"),
        POLYGON,
        {"type": "GeometryCollection", "geometries": [POLYGON]},
        {"type": "MultiPolygon", "coordinates": [POLYGON["coordinates"]]},
        {"type": "Polygon", "coordinates": [[[x, y, 0] for x, y in SQUARE]]},  # neither flat nor closed
    ],
)
@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_geojson_in_all_its_shapes(tmp_path, document, mark):
    path = tmp_path / "a.geojson"
    path.write_text(mark + json.dumps(document), encoding="utf-8")
    assert read_annotations(path).tumor.equals(shapely.Polygon(SQUARE))


def test_holes_of_a_polygon_and_of_a_group_are_subtracted(tmp_path):
    document = [
        feature(SQUARE, holes=[INNER], **TUMOR),
        feature([(70, 70), (90, 70), (90, 90), (70, 90)], classification={"name": "Exclusion"}),
        {"type": "Feature", "geometry": None, "properties": None},
    ]
    assert read_annotations(write_json_file(tmp_path / "a.json", document)).tumor.area == 10_000 - 1_600 - 400


FAR = [(1000, 1000), (5000, 1000), (5000, 5000), (1000, 5000)]
NOT_AREAS = {
    "PointSet": ("4 points", FAR),
    "Dot": ("1 point", FAR[:1]),
    "Measurement": ("1 measurement", FAR[:2]),
    "None": ('1 annotation of type "None"', FAR),
    "Arrow": ('1 annotation of type "Arrow"', FAR),
    "Polygon": ("1 outline without area", FAR[:2]),
}


@pytest.mark.parametrize("kind", NOT_AREAS)
@pytest.mark.parametrize("group", ["Tumor", "None"])
def test_asap_annotations_without_area_are_ignored_and_reported(tmp_path, kind, group):
    said, points = NOT_AREAS[kind]
    path = asap(tmp_path / "a.xml", (group, SQUARE), ("other", points))
    path.write_text(
        path.read_text().replace('Type="Polygon" PartOfGroup="other"', f'Type="{kind}" PartOfGroup="{group}"')
    )
    found = read_annotations(path)
    assert found.tumor.area == 10_000
    assert found.notes == (f"a.xml: left out as no outlined areas: {said}",)


@pytest.mark.parametrize("kind", ["Rectangle", "Spline", "polygon", ""])
def test_asap_rectangles_splines_and_untyped_annotations_are_areas(tmp_path, kind):
    path = asap(tmp_path / "a.xml", ("Tumor", SQUARE))
    path.write_text(path.read_text().replace('Type="Polygon"', f'Type="{kind}"' if kind else ""))
    assert read_annotations(path).tumor.area == 10_000 and read_annotations(path).notes == ()
    corners = asap(tmp_path / "b.xml", ("Tumor", [(100, 0), (0, 50)]))
    corners.write_text(corners.read_text().replace("Polygon", "Rectangle"))
    assert read_annotations(corners).tumor.area == 5_000


ANALYSED = [
    ({"properties": {"objectType": "cell"}}, "cell"),
    ({"properties": {"object_type": "tile"}}, "tile"),
    ({"properties": {"type": "detection"}}, "detection"),
    ({"properties": {"objectType": "tmaCore", "isMissing": False}}, "TMA core"),
    ({"properties": {"object_type": "tma_core"}}, "TMA core"),
    *(({"id": f"Path{name}Object"}, name.lower()) for name in ("Cell", "Tile", "Detection")),
    ({"id": "TMACoreObject"}, "TMA core"),
    ({"properties": {"objectType": "root"}}, None),
    ({"id": "PathRootObject"}, None),
]


@pytest.mark.parametrize(("spelled", "kind"), ANALYSED)
@pytest.mark.parametrize("children", ["childObjects", "children"])
def test_qupath_analysis_objects_are_reported_and_annotations_inside_them_count(tmp_path, spelled, kind, children):
    nucleus = feature(FAR)["geometry"]
    inner = feature(INNER, objectType="annotation", classification={"name": "Tumor"})
    between = feature(SQUARE, objectType="annotation", classification="Region*", **{children: [inner]})
    made = feature(FAR, classification={"name": "Tumor"}) | spelled | {"nucleusGeometry": nucleus}
    made["properties"] = TUMOR | spelled.get("properties", {}) | {children: [between]}
    found = read_annotations(write_json_file(tmp_path / "a.geojson", [made]))
    assert found.tumor.equals(shapely.Polygon(INNER)) and found.groups == {"Tumor": 1, "Region*": 1}
    assert found.omissions == ({kind: 1} if kind else {})
    if kind is None:
        del made["geometry"]
        assert read_annotations(write_json_file(tmp_path / "b.geojson", [made])).tumor.area == 1_600


@pytest.mark.parametrize("spelled", ["annotation", "PathAnnotationObject", "unknown", "ellipse"])
def test_qupath_objects_of_any_other_type_count_as_drawn(tmp_path, spelled):
    for properties in ({"objectType": spelled}, {"object_type": spelled}, {"type": spelled, "name": "Tumor"}):
        one = feature(SQUARE, **(properties | {"isLocked": True, "measurements": []}))
        one["geometry"] |= {"isEllipse": True, "plane": {"c": -1, "z": 0, "t": 0}}
        assert read_annotations(write_json_file(tmp_path / "a.geojson", [one])).tumor.area == 10_000


@pytest.mark.parametrize(
    "classification",
    [
        "Tumor: Positive",
        {"name": "Tumor: Positive", "colorRGB": -377282},
        {"names": ["Tumor", "Positive"], "color": [250, 62, 62]},
        {"name": "Positive", "parentClass": {"name": "Tumor", "colorRGB": -3670016}},
    ],
)
def test_a_derived_class_is_its_base_however_a_version_spells_it(tmp_path, classification):
    document = [feature(SQUARE, classification=classification), feature(INNER, classification="Ignore*")]
    path = write_json_file(tmp_path / "a.geojson", document)
    found = read_annotations(path)
    assert found.tumor.area == 10_000 and found.groups == {"Tumor: Positive": 1, "Ignore*": 1}
    assert read_annotations(path, {"tumor: positive": "ignored"}).tumor.area == 0


def test_points_lines_and_objects_without_geometry_are_counted_by_kind(tmp_path):
    shapes = [
        {"type": "Point", "coordinates": [1, 1]},
        {"type": "MultiPoint", "coordinates": [[x, 7] for x in range(9)]},
        {"type": "LineString", "coordinates": SQUARE},
        {"type": "GeometryCollection", "geometries": [POLYGON, {"type": "MultiLineString", "coordinates": [SQUARE]}]},
        {"type": "MultiPolygon", "coordinates": []},
        None,
    ]
    document = [{"type": "Feature", "geometry": shape, "properties": TUMOR} for shape in shapes]
    document += [feature(FAR, objectType="cell") for _ in range(12)]
    found = read_annotations(write_json_file(tmp_path / "a.geojson", document))
    assert found.tumor.area == 10_000
    assert found.notes == (
        "a.geojson: left out as no outlined areas: 12 cells, 2 lines, 1 object without a shape, "
        "1 outline without area and 10 points",
    )


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ([], "holds no outline"),
        ({"type": "FeatureCollection", "features": []}, "holds no outline"),
        ([feature(SQUARE, objectType="tile")] * 2, "nothing was taken from it; left out as no outlined areas: 2 tiles"),
        ([{"type": "Feature", "geometry": None, "properties": {"objectType": "root"}}], "holds no outline"),
    ],
)
def test_a_file_without_usable_outlines_is_reported(tmp_path, document, said):
    found = read_annotations(write_json_file(tmp_path / "a.json", document))
    assert found.tumor.is_empty and found.notes == (f"a.json: {said}",)


PAST_ITS_START = [(0, 0), (10, 0), (10, 10), (0, 10), (0, -2), (5, -2), (5, 5), (-1, 5)]


@pytest.mark.parametrize(
    ("ring", "area"),
    [
        ([(0, 0), (10, 10), (10, 0), (0, 10)], 50),  # bow tie
        ([*SQUARE, SQUARE[0]], 10_000),  # closed
        ([p for p in SQUARE for _ in range(3)], 10_000),  # repeated points
        ([*SQUARE, *SQUARE], 10_000),  # drawn twice
        (PAST_ITS_START, 112.5),
        ([(0, 0), (100, 0), (100, 100), (0, 100), (0, 0), (0, -50)], 10_000),  # a spike
        ([(0, 0), (10, 10)], 0),
        ([(0, 0)], 0),
        ([], 0),
        ([(0, 0), (5, 5), (10, 10)], 0),  # flat
    ],
)
def test_invalid_rings_are_repaired_or_dropped(tmp_path, ring, area):
    tumor = read_annotations(asap(tmp_path / "a.xml", ("metastases", ring))).tumor
    assert tumor.is_valid and tumor.geom_type in {"Polygon", "MultiPolygon", "GeometryCollection"}
    assert tumor.area == pytest.approx(area)
    share = share_inside(tumor, np.array([[-1000, -1000]]), 5000.0)[0]
    assert share * 5000**2 == pytest.approx(area, rel=1e-4)


def star(n, seed=0, radius=20_000.0, centre=30_000.0):
    """A ragged outline of n vertices."""
    angle = np.linspace(0, 2 * np.pi, n, endpoint=False)
    away = radius * (1 + 0.2 * np.sin(7 * angle) + 0.01 * np.random.default_rng(seed).normal(size=n))
    return shapely.Polygon(np.c_[centre + away * np.cos(angle), centre + away * np.sin(angle)])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), side=st.floats(1, 90), n=st.sampled_from([5, 100, 700]))
def test_shares_are_exact_areas(seed, side, n):
    rng = np.random.default_rng(seed)
    outline = star(n, seed, radius=100, centre=150)
    hole = affinity.scale(star(9, seed + 1, radius=100, centre=150), 0.4, 0.4)
    tumor = shapely.difference(outline.buffer(0), hole)
    xy = rng.integers(-20, 320, (40, 2))
    expected = [tumor.intersection(shapely.box(x, y, x + side, y + side)).area / side**2 for x, y in xy]
    got = share_inside(tumor, xy, side)
    assert got.dtype == np.float32
    np.testing.assert_allclose(got, expected, atol=1e-5)


def test_patches_that_only_touch_an_outline_share_no_area_with_it():
    slanted = affinity.rotate(shapely.Polygon(SQUARE), 0.3)
    for tumor in (shapely.Polygon(SQUARE), shapely.union(shapely.Polygon(SQUARE), slanted).convex_hull):
        left, _, right, _ = tumor.bounds
        xy = np.array([[int(np.ceil(right)), 0], [int(np.floor(left)) - 50, 0]])
        assert share_inside(tumor, xy, 50.0).tolist() == [0, 0]
    inside = share_inside(star(3000), np.array([[29_000, 29_000]]), 333.3)
    assert inside.tolist() == [1]


@needs_shared
def test_files_of_other_tools_read_once_their_groups_are_named_and_agree():
    groups = ("UT", "I", "artifact", "aberrant_positive_columnar")
    areas = []
    for name in ("asap_example.xml", "asap_example.geojson", "dlup_qupath05.geojson"):
        with pytest.raises(WsiFlError, match="unknown annotation groups"):
            read_annotations(SHARED / name)
        every = read_annotations(SHARED / name, dict.fromkeys((*groups, "unsure"), "tumor")).tumor
        assert every.is_valid and every.area > 0
        roles = dict.fromkeys(groups, "ignored") | {"unsure": "tumor"}
        areas.append(read_annotations(SHARED / name, roles).tumor.area)
    assert areas[0] == pytest.approx(areas[1])
