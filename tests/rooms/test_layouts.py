"""Archives as hospitals keep them: which slides, patients, labels and outlines they hold."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import conftest
import pytest

from wsi_fl.slides.layouts import Sources, describe, detect, read_site
from wsi_fl.types import UsageError, WsiFlError


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


refused = partial(conftest.refused, error=WsiFlError)

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


def camelyon17(root: Path, style: str) -> Path:
    """An archive in one of the ways Camelyon17 is kept; its files are empty."""
    for name in [*C17_STAGES, "patient_100_node_0", "patient_199_node_4"]:
        patient = int(name[8:11])
        folder = {"images": "images", "center": f"training/center_{patient // 20}"}.get(
            style, f"centre_{patient // 20}"
        )
        touch(root / folder / f"{name}.tif")
    touch(root / "masks" / "patient_004_node_4_mask.tif")
    touch(*(root / "annotations" / f"{name}.xml" for name in C17_OUTLINED))
    rows = ["patient,stage", "patient_000.zip,pN0(i+)", "patient_004.zip,pN1"]
    rows += [f"{name}.tif,{stage}" for name, stage in C17_STAGES.items()]
    (root / "stages.csv").write_text("\n".join(rows) + "\n")
    return root


def sources_of(found) -> Sources:
    def path(text):
        return Path(text) if text else None

    label = f"sites/{found.name}.toml"
    return Sources(found.name, label, found.slides, path(found.annotations), path(found.labels))


@pytest.mark.parametrize("style", ["images", "center", "centre"])
@pytest.mark.parametrize("folder", ["c17", "c 17 [v1] *"])
def test_camelyon17_is_five_centres_however_its_folders_are_called(tmp_path, style, folder):
    archive = camelyon17(tmp_path / folder, style)
    if style != "images":  # their test patients are in folders of no training centre
        touch(archive / "testing" / "patient_100_node_1.tif")
    assert detect(archive) == "camelyon17"
    found = describe(archive, "camelyon17")
    assert [(site.name, site.n_slides) for site in found] == [("C1", 6), ("C2", 2), ("C5", 1)]
    seen: list[str] = []
    for site in found:
        records, aside = read_site("camelyon17", sources_of(site))
        assert len(records) + len(aside) == site.n_slides
        seen += [r.slide for r in records] + [a.slide for a in aside]
        assert {int(r.patient[8:]) // 20 for r in records} == {int(site.name[1]) - 1}
    assert sorted(seen) == sorted(C17_STAGES)


def test_camelyon17_slides_are_supervised_by_stage_and_outline(tmp_path):
    site = describe(camelyon17(tmp_path, "center"), "camelyon17")[0]
    records, aside = read_site("camelyon17", sources_of(site))
    assert [(r.slide, r.patient, r.supervision, r.positive) for r in records] == [
        ("patient_000_node_0", "patient_000", "negative", False),
        ("patient_000_node_1", "patient_000", "partial", True),
        ("patient_004_node_4", "patient_004", "annotated", True),
        ("patient_010_node_4", "patient_010", "annotated", True),
    ]
    assert all(r.site == "C1" and r.path.is_file() and r.path.stem == r.slide for r in records)
    assert [r.annotation.stem if r.annotation else None for r in records] == [
        None,
        *(r.slide for r in records[1:]),
    ]
    assert {a.slide: a.reason.split(",")[0] for a in aside} == {
        "patient_012_node_0": "itc",
        "patient_013_node_2": "macro",
    }
    assert all("not outlined" in a.reason and f"{a.slide}.xml" in a.reason for a in aside)


def test_without_annotations_a_positive_slide_is_weakly_supervised(tmp_path):
    site = describe(camelyon17(tmp_path, "center"), "camelyon17")[0]
    weak = Sources("C1", "sites/C1.toml", site.slides, None, Path(site.labels or ""))
    records, aside = read_site("camelyon17", weak)
    assert aside == []
    assert [r.supervision for r in records] == ["negative"] + ["weak"] * 5
    assert all(r.annotation is None for r in records)


def test_slides_without_a_stage_or_with_another_name_are_set_aside(tmp_path):
    archive = camelyon17(tmp_path, "center")
    folder = archive / "training" / "center_0"
    touch(folder / "patient_015_node_0.tif", folder / "control.tif")
    (folder / "patient_000_node_0.tif").rename(folder / "patient_000_node_0.tiff")
    sources = sources_of(describe(archive, "camelyon17")[0])
    records, aside = read_site("camelyon17", Sources(**{**vars(sources), "slides": (f"{folder}/*.tif*",)}))
    reasons = {a.slide: a.reason for a in aside}
    assert reasons["patient_015_node_0"] == "no stage in stages.csv"
    assert "patient_PPP_node_N" in reasons["control"]
    assert records[0].slide == "patient_000_node_0", "the stages call it .tif, the file is .tiff"


def test_what_a_site_file_names_must_be_there(tmp_path):
    archive = camelyon17(tmp_path, "center")
    good = vars(sources_of(describe(archive, "camelyon17")[0]))

    def read(**change):
        return lambda: read_site("camelyon17", Sources(**{**good, **change}))

    none = tmp_path / "none"
    for change, words in (
        ({"slides": ("none/*.tif",)}, ("slides matched no file", "none/*.tif")),
        ({"labels": none}, ("labels: no such file", str(none))),
        ({"labels": None}, ("labels is missing", "stages.csv")),
        ({"annotations": none}, ("annotations: no such folder", str(none))),
        ({"split": none}, ("split: no such file", str(none))),
    ):
        refused(read(**change), "sites/C1.toml: ", *words)
        with pytest.raises(UsageError):
            read(**change)()
    empty = tmp_path / "empty.csv"
    empty.write_text("patient,stage\n")
    refused(read(labels=empty), "sites/C1.toml", "none of its slides can be used", "no stage in empty.csv")
    empty.write_text("name,stage\n")
    refused(read(labels=empty), "empty.csv", "column 'patient' is missing", "name, stage")
    empty.write_text("patient,stage\npatient_000_node_0.tif,sick\n")
    refused(read(labels=empty), "empty.csv", "patient_000_node_0.tif", "unknown label 'sick'", "negative")
    empty.write_bytes("patient,stage\npatient_000_node_0.tif,n\xe9gatif\n".encode("latin-1"))
    refused(read(labels=empty), "empty.csv", "not a readable CSV")


def split_read(tmp_path: Path, text: str):
    archive = camelyon17(tmp_path / "c17", "center")
    (tmp_path / "split.csv").write_text(text)
    sources = Sources(
        **{**vars(sources_of(describe(archive, "camelyon17")[0])), "split": tmp_path / "split.csv"}
    )
    return lambda: read_site("camelyon17", sources)


@pytest.mark.parametrize(
    "text",
    [
        "patient,split\npatient_000,test\npatient_004,train\npatient_010,val\n",
        "slide,split\npatient_000_node_0,test\npatient_000_node_1,test\n"
        "patient_004_node_4,train\npatient_010_node_4,val\n",
        "slide,split\npatient_000_node_0.tif,test\npatient_000_node_1.tif,test\n"
        "patient_004_node_4.tif,train\npatient_010_node_4.tif,val\n",
    ],
)
def test_split_table_names_patients_or_slides(tmp_path, text):
    records, _ = split_read(tmp_path, text)()
    assert [r.split for r in records] == ["test", "test", "train", "val"]


def test_mistake_in_a_split_table_is_one_line(tmp_path):
    for k, (text, words) in enumerate(
        (
            ("patient,part\na,test\n", ("column 'split' is missing",)),
            ("patient,split\npatient_000,testing\n", ("split.csv line 2", "train, val, test")),
            ("patient,split\n,test\n", ("split.csv line 2", "patient or slide")),
            ("patient,split\np,test\np,train\n", ("p is in two splits", "test and train")),
            (
                "patient,split\npatient-000,test\n",
                ("sites/C1.toml: split: ", "none of its slides or patients"),
            ),
        )
    ):
        refused(split_read(tmp_path / str(k), text), *words)


def test_camelyon16_is_two_hospitals(tmp_path):
    names = ("normal_001", "normal_100", "normal_101", "normal_160", "tumor_001", "tumor_070", "tumor_071")
    for name in names:
        touch(tmp_path / "training" / name.split("_")[0] / f"{name}.tif")
    touch(tmp_path / "training" / "tumor" / "tumor_001_mask.tif", tmp_path / "testing" / "test_001.tif")
    touch(*(tmp_path / "training" / "lesion_annotations" / f"{n}.xml" for n in ("tumor_001", "tumor_071")))
    assert detect(tmp_path) == "camelyon16"
    found = describe(tmp_path, "camelyon16")
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
    table = root / "slides.csv"
    return read_site(
        "generic", Sources(site, f"sites/{site}.toml", (f"{root}/slides/*",), labels=table, **more)
    )


def test_generic_archive_with_all_columns(tmp_path):
    archive = generic(
        tmp_path,
        f"{HEADER},split,annotation,mpp\n"
        "a.svs,p1,north,tumor,train,x.geojson,0.25\n"
        "b,p2,north,Negative,test,,\n"
        "c,p3,south,1,,,\n"
        "d.mrxs,p1,north,itc,train,x.geojson,\n"
        "e,p4,north,tumor,,,\n",
    )
    assert detect(archive) == "generic"
    assert [(s.name, s.n_slides) for s in describe(archive, "generic")] == [("north", 4), ("south", 1)]
    records, aside = read_generic(archive, mpp_override=0.5)
    assert [(r.slide, r.patient, r.supervision, r.positive, r.split, r.mpp_override) for r in records] == [
        ("a", "p1", "annotated", True, "train", 0.25),
        ("b", "p2", "negative", False, "test", 0.5),
        ("d", "p1", "partial", True, "train", 0.5),
    ]
    assert [r.annotation for r in records] == [tmp_path / "x.geojson", None, tmp_path / "x.geojson"]
    assert [(a.slide, a.reason) for a in aside] == [("e", "no such slide file (slides.csv line 6)")]
    assert [r.supervision for r in read_generic(archive, "south")[0]] == ["weak"]


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ("a,p1,north,sick", ("slides.csv line 2", "unknown label 'sick'", "tumor")),
        ("a,p1,north,", ("slides.csv line 2", "unknown label ''")),
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
def test_mistake_in_a_generic_table_is_one_line(tmp_path, rows, words):
    files = ("a.svs", "a.tif") if "a.svs" in rows else ("a.svs",)
    rows = "\n".join(row + "," * (6 - row.count(",")) for row in rows.split("\n"))
    refused(
        lambda: read_generic(generic(tmp_path, f"{HEADER},annotation,mpp,split\n{rows}\n", files)), *words
    )


def test_slide_named_without_suffix_must_be_the_only_one_of_its_name(tmp_path):
    archive = generic(
        tmp_path, f"{HEADER}\na,p1,north,tumor\nb,p2,north,tumor\n", ("a.svs", "a.xml", "b.svs")
    )
    records, aside = read_generic(archive)
    assert [r.slide for r in records] == ["b"]
    assert "a.svs, a.xml" in aside[0].reason and "suffix" in aside[0].reason
    (archive / "slides.csv").write_text(f"{HEADER}\na.svs,p1,north,tumor\n")
    assert [r.path.name for r in read_generic(archive)[0]] == ["a.svs"]


def test_archive_of_no_known_layout_says_what_was_looked_for(tmp_path):
    touch(tmp_path / "images" / "slide-1.tif")
    refused(lambda: detect(tmp_path), str(tmp_path), "slides.csv", "patient_PPP_node_N.tif", "normal_NNN.tif")
    refused(lambda: detect(tmp_path / "none"), "none: no such folder")
    for layout in ("camelyon17", "camelyon16"):
        refused(lambda layout=layout: describe(tmp_path, layout), f"no slide of a {layout} archive")
    refused(lambda: describe(tmp_path, "generic"), "slides.csv: no such file")
