"""Tests of mosaics: choice of patches, features of the encoder, interrupted and damaged stores."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from conftest import refused
from PIL import Image
from safetensors.torch import load_file, save_file
from training_runs import trained

from wsi_fl.demo import simulated_slides
from wsi_fl.models.encoder import Encoder
from wsi_fl.slides.layouts import read_site
from wsi_fl.slides.patching.mosaic import choose_mosaic
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.stages.evaluation.predict import predict
from wsi_fl.stages.prepare import slide_lists
from wsi_fl.stages.prepare.build_bags import make_mosaics
from wsi_fl.stages.prepare.init_study import init_study
from wsi_fl.stores.bag_shards import read_bag_shard
from wsi_fl.stores.bag_store import BagStore
from wsi_fl.study.folder import Study
from wsi_fl.system.files import JOBS_FOLDER
from wsi_fl.types import CLASSES, WsiFlError

ROUGH = 1e-3 if torch.cuda.is_available() else 0.0
"""How far features are off where matrix products have half the bits."""


@pytest.fixture(scope="session")
def archive(tmp_path_factory):
    """Four slides of one hospital."""
    return simulated_slides.simulate_archive(
        tmp_path_factory.mktemp("mosaic") / "archive", n_sites=1, patients_per_site=2, size_px=768
    )


@pytest.fixture(scope="session")
def settings(tiny_weights):
    given = {"size_px": 64, "mpp": 1.0, "min_tissue": 0.5, "encoder": "test_efficientnet", "weights": tiny_weights}
    return [f"mosaic.{key}={value}" for key, value in given.items()]


@pytest.fixture(scope="session")
def calm(archive, settings, tmp_path_factory):
    """A study with mosaics made without an interruption, and the document of the command."""
    root = tmp_path_factory.mktemp("calm") / "study"
    init_study(root, archive=archive)
    (row,) = make_mosaics(Study(root), site="C1", overrides=settings)["sites"]
    return Study(root), row


@pytest.fixture
def study(archive, tmp_path):
    init_study(tmp_path / "study", archive=archive)
    return Study(tmp_path / "study")


def write_other_weights(weights, folder):
    """Write a file of other weights."""
    found = {k: v * 1.5 if v.is_floating_point() else v for k, v in load_file(weights).items()}
    save_file(found, folder / "other.safetensors")
    return folder / "other.safetensors"


def plain_features(name, path, patches):
    """Compute features with timm alone."""
    model = timm.create_model(name, num_classes=0).eval()
    state = {k: v.float() for k, v in load_file(path).items() if not k.startswith("classifier.")}
    model.load_state_dict(state, strict=True)
    config = timm.data.resolve_model_data_config(model)
    mean, std = (torch.tensor(config[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    with torch.inference_mode():
        return model((torch.from_numpy(patches).permute(0, 3, 1, 2) / 255 - mean) / std).numpy()


def test_the_store_holds_the_features_of_timm(calm, archive, tiny_weights):
    study, row = calm
    assert row["failed"] == [] and row["bags"] == row["slides"] == 4 == row["train"] + row["test"]
    assert sum(row["classes"].values()) == 4 and set(row["classes"]) == set(CLASSES)
    with BagStore(study.root / row["store"]) as store:
        assert row["patches"] == sum(len(store.read_bag(k).features) for k in range(4))
        assert store.meta.encoder == row["encoder"] and "sha256:" in row["encoder"]
        for k, name in enumerate(store.table.slide):
            bag = store.read_bag(k)
            with Slide(next(archive.rglob(f"{name}.tif"))) as slide:
                patches = np.stack([slide.read((int(x), int(y)), 64, 1.0) for x, y in bag.xy_l0])
                assert store.mpp_l0[k] == slide.mpp
            expected = plain_features("test_efficientnet", tiny_weights, patches)
            np.testing.assert_allclose(bag.features, expected, atol=ROUGH or 1e-4)
            assert bag.weight.sum() == pytest.approx(1, abs=1e-5)
            with Image.open(study.root / f"stores/C1/mosaics/{name}.png") as picture:
                assert min(picture.size) > 400


def test_a_new_slide_is_predicted_from_a_fresh_mosaic(calm, archive, settings, tiny_weights, tmp_path):
    study = Study(shutil.copytree(calm[0].root, tmp_path / "study"))
    overrides = [*settings, "train.data=mosaics", "train.rounds=2", "train.batch_size=2"]
    overrides += ["model.private=deepset", "privacy.enabled=false"]
    overrides += ["mosaic.size_px=128", "mosaic.clusters=2", "mosaic.fraction=0.9"]  # not how they were made
    run = trained(study, "regular", *overrides)["run"]
    with BagStore(study.mosaic_path("C1")) as store:
        name = str(store.table.slide[0])
    (known,) = predict(study, run, site="C1", slides=[Path(name)])["slides"]
    stranger = tmp_path / "stranger.tif"
    shutil.copy(next(archive.rglob(f"{name}.tif")), stranger)
    (new,) = predict(study, run, site="C1", slides=[stranger])["slides"]
    assert new["patches"] == known["patches"]
    assert new["probabilities"] == pytest.approx(known["probabilities"], abs=1e-6)
    assert (study.root / new["heatmap"]).exists()
    config = study.root / run / "config.toml"
    config.write_text(config.read_text().replace(str(tiny_weights), str(write_other_weights(tiny_weights, tmp_path))))
    (failed,) = predict(study, run, site="C1", slides=[stranger])["failed"]
    assert "was trained on features of test_efficientnet sha256:" in failed["reason"]


def test_the_mosaic_samples_every_colour_group_in_proportion_without_repeats():
    rng = np.random.default_rng(0)
    centres = np.array([[200, 100, 150], [90, 40, 110], [230, 200, 220]])
    group = np.repeat([0, 1, 2], [120, 60, 7])
    colour = centres[group] + rng.normal(0, 2, (len(group), 3))
    xy = np.stack([np.arange(len(group)) % 20, np.arange(len(group)) // 20], 1) * 1000
    found = choose_mosaic(colour, xy, clusters=3, fraction=0.05, seed=0)
    assert all((found.cluster[group == k] == c).all() for k, c in ((0, 1), (1, 0), (2, 2)))
    assert len(np.unique(found.rows)) == len(found.rows) == 6 + 3 + 1
    assert np.bincount(found.cluster[found.rows]).tolist() == [3, 6, 1]
    assert found.weight.sum() == pytest.approx(1)
    far = np.linalg.norm(xy[found.rows[:, None]] - xy[None], axis=-1)[:, group == 0].min(0).max()
    assert far < 10_000


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 3])
def test_mosaic_killed_at_any_moment_and_restarted_writes_the_same_bytes(study, calm, settings, after):
    command = [sys.executable, "-m", "wsi_fl", "mosaic", "--site", "C1"]
    command += [part for value in settings for part in ("--set", value)]
    process = subprocess.Popen(command, cwd=study.root, stderr=subprocess.DEVNULL, start_new_session=True)
    folder = study.root / "stores" / "C1"
    while process.poll() is None:
        if (folder / JOBS_FOLDER).exists() and len(list((folder / "mosaics").glob("[!.]*.png"))) >= after:
            os.killpg(process.pid, signal.SIGKILL)
            break
        time.sleep(0.002)
    process.wait()
    make_mosaics(study, site="C1", overrides=settings)
    whole, _ = calm
    for path in sorted((whole.root / "stores/C1").rglob("*.h5")):
        assert (study.root / path.relative_to(whole.root)).read_bytes() == path.read_bytes()
    assert not list((study.root / "stores").rglob("*.partial*"))


def test_a_second_run_writes_nothing_and_changes_are_noticed(study, calm, settings, tiny_weights, tmp_path, capsys):
    shutil.copytree(calm[0].root / "stores", study.root / "stores")
    shards = sorted((study.root / "stores/C1/mosaics").glob("*.h5"))
    before = {path: path.stat().st_mtime_ns for path in shards}
    make_mosaics(study, site="C1", overrides=settings)
    assert all(path.stat().st_mtime_ns == before[path] for path in shards)
    other = f"mosaic.weights={write_other_weights(tiny_weights, tmp_path)}"
    make_mosaics(study, site="C1", overrides=[*settings, other])
    assert all(path.stat().st_mtime_ns != before[path] for path in shards)
    assert capsys.readouterr().err.count("made again") == 4


def test_slides_without_tissue_and_broken_ones_are_excluded_in_one_line(archive, tmp_path, settings):
    copy = tmp_path / "copy"
    shutil.copytree(archive, copy)
    broken, empty, *_ = sorted(copy.rglob("*.tif"))
    broken.write_bytes(broken.read_bytes()[:5000])
    simulated_slides.write_pyramid(empty, np.full((1024, 1024, 3), 243, np.uint8), 0.5, quality=90)
    init_study(tmp_path / "study2", archive=copy)
    study = Study(tmp_path / "study2")
    (row,) = make_mosaics(study, site="C1", overrides=settings)["sites"]
    reasons = {one["slide"]: one["reason"] for one in row["failed"]}
    assert reasons.keys() == {broken.stem, empty.stem} and row["bags"] == 2
    assert "\n" not in "".join(reasons.values()) and "no tissue" in reasons[empty.stem]


@pytest.mark.slow
def test_a_damaged_patch_is_excluded_and_named(study, settings, monkeypatch):
    slide = Slide.read
    bad = []

    def read(self, xy, *more):
        if not bad:
            bad.append((self.path.stem, xy))
        if (self.path.stem, xy) == bad[0]:
            raise WsiFlError(f"{self.path.name}: cannot be read")
        return slide(self, xy, *more)

    monkeypatch.setattr(Slide, "read", read)
    (row,) = make_mosaics(study, site="C1", overrides=[*settings, "slides.reader=openslide"])["sites"]
    ((name, xy),) = bad
    assert [one["slide"] for one in row["failed"]] == [name] and row["bags"] == 4
    assert "patches excluded, at level-0 pixel" in row["failed"][0]["reason"]
    shard = read_bag_shard(study.root / f"stores/C1/mosaics/{name}.h5")
    assert [place[:2] for place in shard.unread] == [xy] and list(xy) not in shard.bag.xy_l0.tolist()


def test_ranks_share_the_slides_and_give_the_same_store(study, calm, settings, as_ranks):
    whole, alone = calm
    document, nothing = as_ranks(2, lambda: make_mosaics(study, site=None, overrides=settings))
    assert not nothing  # said once
    (row,) = document["sites"]
    assert {**row, "seconds": 0} == {**alone, "seconds": 0}
    with BagStore(study.mosaic_path("C1")) as one, BagStore(whole.mosaic_path("C1")) as other:
        for k in range(len(one)):
            np.testing.assert_allclose(one.read_bag(k).features, other.read_bag(k).features, atol=1e-5)
            assert np.array_equal(one.read_bag(k).xy_l0, other.read_bag(k).xy_l0)


def test_subtypes_are_classes_and_other_diagnoses_are_excluded(study, settings, monkeypatch):
    names = {"kidney": ["KIRP", "KIRC"], "lung": ["LUAD"]}

    def diagnosed(*given):
        kinds = zip(read_site(*given)[0], ("KIRC", "KIRP", "LUAD", "SKCM"), strict=True)
        return [replace(one, diagnosis=kind) for one, kind in kinds], []

    monkeypatch.setattr(slide_lists, "read_site", diagnosed)
    (study.root / "pipelines" / "sub.toml").write_text(
        "[subtypes]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in names.items())
    )
    (row,) = make_mosaics(study, site="C1", pipeline_name="sub", overrides=settings)["sites"]
    assert row["classes"] == {"KIRC": 1, "KIRP": 1, "LUAD": 1} and len(row["failed"]) == 1
    assert row["failed"][0]["reason"] == "its diagnosis SKCM is none of the study's (KIRC, KIRP, LUAD)"
    with BagStore(study.mosaic_path("C1")) as store:
        assert store.table.tumor_type.tolist() == ["kidney", "kidney", "lung"]
        assert store.meta.tumor_types == {key: tuple(value) for key, value in names.items()}


@pytest.mark.slow
def test_torchvisions_and_kimianets_keys_load_into_timms_densenet(tmp_path):
    import torchvision

    torch.manual_seed(0)
    model = torchvision.models.densenet121(weights=None).eval()
    state = model.state_dict()
    kimianet = {
        f"module.model.0.{key[9:]}" if key.startswith("features.") else f"module.fc_4.{key[11:]}": value
        for key, value in state.items()
    }
    patch = np.random.default_rng(0).integers(0, 256, (1, 64, 64, 3)).astype(np.uint8)
    for given, pooled in (({f"module.{k}": v for k, v in state.items()}, torch.relu), (kimianet, lambda one: one)):
        path = tmp_path / "weights.safetensors"
        save_file(given, path)
        encoder = Encoder("densenet121", path)
        pixels = torch.from_numpy(patch).permute(0, 3, 1, 2) / 255
        with torch.inference_mode():
            maps = model.features(encoder.network._normalize_images(pixels))
        np.testing.assert_allclose(encoder(patch), pooled(maps).mean((2, 3)).numpy(), atol=1e-4)


def test_a_scan_of_several_patients_is_in_one_split_and_reported(settings, tmp_path):
    """Covers links and scans at two sites."""
    folder = simulated_slides.simulate_archive(tmp_path / "painted", n_sites=1, patients_per_site=1, size_px=768)
    source = next(folder.rglob("*.tif"))
    slides = tmp_path / "archive" / "slides"
    slides.mkdir(parents=True)
    shutil.copy(source, slides / "a.tif")
    (slides / "b.tif").symlink_to(slides / "a.tif")
    shutil.copy(source, slides / "c.tif")
    table = "slide,patient,site,label\na.tif,p,A,tumor\nb.tif,q,A,tumor\nc.tif,r,B,tumor\n"
    (tmp_path / "archive" / "slides.csv").write_text(table)
    init_study(tmp_path / "study", archive=tmp_path / "archive")
    made = make_mosaics(Study(tmp_path / "study"), site=None, overrides=[*settings, "slides.test_fraction=0.5"])
    (line,) = made["sites"][0]["copies"]
    assert "a (patient p) and b (patient q) are one scan: all are in" in line
    assert made["copies"] and "c (site B, patient r)" in made["copies"][0]


def test_slides_that_all_lack_a_class_are_refused_in_one_line(settings, tmp_path):
    (tmp_path / "archive" / "slides").mkdir(parents=True)
    for name in "ab":
        (tmp_path / "archive" / "slides" / f"{name}.tif").touch()
    table = "slide,patient,site,label,diagnosis\na.tif,p,A,tumor,X\nb.tif,q,A,tumor,X\n"
    (tmp_path / "archive" / "slides.csv").write_text(table)
    init_study(tmp_path / "study", archive=tmp_path / "archive")
    study, asked = Study(tmp_path / "study"), [*settings, 'subtypes.any=["x", "Y"]']
    words = ("no slide gave a mosaic; the first: a: its diagnosis X is none", "did you mean x?")
    refused(lambda: make_mosaics(study, site="A", overrides=asked), *words, error=WsiFlError)
    with pytest.raises(WsiFlError, match="its slides have diagnoses") as error:
        make_mosaics(study, site="A", overrides=settings)
    hint = re.search(r"subtypes = (.*)$", str(error.value))[1]
    assert tomllib.loads(f"subtypes = {hint}") == {"subtypes": {"tumor": ["X", "OTHER"]}}
