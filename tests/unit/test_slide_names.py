"""Names of slides and patients are compared as people read them, from any operating system."""

from pathlib import Path
from unicodedata import normalize

import numpy as np
import pytest
from builders import refused
from test_archive_layouts import HEADER, generic, read_generic
from test_slide_tables import archive

from wsi_fl.slides.layouts import Sources, detect_layout, list_sites, read_site
from wsi_fl.slides.layouts.common import match_slide_name
from wsi_fl.stores.images import read_data_set
from wsi_fl.study.folder import Study
from wsi_fl.system.file_names import describe_mismatch, drop_companions, glob_paths, is_missing

COMPANIONS = ("._a.tif", ".DS_Store", "Thumbs.db", "desktop.ini", "~$slides.csv", "b.tif~", ".~lock.slides.csv#")


@pytest.mark.parametrize(
    ("on_disk", "in_table"),
    [
        (normalize("NFD", "Drüse.tif"), normalize("NFC", "Drüse.tif")),
        (normalize("NFC", "Drüse.tif"), normalize("NFD", "Drüse")),
        (normalize("NFD", "가나.svs"), normalize("NFC", "가나.svs")),
        ("w.tif", "D:\\scans\\w.tif"),
        ("w.tif", "\\\\server\\share\\scans\\w.tif"),
        ("w.tif", "D:/scans\\2026/w.tif"),
        ("u.tif", "/mnt/scans/u.tif"),
        ("a.svs", "a.SVS"),
        ("x.ome.tif", "x.ome"),
        ("b 1.tif", "  b 1.tif\u00a0"),
        ("c.tif", "c.tif\u200b"),
    ],
)
def test_a_table_finds_its_slides_however_their_names_are_written(tmp_path, on_disk, in_table):
    root = generic(tmp_path, f"{HEADER}\n{in_table},p,A,tumor\n", (on_disk,))
    records, aside = read_generic(root, site="A")
    assert aside == [] and [one.path.name for one in records] == [on_disk]
    assert records[0].slide == normalize("NFC", Path(on_disk).stem)


def test_patients_who_look_alike_are_one(tmp_path):
    names = normalize("NFC", "Müller"), normalize("NFD", "Müller")
    root = archive(tmp_path, f"{HEADER}\na.tif,{names[0]},A,tumor\nb.tif,{names[1]},A,tumor\n")
    assert len({one.patient for one in read_generic(root, site="A")[0]}) == 1


@pytest.mark.parametrize("word", ["nan", "NA", "N/A", "none", "null", "-", "NaN", "<NA>", "#N/A", ""])
def test_placeholders_are_no_patient_and_no_label(tmp_path, word):
    assert is_missing(word)
    root = archive(tmp_path, f"{HEADER}\na.tif,p,A,tumor\nb.tif,{word},A,tumor\n")
    remark = f" ({word!r} means unknown)" if word else ""
    refused(lambda: read_generic(root, site="A"), f"slides.csv line 3: patient is empty{remark};", "delete the row")
    root = archive(tmp_path, f"{HEADER}\na.tif,p,A,tumor\nb.tif,q,A,{word}\n")
    records, aside = read_generic(root, site="A")
    assert [one.slide for one in records] == ["a"] and "has no label (slides.csv line 3)" in aside[0].reason


@pytest.mark.parametrize("name", ["0", "no", "Nandi", "Nona", "N1", "-1"])
def test_names_that_resemble_placeholders_are_names(name):
    assert not is_missing(name)


@pytest.mark.parametrize(
    ("wanted", "there", "difference"),
    [
        ("s1", "S1", "upper and lower case"),
        ("1", "001", "leading zeros"),
        ("p7_03", "p07_3", "leading zeros"),
        ("TCGA-AA-0000-01Z-00-DX1", "TCGA-AA-0000-01Z-00-DX1.9F0AB1C2-0000-1111-2222-333344445555", "the UUID"),
        ("x", "x.ome.tif", "suffixes"),
        ("a_1", "a-1", "spaces, dots, dashes and underscores"),
    ],
)
def test_unmatched_names_are_reported_with_their_difference(wanted, there, difference):
    line = describe_mismatch([wanted, "other"], [there, "another"])
    assert line.endswith(f"; {wanted} and {there} differ in {difference}") and "another" in line
    assert describe_mismatch(["k"], ["m"]) == "the table has k, the site m"


def test_a_row_without_a_slide_is_reported_with_similar_names(tmp_path):
    root = archive(tmp_path, f"{HEADER}\na.tif,p,A,tumor\nB.tif,q,A,tumor\n")
    _, aside = read_generic(root, site="A")
    assert aside[0].reason.startswith("no such slide file; B.tif and b.tif differ in upper and lower case")


def test_companion_files_of_macos_are_ignored(tmp_path):
    root = archive(tmp_path, f"{HEADER}\na.tif,p,A,tumor\n")
    for name in COMPANIONS:
        (root / "slides" / name).write_bytes(b"\0\5\x16\7")
        (root / name).write_bytes(b"\0\5\x16\7")
    assert {path.name for path in glob_paths(f"{root}/slides/*")} == {f"{name}.tif" for name in "abcd"}
    assert not {path.name for path in drop_companions(root.iterdir())} & set(COMPANIONS)
    for folder in ("@eaDir/e.tif", "#recycle", "more/.snapshot"):  # of network disks: previews, deleted files, the past
        (root / "slides" / folder).mkdir(parents=True)
        (root / "slides" / folder / "f.tif").touch()
    (root / "slides" / "more" / "e.tif").touch()
    for pattern in ("**/*.tif", "*/*.tif", "**/more/**/*.tif"):
        assert {path.name for path in glob_paths(f"{root}/slides/{pattern}")} - {f"{c}.tif" for c in "abcd"} == {
            "e.tif"
        }
    for folder in ("more/.snapshot", "*/.snapshot"):  # where it is named
        assert {path.name for path in glob_paths(f"{root}/slides/{folder}/*")} == {"f.tif"}
    camelyon = tmp_path / "c17"
    camelyon.mkdir()
    for name in ("patient_000_node_0.tif", "._patient_000_node_0.tif", "._patient_000_node_1.tif"):
        (camelyon / name).touch()
    assert detect_layout(camelyon) == "camelyon17"
    assert [site.n_slides for site in list_sites(camelyon, "camelyon17")] == [1]


def test_companion_files_are_no_site_no_pipeline_and_no_class(tmp_path):
    for folder, name in (("sites", "A"), ("pipelines", "small")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{name}.toml").write_text(f'name = "{name}"' if folder == "sites" else "")
        (tmp_path / folder / f"._{name}.toml").write_bytes(b"\0\5\x16\7")
    study = Study(tmp_path)
    assert study.site_names() == ["A"] and study.pipeline_name(None) == "small"
    from PIL import Image

    for k, name in enumerate(("healthy", "tumor", ".ipynb_checkpoints", "__MACOSX")):
        (tmp_path / "images" / name).mkdir(parents=True)
        Image.fromarray(np.full((8, 8, 3), 40 * k, np.uint8)).save(tmp_path / "images" / name / "a.png")
        (tmp_path / "images" / name / "._a.png").write_bytes(b"\0\5\x16\7")
    found = read_data_set(tmp_path / "images")
    assert found.classes == ("healthy", "tumor") and len(found.train) == 2


def test_a_pattern_fits_a_folder_whose_name_is_composed_otherwise(tmp_path):
    folder = tmp_path / normalize("NFD", "Müller")
    folder.mkdir()
    (folder / "a.tif").touch()
    assert [path.name for path in glob_paths(f"{tmp_path}/{normalize('NFC', 'Müller')}/*.tif")] == ["a.tif"]


def test_an_outline_is_found_by_a_path_of_windows_and_by_a_name_composed_otherwise(tmp_path):
    outline = normalize("NFD", "Drüse.xml")
    for text in (normalize("NFC", "Drüse.xml"), f"C:\\outlines\\{normalize('NFC', 'Drüse.xml')}"):
        root = generic(tmp_path, f"{HEADER},annotation\na.tif,p,A,tumor,{text}\n", ("a.tif",))
        (root / outline).touch()
        records, _ = read_generic(root, site="A")
        assert records[0].annotation.is_file()


def test_a_decimal_comma_is_refused_with_its_correction(tmp_path):
    root = generic(tmp_path, f"{HEADER};mpp\n".replace(",", ";") + "a.tif;p;A;tumor;0,25\n", ("a.tif",))
    refused(lambda: read_generic(root, site="A"), "slides.csv line 2", "mpp is '0,25'", "write 0.25")
    (root / "slides.csv").write_text((root / "slides.csv").read_text().replace("0,25", "0.25"))
    assert read_generic(root, site="A")[0][0].mpp_override == 0.25


def test_an_unmatched_split_table_is_refused_with_names_of_both_tables(tmp_path):
    root = archive(tmp_path, f"{HEADER}\na.tif,p1,A,tumor\nb.tif,p2,A,tumor\n")
    table = tmp_path / "split.csv"
    sources = Sources("A", "sites/A.toml", (f"{root}/slides/*",), labels=root / "slides.csv", split=table)
    table.write_text("patient,split\nP1,train\nP2,test\n")
    refused(lambda: read_site("generic", sources), "split.csv names none", "P1 and p1 differ in upper and lower case")
    table.write_text("slide,split\nD:\\scans\\a.tif,train\nD:\\scans\\b.tif,test\n")
    assert [one.split for one in read_site("generic", sources)[0]] == ["train", "test"]


def test_a_slide_of_a_table_is_its_files_name_without_folder_and_suffix():
    known = {"a", "b.c", "d\\e"}
    named = {"D:\\x\\a.svs": "a", "/y/b.c": "b.c", "b.c.h5": "b.c", "d\\e": "d\\e", "z.tif": "z.tif"}
    named |= {"a.1": "a.1", "a.B": "a.B", "a.QPTIFF": "a"}  # a.1 is no file of slide a
    assert {text: match_slide_name(text, known) for text in named} == named
