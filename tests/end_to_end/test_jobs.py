"""Any number of jobs on one site: real processes that share its slides give the store of one process."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
from conftest import refused
from test_tile import SETTINGS, files_of, flags

from wsi_fl.demo import simulated_slides
from wsi_fl.stages.prepare import slide_lists, tile
from wsi_fl.stages.prepare.build_bags import make_features, make_mosaics
from wsi_fl.stages.prepare.init_study import init_study
from wsi_fl.stages.prepare.tile import tile_slides
from wsi_fl.stages.runtime.rank_job import Part
from wsi_fl.study.folder import Study
from wsi_fl.system.files import JOBS_FOLDER
from wsi_fl.system.join_work import join_work
from wsi_fl.system.shared_work import WorkEnded, WorkKey
from wsi_fl.types import WsiFlError

COMMAND = [sys.executable, "-m", "wsi_fl", "tile", "--site", "C1", "--json", *flags(SETTINGS)]


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """Twelve small slides of one hospital."""
    folder = tmp_path_factory.mktemp("phantom") / "archive"
    return simulated_slides.simulate_archive(folder, n_sites=1, patients_per_site=6, size_px=512)


@pytest.fixture
def study(archive, tmp_path):
    init_study(tmp_path / "study", archive=archive)
    return Study(tmp_path / "study")


@pytest.fixture(scope="module")
def calm(archive, tmp_path_factory):
    """The site's files as one process makes them, and its row."""
    root = tmp_path_factory.mktemp("calm") / "study"
    init_study(root, archive=archive)
    (row,) = tile_slides(Study(root), site="C1", overrides=SETTINGS)["sites"]
    return files_of(Study(root)), row


def start(study):
    return subprocess.Popen(COMMAND, cwd=study.root, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def recorded(study, phase):
    """Return how many slides of a phase are done in the unfinished work."""
    return len(list((study.root / "stores" / "C1" / JOBS_FOLDER).glob(f"*/{phase}*/*.done")))


def test_jobs_at_once_of_which_one_is_killed_give_the_bytes_of_one_process(study, calm):
    expected, calm_row = calm
    jobs = [start(study) for _ in range(3)]
    while recorded(study, "plans") < 3 and jobs[0].poll() is None:
        time.sleep(0.002)
    jobs[0].send_signal(signal.SIGKILL)
    said = [job.communicate(timeout=120) for job in jobs]
    assert [job.returncode for job in jobs] == [-signal.SIGKILL, 0, 0], said
    assert files_of(study) == expected
    rows = [json.loads(out)["sites"][0] for out, _ in said[1:]]
    for row in rows:  # whoever closed it: each says what there is, and what it did
        assert row["closed"] and row["done"] <= 12
        assert row | {"seconds": 0, "done": 0} == calm_row | {"seconds": 0, "done": 0}
    assert calm_row["done"] == 12 and sum(row["done"] for row in rows) <= 12


def test_a_job_waits_for_slides_of_others_and_takes_those_of_dead_ones(study, calm, capsys):
    """Another machine holds a slide, and does it while this job waits."""
    key = seen_key(study)
    folder = study.root / "stores" / "C1"
    with join_work(folder, key, "site C1") as other:
        assert other.claim_item("plans", "patient_000_node_0")
        job = start(study)
        while recorded(study, "plans") < 11:
            time.sleep(0.01)
        time.sleep(0.5)
        assert job.poll() is None and recorded(study, "plans") == 11
        other.release_claims()
        out, told = job.communicate(timeout=60)
    assert job.returncode == 0, told
    assert f"C1: waiting for other jobs, which have 1 of the slides: process {os.getpid()} on " in told
    assert json.loads(out)["sites"][0]["done"] == 12
    assert {name: data for name, data in files_of(study).items() if JOBS_FOLDER not in name} == calm[0]


def test_a_job_says_how_many_slides_it_took_over_from_dead_ones(study, calm):
    key = seen_key(study)
    folder = study.root / "stores" / "C1"
    with join_work(folder, key, "site C1") as dead:
        assert dead.claim_item("plans", "patient_000_node_0") and dead.claim_item("plans", "patient_001_node_0")
        for heartbeat in folder.glob(f"{JOBS_FOLDER}/*/jobs/*"):
            heartbeat.unlink()
        job = start(study)
        _, told = job.communicate(timeout=60)
    assert job.returncode == 0 and "C1: took over 2 of the slides from jobs that died" in told, told


def seen_key(study):
    """Return the key of the work of `COMMAND`, as a job that is killed leaves it."""
    job = start(study)
    while not recorded(study, "plans"):
        time.sleep(0.002)
    job.kill()
    job.communicate()
    (path,) = (study.root / "stores" / "C1").glob(f"{JOBS_FOLDER}/*/work.json")
    key = WorkKey(*json.loads(path.read_text()))
    with join_work(path.parents[2], key, "site C1") as work:
        work.finish_work()
    return key


def test_jobs_with_other_settings_are_refused_while_one_is_at_work(study):
    with join_work(study.root / "stores" / "C1", WorkKey("tile", "other"), "site C1"):
        for overrides in (SETTINGS, [*SETTINGS, "tile.min_tissue=0.3"]):
            words = "site C1: another wsi-fl command is writing", "with other settings", "wait for it"
            refused(lambda o=overrides: tile_slides(study, site="C1", overrides=o), *words, error=WsiFlError)


def test_masks_and_all_files_of_a_slide_are_settings_of_the_work(study, tmp_path):
    """Outcomes of other masks or data are not continued."""
    masks, slide, dicom = tmp_path / "masks", tmp_path / "s.mrxs", tmp_path / "d"
    for path in (masks / "s.png", masks / "d.png", slide, tmp_path / "s" / "Data0.dat", dicom / "0.dcm"):
        path.parent.mkdir(exist_ok=True)
        path.write_text("a")
    listed, *_ = slide_lists.list_slides(study, site="C1", overrides=[f"tissue.method={masks}"])
    records = [replace(listed.records[0], slide=path.stem, path=path) for path in (slide, dicom)]

    def describe():
        return json.dumps(slide_lists.describe_settings(replace(listed, records=records), "tissue"), default=str)

    seen = [describe()]
    for path in (masks / "d.png", tmp_path / "s" / "Data0.dat", dicom / "0.dcm"):
        path.write_text("bc")
        seen.append(describe())
    (masks / "s.png").unlink()
    assert len({*seen, describe()}) == 5 and seen[-1] != describe()


def test_who_was_taken_for_dead_deletes_no_shards_of_others(study, monkeypatch):
    """Another machine ends the work and tiles all slides, while this one is suspended with its store of six patches."""
    real, (before,) = tile.list_strays, tile_slides(study, site="C1", overrides=SETTINGS)["sites"]
    folder = study.root / "stores" / "C1"

    def end_work(*arguments):
        shutil.rmtree(folder / JOBS_FOLDER, ignore_errors=True)
        return real(*arguments)

    monkeypatch.setattr(tile, "list_strays", end_work)
    few = [*SETTINGS, "tile.max_per_site=6"]
    refused(lambda: tile_slides(study, site="C1", overrides=few), "start it again", error=WorkEnded)
    assert len(list((folder / "slides").glob("*.h5"))) == before["slides"] - len(before["failed"])


def test_plans_of_all_listed_slides_stay_for_jobs_behind_the_one_that_closes(study, monkeypatch):
    """This job looks at the plans after another has closed a store that lacks most slides."""
    few, real, plans = [*SETTINGS, "tile.max_per_site=6"], tile.select_patches, study.root / "stores" / "C1" / ".plans"
    plans.mkdir(parents=True)
    (plans / "gone.npz").touch()

    def close_first(*arguments):
        monkeypatch.setattr(tile, "select_patches", real)
        assert tile_slides(study, site="C1", overrides=few)["sites"][0]["closed"]
        return real(*arguments)

    monkeypatch.setattr(tile, "select_patches", close_first)
    assert tile_slides(study, site="C1", overrides=few)["sites"][0]["patches"] == 6
    assert len(list(plans.iterdir())) == 12


def test_parts_do_their_slides_and_the_last_one_closes_the_store(study, calm, wsi_fl):
    def tile_part(k):
        done = wsi_fl("tile", "--site", "C1", "--part", f"{k}/3", "--json", *flags(SETTINGS), cwd=study.root)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout), done.stderr

    first, _ = tile_part(2)
    shards = study.root / "stores" / "C1" / "slides"
    assert first["sites"] == [] and first["next"] == [] and len(list(shards.glob("*.h5"))) == 4
    row = {"site": "C1", "part": "2/3", "closed": False, "done": 4, "slides": 12, "missing": 8, "missing_parts": [1, 3]}
    assert first["parts"] == [row]
    done = wsi_fl("tile", "--site", "C1", "--part", "1/3", *flags(SETTINGS), cwd=study.root)
    line = "part 1/3 is done (4 slides by this job); 4 of 12 slides are missing (part 3)"
    assert done.returncode == 0 and line in done.stderr and "`wsi-fl tile --site C1`" in done.stderr
    assert not study.store_path("C1").exists()
    last, _ = tile_part(3)
    assert last["parts"] == [] and last["sites"][0]["closed"] and last["sites"][0]["done"] == 4
    assert files_of(study) == calm[0]
    done = wsi_fl("tile", "--site", "C1", "--part", "4/3", cwd=study.root)
    assert done.returncode == 2 and "--part 4/3" in done.stderr


def test_parts_of_another_number_are_told_and_lose_no_slide(study, calm, capfd):
    tile_slides(study, site="C1", overrides=SETTINGS, part=Part(1, 3))
    (row,) = tile_slides(study, site="C1", overrides=SETTINGS, part=Part(2, 2))["parts"]
    assert "  C1: --part 2/2 beside earlier parts of 3: some slides may be in none" in capfd.readouterr().err
    assert (row["missing"], row["missing_parts"]) == (4, [1])  # of slides 0, 3, 6, 9 and 1, 3, 5, 7, 9, 11 of 12
    (row,) = tile_slides(study, site="C1", overrides=SETTINGS)["sites"]
    assert row["done"] == 4 and files_of(study) == calm[0]


def test_a_call_without_a_part_does_what_is_missing_and_closes(study, calm):
    tile_slides(study, site="C1", overrides=SETTINGS, part=Part(1, 3))
    (study.root / "stores" / "C1" / "slides" / "patient_000_node_0.h5").unlink()
    (row,) = tile_slides(study, site="C1", overrides=SETTINGS)["sites"]
    assert row["done"] == 9 and files_of(study) == calm[0]


def test_ranks_and_plain_jobs_share_one_site(study, calm, as_ranks):
    job = start(study)
    document, nothing = as_ranks(2, lambda: tile_slides(study, site="C1", overrides=SETTINGS))
    out, told = job.communicate(timeout=60)
    assert job.returncode == 0 and not nothing, told
    (row,) = document["sites"]
    assert row["done"] + json.loads(out)["sites"][0]["done"] >= 12
    assert files_of(study) == calm[0]


@pytest.fixture(scope="module")
def settings(tiny_weights):
    names = {"encoder": "test_efficientnet", "weights": tiny_weights}
    sizes = ["mosaic.size_px=64", "mosaic.mpp=1.0", "mosaic.clusters=2", "mosaic.fraction=0.2"]
    return [*sizes, *(f"{section}.{key}={value}" for section in ("mosaic", "features") for key, value in names.items())]


@pytest.mark.parametrize("make", [make_features, make_mosaics])
def test_jobs_at_once_and_parts_encode_each_slide_once_and_give_the_same_bytes(study, settings, calm, make):
    more = {"site": "C1", "overrides": [*SETTINGS, *settings]}
    tile_slides(study, site="C1", overrides=SETTINGS)
    (alone,) = make(study, **more)["sites"]
    expected, rows = files_of(study), []
    for parts in ((None, None), (Part(1, 2), Part(2, 2))):
        for path in (study.root / "stores" / "C1").iterdir():
            if path.name in {"features", "features.h5", "mosaics", "mosaic.h5"}:
                shutil.rmtree(path) if path.is_dir() else path.unlink()
        with ThreadPoolExecutor(2) as threads:
            documents = list(threads.map(lambda part: make(study, part=part, **more), parts))
        rows = [row for document in documents for row in (*document["sites"], *document["parts"])]
        assert sum(row["done"] for row in rows) == alone["done"] == alone["slides"]
        assert files_of(study) == expected
    assert sorted(row["done"] for row in rows) == [6, 6] and any(row["closed"] for row in rows)


def test_a_store_that_cannot_be_closed_is_one_line_for_all_jobs_and_begins_anew(study, calm):
    part = Part(1, 2)
    tile_slides(study, site="C1", overrides=SETTINGS, part=part)
    shard = next((study.root / "stores" / "C1" / "slides").glob("*.h5"))
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    rest = partial(tile_slides, study, site="C1", overrides=SETTINGS, part=Part(2, 2))
    refused(rest, "run the command again", error=WsiFlError)
    assert tile_slides(study, site="C1", overrides=SETTINGS)["sites"][0]["closed"]
    assert files_of(study) == calm[0]


def test_parts_are_kept_until_the_last_is_done(study, settings):
    """Another command and other settings between them are refused, and no outcome is lost."""
    tile_slides(study, site="C1", overrides=SETTINGS, part=Part(1, 2))
    others = (
        partial(make_mosaics, overrides=settings),
        partial(tile_slides, overrides=[*SETTINGS, "tile.min_tissue=0.3"]),
    )
    for other in others:
        refused(partial(other, study, site="C1", part=Part(1, 2)), "parts of unfinished work (tile)", error=WsiFlError)
    assert tile_slides(study, site="C1", overrides=SETTINGS, part=Part(2, 2))["sites"][0]["done"] == 6
    assert not (study.root / "stores" / "C1" / JOBS_FOLDER).exists()
    document = make_mosaics(study, site="C1", overrides=settings, part=Part(1, 2))
    assert document["parts"] and document["next"] == [], "there is nothing to train on yet"
