"""Mosaics: the right patches, the encoder's own features of them, and stores that survive anything."""

import csv
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import h5py
import numpy as np
import pytest
import timm
import torch
from conftest import SHARED, refused
from PIL import Image
from safetensors.torch import load_file, save_file

from wsi_fl.demo import phantom
from wsi_fl.models.encoder import Encoder, encode
from wsi_fl.slides.choosing.mosaic import MosaicParams, candidates, choose, mean_colour, plan_mosaic
from wsi_fl.slides.layouts import read_site
from wsi_fl.slides.reading.reader import Slide
from wsi_fl.stages.answers.predict import predict
from wsi_fl.stages.prepare import sources
from wsi_fl.stages.prepare.bag_labels import labelled
from wsi_fl.stages.prepare.export import export
from wsi_fl.stages.prepare.init import init
from wsi_fl.stages.prepare.mosaic import mosaic
from wsi_fl.stages.training.train import train
from wsi_fl.stores.bag_shards import read_shard
from wsi_fl.stores.bags import BagStore
from wsi_fl.study.folder import Study
from wsi_fl.system.locks import locked
from wsi_fl.types import CLASSES, GridSpec, SlideRecord, UsageError, WsiFlError

FIXTURES = Path(__file__).parents[1] / "fixtures"
LITE0 = SHARED / "weights" / "tf_efficientnet_lite0.fp16.safetensors"
SPEC = GridSpec(64, 1.0, 64)


@pytest.fixture(scope="session")
def archive(tmp_path_factory):
    """Four slides of one hospital."""
    return phantom.paint_archive(
        tmp_path_factory.mktemp("mosaic") / "archive", n_sites=1, patients_per_site=2, size_px=1024
    )


@pytest.fixture(scope="session")
def weights(tmp_path_factory):
    """Random weights of a tiny architecture."""
    path = tmp_path_factory.mktemp("weights") / "tiny.safetensors"
    torch.manual_seed(0)
    save_file(timm.create_model("test_efficientnet", num_classes=7).state_dict(), path)
    return path


@pytest.fixture(scope="session")
def calm(archive, weights, tmp_path_factory):
    """A study whose mosaics were made without a disturbance, and what was said of them."""
    root = tmp_path_factory.mktemp("calm") / "study"
    init(root, archive=archive)
    (row,) = mosaic(Study(root), site="C1", overrides=settings(weights))["sites"]
    return Study(root), row


@pytest.fixture
def study(archive, tmp_path):
    init(tmp_path / "study", archive=archive)
    return Study(tmp_path / "study")


def settings(weights, **more):
    given = {"size_px": 64, "mpp": 1.0, "min_tissue": 0.5, "encoder": "test_efficientnet", "weights": weights}
    return [f"mosaic.{key}={value}" for key, value in (given | more).items()]


def a_slide(archive, number=1):
    path = sorted(archive.rglob("*.tif"))[number]
    return SlideRecord(path, path.stem, "p", "C1", "weak", True)


def plain_features(name, path, patches):
    """What anybody gets from timm."""
    model = timm.create_model(name, num_classes=0).eval()
    state = {
        key: value.float() for key, value in load_file(path).items() if not key.startswith("classifier.")
    }
    model.load_state_dict(state, strict=True)
    config = timm.data.resolve_model_data_config(model)
    mean, std = (torch.tensor(config[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    with torch.inference_mode():
        return model((torch.from_numpy(patches).permute(0, 3, 1, 2) / 255 - mean) / std).numpy()


def test_the_store_holds_what_timm_makes_of_the_slides_patches(calm, archive, weights):
    study, row = calm
    assert row["failed"] == [] and row["bags"] == row["slides"] == 4 == row["train"] + row["test"]
    assert sum(row["classes"].values()) == 4 and set(row["classes"]) == set(CLASSES)
    with BagStore(study.root / row["store"]) as store:
        assert row["patches"] == sum(len(store.bag(k).features) for k in range(4))
        assert store.meta.encoder == row["encoder"] and "sha256:" in row["encoder"]
        for k, name in enumerate(store.table.slide):
            bag = store.bag(k)
            with Slide(next(archive.rglob(f"{name}.tif"))) as slide:
                patches = np.stack([slide.read((int(x), int(y)), 64, 1.0) for x, y in bag.xy_l0])
                assert store.mpp_l0[k] == slide.mpp
            expected = plain_features("test_efficientnet", weights, patches)
            np.testing.assert_allclose(bag.features, expected, atol=1e-4)
            assert bag.weight.sum() == pytest.approx(1, abs=1e-5)
            with Image.open(study.root / f"stores/C1/mosaics/{name}.png") as picture:
                assert min(picture.size) > 400


def test_a_new_slide_is_predicted_from_a_mosaic_made_on_the_spot(calm, archive, weights, tmp_path):
    study = Study(shutil.copytree(calm[0].root, tmp_path / "study"))
    overrides = [*settings(weights), "train.data=mosaics", "train.rounds=2", "train.batch_size=2"]
    overrides += ["model.private=deepset", "privacy.enabled=false"]
    overrides += ["mosaic.size_px=128", "mosaic.clusters=2", "mosaic.fraction=0.9"]  # not how they were made
    run = train(study, method="regular", overrides=overrides, backend="local")["run"]
    with BagStore(study.mosaic("C1")) as store:
        name = str(store.table.slide[0])
    (known,) = predict(study, run, site="C1", slides=[Path(name)])["slides"]
    stranger = tmp_path / "stranger.tif"
    shutil.copy(next(archive.rglob(f"{name}.tif")), stranger)
    (new,) = predict(study, run, site="C1", slides=[stranger])["slides"]
    assert new["patches"] == known["patches"]
    assert new["probabilities"] == pytest.approx(known["probabilities"], abs=1e-6)
    assert (study.root / new["heatmap"]).exists()
    other = tmp_path / "other.safetensors"
    save_file({key: value * 1.5 for key, value in load_file(weights).items()}, other)
    shutil.copy(other, weights_copy := tmp_path / "weights.safetensors")
    config = study.root / run / "config.toml"
    config.write_text(config.read_text().replace(str(weights), str(weights_copy)))
    (failed,) = predict(study, run, site="C1", slides=[stranger])["failed"]
    assert "was trained on features of test_efficientnet sha256:" in failed["reason"]


@pytest.mark.skipif(not LITE0.exists(), reason="the published weights are not here")
def test_published_weights_give_timms_features_in_any_division_into_batches():
    patches = np.random.default_rng(0).integers(0, 256, (7, 96, 96, 3)).astype(np.uint8)
    encoder = Encoder("tf_efficientnet_lite0", LITE0, batch_size=4)
    found = encode([patches[:1], patches[1:6], patches[6:]], encoder)
    expected = plain_features("tf_efficientnet_lite0", LITE0, patches)
    assert found.shape == (7, 1280) and found.dtype == np.float32
    np.testing.assert_allclose(found, expected, atol=1e-4, rtol=1e-4)


def test_the_mosaic_keeps_of_every_colour_group_its_share_of_places_once():
    rng = np.random.default_rng(0)
    centres = np.array([[200, 100, 150], [90, 40, 110], [230, 200, 220]])
    group = np.repeat([0, 1, 2], [120, 60, 7])
    colour = centres[group] + rng.normal(0, 2, (len(group), 3))
    xy = np.stack([np.arange(len(group)) % 20, np.arange(len(group)) // 20], 1) * 1000
    found = choose(colour, xy, clusters=3, fraction=0.05, seed=0)
    assert [
        found.cluster[group == k].tolist() == [c] * int((group == k).sum())
        for k, c in ((0, 1), (1, 0), (2, 2))
    ]
    assert len(np.unique(found.rows)) == len(found.rows) == 6 + 3 + 1
    assert np.bincount(found.cluster[found.rows]).tolist() == [3, 6, 1]
    assert found.weight.sum() == pytest.approx(1)
    far = [
        np.linalg.norm(xy[found.rows[:, None]] - xy[None], axis=-1)[:, group == k].min(0).max() for k in (0,)
    ]
    assert far[0] < 10_000


@pytest.mark.parametrize("n", [1, 2, 5])
def test_fewer_patches_than_clusters_are_still_a_mosaic(n):
    colour = np.random.default_rng(n).uniform(0, 255, (n, 3))
    found = choose(colour, np.arange(2 * n).reshape(n, 2), clusters=9, fraction=0.05, seed=0)
    assert found.rows.tolist() == list(range(n))
    same = choose(np.full((n, 3), 128.0), np.arange(2 * n).reshape(n, 2), clusters=9, fraction=0.05, seed=0)
    assert len(same.rows) == 1 and same.weight.tolist() == [1.0]


def test_a_slide_without_full_patches_gives_its_best_few_and_says_so():
    rows, note = candidates(np.array([0.1, 0.55, 0, 0.6, 0.2], np.float32), 0.7, 9)
    assert (
        rows.tolist() == [1, 3]
        and note == "no patch holds 70% tissue; the best 2 stand for the slide (55% to 60%)"
    )
    assert candidates(np.array([0.9, 0.2], np.float32), 0.7, 9)[0].tolist() == [0]
    with pytest.raises(WsiFlError, match="no patch"):
        candidates(np.zeros(3, np.float32), 0.7, 9)


def test_the_thumbnails_mean_colours_are_those_at_5x(archive):
    with Slide(a_slide(archive).path) as slide:
        thumbnail, downsample = slide.thumbnail(512)
        xy = np.array([[256, 256], [320, 512], [601, 333]])
        found = mean_colour(thumbnail, xy, 128 / slide.mpp, downsample)
        own = [slide.read((int(x), int(y)), 64, 2.0).mean((0, 1)) for x, y in xy]
    np.testing.assert_allclose(found, own, atol=1.5)


def test_mosaics_do_not_depend_on_threads_or_the_run(archive, monkeypatch):
    first = plan_mosaic(a_slide(archive), SPEC, MosaicParams(min_tissue=0.5))
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    second = plan_mosaic(a_slide(archive), SPEC, MosaicParams(min_tissue=0.5))
    assert np.array_equal(first.mosaic.rows, second.mosaic.rows)
    assert np.array_equal(first.mosaic.cluster, second.mosaic.cluster)
    assert first.kept_l0.shape == (len(first.mosaic.rows), 2)


@pytest.mark.slow
@pytest.mark.parametrize("after", [0, 3])
def test_killed_at_any_moment_and_started_again_gives_the_same_bytes(study, calm, weights, after):
    command = [sys.executable, "-m", "wsi_fl", "mosaic", "--site", "C1"]
    command += [part for value in settings(weights) for part in ("--set", value)]
    process = subprocess.Popen(command, cwd=study.root, stderr=subprocess.DEVNULL, start_new_session=True)
    folder = study.root / "stores" / "C1"
    while process.poll() is None:
        if (folder / ".lock").exists() and len(list((folder / "mosaics").glob("[!.]*.png"))) >= after:
            os.killpg(process.pid, signal.SIGKILL)
            break
        time.sleep(0.002)
    process.wait()
    mosaic(study, site="C1", overrides=settings(weights))
    whole, _ = calm
    for path in sorted((whole.root / "stores/C1").rglob("*.h5")):
        assert (study.root / path.relative_to(whole.root)).read_bytes() == path.read_bytes()
    assert not list((study.root / "stores").rglob("*.partial*"))


def test_a_second_run_makes_nothing_and_changes_are_noticed(study, calm, weights, tmp_path, capsys):
    shutil.copytree(calm[0].root / "stores", study.root / "stores")
    shards = sorted((study.root / "stores/C1/mosaics").glob("*.h5"))
    before = {path: path.stat().st_mtime_ns for path in shards}
    mosaic(study, site="C1", overrides=settings(weights))
    assert all(path.stat().st_mtime_ns == before[path] for path in shards)
    other = tmp_path / "other.safetensors"
    save_file({k: v * 1.5 if v.is_floating_point() else v for k, v in load_file(weights).items()}, other)
    mosaic(study, site="C1", overrides=settings(other))
    assert all(path.stat().st_mtime_ns != before[path] for path in shards)
    assert capsys.readouterr().err.count("made again") == 4


def test_slides_without_tissue_and_broken_ones_are_set_aside_in_one_line(archive, tmp_path, weights):
    copy = tmp_path / "copy"
    shutil.copytree(archive, copy)
    broken, empty, *_ = sorted(copy.rglob("*.tif"))
    broken.write_bytes(broken.read_bytes()[:5000])
    phantom.write_pyramid(empty, np.full((1024, 1024, 3), 243, np.uint8), 0.5, quality=90)
    init(tmp_path / "study2", archive=copy)
    study = Study(tmp_path / "study2")
    (row,) = mosaic(study, site="C1", overrides=settings(weights))["sites"]
    assert {one["slide"] for one in row["failed"]} == {broken.stem, empty.stem}
    assert all("\n" not in one["reason"] for one in row["failed"]) and row["bags"] == 2
    reasons = {one["slide"]: one["reason"] for one in row["failed"]}
    assert "no tissue" in reasons[empty.stem]


def test_a_damaged_patch_is_left_out_and_named(study, weights, monkeypatch):
    slide = Slide.read
    bad = []

    def read(self, xy, *more):
        if not bad:
            bad.append((self.path.stem, xy))
        if (self.path.stem, xy) == bad[0]:
            raise WsiFlError(f"{self.path.name}: cannot be read")
        return slide(self, xy, *more)

    monkeypatch.setattr(Slide, "read", read)
    (row,) = mosaic(study, site="C1", overrides=[*settings(weights), "slides.reader=openslide"])["sites"]
    ((name, xy),) = bad
    assert [one["slide"] for one in row["failed"]] == [name] and row["bags"] == 4
    assert "patches set aside, at level-0 pixel" in row["failed"][0]["reason"]
    shard = read_shard(study.root / f"stores/C1/mosaics/{name}.h5")
    assert [place[:2] for place in shard.unread] == [xy] and list(xy) not in shard.bag.xy_l0.tolist()


def test_ranks_share_the_slides_and_give_the_same_store(study, calm, weights, as_ranks):
    whole, alone = calm
    document, nothing = as_ranks(2, lambda: mosaic(study, site=None, overrides=settings(weights)))
    assert not nothing  # said once
    (row,) = document["sites"]
    assert {**row, "seconds": 0} == {**alone, "seconds": 0}
    with BagStore(study.mosaic("C1")) as one, BagStore(whole.mosaic("C1")) as other:
        for k in range(len(one)):
            np.testing.assert_allclose(one.bag(k).features, other.bag(k).features, atol=1e-5)
            assert np.array_equal(one.bag(k).xy_l0, other.bag(k).xy_l0)


def test_two_at_a_time_on_one_site_are_refused(study, weights):
    with locked(study.mosaic("C1").parent, "C1"), pytest.raises(WsiFlError, match="another wsi-fl"):
        mosaic(study, site="C1", overrides=settings(weights))


def test_subtypes_are_classes_and_other_diagnoses_are_set_aside(study, weights, monkeypatch):
    names = {"kidney": ["KIRP", "KIRC"], "lung": ["LUAD"]}
    monkeypatch.setattr(sources, "read_site", lambda *given: (diagnosed(read_site(*given)[0]), []))
    (study.root / "pipelines" / "sub.toml").write_text(
        "[subtypes]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in names.items())
    )
    (row,) = mosaic(study, site="C1", pipeline_name="sub", overrides=settings(weights))["sites"]
    assert row["classes"] == {"KIRC": 1, "KIRP": 1, "LUAD": 1} and len(row["failed"]) == 1
    assert row["failed"][0]["reason"] == "its diagnosis SKCM is none of the study's (KIRC, KIRP, LUAD)"
    with BagStore(study.mosaic("C1")) as store:
        assert store.table.tumor_type.tolist() == ["kidney", "kidney", "lung"]
        assert store.meta.tumor_types == {key: tuple(value) for key, value in names.items()}


def diagnosed(records):
    from dataclasses import replace

    return [
        replace(one, diagnosis=name)
        for one, name in zip(records, ("KIRC", "KIRP", "LUAD", "SKCM"), strict=True)
    ]


def test_diagnoses_without_subtypes_are_a_mistake():
    record = SlideRecord(Path("a.svs"), "a", "p", "T", "weak", True, diagnosis="KIRC", tumor_type="kidney")
    refused(lambda: labelled([record], {}), "subtypes", "KIRC")
    assert labelled([record], {"lung": ["LUAD"], "kidney": ["KIRC"]}).label == {"a": 0}
    assert labelled([record], {"lung": ["LUAD", "KIRC"], "kidney": ["KIRP"]}).aside[0].slide == "a"


def rename(weights, change):
    return {change(key): value.clone() for key, value in load_file(weights).items()}


def test_wrong_weights_end_in_one_line(weights, tmp_path):
    state = load_file(weights)
    path = tmp_path / "bad.safetensors"
    name = "test_efficientnet"

    def refusal(state, *words):
        save_file(state, path)
        refused(lambda: Encoder(name, path), *words, error=WsiFlError)

    refusal({k: v for k, v in state.items() if k != "conv_stem.weight"}, "'conv_stem.weight' is missing")
    refusal(state | {"odd.weight": torch.zeros(1)}, "'odd.weight'")
    refusal(state | {"conv_stem.weight": torch.zeros(1, 3, 3, 3)}, "conv_stem.weight", "shape")
    refusal(state | {"conv_stem.weight": state["conv_stem.weight"] * np.nan}, "no numbers")
    path.write_bytes(b"no")
    refused(lambda: Encoder(name, path), "not a readable safetensors", error=WsiFlError)
    refused(lambda: Encoder(name, tmp_path / "none.safetensors"), "no such file", error=WsiFlError)
    pickle = tmp_path / "kimianet.pth"
    pickle.write_bytes(b"")
    refused(lambda: Encoder(name, pickle), "pickle", "safetensors.torch.save_file", error=WsiFlError)
    refused(lambda: Encoder("test_efficientnett", weights), "timm makes no such model")


def test_published_weights_that_cannot_be_had_end_in_one_line(monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    import socket

    def nowhere(*_):
        raise OSError("Name or service not known")

    monkeypatch.setattr(socket, "getaddrinfo", nowhere)
    monkeypatch.setattr("urllib.request.getproxies", dict)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: None)
    refused(lambda: Encoder("test_efficientnet"), "cannot be downloaded", "set weights", error=WsiFlError)


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
    for given, pooled in (
        ({f"module.{k}": v for k, v in state.items()}, torch.relu),
        (kimianet, lambda one: one),
    ):
        path = tmp_path / "weights.safetensors"
        save_file(given, path)
        encoder = Encoder("densenet121", path)
        with torch.inference_mode():
            maps = model.features(encoder.prepared(torch.from_numpy(patch)))
        np.testing.assert_allclose(encoder(patch), pooled(maps).mean((2, 3)).numpy(), atol=1e-4)


def test_one_size_encoders_resize_and_others_take_patches_as_they_are(tmp_path, weights):
    path = tmp_path / "vit.safetensors"
    save_file(timm.create_model("test_vit", num_classes=0).state_dict(), path)
    encoder = Encoder("test_vit", path)
    assert encoder.input_px == 160 and encoder(np.zeros((2, 200, 200, 3), np.uint8)).shape == (2, 64)
    refused(lambda: Encoder("test_vit", path, input_px=96), "160 px alone")
    assert Encoder("test_efficientnet", weights).input_px is None
    smaller = Encoder("test_efficientnet", weights, input_px=64)
    flat = np.full((1, 128, 128, 3), 90, np.uint8)
    np.testing.assert_allclose(smaller(flat), smaller(flat[:, :64, :64]), atol=1e-4)
    assert (
        "at 64 px" in smaller.label
        and smaller.label.split(";")[0][-23:]
        == Encoder("test_efficientnet", weights).label.split(";")[0][-23:]
    )


def test_export_reads_back_as_clam_and_trident_do(calm):
    study, _ = calm
    document = export(study, site="C1", form="clam")
    with (study.root / document["table"]).open() as handle:
        rows = list(csv.DictReader(handle))
    with BagStore(study.mosaic("C1")) as store:
        assert [row["slide_id"] for row in rows] == store.table.slide.tolist()
        for k, row in enumerate(rows):
            assert row["label"] == CLASSES[store.table.label[k]] and row["case_id"] == store.table.patient[k]
            with h5py.File(study.root / document["out"] / "h5_files" / f"{row['slide_id']}.h5") as file:
                assert np.array_equal(file["features"][:], store.bag(k).features)
                assert np.array_equal(file["coords"][:], store.bag(k).xy_l0)
                assert file["coords"].attrs["patch_size_level0"] == round(64 / store.mpp_l0[k])
    refused(lambda: export(study, site="C1", form="xyz"), "use clam", error=UsageError)


def test_the_command_tells_bad_usage_and_prints_one_document(study, calm, weights, wsi_fl):
    assert wsi_fl("mosaic", cwd=study.root).returncode == 2
    shutil.copytree(calm[0].root / "stores", study.root / "stores")
    sets = [part for value in settings(weights) for part in ("--set", value)]
    done = wsi_fl("mosaic", "--all", *sets, "--json", cwd=study.root)
    assert done.returncode == 0, done.stderr
    keys = {"site", "slides", "failed", "bags", "patches", "classes", "train", "test", "store", "seconds"}
    assert keys <= json.loads(done.stdout)["sites"][0].keys()
