"""`synthesize train | sample | check`: resumption, verdicts, refusals, synthetic stores, and a planted copier."""

import hashlib
import json
import shutil
import signal
import subprocess
import sys
import time
from functools import partial
from types import SimpleNamespace

import h5py
import numpy as np
import pytest
import test_mpcpa
import torch
from conftest import check, refused, same, train_generator, write_patches_as_bags
from PIL import Image
from safetensors.torch import load_file

from wsi_fl.oneshot.release_statistics import release_statistics
from wsi_fl.stages.prepare.check_stores import check_sites as check_stores
from wsi_fl.stages.prepare.partition import partition_images
from wsi_fl.stages.site.site_data import open_store
from wsi_fl.stages.training.train import train
from wsi_fl.stores.bag_store import BagMeta
from wsi_fl.stores.patch_shards import pack_store
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.synthesis.folder import GeneratorFolder
from wsi_fl.synthesis.stages import gan
from wsi_fl.synthesis.stages.gan import KIND
from wsi_fl.synthesis.stages.synthetic_stores import sample_generator
from wsi_fl.system.files import read_lines, write_sealed
from wsi_fl.types import WsiFlError

SMALL = """
gan = { resolution = 16, iterations = 4, privacy_iterations = 2, batch_size = 4, z_dim = 8, w_dim = 8, \
mapping_layers = 2, channel_base = 128, channel_max = 16, checkpoint_every = 2, check_images = 40, \
check_samples = 40, projections = 6, projection_steps = 3 }
lpips = { weights = "random:0" }
train = { rounds = 1, batch_size = 8, augment = "none" }
model = { private = "cnn1", proxy = "mlp" }
"""


make_study = partial(test_mpcpa.make_study, n_sites=1, n=60, text=SMALL)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    study = make_study(tmp_path_factory.mktemp("gan") / "study")
    train_generator(study, site="S1")
    return study


@pytest.fixture(scope="module")
def checked(trained):
    return trained, check(trained, site="S1")


@pytest.fixture
def study_copy(checked, tmp_path):
    """A copy of the study that tests may change."""
    return Study(shutil.copytree(checked[0].root, tmp_path / "study"))


def digest_of(study):
    return KIND.require_trained(study, "S1")[0].compute_digest("after")


def tensors(study, phase="after"):
    return load_file(study.generator_path("S1") / f"{phase}.safetensors")


def test_both_generators_are_kept_and_described_in_gan_json(trained):
    folder, document = KIND.require_trained(trained, "S1")
    assert document["finished"] and document["margin"] > 0
    for phase, iterations in (("before", 4), ("after", 6)):
        assert document["phases"][phase]["iterations"] == iterations
        assert document["phases"][phase]["sha256"] == folder.compute_digest(phase)
    assert "UNTRAINED" in document["settings"]["privacy"]["lpips"]
    assert not same(tensors(trained, "before"), tensors(trained))
    last = folder.read_metrics()[-1]
    assert last["phase"] == "after" and last["privacy"] is not None
    picture = Image.open(sorted((folder.path / "samples").glob("*.png"))[-1])
    assert picture.size[0] > 8 * 16
    assert not [path for path in folder.path.rglob("*") if path.suffix in {".pt", ".pth", ".pkl"}]


@pytest.mark.slow
def test_the_papers_privacy_loss_needs_no_margin_and_trains_another_generator(trained, tmp_path):
    study = make_study(tmp_path / "study")
    document = train_generator(study, site="S1", overrides=["gan.privacy_loss=negative_distance"])
    stored = KIND.require_trained(study, "S1")[1]
    assert document["margin"] is None and stored["settings"]["privacy"]["loss"] == "negative_distance"
    assert GeneratorFolder(study.generator_path("S1")).read_metrics()[-1]["privacy"] < 0
    assert same(tensors(study, "before"), tensors(trained, "before")) and not same(tensors(study), tensors(trained))
    refused(lambda: train_generator(study, site="S1"), "privacy", "--again")


@pytest.mark.slow
def test_training_with_other_settings_needs_again(trained, tmp_path):
    refused(lambda: train_generator(trained, site="S1", overrides=["gan.lr=0.001"]), "terms", "--again")
    study = make_study(tmp_path / "study")
    train_generator(study, site="S1", overrides=["gan.privacy_iterations=0"])
    assert not (study.generator_path("S1") / "after.safetensors").exists()
    assert KIND.require_trained(study, "S1")[1]["phases"].keys() == {"before"}
    train_generator(study, site="S1", restart=True)
    assert (study.generator_path("S1") / "after.safetensors").exists()


@pytest.fixture
def halfway(trained, tmp_path):
    """A training that was killed just before its end, with checkpoints of iterations 4 and 6."""
    study = Study(shutil.copytree(trained.root, tmp_path / "halfway"))
    folder = KIND.find_folder(study, "S1")
    folder.write_document(folder.read_document() | {"finished": False})
    assert folder.list_iterations() == [4, 6]
    return study, folder, [folder.path / "state" / f"iteration_{k:07d}.safetensors" for k in (4, 6)]


def resumed_output(study):
    """(reported lines, lines of `check`) of a resumed training."""
    damaged = check_stores(study, site="S1")["sites"][0]["damaged"]
    lines = []
    train_generator(study, site="S1", watcher=SimpleNamespace(update=lambda *_: None, print_message=lines.append))
    return lines, damaged


def test_a_missing_checkpoint_is_reported_in_one_line_and_made_again(trained, halfway):
    study, folder, (_, newest) = halfway
    newest.unlink()
    (line,), (damaged,) = resumed_output(study)
    assert line == damaged and newest.name in line and "goes on from iteration 4" in line and "\n" not in line
    assert folder.list_iterations() == [4, 6] and same(tensors(study), tensors(trained))
    assert folder.read_metrics()[-1]["iteration"] == 6 and resumed_output(study) == ([], [])


def test_a_checkpoint_in_another_s_place_is_refused(halfway):
    study, _, (older, newest) = halfway
    shutil.copyfile(older, newest)
    words = (newest.name, "not the checkpoint", "delete it")
    refused(lambda: train_generator(study, site="S1"), *words, error=WsiFlError)
    (damaged,) = check_stores(study, site="S1")["sites"][0]["damaged"]
    assert newest.name in damaged
    newest.unlink()  # as advised
    train_generator(study, site="S1")


def test_a_training_killed_between_a_checkpoint_and_its_digest_resumes(halfway):
    study, folder, (older, _) = halfway
    known = {"sha256": {"4": hashlib.sha256(older.read_bytes()).hexdigest()}}
    write_sealed(folder.path / "state" / "known.json", known)
    assert resumed_output(study) == ([], [])


@pytest.mark.slow
def test_settings_of_the_privacy_loss_may_change_until_it_has_begun(tmp_path):
    """The result equals a training with the new settings from the start; a step that depends on them fixes them."""
    changed, fresh = make_study(tmp_path / "changed"), make_study(tmp_path / "fresh")
    new = ["gan.privacy_weight=5.0", "gan.privacy_images=10", "gan.privacy_quantile=0.9"]
    long = ["gan.privacy_iterations=4000"]
    interrupted(changed, long, signal.SIGKILL, 3)
    folder = GeneratorFolder(changed.generator_path("S1"))
    for iteration in folder.list_iterations():  # whatever the kill was too late for
        if iteration > 4:
            (folder.path / "state" / f"iteration_{iteration:07d}.safetensors").unlink()
    assert folder.list_iterations()[-1] == 4
    refused(lambda: train_generator(changed, site="S1", overrides=[*new, "gan.lr=0.1"]), "terms", "--again")
    train_generator(changed, site="S1", overrides=new)
    train_generator(fresh, site="S1", overrides=new)
    assert same(tensors(changed), tensors(fresh))
    assert folder.read_document() == GeneratorFolder(fresh.generator_path("S1")).read_document()
    refused(lambda: train_generator(changed, site="S1"), "other settings of the privacy loss")


def interrupted(study, settings, how, after):
    """Run the command until a checkpoint later than iteration `after`, end it by a signal, and return its output."""
    command = [sys.executable, "-m", "wsi_fl", "synthesize", "train", "--site", "S1"]
    command += [word for one in settings for word in ("--set", one)]
    process = subprocess.Popen(command, cwd=study.root, stderr=subprocess.PIPE, text=True)
    folder = KIND.find_folder(study, "S1")
    deadline = time.monotonic() + 300
    while max(folder.list_iterations(), default=0) <= after:
        assert process.poll() is None, process.stderr.read()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    process.send_signal(how)
    said = process.communicate()[1]
    refused(lambda: KIND.require_trained(study, "S1"), "has not finished", error=WsiFlError)
    return process.returncode, said


@pytest.mark.slow
def test_a_killed_training_resumes_bit_for_bit(tmp_path):
    """Ctrl-C, then SIGKILL, then the same command; compared with an uninterrupted training."""
    alone, killed = make_study(tmp_path / "alone"), make_study(tmp_path / "killed")
    settings = ["gan.iterations=28", "gan.privacy_iterations=12", "gan.checkpoint_every=4"]
    train_generator(alone, site="S1", overrides=settings)
    code, said = interrupted(killed, settings, signal.SIGINT, 0)
    assert code == 1 and "start the same command again" in said and "Traceback" not in said
    interrupted(killed, settings, signal.SIGKILL, max(GeneratorFolder(killed.generator_path("S1")).list_iterations()))
    train_generator(killed, site="S1", overrides=settings)
    assert same(tensors(alone, "before"), tensors(killed, "before"))
    assert same(tensors(alone), tensors(killed))
    lines = read_lines(killed.generator_path("S1") / "metrics.jsonl")
    assert [line["iteration"] for line in lines] == [20, 40]


def test_a_real_site_gets_no_untrained_distance(tmp_path):
    study = make_study(tmp_path / "study")
    (study.root / "sites" / "S1.toml").write_text('name = "S1"\nreal = true\n')
    refused(lambda: train_generator(study, site="S1"), "lpips.weights", "real")


def test_the_verdict_has_all_requested_comparisons(checked):
    study, document = checked
    assert document["passed"], document["reasons"]
    assert document == KIND.find_folder(study, "S1").read_check()
    assert document["generator"] == {"phase": "after", "sha256": digest_of(study)}
    for phase in ("before", "after"):
        for what in ("nearest sample", "projection"):
            comparison = document["copying"][phase][what]
            assert comparison["training"]["n"] == (36 if what == "nearest sample" else 6)
            assert 0 <= comparison["p_nearer"] <= 1
        assert document["projection"][phase]["q05"] <= document["projection"][phase]["median"]
    assert document["projection"]["moved"]["n"] == 6
    for words in ("UNTRAINED", "not differential privacy", "FID and KID were not computed"):
        assert any(words in note for note in document["notes"])


def test_a_generator_is_resumed_and_checked_only_with_its_training_pixels(study_copy):
    study, data = study_copy, dict(np.load(study_copy.root / "data.npz"))
    np.savez(study.root / "data.npz", x=255 - data["x"], y=data["y"])
    shutil.rmtree(study.store_path("S1").parent)
    (study.root / "sites" / "S1.toml").unlink()
    partition_images(study, study.root / "data.npz", n_sites=1, test_fraction=0.4)
    refused(lambda: train_generator(study, site="S1"), "another store of site S1")
    refused(lambda: check(study, site="S1"), "made anew")


def test_without_a_check_of_this_generator_nothing_is_written(study_copy, wsi_fl):
    study = study_copy
    path = study.generator_path("S1") / "check.json"
    document = json.loads(path.read_text())
    document["generator"]["sha256"] = "0" * 64
    write_sealed(path, document)
    refused(lambda: sample_generator(study, site="S1", n_per_class=2), "another generator", error=WsiFlError)
    path.unlink()
    found = wsi_fl("synthesize", "sample", "--site", "S1", "--n-per-class", "3", cwd=study.root)
    assert found.returncode == 1 and found.stderr.count("wsi-fl: error") == 1
    assert "`synthesize check` was not run" in found.stderr
    assert not (study.root / "stores" / "S1-synthetic").exists()
    told = sample_generator(study, site="S1", n_per_class=3, despite_failed_check=True)
    assert told["generator"]["check"] == "not run"


def test_a_synthetic_store_is_a_marked_patch_store_and_never_replaces_a_real_one(checked):
    study, _ = checked
    document = sample_generator(study, site="S1", n_per_class=5, name="twin", seed=3, as_site=True)
    with open_store(study, "twin") as store:
        table, provenance = store.table, json.loads(store.meta.generator)
        assert (len(store), store.meta.spec.size_px, len(np.unique(table.patient))) == (10, 16, 10)
        assert np.bincount(table.label).tolist() == [5, 5] and set(table.split) == {"train"}
        pixels = store.read(np.arange(10))
        assert pixels.std() > 1
    assert provenance == document["generator"] and provenance["differential_privacy"] is False
    assert (provenance["sha256"], provenance["check"]) == (digest_of(study), "passed")
    with h5py.File(study.store_path("twin")) as file:
        assert bool(file.attrs["synthetic"]) and int(file.attrs["version"]) == 1
    packed = study.root / "packed.h5"
    pack_store(study.store_path("twin"), packed)
    with PatchStore(packed) as store:
        assert json.loads(store.meta.generator) == provenance
        assert np.array_equal(store.read(np.arange(10)), pixels)
    with open_store(study, "S1") as store:
        assert store.meta.generator is None
    refused(lambda: train_generator(study, site="twin"), "synthetic already")
    refused(lambda: sample_generator(study, site="S1", n_per_class=2, name="S1"), "real patches")
    refused(lambda: sample_generator(study, site="S1", n_per_class=0), "at least 1")
    refused(lambda: sample_generator(study, site="S2", n_per_class=2), "unknown site")


def test_models_train_on_a_synthetic_store(checked):
    study, _ = checked
    sample_generator(study, site="S1", n_per_class=8, name="both", as_site=True)
    both = 'sites=["both", "S1"]'
    summary = train(study, method="fedavg", overrides=[both, "privacy.enabled=false"], backend="local")
    assert {row["site"] for row in summary["sites"]} == {"both", "S1"}
    summary = train(study, method="proxyfl", overrides=[both], backend="local")
    assert {row["site"]: row["guarantee"] for row in summary["sites"]} == {"both": "none", "S1": "guaranteed"}


def test_features_of_synthetic_patches_are_marked_as_synthetic(study_copy):
    study = study_copy
    sample_generator(study, site="S1", n_per_class=8, name="both", as_site=True)
    with open_store(study, "both") as store:
        meta, table = store.meta, store.table
    known = BagMeta("both", meta.classes, "e", meta.spec, "features", generator=meta.generator)
    write_patches_as_bags(study.features_path("both"), known, table, np.zeros((len(table), 3), np.float32))
    heads = ["train.data=features", "model.private=linear_head", "model.proxy=linear_head"]
    (row,) = release_statistics(study, site="both", overrides=heads)["sites"]
    assert row["guarantee"] == "none"


def test_a_real_hospitals_generator_becomes_a_site_of_others_only_if_allowed(study_copy):
    study = study_copy
    path = study.root / "sites" / "S1.toml"
    path.write_text(path.read_text().replace("real = false", "real = true"))
    refused(lambda: sample_generator(study, site="S1", n_per_class=2, as_site=True), "S1.toml", 'allow = ["generator"]')
    assert not study.store_path("S1-synthetic").exists()
    path.write_text(path.read_text() + '\nallow = ["generator"]\n')
    assert sample_generator(study, site="S1", n_per_class=2, as_site=True)["site_file"]


@pytest.mark.slow
def test_a_copying_generator_is_detected_and_no_set_is_written(study_copy, wsi_fl, monkeypatch):
    """A planted generator with the privacy loss draws its training images, almost invisibly changed."""
    study, load, draw = study_copy, gan._load_gan, gan.draw_samples

    def load_planted(folder, phase):
        generator = load(folder, phase)
        generator.copies = phase == "after"
        return generator

    def draw_planted(generator, labels, *, seed):
        if not generator.copies:
            return draw(generator, labels, seed=seed)
        with open_store(study, "S1") as store:
            pixels = store.read(np.flatnonzero(store.table.split == "train")[: len(labels)]).astype(int)
        pixels += np.random.default_rng(seed).integers(-2, 3, pixels.shape)
        return torch.from_numpy(pixels.clip(0, 255).astype(np.uint8).transpose(0, 3, 1, 2).copy())

    monkeypatch.setattr(gan, "_load_gan", load_planted)
    monkeypatch.setattr(gan, "draw_samples", draw_planted)
    found = wsi_fl("synthesize", "check", "--site", "S1", "--json", cwd=study.root)
    assert found.returncode == 1, found.stderr
    document = json.loads(found.stdout)
    honest, copying = (document["copying"][phase]["nearest sample"] for phase in ("before", "after"))
    assert not document["passed"] and honest["copies_training"] == 0
    assert (copying["copies_training"], copying["copies_held_out"]) == (36, 0)
    assert any("reproduced almost exactly" in reason for reason in document["reasons"])
    words = ("not passed", "--despite-failed-check")
    refused(lambda: sample_generator(study, site="S1", n_per_class=2), *words, error=WsiFlError)
    assert not study.store_path("S1-synthetic").exists()
    told = sample_generator(study, site="S1", n_per_class=2, despite_failed_check=True)
    assert told["generator"]["check"] == "failed" and told["generator"]["reasons"]
