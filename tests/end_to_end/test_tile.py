"""From slides to a store: correct patches at the correct position, every loss reported."""

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
import tifffile
from conftest import nightly, refused
from file_changes import edit, make_real
from test_pyramid_levels import LACKING, NOTE, left_out, zeroed
from test_pyramid_levels import write as levels_file

from wsi_fl.demo import simulated_slides
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.stages.prepare import tile_plans as stage
from wsi_fl.stages.prepare.init_study import init_study
from wsi_fl.stages.prepare.tile import render_tile_lines, tile_slides
from wsi_fl.stages.runtime.console import TextLine
from wsi_fl.stages.site.site_data import open_store
from wsi_fl.stages.training import launch
from wsi_fl.stores.patch_shards import read_shard_content
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.system.join_work import site_lock
from wsi_fl.types import WsiFlError

SETTINGS = ["tile.size_px=64", "tile.mpp=1.0", "tile.balance=false"]


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """Eight small slides of two hospitals."""
    folder = tmp_path_factory.mktemp("phantom") / "archive"
    return simulated_slides.simulate_archive(folder, n_sites=2, patients_per_site=2, size_px=512)


@pytest.fixture
def study(archive, tmp_path):
    init_study(tmp_path / "study", archive=archive)
    return Study(tmp_path / "study")


@pytest.fixture(scope="module")
def calm(archive, tmp_path_factory):
    """A study without interruption, and its output."""
    root = tmp_path_factory.mktemp("calm") / "study"
    init_study(root, archive=archive)
    return Study(root), tile_slides(Study(root), site=None, overrides=SETTINGS)


def generic_study(root, rows, slides):
    """A study of one generic site whose slides are copied into it."""
    (root / "slides").mkdir(parents=True)
    for path in slides:
        shutil.copy(path, root / "slides" / path.name)
    lines = ["slide,patient,site,label,annotation,mpp", *(",".join([*row, "", ""]) for row in rows)]
    (root / "slides.csv").write_text("\n".join(lines) + "\n")
    init_study(root / "study", archive=root)
    return Study(root / "study")


def flags(settings):
    return [part for value in settings for part in ("--set", value)]


def files_of(study):
    root = study.root / "stores"
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def content(study, site):
    with PatchStore(study.store_path(site)) as store:
        return store.read(np.arange(len(store))), store.table


def test_every_patch_is_the_slides_pixels_at_its_position_with_its_true_label(calm, archive):
    study, document = calm
    truth = {slide.name: slide for slide in simulated_slides.plan_slides(2, 2, 512, 0)}
    for row in document["sites"]:
        pixels, table = content(study, row["site"])
        assert row["failed"] == [] and row["patches"] == len(table) == row["healthy"] + row["tumor"]
        assert row["train"] + row["test"] == row["patches"]
        assert sum(sum(counts.values()) for counts in row["table"].values()) == row["patches"]
        assert set(table.patient[table.split == "train"]).isdisjoint(table.patient[table.split == "test"])
        for k in range(0, len(table), 3):
            x, y = (int(v) for v in table.xy_l0[k])
            with Slide(next(archive.rglob(f"{table.slide[k]}.tif"))) as slide:
                assert np.array_equal(pixels[k], slide.read((x, y), 64, 1.0))
        for name in np.unique(table.slide):
            mask = simulated_slides.tumor_mask(truth[str(name)].build_anatomy())
            mine = table.slide == name
            inside = np.array([mask[y : y + 128, x : x + 128].mean() for x, y in table.xy_l0[mine]])
            assert (inside[table.label[mine] == 1] > 0).all()  # any tumour, as this pipeline has it
            assert (inside[table.label[mine] == 0] <= 0.02).all()


def test_a_slide_is_opened_again_only_where_something_changed(study, monkeypatch):
    """Tissue and outlines are read again only then, and the store is the same either way."""
    looked, real = [], stage.plan_slide

    def noted(record, *arguments, **given):
        looked.append(record.slide)
        return real(record, *arguments, **given)

    def again(*overrides):
        looked.clear()
        tile_slides(study, site="C1", overrides=[*SETTINGS, *overrides])
        return sorted(looked)

    def stamps():
        return [path.stat().st_mtime_ns for path in study.store_path("C1").parent.glob("slides/*.h5")]

    monkeypatch.setattr(stage, "plan_slide", noted)
    everything = again()
    before, written = study.store_path("C1").read_bytes(), stamps()
    assert len(everything) == 4 and again() == [] and study.store_path("C1").read_bytes() == before
    assert stamps() == written
    slide = next(study.resolve(study.load_site("C1").slides).parent.glob("*.tif"))
    stamp = slide.stat().st_atime_ns, slide.stat().st_mtime_ns
    os.utime(slide, ns=(stamp[0], stamp[1] + 1))
    assert again() == [slide.stem] and again() == []
    os.utime(slide, ns=stamp)  # others read it too
    plan = next((study.store_path("C1").parent / ".plans").glob("*.npz"))
    damaged = bytearray(plan.read_bytes())
    damaged[len(damaged) // 2] ^= 0x40
    plan.write_bytes(damaged)
    assert {plan.stem} <= set(again()) <= {plan.stem, slide.stem}
    assert again("tile.min_tissue=0.3") == again("tile.min_tissue=0.2") == everything
    assert again("tile.max_per_slide=5") == []  # what is drawn rests on plans alone
    assert study.store_path("C1").read_bytes() != before and again() == []
    assert study.store_path("C1").read_bytes() == before


RANKS = ["-n", "2", "--oversubscribe", "--bind-to", "none"]


@pytest.mark.parametrize(("after", "ranks"), [(0.05, ()), *nightly((0.4, ()), (0.0, RANKS))])
def test_killed_at_any_moment_and_started_again_gives_the_same_bytes(study, calm, after, ranks):
    """By one process, or by two ranks of which one is killed."""
    command = [sys.executable, "-m", "wsi_fl", "tile", "--all", *flags(SETTINGS)]
    if ranks:
        command = [launch.find_mpiexec(), *ranks, *command]
    process = subprocess.Popen(command, cwd=study.root, stderr=subprocess.DEVNULL, start_new_session=True)
    while not list((study.root / "stores").glob("*/slides")) and process.poll() is None:
        time.sleep(0.005)
    time.sleep(after)
    if process.poll() is None:
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        os.kill(int(children[-1]) if ranks else process.pid, signal.SIGKILL)
    assert process.wait(60) or not ranks
    tile_slides(study, site=None, overrides=SETTINGS)
    assert files_of(study) == files_of(calm[0])


def test_without_annotations_patches_take_the_slides_label_and_tile_reports_it(archive, tmp_path, wsi_fl):
    slides = sorted((archive / "training" / "center_0").glob("patient_000_*.tif"))
    rows = [[s.name, f"p{k}", "A", "tumor" if k else "normal"] for k, s in enumerate(slides)]
    study = generic_study(tmp_path, rows, slides)
    done = wsi_fl("tile", "--all", *flags(SETTINGS), "--json", cwd=study.root)
    assert done.returncode == 0 and "take the slide's label" in done.stderr
    document = json.loads(done.stdout)
    assert document["next"] == [" ".join(["wsi-fl train --method regular", *flags(SETTINGS)])]
    make_real(study, "A", says="real = true")
    again = tile_slides(study, site=None, overrides=SETTINGS)
    assert again["next"] == ["wsi-fl federation approve PLAN --kit KIT"]
    _, table = content(study, "A")
    assert set(table.label[table.slide == slides[1].stem]) == {1}
    assert np.isnan(table.tumor_fraction[table.label == 1]).all()
    assert document["sites"][0]["tumor"] == int((table.label == 1).sum())


def test_a_dry_run_reports_the_cost_of_tiling_and_writes_nothing(study, calm, wsi_fl):
    before = files_of(study)
    result = wsi_fl("tile", "--all", "--dry-run", "--json", *flags(SETTINGS), cwd=study.root)
    document = json.loads(result.stdout)
    assert files_of(study) == before
    whole = calm[1]["sites"]
    for said, row in zip(document["sites"], whole, strict=True):
        assert said["site"] == row["site"] and said["slides"] == row["slides"] == said["tried"]
        assert said["patches"] == row["patches"] and said["seconds"] > 0
        assert 0 < said["bytes"] <= row["patches"] * (3 * 64**2 + 64)
    assert document["patches"] == sum(row["patches"] for row in whole)
    assert "nothing was written" in wsi_fl("tile", "--site", "C1", "--dry-run", cwd=study.root).stderr


def test_patches_overlap_and_outlines_have_another_meaning_where_the_settings_say_so(study):
    names = 'tile.groups={metastases="ignored"}'
    (row,) = tile_slides(study, site="C1", overrides=[*SETTINGS, "tile.stride_px=32", names])["sites"]
    _, table = content(study, "C1")
    corners = {tuple(xy) for xy in table.xy_l0[table.slide == table.slide[0]].tolist()}
    assert any((x + 64, y) in corners for x, y in corners), "half a patch of 128 level-0 pixels"
    assert row["failed"] and all("no tumour is outlined" in slide["reason"] for slide in row["failed"])


def test_a_full_disk_is_refused_before_anything_is_written(study, monkeypatch):
    usage = shutil.disk_usage(study.root)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=1000))
    refused(lambda: tile_slides(study, site="C1", overrides=SETTINGS), "disk is full", error=WsiFlError)
    assert not list((study.root / "stores").rglob("*.h5"))


SPLIT = (
    "slide,split\npatient_000_node_0,train\npatient_000_node_1,test\n"
    "patient_001_node_0,train\npatient_001_node_1,train\n"
)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--site", "C9"], "unknown site 'C9'"),
        ([], "one of --site NAME and --all"),
        (["--all", "--set", "tile.size=3"], "did you mean"),
        (["--all", "--set", "store.pixels=gzip"], "jpeg:90"),
        (["--all", "--set", "store.pixels=jpeg:101"], "jpeg:90"),
        (["--site", "C1"], "in two splits"),
    ],
)
def test_bad_input_ends_in_one_line(study, wsi_fl, arguments, words):
    (study.root / "split.csv").write_text(SPLIT)
    edit(study.root / "sites" / "C1.toml", more='split = "split.csv"\n')
    done = wsi_fl("tile", *arguments, cwd=study.root)
    assert done.returncode == 2
    assert words in done.stderr.splitlines()[-1] and done.stderr.count("wsi-fl: error") == 1


@pytest.fixture(scope="module")
def aligned(tmp_path_factory):
    """Slides whose patches of 256 px at 0.5 µm are their own tiles, of three patients."""
    folder = tmp_path_factory.mktemp("aligned")
    image = simulated_slides.simulate_slide(simulated_slides.plan_slides(1, 1, 2048, 0)[1])
    for k in range(3):
        block = np.roll(image, 256 * k, axis=1)
        simulated_slides.write_pyramid(folder / f"slide_{k}.tif", block, 0.5, tile_px=256, quality=80)
    return sorted(folder.glob("*.tif"))


def tiled(root, slides, content, *more):
    rows = [[path.name, f"p{k}", "A", "normal"] for k, path in enumerate(slides)]
    study = generic_study(root, rows, slides)
    return study, retiled(study, content, *more)


def retiled(study, content, *more):
    (row,) = tile_slides(study, site="A", overrides=[*ALIGNED, f"store.pixels={content}", *more])["sites"]
    return row


def read(study, rows=None):
    """(pixels, table) of a store, however it keeps pixels."""
    with open_store(study, "A") as store:
        return store.read(np.arange(len(store)) if rows is None else rows), store.table


def shards_of(study):
    return sorted((study.store_path("A").parent / "slides").glob("*.h5"))


ALIGNED = ["tile.size_px=256", "tile.mpp=0.5", "tile.balance=false", "tile.min_tissue=0.05"]


def test_native_raw_and_none_give_the_same_arrays_and_jpeg_is_close(aligned, tmp_path):
    found, bytes_of, order = {}, {}, None
    for content in ("raw", "native", "none", "jpeg:90"):
        study, row = tiled(tmp_path / content.replace(":", ""), aligned[:2], content)
        order = np.random.default_rng(0).permutation(row["patches"])
        found[content] = read(study, order)
        assert row["failed"] == []
        assert [read_shard_content(shard) for shard in shards_of(study)] == [(content, ())] * 2
        bytes_of[content] = sum(path.stat().st_size for path in shards_of(study))
    raw, table = found["raw"]
    for content in ("native", "none"):
        np.testing.assert_array_equal(found[content][0], raw)
        np.testing.assert_array_equal(found[content][1].xy_l0, table.xy_l0)
    off = np.abs(found["jpeg:90"][0].astype(int) - raw)
    assert 0 < off.mean() < 3
    assert bytes_of["native"] < bytes_of["raw"] / 5 and bytes_of["none"] < bytes_of["raw"] / 50


def test_where_tiles_are_no_patches_the_shard_is_raw_and_tile_reports_it(aligned, tmp_path, capsys):
    study, row = tiled(tmp_path, aligned[:1], "native", "tile.mpp=0.75")
    assert row["patches"] and {read_shard_content(shard)[0] for shard in shards_of(study)} == {"raw"}
    assert "1 of 1 slides are stored raw" in capsys.readouterr().err
    written = shards_of(study)[0].stat().st_mtime_ns
    tile_slides(study, site="A", overrides=[*ALIGNED, "tile.mpp=0.75"])  # native is the default
    assert shards_of(study)[0].stat().st_mtime_ns == written


def spoil(path, *corners, half=False):
    """Damage the native tiles at level-0 corners of a slide of 256-px tiles, or drop the data after them."""
    with tifffile.TiffFile(path) as tif:
        page = tif.pages[0]
        across, starts, lengths = -(-page.imagewidth // 256), page.dataoffsets, page.databytecounts
    content = bytearray(path.read_bytes())
    for x, y in corners:
        start, length = (of[y // 256 * across + x // 256] for of in (starts, lengths))
        garbage = np.random.default_rng(0).integers(0, 256, length, np.uint8).tobytes()
        kept = length // 2 if half else 0
        content[start + kept : start + length] = bytes(length - kept) if half else garbage
    path.write_bytes(content)


@pytest.mark.parametrize(("half", "content"), [(True, "native"), *nightly((False, "raw"), (True, "none"))])
def test_patches_of_a_corrupt_tile_are_excluded_and_all_others_are_correct(aligned, tmp_path, content, half):
    study, _ = tiled(tmp_path, aligned[:2], content)
    whole, table = read(study)
    slide = table.slide[0]
    lost = int(np.flatnonzero(table.slide == slide)[1])
    shutil.rmtree(study.root / "stores")
    spoil(tmp_path / "slides" / f"{slide}.tif", table.xy_l0[lost], half=half)
    stamps, (x, y) = [], table.xy_l0[lost]
    for _ in range(2):  # the second start finds all of it done, and says the same
        row = retiled(study, content)
        (aside,) = row["failed"]
        assert aside["slide"] == slide and "\n" not in aside["reason"]
        assert f"1 of {(table.slide == slide).sum()} patches" in aside["reason"]
        assert f"({x}, {y})" in aside["reason"] and row["patches"] == len(table) - 1
        stamps.append([path.stat().st_mtime_ns for path in shards_of(study)])
    assert stamps[0] == stamps[1]
    pixels, left = read(study)
    np.testing.assert_array_equal(pixels, np.delete(whole, lost, 0))
    np.testing.assert_array_equal(left.xy_l0, np.delete(table.xy_l0, lost, 0))


def test_slides_that_are_truncated_or_have_only_corrupt_patches_are_excluded(aligned, tmp_path):
    study, _ = tiled(tmp_path, aligned, "native")
    pixels, table = read(study)
    first, second, third = (path.stem for path in aligned)
    spoil(tmp_path / "slides" / f"{first}.tif", *table.xy_l0[table.slide == first])
    cut_off = tmp_path / "slides" / f"{second}.tif"
    cut_off.write_bytes(cut_off.read_bytes()[:5000])
    shutil.rmtree(study.root / "stores")
    failed = retiled(study, "native")["failed"]
    assert sorted(aside["slide"] for aside in failed) == [first, second]
    assert not any("\n" in aside["reason"] for aside in failed)
    assert [shard.stem for shard in shards_of(study)] == [third]
    np.testing.assert_array_equal(read(study)[0], pixels[table.slide == third])


def test_a_store_without_pixels_finds_moved_slides_and_refuses_others(aligned, tmp_path):
    def unread(*words, opened=lambda: open_store(study, "A")):
        with opened() as store:
            refused(lambda: store.read(np.arange(2)), *words, error=WsiFlError)

    study, _ = tiled(tmp_path, aligned[:2], "none")
    before, _ = read(study)
    unread("no pixels of slide", opened=lambda: PatchStore(study.store_path("A")))
    (tmp_path / "slides").rename(tmp_path / "moved")
    unread("gone", "sites/A.toml")
    edit(study.root / "sites" / "A.toml", "/slides/", "/moved/")
    np.testing.assert_array_equal(read(study)[0], before)
    first, second = sorted((tmp_path / "moved").glob("*.tif"))
    shutil.copy(second, first)
    unread("not the slide that was tiled")


def test_two_ranks_make_the_store_of_one_process_byte_for_byte(study, calm, as_ranks):
    alone, expected = calm
    document, nothing = as_ranks(2, lambda: tile_slides(study, site=None, overrides=SETTINGS))
    assert not nothing  # said once
    timeless = [[row | {"seconds": 0} for row in one["sites"]] for one in (document, expected)]
    assert timeless[0] == timeless[1] and document["next"] == expected["next"]
    assert files_of(study) == files_of(alone)


def test_a_second_job_is_refused_while_ranks_work_and_the_failure_is_reported_once(study, as_ranks):
    with site_lock(study.store_path("C1").parent, "C1"):
        told, *silent = as_ranks(3, lambda: tile_slides(study, site=None))
    assert isinstance(told, WsiFlError) and "another wsi-fl command" in str(told)
    assert [end.code for end in silent] == [1, 1]


MEMORY = """
from pathlib import Path
import numpy as np
from wsi_fl.slides.patching.slide_plan import SlidePlan
from wsi_fl.stages.prepare.tile_plans import Plans, sample_patches
from wsi_fl.stores.fields import StoreMeta
from wsi_fl.stores.patch_store import SlideSource
from wsi_fl.stores.patch_shards import ShardMeta, link_shards, write_positions
from wsi_fl.types import CLASSES, GridSpec, PatchTable, SlideRecord

folder, spec, rng = Path({folder!r}), GridSpec(512, 0.5, 512), np.random.default_rng(0)
records = [SlideRecord(Path(f"{{k}}"), f"slide {{k:04}}", "p", "A", "weak", False) for k in range({n})]
plans, shards = Plans(folder / ".plans", records, spec), []
for k, record in enumerate(records):
    rows = rng.integers(0, 9, (2000, 2)), rng.integers(0, 2, 2000), np.zeros(2000, np.float32)
    seen = bytes(200_000), np.zeros(1 << 17, np.uint8), (1024, 1024), [np.zeros((50, 2))]
    aside = np.zeros((0, 2), np.int64), np.zeros(0, "U1"), "saturation", 1.0
    facts = record, spec, 0.5, (100_000, 100_000), (0, 0, 100_000, 100_000), "hash", False, 97.0, ()
    plans.save_plan(k, SlidePlan(*facts, *rows, *seen, *aside), None)
for k, keep in enumerate(sample_patches(plans, range({n}), balance=True, max_per_slide=None)):
    one = plans.load_plan(k)
    text = np.full(int(keep.sum()), one.record.slide)
    table = PatchTable(one.xy_l0[keep], one.label[keep], one.tumor_fraction[keep], text, text, text)
    shards.append(folder / "slides" / f"{{k}}.h5")
    meta = ShardMeta(one.record.slide, one.record.patient, "train", spec, "", content="none")
    write_positions(shards[-1], meta, table, SlideSource(one.record.slide, "x", "", None, "auto"))
link_shards(folder / "patches.h5", StoreMeta("A", CLASSES, spec), shards)
print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])  # ru_maxrss counts the parent
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_slides(tmp_path):
    """Resident memory while planning, choosing and linking 40 and 400 slides of 2 000 patches each."""
    peaks = []
    for n_slides in (40, 400):
        code = MEMORY.format(n=n_slides, folder=str(tmp_path / str(n_slides)))
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout))
    assert peaks[1] - peaks[0] < 64 << 10, peaks  # KiB


def test_a_damaged_level_is_reported_at_no_loss_of_patches_and_missing_tiles_are_counted(tmp_path):
    slides = [levels_file(tmp_path / f"{name}.tif") for name in ("whole", "coarse", "lacking")]
    zeroed(slides[1], 1)
    left_out(slides[2], 0, LACKING)
    rows = [(path.name, path.stem, "A", "negative") for path in slides]
    study = generic_study(tmp_path / "archive", rows, slides)
    for mpp, native in ((0.5, "native"), (2.0, "raw")):
        how = ["tile.size_px=64", f"tile.mpp={mpp}", "tile.balance=false", "slides.test_fraction=0"]
        document = tile_slides(study, site=None, overrides=[*how, f"store.pixels={native}"])
        (row,), lines = (
            document["sites"],
            [line.text for line in render_tile_lines(document) if isinstance(line, TextLine)],
        )
        pixels, table = content(study, "A")
        n = {slide: int((table.slide == slide).sum()) for slide in ("whole", "coarse", "lacking")}
        told = mpp == 2.0  # else nobody looks at level 1
        assert n["coarse"] == n["whole"]
        assert row["notes"] == [{"slide": "coarse", "note": NOTE.format(1)}] * told
        assert (f"  A: coarse: {NOTE.format(1)}" in lines) == told
        assert np.abs(pixels[table.slide == "coarse"].astype(int) - pixels[table.slide == "whole"]).mean() < 6
        if mpp == 0.5:
            (failed,) = row["failed"]
            assert n["lacking"] == n["whole"] - 2 and failed["reason"].startswith("2 of 16 patches excluded, at")
            assert "lacks pixels" in failed["reason"]
            places = table.xy_l0[table.slide == "lacking"].tolist()
            assert [192, 192] not in places and [256, 192] not in places
        else:  # level 1 has all
            assert n["lacking"] == n["whole"] and not row["failed"]
