"""A download of the Imaging Data Commons becomes features by the commands of its page."""

import re
import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from builders import halves
from conftest import refused
from dicom_files import write_concatenation, write_dicom
from test_dicom import JPEG, jpeg

from wsi_fl.slides.layouts import list_site
from wsi_fl.slides.reading.formats import slide_name
from wsi_fl.stages.prepare.init_study import init_study
from wsi_fl.stages.prepare.slide_lists import resolve_sources
from wsi_fl.stages.site.site_data import open_store
from wsi_fl.stores.bag_store import BagStore
from wsi_fl.study.folder import Study
from wsi_fl.types import UsageError

PAGE = (Path(__file__).parents[2] / "docs" / "how-to" / "imaging-data-commons.md").read_text(encoding="utf-8")
SLIDES = {
    "TCGA-05-4244-01Z-00-DX1": ("tcga_luad", "TCGA-05-4244", {}),
    "TCGA-05-4244-01A-01-TS1": ("tcga_luad", "TCGA-05-4244", {"bounds": (0, 30, 64)}),
    "TCGA-95-7039-01Z-00-DX1": ("tcga_luad", "TCGA-95-7039", {"syntax": JPEG, "colours": "YBR_FULL_422", "pack": jpeg}),
    "C3L-00001-21": ("cptac_lscc", "C3L-00001", {"lacking": (0,)}),
    "C3N-00002-22": ("cptac_lscc", "C3N-00002", {}),
}
"""Glass slide → collection, patient, and how its finest level is written."""
PICTURES = {}
for k, name in enumerate(SLIDES):
    PICTURES[name] = np.full((512, 512, 3), 255, np.uint8)
    grain = np.random.default_rng(k).normal(0, 25, (300, 380, 1))
    PICTURES[name][100:400, 64:444] = (np.array([190, 110, 150 + 10 * k]) + grain).clip(0, 255)


def write_series(root, collection, patient, name, n, *, bounds=None, **how):
    """Write a series as the client lays it: two levels, and the pictures beside them."""
    series, picture = f"1.3.6.1.4.1.5962.99.1.{n}", PICTURES.get(name, PICTURES["C3L-00001-21"])
    folder = root / collection / patient / "2.25.1" / f"SM_{series}"
    marks = {"patient": patient, "container": name, "series": series}
    if bounds:
        write_concatenation(folder, picture, bounds, **marks, **how)
    else:
        write_dicom(folder / "9b1deb4d.dcm", picture, **marks, **how)
    write_dicom(folder / "level.dcm", halves(picture)[1], mpp=1.0, **marks)
    for kind in ("LABEL", "OVERVIEW", "THUMBNAIL"):
        write_dicom(folder / f"{kind}.dcm", picture[:64, :64], kind=f"ORIGINAL\\PRIMARY\\{kind}\\NONE", **marks)
    return folder


@pytest.fixture(scope="module")
def download(tmp_path_factory):
    root = tmp_path_factory.mktemp("data") / "idc"
    for n, (name, (collection, patient, how)) in enumerate(SLIDES.items()):
        write_series(root, collection, patient, name, n, **how)
    for modality in ("ANN", "SEG", "CT"):
        path = root / "tcga_luad" / "TCGA-05-4244" / "2.25.2" / f"{modality}_1.2.3" / "a.dcm"
        path.parent.mkdir(parents=True)
        path.write_bytes(bytes(128) + b"DICM")
    return root


def test_the_page_goes_from_a_download_to_features(download, tiny_weights, tmp_path, wsi_fl, monkeypatch):
    (code,) = re.findall(r"```python\n(.+?)```", PAGE, re.DOTALL)
    (shown,) = re.findall(r"(?:^      \S.+\n)+", PAGE, re.MULTILINE)
    shutil.copy(tiny_weights, tmp_path / "encoder.safetensors")
    rows = {f"{patient},{('tumor', 'normal')[patient.startswith('C3L')]}" for _, patient, _ in SLIDES.values()}
    (tmp_path / "labels.csv").write_text("\n".join(["patient,label", *sorted(rows)]) + "\n")
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^    (wsi-fl .+)$", PAGE, re.MULTILINE)
    assert [shlex.split(command)[1] for command in commands] == ["init", "tile", "features", "check"]
    for command in commands:
        words = shlex.split(command.replace("/data/idc", str(download)).replace("encoder.s", "../encoder.s"))
        place = tmp_path if words[1] == "init" else tmp_path / "study"
        more = ["--set", "features.encoder=test_efficientnet"] if words[1] == "features" else []
        ran = wsi_fl(*words[1:], *more, cwd=place)
        assert not ran.returncode, (command, ran.stderr)
        if words[1] == "init":
            assert re.sub(r"(?m)^ +", "", shown) in re.sub(r"(?m)^ +", "", ran.stderr)
            exec(code, {})
    assert "nothing is damaged" in ran.stderr
    study, n_slides = Study(tmp_path / "study"), 0
    for site in ("tcga_luad", "cptac_lscc"):
        with BagStore(study.features_path(site)) as bags, open_store(study, site) as store:
            table, spec = store.table, store.meta.spec
            assert set(zip(bags.table.slide, bags.table.patient, strict=True)) == {
                (name, patient) for name, (collection, patient, _) in SLIDES.items() if collection == site
            }
            side = round(spec.size_px * spec.mpp / 0.5)
            for row, pixels in enumerate(store.read(np.arange(len(store)))):
                x, y = table.xy_l0[row]
                meant = np.full((side, side, 3), 255)
                part = PICTURES[table.slide[row]][y : y + side, x : x + side]
                meant[: len(part), : part.shape[1]] = part
                # JPEG's colours are off by up to one grey level, and the patch's edges lie between pixels
                np.testing.assert_allclose(pixels.mean((0, 1)), meant.mean((0, 1)), atol=2)
            n_slides += len(set(table.slide))
    assert n_slides == len(SLIDES)


def rows_of(study):
    header, *rows = (study / "slides.csv").read_text().splitlines()
    assert header == "slide,patient,site,label,series"
    return [row.split(",") for row in rows]


def test_series_of_one_glass_slide_are_slides_and_a_name_that_is_no_file_name_is_not_taken(tmp_path):
    first, second, third = (
        write_series(tmp_path / "idc", "htan_x", patient, name, n)
        for n, (patient, name) in enumerate([("P1", "HT-1"), ("P1", "HT-1"), ("P2", "../HT")], 20)
    )
    assert [slide_name(path) for path in (first, third)] == ["HT-1", third.name]
    broken = first.parent / "SM_1.2.99"
    broken.mkdir()
    (broken / "a.dcm").write_bytes((first / "level.dcm").read_bytes()[:300])
    document = init_study(tmp_path / "study", archive=tmp_path / "idc" / "htan_x")
    assert document["notes"][:2] == [
        "htan_x: 2 series of glass slide HT-1 are named by their folders",
        "SM folders without a readable slide: 1 (SM_1.2.99); download them again",
    ]
    rows = rows_of(tmp_path / "study")
    assert [row[:3] for row in rows] == [
        [first.name, "P1", "htan_x"],
        [second.name, "P1", "htan_x"],
        [third.name, "P2", "htan_x"],
    ]
    assert rows[0][4] == first.name.removeprefix("SM_")


def list_slides(study):
    lines, study = [], Study(study)
    (site,) = (study.load_site(name) for name in study.site_names())
    sources = resolve_sources(study, site)
    records, excluded = list_site(site.layout, replace(sources, tell=lines.append))
    return {record.slide: record.path.name for record in records}, {one.slide: one.reason for one in excluded}, lines


def test_rows_name_glass_slides_or_folders_and_what_has_none_is_counted(tmp_path):
    folders = [write_series(tmp_path / "idc", "c", "P1", name, n) for n, name in enumerate(("G1", "G2", "G2"), 30)]
    init_study(tmp_path / "study", archive=tmp_path / "idc")
    table = "slide,patient,site,label\nG1,P1,c,tumor\n{},P1,c,tumor\n"
    (tmp_path / "study" / "slides.csv").write_text(table.format(folders[1].name))
    records, excluded, lines = list_slides(tmp_path / "study")
    assert records == {"G1": folders[0].name, folders[1].name: folders[1].name} and not excluded
    assert "slides.csv: 1 of 3 slides have no row, and are left out" in lines
    (tmp_path / "study" / "slides.csv").write_text(table.format("G2"))
    _, excluded, _ = list_slides(tmp_path / "study")
    assert f"several files are called so ({folders[1].name}, {folders[2].name})" in excluded["G2"]
    (tmp_path / "study" / "slides.csv").write_text(table.format("g2"))
    _, excluded, _ = list_slides(tmp_path / "study")
    assert "no such slide file" in excluded["g2"]


def test_a_table_at_the_top_of_a_download_names_sites_and_diagnoses(download, tmp_path):
    shutil.copytree(download, tmp_path / "idc")
    refused(
        lambda: init_study(tmp_path / "none", archive=tmp_path / "idc", pipeline="tcga_subtypes"),
        "tcga_subtypes needs diagnoses",
        "slides.csv",
        error=UsageError,
    )
    kinds = {"tcga_luad": "LUAD", "cptac_lscc": "LUSC"}
    rows = [
        f"{name},{patient},{'north' if k % 2 else 'south'},tumor,{kinds[collection]},lung"
        for k, (name, (collection, patient, _)) in enumerate(SLIDES.items())
    ]
    text = "\n".join(["slide,patient,site,label,diagnosis,tumor_type", *rows]) + "\n"
    (tmp_path / "idc" / "slides.csv").write_text(text)
    document = init_study(tmp_path / "study", archive=tmp_path / "idc", pipeline="tcga_small")
    assert document["sites"] == [{"site": "north", "slides": 2}, {"site": "south", "slides": 3}]
    assert document["subtypes"] == {"lung": ["LUAD", "LUSC"]}
    assert not (tmp_path / "study" / "slides.csv").exists()


def test_deleted_slides_and_snapshots_of_a_network_disk_are_no_slides_and_links_are_followed(tmp_path):
    root = tmp_path / "idc"
    write_series(root, "coll", "P1", "A1", 1)
    write_series(root / "#recycle", "coll", "P9", "A9", 9)
    write_series(root / "coll" / "#snapshot" / "monday", "coll", "P1", "A1", 1)
    write_series(tmp_path / "other disk", "more", "P2", "A2", 2)
    (root / "more").symlink_to(tmp_path / "other disk" / "more")
    init_study(tmp_path / "study", archive=root)
    lines = (tmp_path / "study" / "slides.csv").read_text().splitlines()
    assert sorted(line.split(",")[:3] for line in lines[1:]) == [["A1", "P1", "coll"], ["A2", "P2", "more"]]


def test_a_row_with_a_series_is_that_series_whatever_other_patients_glass_slides_are_called(tmp_path):
    root = tmp_path / "idc"
    for n, patient in ((1, "P1"), (2, "P2")):
        write_series(root, "coll", patient, "A1", n)
    init_study(tmp_path / "study", archive=root)
    table = tmp_path / "study" / "slides.csv"
    rows = [line.split(",") for line in table.read_text().splitlines()[1:]]
    assert sorted((row[1], row[4][-1]) for row in rows) == [("P1", "1"), ("P2", "2")]
    header, *_ = table.read_text().splitlines()
    table.write_text("\n".join([header, *(f"A1-{row[1]},{row[1]},coll,tumor,{row[4]}" for row in rows)]) + "\n")
    records, excluded, _ = list_slides(tmp_path / "study")
    assert not excluded and sorted(name[-1] for name in records.values()) == ["1", "2"]


def test_a_folder_within_a_collection_is_a_site(tmp_path):
    write_series(tmp_path / "idc", "c", "P1", "G1", 40)
    document = init_study(tmp_path / "study", archive=tmp_path / "idc" / "c" / "P1")
    assert document["sites"] == [{"site": "P1", "slides": 1}]
    assert list(list_slides(tmp_path / "study")[1]) == ["G1"]  # it has no label yet


def test_a_folder_whose_slides_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "idc" / "c" / "p" / "1.2" / "SM_1.2.3").mkdir(parents=True)
    refused(
        lambda: init_study(tmp_path / "study", archive=tmp_path / "idc"), "none of its 1 SM folders", error=UsageError
    )
    assert not (tmp_path / "study" / "sites").exists()
