"""Damage is noticed wherever it lies, named with the command that mends it, and mended by that command alone."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import zlib

import h5py
import numpy as np
import pytest
import timm
import torch
from conftest import make_study, refused, write_store
from safetensors.torch import save_file

from wsi_fl.demo import phantom
from wsi_fl.runs.run import RunFolder
from wsi_fl.runs.site import SiteFolder
from wsi_fl.stages.prepare.check import check
from wsi_fl.stages.prepare.features import features
from wsi_fl.stages.prepare.init import init
from wsi_fl.stages.prepare.tile import tile
from wsi_fl.stages.site.data import Patches, open_bags, open_store
from wsi_fl.stages.training.train import resume, train
from wsi_fl.stores import hdf5
from wsi_fl.stores.bag_shards import BagShard, current_shard, write_shard
from wsi_fl.stores.bags import Bag, BagMeta, write_bags
from wsi_fl.stores.checksums import HEAD, ROWS
from wsi_fl.stores.patches import PatchStore
from wsi_fl.stores.shards import pack
from wsi_fl.study.folder import Study
from wsi_fl.synthesis.folder import GeneratorFolder
from wsi_fl.synthesis.stylegan2 import GanShape, Generator
from wsi_fl.system.tensors import save_tensors
from wsi_fl.types import BagTable, GridSpec, WsiFlError

SMALL = "size_px = 64\nmpp = 1.0\nbalance = false\n"


@pytest.fixture(scope="module")
def slides(tmp_path_factory):
    return phantom.paint_archive(
        tmp_path_factory.mktemp("damage") / "archive", n_sites=1, patients_per_site=1, size_px=768
    )


@pytest.fixture(scope="module")
def kept(slides, tmp_path_factory):
    """A tiled study for each way to store pixels, whose pipeline says all that tiling needs."""
    studies = {}
    for content in ("raw", "jpeg:90", "none"):
        root = tmp_path_factory.mktemp("tiled") / "study"
        init(root, archive=slides)
        for pipeline in (root / "pipelines").glob("*.toml"):
            pipeline.write_text(f'[tile]\n{SMALL}[store]\npixels = "{content}"\n')
        studies[content] = Study(root)
        tile(studies[content], site="C1")
    return studies


@pytest.fixture
def tiled(kept, tmp_path):
    return lambda content: Study(shutil.copytree(kept[content].root, tmp_path / "study"))


def files_of(study, site="C1"):
    folder = study.store(site).parent
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*.h5"))
        if ".lock" not in path.name
    }


def read_all(study, site="C1"):
    """As training reads: every patch of the store."""
    with open_store(study, site) as store:
        return store.read(np.arange(len(store)))


def flip(path, offset, bit=0x40):
    data = bytearray(path.read_bytes())
    data[offset] ^= bit
    path.write_bytes(data)


def place_of(path, name, row=0):
    """The offset in the file of a row of a dataset."""
    with h5py.File(path) as file:
        data = file[name]
        if data.chunks:
            return data.id.get_chunk_info_by_coord((row, 0, 0, 0)).byte_offset
        return data.id.get_offset() + row * data.dtype.itemsize * int(np.prod(data.shape[1:], dtype=int))


def edit(path, change):
    with h5py.File(path, "r+") as file:
        change(file)


def other_label(file):
    file["label"][0] ^= 1


def other_corner(file):
    file["xy_l0"][0, 0] += 64


def no_fraction(file):
    del file["tumor_fraction"]


def no_sums(file):
    del file[ROWS]


def no_seal(file):
    del file.attrs[HEAD]


def other_content(file):
    file.attrs["content"] = "nonsense"


def other_fingerprint(file):
    file.attrs["fingerprint"] = "0" * 64


def zeros(file):
    name = "bytes" if "bytes" in file else "pixels"
    file[name][-1] = np.zeros_like(file[name][-1])
    file[name][: len(file[name]) // 2] = 0


HURTS = [other_label, other_corner, no_fraction, no_sums, no_seal, other_content, other_fingerprint, zeros]


@pytest.mark.parametrize("content", ["raw", "jpeg:90", "none"])
@pytest.mark.parametrize("hurt", HURTS)
def test_tile_makes_a_damaged_shard_what_it_was_byte_for_byte(tiled, content, hurt, wsi_fl):
    if content == "none" and hurt in (no_sums, zeros):
        pytest.skip("such a shard has no pixels")
    study = tiled(content)
    before = files_of(study)
    edit(sorted((study.store("C1").parent / "slides").glob("*.h5"))[0], hurt)
    damaged = wsi_fl("check", "--site", "C1", "--json", cwd=study.root)
    assert damaged.returncode == 1
    (line,) = json.loads(damaged.stdout)["sites"][0]["damaged"]
    assert "slide" in line and "`wsi-fl tile --site C1`" in line
    assert wsi_fl("tile", "--site", "C1", cwd=study.root).returncode == 0
    assert files_of(study) == before
    assert wsi_fl("check", "--site", "C1", cwd=study.root).returncode == 0


@pytest.mark.parametrize("content", ["raw", "jpeg:90"])
@pytest.mark.parametrize("bit", [0x01, 0x80])
def test_one_bit_of_a_patch_is_found_by_training_and_mended_by_what_it_advises(tiled, content, bit, wsi_fl):
    study = tiled(content)
    before, pixels = files_of(study), read_all(study)
    shard = sorted((study.store("C1").parent / "slides").glob("*.h5"))[0]
    if content == "raw":
        at = place_of(shard, "pixels", 3) + 1000
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
def test_random_flips_are_never_learned_and_never_laundered(tiled):
    """Anywhere in a shard: training refuses what differs, and after `tile` nothing differs."""
    study = tiled("raw")
    pixels = read_all(study)
    with open_store(study, "C1") as store:
        table = store.table
    shard = sorted((study.store("C1").parent / "slides").glob("*.h5"))[0]
    whole, rng = shard.read_bytes(), np.random.default_rng(0)
    spots = [*rng.integers(0, 8192, 60), *rng.integers(0, len(whole), 20)]
    refusals = 0
    for spot in spots:
        flip(shard, int(spot), 1 << int(rng.integers(8)))
        try:
            np.testing.assert_array_equal(read_all(study), pixels)
        except WsiFlError as error:
            assert "unexpected" not in str(error)
            refusals += 1
            tile(study, site="C1")
            np.testing.assert_array_equal(read_all(study), pixels)
            with open_store(study, "C1") as store:
                for name in ("label", "xy_l0", "tumor_fraction", "slide", "patient", "split"):
                    np.testing.assert_array_equal(getattr(store.table, name), getattr(table, name))
        shard.write_bytes(whole)
    assert refusals > 20


def test_a_packed_store_knows_its_bytes(tiled, tmp_path):
    study = tiled("raw")
    pack(study.store("C1"), tmp_path / "packed.h5")
    with PatchStore(tmp_path / "packed.h5") as store:
        assert not any(store.verify(slide) for slide in store.slides)
    with h5py.File(tmp_path / "packed.h5", "r+") as file:
        pixels = next(iter(file["slides"].values()))["pixels"]
        pixels[1, 0, 0, 0] ^= 1
    with PatchStore(tmp_path / "packed.h5") as store:
        refused(lambda: store.read(np.arange(3)), "patch 1", "damaged", error=WsiFlError)


@pytest.mark.parametrize("name", ["label", "patient", "split", "xy_l0"])
def test_a_column_of_a_store_that_changed_is_refused(tiled, name):
    study = tiled("raw")
    flip(study.store("C1"), place_of(study.store("C1"), name), 0x01)
    refused(lambda: open_store(study, "C1"), "patches.h5", "wsi-fl tile --site C1", error=WsiFlError)
    tile(study, site="C1")
    read_all(study)


def test_images_advise_what_makes_them(tmp_path):
    study = make_study(tmp_path / "study", n_sites=1, mpp=0.0)
    shard = study.store("S0").parent / "slides" / "S0_slide_0.h5"
    flip(shard, place_of(shard, "pixels", 2))
    with open_store(study, "S0") as store:
        refused(lambda: store.read(np.arange(4)), "damaged", "backup", "wsi-fl partition", error=WsiFlError)


# features


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Two sites with features of their patches, and a pipeline that says how."""
    root = tmp_path_factory.mktemp("features")
    torch.manual_seed(0)
    save_file(timm.create_model("test_efficientnet", num_classes=7).state_dict(), root / "tiny.safetensors")
    extra = f'[features]\nencoder = "test_efficientnet"\nweights = "{root / "tiny.safetensors"}"\n'
    study = make_study(root / "study", n_sites=2, extra=extra, size_px=32)
    features(study, site=None)
    return study


@pytest.mark.parametrize("where", ["features.h5", "features/S0_slide_1.h5"])
@pytest.mark.parametrize("name", ["features", ROWS])
def test_a_changed_feature_is_named_and_mended(made, tmp_path, where, name, wsi_fl):
    study = Study(shutil.copytree(made.root, tmp_path / "study"))
    before = files_of(study, "S0")
    path = study.features("S0").parent / where
    row = 15 if where == "features.h5" else 2
    flip(path, place_of(path, name, row), 0x01)
    (line,) = check(study, site="S0")["sites"][0]["damaged"]
    if where == "features.h5":
        assert "patch 15, of slide S0_slide_1," in line

        def read():
            with open_bags(study, "S0", "features") as store:
                store.read(np.array([15, 2]))

        refused(read, "patch 15, of slide S0_slide_1,", "wsi-fl features --site S0", error=WsiFlError)
    (command,) = re.findall(r"`wsi-fl ([^`]*)`", line)
    assert wsi_fl(*command.split(), cwd=study.root).returncode == 0
    assert files_of(study, "S0") == before


# bags


def a_bag(seed, n=5):
    rng = np.random.default_rng(seed)
    corners = rng.integers(0, 999, (n, 2))
    return Bag(rng.normal(size=(n, 4)).astype(np.float32), corners, np.arange(n), np.full(n, 0.2, np.float32))


def bags_of(path, site="S0", made_by="mosaic"):
    spec, n = GridSpec(64, 1.0, 64), 3
    text = np.array([f"slide {k}" for k in range(n)])
    table = BagTable(
        np.arange(n) % 2,
        slide=text,
        patient=text,
        split=np.array(["train"] * n),
        tumor_type=np.array([""] * n),
    )
    meta = BagMeta(site, ("a", "b"), "tiny", spec, made_by)
    write_bags(path, meta, table, [a_bag(k) for k in range(n)])


def test_a_changed_bag_is_named(tmp_path):
    study = make_study(tmp_path / "study", n_sites=1)
    bags_of(path := study.mosaic("S0"))
    flip(path, place_of(path, "features", 7), 0x01)
    with open_bags(study, "S0", "mosaics") as store:
        store.bag(0), store.bag(2)
        refused(lambda: store.bag(1), "slide 1", "damaged", "wsi-fl mosaic --site S0", error=WsiFlError)


@pytest.mark.parametrize("column", ["xy_l0", "cluster", "weight", "label", "start"])
def test_a_changed_column_of_bags_is_refused(tmp_path, column):
    study = make_study(tmp_path / "study", n_sites=1)
    bags_of(path := study.mosaic("S0"))
    flip(path, place_of(path, column, 1), 0x01)
    refused(lambda: open_bags(study, "S0", "mosaics"), "mosaic.h5", "damaged", error=WsiFlError)


def test_imported_bags_advise_import(tmp_path):
    study = make_study(tmp_path / "study", n_sites=1)
    bags_of(path := study.mosaic("S0"), made_by="import")
    flip(path, place_of(path, "features", 7))
    with open_bags(study, "S0", "mosaics") as store:
        refused(lambda: store.bag(1), "wsi-fl import --site S0", error=WsiFlError)


@pytest.mark.parametrize("column", ["features", "xy_l0", "weight"])
def test_a_damaged_mosaic_is_made_again(tmp_path, column):
    shard = BagShard("s", "f" * 64, "tiny", GridSpec(64, 1.0, 64), a_bag(0), 0.5)
    write_shard(path := tmp_path / "S0" / "mosaics" / "s.h5", shard)
    assert current_shard(path, "f" * 64).slide == "s"
    flip(path, place_of(path, column, 2), 0x01)
    assert "damaged" in current_shard(path, "f" * 64)


# stores under another's name


@pytest.mark.parametrize("kind", ["patches", "features", "mosaics"])
def test_a_store_of_another_site_is_refused(made, tmp_path, kind):
    study = Study(shutil.copytree(made.root, tmp_path / "study"))
    bags_of(study.mosaic("S0"))
    shutil.rmtree(study.store("S1").parent)
    shutil.copytree(study.store("S0").parent, study.store("S1").parent)

    def opened(site):
        return open_store(study, site) if kind == "patches" else open_bags(study, site, kind)

    refused(lambda: opened("S1"), "stores/S1/", "is the store of site S0", error=WsiFlError)
    opened("S0").close()


# checkpoints and generators


TENSORS = {"private/w": torch.arange(600.0).reshape(20, 30).T, "n": torch.tensor(7), "e": torch.empty(0)}


@pytest.fixture
def site(tmp_path):
    folder = SiteFolder(tmp_path / "runs" / "00007-proxyfl-p" / "sites" / "C1")
    folder.save_checkpoint(3, TENSORS, {"round": 3, "losses": {"1": 0.5}, 2: [1, 2]})
    return folder


def test_a_bit_anywhere_in_a_checkpoint_is_found(site):
    path = site.checkpoint_path(3)
    whole = path.read_bytes()
    tensors, document = site.load_checkpoint(3)
    assert document == {"round": 3, "losses": {"1": 0.5}, "2": [1, 2]}
    assert all(torch.equal(tensors[name], value) for name, value in TENSORS.items())
    for spot in [*range(8, len(whole), 37), len(whole) - 1]:
        flip(path, spot, 0x01)
        refused(lambda: site.load_checkpoint(3), "damaged checkpoint", "start a new run", error=WsiFlError)
        path.write_bytes(whole)


def test_a_damaged_checkpoint_says_which_way_on_there_is(site):
    site.save_checkpoint(4, TENSORS, {"round": 4})
    flip(site.checkpoint_path(4), -9)
    words = ("backup", "wsi-fl train --resume 00007-proxyfl-p", "round 3", "new run")
    refused(lambda: site.load_checkpoint(4), *words, error=WsiFlError)


def test_a_changed_model_is_found(site):
    path = site.save_model("private", TENSORS)
    assert site.load_model("private").keys() == TENSORS.keys()
    flip(path, -5)
    refused(lambda: site.load_model("private"), "private.safetensors", "damaged", error=WsiFlError)


def test_a_changed_model_is_written_again_by_what_it_advises(tmp_path):
    study = make_study(tmp_path / "study", n_sites=2)
    run = RunFolder(study.root / train(study, method="proxyfl", backend="local")["run"])
    paths = sorted(run.path.glob("sites/*/*.safetensors"))
    before = [path.read_bytes() for path in paths]
    for path in paths:
        flip(path, -5)
    words = ("backup", "delete the run's summary.json", f"`wsi-fl train --resume {run.name}`")
    refused(lambda: run.site("S0").load_model("private"), *words, error=WsiFlError)
    (run.path / "summary.json").unlink()
    resume(study, run.name, backend="local")
    assert len(before) == 4 and [path.read_bytes() for path in paths] == before


@pytest.mark.parametrize("text", ["3", "[1]", "null", '"x"', "{", b"\xff"])
@pytest.mark.parametrize("name", ["store", "plan", "canaries", "choice", "tuned", "releases"])
def test_a_document_of_a_run_that_is_no_object_is_named_with_a_way_on(site, name, text):
    read = {
        "store": lambda: site.remember_store("a", {}),
        "releases": lambda: site.remember_released({}),
    }.get(name, lambda: site.kept(name))
    (site.path / f"{name}.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    refused(read, f"{name}.json: ", "put its backup back, or start a new run", error=WsiFlError)


def test_the_documents_of_a_run_know_their_content(site):
    site.remember_store("a", {"classes": ["ü"]})
    site.keep("canaries", {"n": 2, "seed": "7", "coins": [True, False]})
    for name, read in (("store", site.store_facts), ("canaries", lambda: site.kept("canaries"))):
        path, known = site.path / f"{name}.json", read()
        assert "digest" not in known
        bare = {key: value for key, value in json.loads(path.read_text()).items() if key != "digest"}
        path.write_text(path.read_text().replace("true", "false").replace("ü", "u"))
        refused(read, f"{name}.json: damaged", "backup", error=WsiFlError)
        path.write_text(json.dumps(bare))
        refused(read, f"{name}.json: damaged", "backup", error=WsiFlError)


def test_a_run_goes_on_with_the_pixels_that_it_began_with_alone(tmp_path):
    study = make_study(tmp_path / "study", n_sites=1)
    folder = SiteFolder(study.runs / "00001-proxyfl-small" / "sites" / "S0")

    def remember():
        with Patches(study, "S0") as data:
            folder.remember_store(data.digest(), data.facts())

    remember()
    write_store(study, "S0", seed=0)
    remember()
    write_store(study, "S0", seed=1)  # of the same columns
    refused(remember, "site S0: its store was made anew since this run began", "new run")


def test_a_changed_generator_is_found_by_check(tmp_path):
    study = make_study(tmp_path / "study", n_sites=1)
    folder = GeneratorFolder(study.generator("S0"))
    folder.save_generator("before", torch.nn.Linear(3, 3))
    assert check(study, site="S0")["ok"]
    flip(folder.generator_path("before"), -5)
    (line,) = check(study, site="S0")["sites"][0]["damaged"]
    assert (
        "before.safetensors" in line and "wsi-fl synthesize train --site S0 --generator gan --again" in line
    )


@pytest.fixture
def generator(tmp_path):
    """A study with a generator in training, checked all the same: its documents, a network and two checkpoints."""
    study = make_study(tmp_path / "study", n_sites=1)
    folder = GeneratorFolder(study.denoiser("S0"), "ddpm.json")
    folder.write_document({"site": "S0", "settings": {}, "store": {}, "phases": {}, "finished": False})
    folder.write_check({"passed": True, "reasons": [], "generator": {"sha256": "0"}, "criteria": 1})
    folder.save_generator("denoiser", torch.nn.Linear(3, 3))
    for iteration in (10, 20):
        save_tensors(folder.path / "state" / f"iteration_{iteration:07d}.safetensors", TENSORS, {})
    return study, folder


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("ddpm.json", ("wsi-fl synthesize train --site S0 --generator ddpm --again",)),
        ("check.json", ("wsi-fl synthesize check --site S0 --generator ddpm",)),
        ("denoiser.safetensors", ("generator", "wsi-fl synthesize train --site S0 --generator ddpm --again")),
        ("state/iteration_0000020.safetensors", ("checkpoint", "delete it, and training goes on")),
    ],
)
@pytest.mark.parametrize("garbage", [b"{", b"[]", b"\xff\xfe", None])
def test_check_reads_all_of_a_generator_and_advises_what_throws_nothing_away(generator, name, words, garbage):
    study, folder = generator
    assert check(study, site="S0")["ok"]
    path = folder.path / name
    path.write_bytes(garbage or path.read_bytes().replace(b"true", b"null").replace(b"S0", b"S1"))
    if garbage is None and path.suffix != ".json":
        flip(path, -5)
    (line,) = check(study, site="S0")["sites"][0]["damaged"]
    assert all(word in line for word in (name, *words)), line
    assert ("--again" in line) == ("--again" in words[-1])


# the command


def test_check_goes_on_after_damage_that_no_reader_foresaw(tmp_path, monkeypatch):
    study = make_study(tmp_path / "study", n_sites=2)

    def fails(store, slide):
        raise ZeroDivisionError(slide)

    monkeypatch.setattr(PatchStore, "verify", fails)
    found = check(study, site=None)["sites"]
    assert [len(row["damaged"]) for row in found] == [4, 4] and found[1]["damaged"][0].startswith(
        "S1: damaged"
    )


def test_check_tells_every_site_and_goes_on_after_damage(made, tmp_path, wsi_fl):
    study = Study(shutil.copytree(made.root, tmp_path / "study"))
    study.store("S0").write_bytes(b"no store")
    for name in ("S1_slide_0", "S1_slide_2"):
        (study.store("S1").parent / "slides" / f"{name}.h5").unlink()
    found = wsi_fl("check", "--all", "--json", cwd=study.root)
    assert found.returncode == 1
    document = json.loads(found.stdout)
    assert [len(row["damaged"]) for row in document["sites"]] == [1, 2] and not document["ok"]
    shown = wsi_fl("check", "--all", cwd=study.root)
    assert shown.returncode == 1 and "S1_slide_2" in shown.stderr


def test_check_without_stores_says_what_makes_them(tmp_path, wsi_fl):
    study = make_study(tmp_path / "study", n_sites=1)
    shutil.rmtree(study.store("S0").parent)
    found = wsi_fl("check", "--site", "S0", cwd=study.root)
    assert found.returncode == 1 and "wsi-fl tile --site S0" in found.stderr
    assert wsi_fl("check", cwd=study.root).returncode == 2


@pytest.mark.parametrize("shape", [{"chAnnel_base": 8}, {}, {"resolution": "x"}, None, [1]])
def test_a_generator_whose_document_says_no_shape_is_damage(tmp_path, shape):
    folder = GeneratorFolder(tmp_path / "C1")
    folder.save_generator("before", torch.nn.Linear(2, 2))
    settings = {"shape": shape} if shape is not None else {}
    folder.write_document({"site": "C1", "settings": settings, "store": {}, "phases": {}, "finished": True})

    def build(said):
        return Generator(GanShape(**said))

    with pytest.raises(WsiFlError, match=r"gan\.json: damaged shape .*--generator gan --again") as caught:
        folder.load_generator("before", build, torch.device("cpu"))
    assert "\n" not in str(caught.value)


def test_a_generators_document_knows_its_content(tmp_path):
    folder = GeneratorFolder(tmp_path / "C1")
    document = {"site": "C1", "settings": {"shape": {"ü": 0.1}}, "store": {}, "phases": {}, "finished": True}
    folder.write_document(document)
    assert folder.document() == document
    path, text = tmp_path / "C1" / "gan.json", (tmp_path / "C1" / "gan.json").read_text()
    for old, new in (('"finished": true', '"finished": false'), ("0.1", "0.2"), ('"store"', '"stores"')):
        path.write_text(text.replace(old, new))
        refused(folder.document, "gan.json: damaged", "--generator gan --again", error=WsiFlError)
    path.write_text("[]")
    refused(folder.document, "gan.json: damaged", error=WsiFlError)


def test_a_runs_answers_know_their_content(tmp_path):
    run = RunFolder(tmp_path / "00001-proxyfl-small")
    summary = {"run": "r", "method": "m", "seconds": 1.5, "sites": [], "lost": [], "communication": {}}
    evaluation = {"run": "r", "sites": [], "merged": {"accuracy": 0.75}}
    manifest = {"id": "a", "method": "m", "config_sha256": ""}
    run.write_manifest(manifest)
    run.write_summary(summary)
    run.write_evaluation(evaluation)
    assert (run.manifest, run.summary(), run.evaluation()) == (manifest, summary, evaluation)
    for name, old, new, read, advice in (
        ("manifest", '"method"', '"mEthod"', lambda: run.manifest, "start a new run"),
        ("summary", '"seconds"', '"sEconds"', run.summary, "train --resume 00001-proxyfl-small"),
        ("evaluation", "0.75", "0.95", run.evaluation, "evaluate 00001-proxyfl-small"),
    ):
        path = run.path / f"{name}.json"
        path.write_text(path.read_text().replace(old, new))
        refused(read, f"{name}.json: damaged", advice, error=WsiFlError)


def test_a_header_of_a_store_that_changed_is_refused_by_hdf5_itself(tmp_path):
    path = tmp_path / "one.h5"
    with hdf5.created(path, 100) as file:
        file["label"] = np.arange(3)
        file.attrs["site"] = "C1"
    whole = path.read_bytes()
    at = whole.index(b"site")
    path.write_bytes(whole[:at] + b"S" + whole[at + 1 :])
    with pytest.raises((OSError, KeyError, RuntimeError)), hdf5.opened(path) as file:
        dict(file.attrs)


@pytest.mark.parametrize("size", [0, 1 << 62, (1 << 64) - 16, (1 << 64) - 24])
def test_a_heap_that_hdf5_would_read_for_ever_is_refused(tmp_path, size):
    path = tmp_path / "one.h5"
    with hdf5.created(path, 100) as file:
        file.attrs["site"] = "C1"
    with hdf5.opened(path) as file:
        assert file.attrs["site"] == "C1"
    whole = path.read_bytes()
    free = (
        whole.index(b"GCOL") + 16 + 16 + 8 + 8
    )  # the heap's head, the text's head and its 8 bytes, to the free room
    path.write_bytes(whole[:free] + struct.pack("<Q", size) + whole[free + 8 :])
    with pytest.raises(OSError, match="heap of its text is damaged"):
        hdf5.opened(path)


def test_a_store_whose_main_file_is_gone_is_no_healthy_one(tiled):
    study = tiled("raw")
    study.store("C1").unlink()
    row = check(study, site="C1")["sites"][0]
    assert [line for line in row["damaged"] if "missing" in line and "`wsi-fl tile --site C1`" in line]


def test_columns_are_written_again_where_their_shards_are_not_those_of_then(tiled):
    study = tiled("raw")
    store, shards = study.store("C1"), sorted((study.store("C1").parent / "slides").glob("*.h5"))
    written = store.stat().st_mtime_ns
    tile(study, site="C1")
    assert store.stat().st_mtime_ns == written
    os.utime(shards[0])  # younger than the columns
    tile(study, site="C1")
    assert (again := store.stat().st_mtime_ns) > written
    with h5py.File(shards[0], "r+") as file:  # other pixels, whole in themselves, with the time of then
        file["pixels"][0, 0, 0] ^= 1
        file["crc32"][0] = zlib.crc32(file["pixels"][0].tobytes())
    os.utime(shards[0], ns=(written, written))
    refused(lambda: read_all(study), "other patches", error=WsiFlError)
    tile(study, site="C1")
    assert store.stat().st_mtime_ns > again
    read_all(study)
