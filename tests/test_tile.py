"""From slides to a store: right patches at the right place, nothing lost, nothing silent."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from conftest import SHARED

from wsi_fl.slides import phantom
from wsi_fl.slides.reader import Slide
from wsi_fl.stages.init import init
from wsi_fl.stages.tile import tile
from wsi_fl.stores.patches import PatchStore
from wsi_fl.study import Study
from wsi_fl.types import UsageError, WsiFlError

SETTINGS = ["tile.size_px=64", "tile.mpp=1.0", "tile.balance=false"]
ODD = SHARED / "data" / "slides_odd"


@pytest.fixture(scope="session")
def archive(tmp_path_factory):
    return phantom.paint_archive(
        tmp_path_factory.mktemp("phantom") / "archive", n_sites=2, patients_per_site=2, size_px=1024
    )


@pytest.fixture
def study(archive, tmp_path):
    init(tmp_path / "study", archive=archive)
    return Study(tmp_path / "study")


def generic_study(root, rows, slides, **site):
    """A study of one generic site whose slides are copied into it."""
    (root / "slides").mkdir(parents=True)
    for path in slides:
        shutil.copy(path, root / "slides" / path.name)
    header = "slide,patient,site,label,annotation,mpp\n"
    (root / "slides.csv").write_text(header + "".join(",".join(row) + "\n" for row in rows))
    init(root / "study", archive=root)
    return Study(root / "study")


def content(study, site):
    with PatchStore(study.store(site)) as store:
        return store.read(np.arange(len(store))), store.table


def test_every_patch_is_the_slides_pixels_at_its_position_with_its_true_label(study, archive):
    document = tile(study, site=None, overrides=SETTINGS)
    truth = {slide.name: slide for slide in phantom.plan_slides(2, 2, 1024, 0)}
    for row in document["sites"]:
        pixels, table = content(study, row["site"])
        assert row["failed"] == [] and row["patches"] == len(table) == row["healthy"] + row["tumor"]
        assert row["train"] + row["test"] == row["patches"]
        for k in range(0, len(table), 7):
            path = next(archive.rglob(f"{table.slide[k]}.tif"))
            x, y = (int(v) for v in table.xy_l0[k])
            with Slide(path) as slide:
                assert np.array_equal(pixels[k], slide.read((x, y), 64, 1.0))
        for name in np.unique(table.slide):
            mask = phantom.truth_mask(truth[str(name)])
            mine = table.slide == name
            inside = np.array([mask[y : y + 128, x : x + 128].mean() for x, y in table.xy_l0[mine]])
            assert (inside[table.label[mine] == 1] >= 0.48).all()
            assert (inside[table.label[mine] == 0] <= 0.02).all()


def test_patients_are_disjoint_and_the_table_adds_up(study):
    document = tile(study, site="C1", overrides=SETTINGS)
    _, table = content(study, "C1")
    assert set(table.patient[table.split == "train"]).isdisjoint(table.patient[table.split == "test"])
    (row,) = document["sites"]
    assert sum(sum(counts.values()) for counts in row["table"].values()) == row["patches"]
    assert (study.root / row["store"]).is_file()


def test_balance_keeps_equally_many_of_each_label_and_the_cap_holds_per_slide(study):
    (row,) = tile(study, site="C1", overrides=[*SETTINGS[:2], "tile.max_per_slide=12"])["sites"]
    assert row["healthy"] == row["tumor"] > 0
    _, table = content(study, "C1")
    assert np.unique(table.slide, return_counts=True)[1].max() <= 12


def test_a_second_run_reads_nothing_and_changed_parameters_are_noticed(study):
    tile(study, site="C1", overrides=SETTINGS)
    shards = sorted((study.root / "stores/C1/slides").glob("*.h5"))
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in shards}
    tile(study, site="C1", overrides=SETTINGS)
    assert all(path.stat().st_mtime_ns == before[path][0] for path in shards)
    tile(study, site="C1", overrides=[*SETTINGS, "tile.min_tissue=0.9"])
    assert any(path.read_bytes() != before[path][1] for path in shards)


@pytest.mark.parametrize("after", [0.05, 0.4, 1.0])
def test_killed_at_any_moment_and_started_again_gives_the_same_bytes(study, archive, tmp_path, after):
    init(tmp_path / "calm", archive=archive)
    calm = Study(tmp_path / "calm")
    overrides = ["tile.size_px=32", *SETTINGS[1:]]
    tile(calm, site="C1", overrides=overrides)
    command = [sys.executable, "-m", "wsi_fl", "tile", "--site", "C1"]
    command += [part for value in overrides for part in ("--set", value)]
    process = subprocess.Popen(command, cwd=study.root, stderr=subprocess.DEVNULL, start_new_session=True)
    slides = study.root / "stores" / "C1" / "slides"
    while not slides.exists() and process.poll() is None:
        time.sleep(0.005)
    time.sleep(after)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    tile(study, site="C1", overrides=overrides)
    for path in sorted((calm.root / "stores/C1").rglob("*.h5")):
        assert (study.root / path.relative_to(calm.root)).read_bytes() == path.read_bytes()
    assert not list((study.root / "stores").rglob("*.partial*"))


def test_a_corrupt_slide_is_set_aside_with_its_reason_and_the_others_stay(study, archive, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(archive, copy)
    broken = sorted((copy / "training" / "center_0").glob("*.tif"))[0]
    broken.write_bytes(broken.read_bytes()[:5000])
    init(tmp_path / "study2", archive=copy)
    other = Study(tmp_path / "study2")
    (row,) = tile(other, site="C1", overrides=SETTINGS)["sites"]
    assert [aside["slide"] for aside in row["failed"]] == [broken.stem]
    assert "\n" not in row["failed"][0]["reason"]
    whole, table = content(other, "C1")
    tile(study, site="C1", overrides=SETTINGS)
    expected, all_of = content(study, "C1")
    assert np.array_equal(whole, expected[all_of.slide != broken.stem])
    assert broken.stem not in set(table.slide)


def test_two_at_a_time_on_one_store_are_refused(study):
    import fcntl

    folder = study.store("C1").parent
    folder.mkdir(parents=True)
    with (folder / ".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        with pytest.raises(WsiFlError, match="another wsi-fl tile"):
            tile(study, site="C1", overrides=SETTINGS)


def test_without_annotations_patches_take_the_slides_label_and_tile_says_so(archive, tmp_path, wsi_fl):
    slides = sorted((archive / "training" / "center_0").glob("patient_000_*.tif"))
    rows = [[s.name, f"p{k}", "A", "tumor" if k else "normal", "", ""] for k, s in enumerate(slides)]
    study = generic_study(tmp_path, rows, slides)
    done = wsi_fl("tile", "--all", *(p for s in SETTINGS for p in ("--set", s)), "--json", cwd=study.root)
    assert done.returncode == 0 and "take the slide's label" in done.stderr
    _, table = content(study, "A")
    assert set(table.label[table.slide == slides[1].stem]) == {1}
    assert np.isnan(table.tumor_fraction[table.label == 1]).all()
    assert json.loads(done.stdout)["sites"][0]["tumor"] == int((table.label == 1).sum())


def test_a_full_disk_is_refused_before_anything_is_written(study, monkeypatch):
    usage = shutil.disk_usage(study.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    with pytest.raises(WsiFlError, match="disk is full"):
        tile(study, site="C1", overrides=SETTINGS)
    assert not list((study.root / "stores").rglob("*.h5"))


@pytest.mark.parametrize(
    ("change", "arguments", "code", "words"),
    [
        (None, ["--site", "C9"], 2, "unknown site 'C9'"),
        (None, [], 2, "one of --site NAME and --all"),
        (None, ["--all", "--set", "tile.size=3"], 2, "did you mean"),
        (("annotations", '"/nowhere"'), ["--site", "C1"], 2, "annotations: no such folder"),
        (("slides", '"/nowhere/*.tif"'), ["--site", "C1"], 2, "slides matched no file"),
        (("split", '"split.csv"'), ["--site", "C1"], 2, "in two splits"),
    ],
)
def test_bad_input_ends_in_one_line(study, wsi_fl, change, arguments, code, words):
    (study.root / "split.csv").write_text(
        "slide,split\npatient_000_node_0,train\npatient_000_node_1,test\n"
        "patient_001_node_0,train\npatient_001_node_1,train\n"
    )
    if change:
        path = study.root / "sites" / "C1.toml"
        lines = [line for line in path.read_text().splitlines() if not line.startswith(change[0])]
        path.write_text("\n".join([*lines, f"{change[0]} = {change[1]}"]) + "\n")
    done = wsi_fl("tile", *arguments, cwd=study.root)
    assert done.returncode == code
    assert words in done.stderr and len(done.stderr.strip().splitlines()) == 1


def test_a_patient_in_two_splits_is_an_error(study):
    with pytest.raises(UsageError, match="two splits"):
        from wsi_fl.slides.splits import assign_splits
        from wsi_fl.types import SlideRecord

        records = [
            SlideRecord(Path("a"), f"s{k}", "p", "C1", "negative", False, split=split)
            for k, split in enumerate(("train", "test"))
        ]
        assign_splits(records, test_fraction=0.2, seed=0)


@pytest.mark.skipif(not ODD.is_dir(), reason="the odd slides are not here")
def test_odd_slides_tile_or_fail_in_one_line_and_the_good_ones_are_kept(tmp_path):
    good = SHARED / "data" / "slides" / "CMU-1-Small-Region.svs"
    odd = [p for p in sorted(ODD.iterdir()) if p.is_file()]
    rows = [[p.name, f"p{k}", "A", "normal", "", ""] for k, p in enumerate([good, *odd])]
    study = generic_study(tmp_path, rows, [good, *odd])
    (row,) = tile(study, site="A", overrides=["tile.size_px=128", "tile.mpp=1.0"])["sites"]
    _, table = content(study, "A")
    seen = set(table.slide.tolist()) | {aside["slide"] for aside in row["failed"]}
    assert good.stem in set(table.slide.tolist())
    assert seen == {p.stem for p in [good, *odd]}
    assert all(aside["reason"] and "\n" not in aside["reason"] for aside in row["failed"])


@pytest.mark.skipif(not (SHARED / "data/pcam_3000_balanced.npz").exists(), reason="PatchCamelyon is not here")
def test_real_patches_come_back_from_a_slide_they_were_laid_into(tmp_path):
    data = np.load(SHARED / "data" / "pcam_3000_balanced.npz")
    chosen = np.concatenate([np.flatnonzero(data["y"] == c)[:24] for c in (0, 1)])
    cells = data["x"][chosen].reshape(6, 8, 96, 96, 3)
    image = np.full((8 * 96, 10 * 96, 3), 243, np.uint8)
    image[96 : 7 * 96, 96 : 9 * 96] = cells.transpose(0, 2, 1, 3, 4).reshape(6 * 96, 8 * 96, 3)
    tumor = [[96, 384], [864, 384], [864, 672], [96, 672], [96, 384]]
    (tmp_path / "a").mkdir()
    phantom.write_pyramid(tmp_path / "a" / "cells.tif", image, 0.972, quality=90)
    outline = {
        "type": "Feature",
        "geometry": {"type": "Polygon", "coordinates": [tumor]},
        "properties": {"classification": {"name": "Tumor"}},
    }
    rows = [["cells.tif", "p", "A", "tumor", "cells.geojson", ""]]
    study = generic_study(tmp_path / "c", rows, [tmp_path / "a" / "cells.tif"])
    (tmp_path / "c" / "cells.geojson").write_text(json.dumps(outline))
    tile(study, site="A", overrides=["tile.size_px=96", "tile.mpp=0.972", "tile.balance=false"])
    pixels, table = content(study, "A")
    for k, (x, y) in enumerate(table.xy_l0):
        row, column = (y - 96) // 96, (x - 96) // 96
        original = cells[row, column].astype(int)
        assert table.label[k] == data["y"][chosen].reshape(6, 8)[row, column]
        assert np.abs(pixels[k].astype(int) - original).mean() < 6
    kept = {((y - 96) // 96, (x - 96) // 96) for x, y in table.xy_l0.tolist()}
    colourful = (np.ptp(cells.astype(int), axis=-1) > 20).mean(axis=(2, 3)) > 0.2
    holds_tissue = {(int(r), int(c)) for r, c in np.argwhere(colourful)}
    assert len(holds_tissue) > 30 and len(holds_tissue - kept) <= 0.05 * len(holds_tissue)
