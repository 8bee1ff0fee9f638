"""Tests of damaged stores, models and checkpoints: detection, advice and repair."""

from __future__ import annotations

import json
import re
import shutil

import h5py
import numpy as np
import pytest
import torch
from conftest import make_study, nightly, refused, write_features, write_store
from test_slide_bags import write_mosaic
from training_runs import trained

from wsi_fl.demo import simulated_slides
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.runs.site_folder import SiteFolder
from wsi_fl.stages.prepare.init_study import init_study
from wsi_fl.stages.prepare.tile import tile_slides
from wsi_fl.stages.site.site_data import open_bags, open_data, open_store
from wsi_fl.stages.training.train import resume_run
from wsi_fl.stores.fields import HEAD
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.types import WsiFlError

SMALL = "size_px = 64\nmpp = 1.0\nbalance = false\n"


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A tiled study for each way to store pixels, with all tiling settings in its pipeline."""
    archive = tmp_path_factory.mktemp("damage") / "archive"
    slides = simulated_slides.simulate_archive(archive, n_sites=1, patients_per_site=1, size_px=512)
    studies = {}
    for content in ("raw", "jpeg:90", "none"):
        root = tmp_path_factory.mktemp("tiled") / "study"
        init_study(root, archive=slides)
        for pipeline in (root / "pipelines").glob("*.toml"):
            pipeline.write_text(f'[tile]\n{SMALL}[store]\npixels = "{content}"\n')
        studies[content] = Study(root)
        tile_slides(studies[content], site="C1")
    return studies


@pytest.fixture
def tiled(kept, tmp_path):
    return lambda content: Study(shutil.copytree(kept[content].root, tmp_path / "study"))


def files_of(study):
    return {path: path.read_bytes() for path in study.store_path("C1").parent.rglob("*.h5")}


def read_all(study):
    """Read every patch of the store as training does."""
    with open_store(study, "C1") as store:
        return store.read(np.arange(len(store)))


def flip(path, offset, bit=0x40):
    data = bytearray(path.read_bytes())
    data[offset] ^= bit
    path.write_bytes(data)


def first_shard(study):
    return min((study.store_path("C1").parent / "slides").glob("*.h5"))


def edit(path, change):
    with h5py.File(path, "r+") as file:
        change(file)


def other_label(file):
    file["label"][0] ^= 1


def other_corner(file):
    file["xy_l0"][0, 0] += 64


def other_split(file):
    file["split"][0] = b"val"


def no_seal(file):
    del file.attrs[HEAD]


def zeros(file):
    name = "bytes" if "bytes" in file else "pixels"
    file[name][-1] = np.zeros_like(file[name][-1])
    file[name][: len(file[name]) // 2] = 0


@pytest.mark.parametrize(
    ("content", "hurt"),
    [("raw", other_label), ("raw", zeros), *nightly(("raw", no_seal), ("jpeg:90", zeros)), ("none", other_corner)],
)
def test_tile_restores_a_damaged_shard_byte_for_byte(tiled, content, hurt, wsi_fl):
    study = tiled(content)
    before = files_of(study)
    edit(first_shard(study), hurt)
    damaged = wsi_fl("check", "--site", "C1", "--json", cwd=study.root)
    assert damaged.returncode == 1
    (line,) = json.loads(damaged.stdout)["sites"][0]["damaged"]
    assert "slide" in line and "`wsi-fl tile --site C1`" in line
    assert wsi_fl("tile", "--site", "C1", cwd=study.root).returncode == 0
    assert files_of(study) == before
    assert wsi_fl("check", "--site", "C1", cwd=study.root).returncode == 0


@pytest.mark.parametrize(("content", "bit"), [("raw", 0x01), ("jpeg:90", 0x80)])
def test_a_flipped_bit_of_a_patch_is_found_by_training_and_repaired_by_its_advice(tiled, content, bit, wsi_fl):
    study = tiled(content)
    before, pixels = files_of(study), read_all(study)
    shard = first_shard(study)
    if content == "raw":
        at = shard.read_bytes().index(pixels[3].tobytes()) + 1000
    else:
        with h5py.File(shard) as file:
            at = file["bytes"].id.get_offset() + int(file["start"][3:5].mean())
    flip(shard, at, bit)
    with pytest.raises(WsiFlError, match=rf"patch 3 in the shard of slide {shard.stem} is damaged") as caught:
        read_all(study)
    (command,) = re.findall(r"`wsi-fl ([^`]*)`", str(caught.value))
    assert wsi_fl(*command.split(), cwd=study.root).returncode == 0
    assert files_of(study) == before
    np.testing.assert_array_equal(read_all(study), pixels)


@pytest.mark.slow
def test_random_bit_flips_are_never_trained_on_and_never_resealed(tiled):
    """Wherever a shard is damaged, training refuses changed rows, and `tile` restores all of them."""
    study, rng, refusals = tiled("raw"), np.random.default_rng(0), 0

    def learned():
        with open_store(study, "C1") as store:
            columns = ("label", "xy_l0", "tumor_fraction", "slide", "patient", "split")
            return [store.read(np.arange(len(store))), *(getattr(store.table, name) for name in columns)]

    before, shard = learned(), first_shard(study)
    whole = shard.read_bytes()
    for spot in [*rng.integers(0, 8192, 60), *rng.integers(0, len(whole), 20)]:
        flip(shard, int(spot), 1 << int(rng.integers(8)))
        try:
            np.testing.assert_array_equal(learned()[0], before[0])
        except WsiFlError as error:
            assert "unexpected" not in str(error)
            refusals += 1
            tile_slides(study, site="C1")
            for found, known in zip(learned(), before, strict=True):
                np.testing.assert_array_equal(found, known)
        shard.write_bytes(whole)
    assert refusals > 20


@pytest.mark.parametrize("hurt", [other_label, other_split])
def test_a_column_of_a_store_that_changed_is_refused(tiled, hurt):
    study = tiled("raw")
    edit(study.store_path("C1"), hurt)
    refused(lambda: open_store(study, "C1"), "patches.h5", "wsi-fl tile --site C1", error=WsiFlError)
    tile_slides(study, site="C1")
    read_all(study)


@pytest.mark.parametrize("kind", ["patches", "features", "mosaics"])
def test_a_store_of_another_site_is_refused(pair, kind):
    write_mosaic(pair, "S0")
    rows = np.zeros((2, 3)), [0, 1], ["p", "q"], ["train", "train"]
    if kind == "features":
        write_features(pair, "S0", *rows)
    shutil.rmtree(pair.store_path("S1").parent)
    shutil.copytree(pair.store_path("S0").parent, pair.store_path("S1").parent)

    def opened(site):
        return open_store(pair, site) if kind == "patches" else open_bags(pair, site, kind)

    refused(lambda: opened("S1"), "stores/S1/", "is the store of site S0", error=WsiFlError)
    opened("S0").close()


TENSORS = {"private/w": torch.arange(600.0).reshape(20, 30).T, "n": torch.tensor(7), "e": torch.empty(0)}


@pytest.fixture
def site(tmp_path):
    folder = SiteFolder(tmp_path / "runs" / "00007-proxyfl-p" / "sites" / "C1")
    folder.save_checkpoint(3, TENSORS, {"round": 3, "losses": {"1": 0.5}, 2: [1, 2]})
    return folder


def test_a_bit_anywhere_in_a_checkpoint_or_a_model_is_found(site):
    path = site.checkpoint_path(3)
    whole = path.read_bytes()
    tensors, document = site.load_checkpoint(3)
    assert document == {"round": 3, "losses": {"1": 0.5}, "2": [1, 2]}
    assert all(torch.equal(tensors[name], value) for name, value in TENSORS.items())
    for spot in [*range(8, len(whole), 37), len(whole) - 1]:
        flip(path, spot, 0x01)
        refused(lambda: site.load_checkpoint(3), "damaged checkpoint", "start a new run", error=WsiFlError)
        path.write_bytes(whole)
    path = site.save_model("private", TENSORS)
    assert site.load_model("private").keys() == TENSORS.keys()
    flip(path, -5)
    refused(lambda: site.load_model("private"), "private.safetensors", "damaged", error=WsiFlError)


@pytest.mark.slow
def test_a_changed_model_is_restored_by_the_advised_command(pair):
    run = RunFolder(pair.root / trained(pair, "proxyfl")["run"])
    paths = sorted(run.path.glob("sites/*/*.safetensors"))
    before = [path.read_bytes() for path in paths]
    for path in paths:
        flip(path, -5)
    words = ("backup", "delete the run's summary.json", f"`wsi-fl train --resume {run.name}`")
    refused(lambda: run.site_folder("S0").load_model("private"), *words, error=WsiFlError)
    (run.path / "summary.json").unlink()
    resume_run(pair, run.name, backend="local")
    assert len(before) == 4 and [path.read_bytes() for path in paths] == before


def test_a_run_resumes_only_with_the_pixels_it_began_with(tmp_path):
    study = make_study(tmp_path / "study", n_sites=1)
    folder = SiteFolder(study.runs_path / "00001-proxyfl-small" / "sites" / "S0")

    def remember():
        with open_data(study, "S0", Pipeline()) as data:
            folder.record_store(data.digest(), data.describe_store())

    remember()
    write_store(study, "S0", seed=0)
    remember()
    write_store(study, "S0", seed=1)  # of the same columns
    refused(remember, "site S0: its store was made anew since this run began", "new run")
