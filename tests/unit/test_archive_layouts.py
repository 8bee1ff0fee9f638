"""Known archive layouts are read with their slides, patients, labels and outlines."""

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from builders import refused

from wsi_fl.slides.layouts import Sources, detect_layout, list_sites, read_site
from wsi_fl.types import UsageError


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


C17_STAGES = {
    "patient_000_node_0": "negative",
    "patient_000_node_1": "itc",
    "patient_004_node_4": "macro",
    "patient_010_node_4": "micro",
    "patient_012_node_0": "itc",
    "patient_013_node_2": "macro",
    "patient_020_node_0": "negative",
    "patient_039_node_1": "macro",
    "patient_099_node_0": "negative",
}
C17_OUTLINED = ("patient_000_node_1", "patient_004_node_4", "patient_010_node_4", "patient_039_node_1")


def camelyon17(root: Path, style: str = "training/center_") -> Path:
    """An archive in one of the ways Camelyon17 is kept; its files are empty."""
    for name in [*C17_STAGES, "patient_100_node_0", "patient_199_node_4"]:
        number = "" if style == "images" else int(name[8:11]) // 20
        touch(root / f"{style}{number}" / f"{name}.tif")
    touch(root / "masks" / "patient_004_node_4_mask.tif")
    touch(*(root / "annotations" / f"{name}.xml" for name in C17_OUTLINED))
    rows = ["patient,stage", "patient_000.zip,pN0(i+)", "patient_004.zip,pN1"]
    rows += [f"{name}.tif,{stage}" for name, stage in C17_STAGES.items()]
    (root / "stages.csv").write_text("\n".join(rows) + "\n")
    return root


def sources_of(found) -> Sources:
    annotations, labels = (Path(one) if one else None for one in (found.annotations, found.labels))
    return Sources(found.name, f"sites/{found.name}.toml", found.slides, annotations, labels)


def first_of(archive: Path) -> Sources:
    return sources_of(list_sites(archive, "camelyon17")[0])


@pytest.mark.parametrize("style", ["images", "training/center_", "centre_"])
@pytest.mark.parametrize("folder", ["c17", "c 17 [v1] *"])
def test_camelyon17_is_five_centers_under_any_folder_names(tmp_path, style, folder):
    archive = camelyon17(tmp_path / folder, style)
    if style != "images":  # their test patients are in folders of no training centre
        touch(archive / "testing" / "patient_100_node_1.tif")
    assert detect_layout(archive) == "camelyon17"
    found = list_sites(archive, "camelyon17")
    assert [(site.name, site.n_slides) for site in found] == [("C1", 6), ("C2", 2), ("C5", 1)]
    seen: list[str] = []
    for site in found:
        records, aside = read_site("camelyon17", sources_of(site))
        assert len(records) + len(aside) == site.n_slides
        seen += [one.slide for one in (*records, *aside)]
        assert {int(r.patient[8:]) // 20 for r in records} == {int(site.name[1]) - 1}
    assert sorted(seen) == sorted(C17_STAGES)


def test_camelyon17_slides_are_supervised_by_stage_and_outline(tmp_path):
    records, aside = read_site("camelyon17", first_of(camelyon17(tmp_path)))
    assert [(r.slide, r.patient, r.supervision, r.positive) for r in records] == [
        ("patient_000_node_0", "patient_000", "negative", False),
        ("patient_000_node_1", "patient_000", "partial", True),
        ("patient_004_node_4", "patient_004", "annotated", True),
        ("patient_010_node_4", "patient_010", "annotated", True),
    ]
    assert all(r.site == "C1" and r.path.is_file() and r.path.stem == r.slide for r in records)
    outlines = [r.annotation.stem if r.annotation else None for r in records]
    assert outlines == [None, *(r.slide for r in records[1:])]
    reasons = {a.slide: a.reason for a in aside}
    assert {slide: reason.split(",")[0] for slide, reason in reasons.items()} == {
        "patient_012_node_0": "itc",
        "patient_013_node_2": "macro",
    }
    assert all("not outlined" in reason and f"{slide}.xml" in reason for slide, reason in reasons.items())


def test_without_annotations_a_positive_slide_is_weakly_supervised(tmp_path):
    records, aside = read_site("camelyon17", replace(first_of(camelyon17(tmp_path)), annotations=None))
    assert aside == [] and all(r.annotation is None for r in records)
    assert [r.supervision for r in records] == ["negative"] + ["weak"] * 5


def test_slides_without_a_stage_or_with_another_name_are_excluded(tmp_path):
    folder = camelyon17(tmp_path) / "training" / "center_0"
    touch(folder / "patient_015_node_0.tif", folder / "control.tif")
    (folder / "patient_000_node_0.tif").rename(folder / "patient_000_node_0.tiff")
    records, aside = read_site("camelyon17", replace(first_of(tmp_path), slides=(f"{folder}/*.tif*",)))
    reasons = {a.slide: a.reason for a in aside}
    assert reasons["patient_015_node_0"] == "no stage in stages.csv"
    assert "patient_PPP_node_N" in reasons["control"]
    assert records[0].slide == "patient_000_node_0", "the stages call it .tif, the file is .tiff"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"slides": ("none/*.tif",)}, ("slides matched no file", "none/*.tif")),
        ({"labels": Path("none")}, ("labels: no such file", "none")),
        ({"labels": None}, ("labels is missing", "stages.csv")),
        ({"annotations": Path("none")}, ("annotations: no such folder", "none")),
        ({"split": Path("none")}, ("split: no such file", "none")),
    ],
)
def test_paths_in_a_site_file_must_exist(tmp_path, change, words):
    good = first_of(camelyon17(tmp_path))
    named = ("sites/C1.toml: ", *words)
    refused(lambda: read_site("camelyon17", replace(good, **change)), *named, error=UsageError)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("patient,stage\n", ("sites/C1.toml", "none of its slides can be used", "no stage in empty.csv")),
        ("name,stage\n", ("empty.csv", "column 'patient' is missing", "name, stage")),
        (
            "patient,stage\npatient_000_node_0.tif,sick\n",
            ("empty.csv", "patient_000_node_0.tif", "unknown label 'sick'", "negative"),
        ),
    ],
)
def test_a_malformed_table_of_stages_is_refused_in_one_line(tmp_path, text, words):
    (tmp_path / "empty.csv").write_bytes(text.encode("latin-1"))
    good = first_of(camelyon17(tmp_path))
    refused(lambda: read_site("camelyon17", replace(good, labels=tmp_path / "empty.csv")), *words)


def split_read(tmp_path: Path, text: str):
    (tmp_path / "split.csv").write_text(text)
    return read_site("camelyon17", replace(first_of(camelyon17(tmp_path)), split=tmp_path / "split.csv"))


@pytest.mark.parametrize(
    "text",
    [
        "patient,split\npatient_000,test\npatient_004,train\npatient_010,val\n",
        "slide,split\npatient_000_node_0,test\npatient_000_node_1,test\n"
        "patient_004_node_4.tif,train\npatient_010_node_4.tif,val\n",
    ],
)
def test_split_table_names_patients_or_slides(tmp_path, text):
    records, _ = split_read(tmp_path, text)
    assert [r.split for r in records] == ["test", "test", "train", "val"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("patient,part\na,test\n", ("column 'split' is missing",)),
        ("patient,split\npatient_000,testing\n", ("split.csv line 2", "train, val, test")),
        ("patient,split\n,test\n", ("split.csv line 2", "patient or slide")),
        ("patient,split\np,test\np,train\n", ("p is in two splits", "test and train")),
        ("patient,split\npatient-000,test\n", ("sites/C1.toml: split: ", "none of its slides or patients")),
    ],
)
def test_a_mistake_in_a_split_table_is_refused_in_one_line(tmp_path, text, words):
    refused(lambda: split_read(tmp_path, text), *words)


def test_camelyon16_is_two_hospitals(tmp_path):
    names = ("normal_001", "normal_100", "normal_101", "normal_160", "tumor_001", "tumor_070", "tumor_071")
    touch(*(tmp_path / "training" / name.split("_")[0] / f"{name}.tif" for name in names))
    touch(tmp_path / "training" / "tumor" / "tumor_001_mask.tif", tmp_path / "testing" / "test_001.tif")
    touch(*(tmp_path / "training" / "lesion_annotations" / f"{n}.xml" for n in ("tumor_001", "tumor_071")))
    assert detect_layout(tmp_path) == "camelyon16"
    found = list_sites(tmp_path, "camelyon16")
    assert [(site.name, site.n_slides) for site in found] == [("RUMC", 4), ("UMCU", 3)]
    records, aside = read_site("camelyon16", sources_of(found[0]))
    assert [(r.slide, r.patient, r.supervision) for r in records] == [
        ("normal_001", "normal_001", "negative"),
        ("normal_100", "normal_100", "negative"),
        ("tumor_001", "tumor_001", "annotated"),
    ]
    assert [a.slide for a in aside] == ["tumor_070"]
    records, aside = read_site("camelyon16", sources_of(found[1]))
    assert [r.slide for r in records] == ["normal_101", "normal_160", "tumor_071"] and aside == []


HEADER = "slide,patient,site,label"


def generic(root: Path, table: str | bytes, files=("a.svs", "b.svs", "c.tif", "d.mrxs")) -> Path:
    touch(*(root / "slides" / name for name in files), root / "x.geojson")
    (root / "slides.csv").write_bytes(table if isinstance(table, bytes) else table.encode())
    return root


def read_generic(root: Path, site: str = "north", **more):
    sources = Sources(site, f"sites/{site}.toml", (f"{root}/slides/*",), labels=root / "slides.csv", **more)
    return read_site("generic", sources)


def test_generic_archive_with_all_columns(tmp_path):
    archive = generic(
        tmp_path,
        f"{HEADER},split,annotation,mpp\n"
        "a.svs,p1,north,tumor,train,x.geojson,0.25\n"
        "b,p2,north,Negative,test,,\n"
        "c,p3,south,1,,,\n"
        "d.mrxs,p1,north,itc,train,x.geojson,\n"
        "e,p4,north,tumor,,,\n"
        "f,p5,north,,,,\n",
    )
    assert detect_layout(archive) == "generic"
    assert [(s.name, s.n_slides) for s in list_sites(archive, "generic")] == [("north", 5), ("south", 1)]
    records, aside = read_generic(archive, mpp_override=0.5)
    assert [(r.slide, r.patient, r.supervision, r.positive, r.split, r.mpp_override) for r in records] == [
        ("a", "p1", "annotated", True, "train", 0.25),
        ("b", "p2", "negative", False, "test", 0.5),
        ("d", "p1", "partial", True, "train", 0.5),
    ]
    assert [r.annotation for r in records] == [tmp_path / "x.geojson", None, tmp_path / "x.geojson"]
    reasons = [("e", "no such slide file (slides.csv line 6)"), ("f", "has no label (slides.csv line 7)")]
    assert [(a.slide, a.reason) for a in aside] == reasons
    assert [r.supervision for r in read_generic(archive, "south")[0]] == ["weak"]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("a,p1,north,sick", ("slides.csv line 2", "unknown label 'sick'", "tumor")),
        ("a,p1,north,", ("sites/north.toml", "none of its slides", "a: has no label (slides.csv line 2)")),
        ("a,p1,south,tumor", ("sites/north.toml", "slides.csv has no row of site north")),
        ("e,p1,north,tumor", ("sites/north.toml", "none of its slides", "e: no such slide file")),
        ("a,p1,north,tumor\na,p1,north,tumor", ("sites/north.toml", "two slides are called a")),
        ("a.svs,p1,north,tumor\na.tif,p1,north,tumor", ("two slides are called a", "a.svs", "a.tif")),
        ("a.svs,p1,north,tumor,y.xml", ("slides.csv line 2", "no such annotation", "y.xml")),
        ("a.svs,p1,north,tumor,,half", ("slides.csv line 2", "mpp is 'half'")),
        ("a.svs,p1,north,tumor,,1e-9", ("slides.csv line 2", "mpp is '1e-9'", "from 0.01 to 1000")),
        ("a.svs,p1,north,tumor,,nan", ("slides.csv line 2", "mpp is 'nan'")),
        ("a.svs,p1,north,tumor,,,tests", ("slides.csv line 2", "unknown split 'tests'", "train, val, test")),
    ],
)
def test_a_mistake_in_a_generic_table_is_refused_in_one_line(tmp_path, rows, words):
    files = ("a.svs", "a.tif") if "a.svs" in rows else ("a.svs",)
    rows = "\n".join(row + "," * (6 - row.count(",")) for row in rows.split("\n"))
    archive = generic(tmp_path, f"{HEADER},annotation,mpp,split\n{rows}\n", files)
    refused(lambda: read_generic(archive), *words)


def test_a_slide_named_without_suffix_must_be_unique(tmp_path):
    table = f"{HEADER}\na,p1,north,tumor\nb,p2,north,tumor\n"
    records, aside = read_generic(generic(tmp_path, table, ("a.svs", "a.xml", "b.svs")))
    assert [r.slide for r in records] == ["b"]
    assert "a.svs, a.xml" in aside[0].reason and "suffix" in aside[0].reason


def test_an_archive_of_unknown_layout_is_refused_with_the_known_layouts(tmp_path):
    touch(tmp_path / "images" / "slide-1.tif")
    refused(lambda: detect_layout(tmp_path), str(tmp_path), "slides.csv", "patient_PPP_node_N.tif", "normal_NNN.tif")
    refused(lambda: detect_layout(tmp_path / "none"), "none: no such folder")
    for layout in ("camelyon17", "camelyon16"):
        refused(partial(list_sites, tmp_path, layout), f"no slide of a {layout} archive")
    refused(lambda: list_sites(tmp_path, "generic"), "slides.csv: no such file")
