"""Tests that duplicate slides, features and images are reported, within a site and between sites."""

import csv

import h5py
import numpy as np
import pytest
import tifffile
from conftest import make_study

from wsi_fl.slides.patching.scan_copies import describe_copies
from wsi_fl.stages.prepare.check_stores import check_sites, render_check_lines
from wsi_fl.stages.prepare.import_export import import_features
from wsi_fl.stages.prepare.init_study import init_study
from wsi_fl.stages.prepare.partition import partition_images
from wsi_fl.stages.prepare.tile import tile_slides
from wsi_fl.stages.runtime.console import TextLine
from wsi_fl.stages.site.run_context import RunContext
from wsi_fl.stages.site.site_data import open_store
from wsi_fl.stages.training.train import train
from wsi_fl.stores.bag_store import Bag, BagMeta, write_bags
from wsi_fl.study.folder import Study
from wsi_fl.types import BagTable, GridSpec

SETTINGS = ["tile.size_px=64", "tile.mpp=1.0", "tile.balance=false"]
FEATURES = """
[subtypes]
any = ["a", "b"]
[train]
data = "mosaics"
"""


def slide(path, seed):
    grain = np.random.default_rng(seed).normal(0, 25, (256, 256, 1))
    pixels = np.clip(np.array([200, 130, 180]) + grain, 0, 255).astype(np.uint8)
    tag = {"resolution": (10_000, 10_000), "resolutionunit": "CENTIMETER", "metadata": None}
    tifffile.imwrite(path, pixels, tile=(128, 128), photometric="rgb", compression="jpeg", **tag)


def write_archive(root, rows):
    """Write an archive of slides, name → (patient, site, seed, split), with a table."""
    (root / "slides").mkdir(parents=True)
    table = ["slide,patient,site,label,split"]
    for name, (patient, site, seed, split) in rows.items():
        slide(root / "slides" / f"{name}.tif", seed)
        table.append(f"{name}.tif,{patient},{site},negative,{split}")
    (root / "slides.csv").write_text("\n".join(table) + "\n")
    return root


def make_archive_study(archive):
    document = init_study(archive / "study", archive=archive)
    return Study(archive / "study"), document


def read_splits(study, site):
    with open_store(study, site) as store:
        return dict(zip(store.table.patient.tolist(), store.table.split.tolist(), strict=True))


def test_a_scan_of_several_patients_is_in_one_split_and_reported_by_init_tile_and_check(tmp_path):
    rows = {f"s{k}": (f"p{k}", "A", 70 if k < 4 else k, "") for k in range(8)}
    study, document = make_archive_study(write_archive(tmp_path, rows))
    named = [f"s{k} (patient p{k})" for k in range(4)]
    assert all(name in document["notes"][0] for name in named)
    made = tile_slides(study, site="A", overrides=[*SETTINGS, "slides.test_fraction=0.5"])
    (line,) = made["sites"][0]["copies"]
    assert all(name in line for name in named) and "s4" not in line and "counts 4" in line
    splits = read_splits(study, "A")
    assert len({splits[f"p{k}"] for k in range(4)}) == 1 and set(splits.values()) == {"train", "test"}
    checked = check_sites(study, site="A")
    assert checked["sites"][0]["copies"] == [line] and checked["ok"]


def test_a_split_that_a_table_prescribes_leaks_no_scan_into_the_test(tmp_path):
    rows = {"a": ("p", "A", 1, "test"), "b": ("q", "A", 1, "train"), "c": ("r", "A", 2, "test")}
    study, _ = make_archive_study(write_archive(tmp_path, rows))
    row = tile_slides(study, site="A", overrides=SETTINGS)["sites"][0]
    (aside,) = row["failed"]
    assert aside["slide"] == "a" and "same scan as b of patient q, which is in train" in aside["reason"]
    assert read_splits(study, "A") == {"q": "train", "r": "test"}


def test_a_scan_at_two_sites_is_reported_by_init_tile_and_check(tmp_path):
    rows = {f"{site}{k}": (f"p{site}{k}", site, k, "") for site in "AB" for k in range(2)}
    study, document = make_archive_study(write_archive(tmp_path, rows))
    assert sum("site A" in note and "site B" in note for note in document["notes"]) == 2
    made = tile_slides(study, site=None, overrides=SETTINGS)
    assert made["sites"][0]["copies"] == [] and len(made["copies"]) == 2
    assert "A0 (site A, patient pA0) and B0 (site B, patient pB0) are one scan" in made["copies"][0]
    assert check_sites(study, site=None)["copies"] == made["copies"]


def features_study(root, *sites):
    (root / "pipelines").mkdir(parents=True)
    (root / "sites").mkdir()
    (root / "pipelines" / "of.toml").write_text(FEATURES)
    for site in sites:
        (root / "sites" / f"{site}.toml").write_text(f'name = "{site}"\nreal = false\n')
    return Study(root)


def bring(study, site, folder, bags, splits=None):
    """Import the bags, name → (patient, features), as TRIDENT writes them."""
    folder.mkdir()
    lines = [("slide", "patient", "label", "split")]
    for number, (name, (patient, x)) in enumerate(bags.items()):
        with h5py.File(folder / f"{name}.h5", "w") as file:
            file["features"], file["coords"] = x, np.arange(2 * len(x)).reshape(-1, 2) * 512
            file["features"].attrs["encoder"] = "ours"
            file["coords"].attrs.update(
                patch_size=256, patch_size_level0=512, level0_magnification=40, target_magnification=20, overlap=0
            )
        lines.append((name, patient, "ab"[number % 2], (splits or {}).get(name, "")))
    with (folder.parent / f"{folder.name}.csv").open("w", newline="") as file:
        csv.writer(file).writerows(lines)
    table = folder.parent / f"{folder.name}.csv"
    return import_features(study, site=site, form="trident", source=folder, labels=table)["sites"][0]


def draw_features(seed, n=5):
    return np.random.default_rng(seed).normal(size=(n, 6)).astype(np.float32)


@pytest.mark.parametrize("n", [1, 5])
def test_duplicate_features_are_reported_by_import_check_and_train(tmp_path, n, wsi_fl):
    study = features_study(tmp_path / "study", "A")
    bags = {f"s{k}": (f"p{k}", draw_features(k, n)) for k in range(8)}
    bags["again"] = ("other", draw_features(2, n)[::-1])  # patch for patch, in another order
    row = bring(study, "A", tmp_path / "bags", bags)
    (line,) = row["copies"]
    assert "again (patient other)" in line and "s2 (patient p2)" in line and "counts 2" in line
    (found,) = check_sites(study, site="A")["sites"][0]["copies"]
    assert "again (patient other)" in found and "s2 (patient p2)" in found
    asked = ("train", "--dry-run", "--method", "oneshot", "--set", "privacy.enabled=false")
    ended = wsi_fl(*asked, "--set", "model.private=mean_head", "--set", "model.proxy=mean_head", cwd=study.root)
    assert "s2 (patient p2)" in ended.stderr and "are one scan" in ended.stderr
    assert not study.runs_path.exists()


def test_features_that_a_table_puts_into_two_splits_are_only_trained_on(tmp_path):
    study = features_study(tmp_path / "study", "A")
    bags = {
        "a": ("p", draw_features(0)),
        "b": ("q", draw_features(0)),
        "c": ("r", draw_features(1)),
        "d": ("s", draw_features(2)),
    }
    row = bring(study, "A", tmp_path / "bags", bags, {"a": "train", "b": "test", "c": "train", "d": "test"})
    (aside,) = row["failed"]
    assert aside["slide"] == "b" and "same scan as a of patient p" in aside["reason"] and row["bags"] == 3


def test_duplicate_images_are_reported_and_never_drawn_for_testing(tmp_path):
    study = make_study(tmp_path / "study", n_sites=0)
    x = np.random.default_rng(0).integers(0, 256, (40, 8, 8, 3)).astype(np.uint8)
    x[20:] = x[:20]
    np.savez(tmp_path / "twice.npz", x=x, y=np.arange(40) % 2)
    made = partition_images(study, tmp_path / "twice.npz", n_sites=2, test_fraction=0.3)
    n_test = sum(row["test"] for row in made["sites"])
    assert 0 < n_test < 12, "copies of training images have gone back"
    assert any("training images are copies of others" in line for line in made["copies"])
    assert not any("test images" in line for line in made["copies"])
    np.savez(tmp_path / "own.npz", x_train=x[:20], y_train=np.arange(20) % 2, x_test=x[15:25], y_test=np.arange(10) % 2)
    own = partition_images(study, tmp_path / "own.npz", n_sites=1, prefix="T")
    assert own["copies"] == ["10 test images are in training too, so scores are too good"]
    np.savez(tmp_path / "once.npz", x=x[:20], y=np.arange(20) % 2)
    assert partition_images(study, tmp_path / "once.npz", n_sites=1, prefix="U")["copies"] == []


def test_a_store_of_an_older_version_with_a_leaking_test_set_is_reported(tmp_path):
    study = features_study(tmp_path / "study", "A")
    names = np.array(["a", "b", "c"])
    table = BagTable(
        np.array([0, 1, 0]), np.full(3, ""), names, np.array(["p", "q", "r"]), np.array(["train", "test", "train"])
    )
    meta = BagMeta("A", ("a", "b"), "ours", GridSpec(256, 0.5, 256), "import", {"any": ("a", "b")})
    bags = [Bag(draw_features(seed), np.arange(10).reshape(5, 2)) for seed in (0, 0, 1)]
    write_bags(study.mosaic_path("A"), meta, table, bags)
    checked = check_sites(study, site="A")
    (line,) = checked["sites"][0]["copies"]
    assert "a (patient p) and b (patient q)" in line and "in test and in train, so scores are too good" in line
    assert "(patient p) and b" in "".join(one.text for one in render_check_lines(checked) if isinstance(one, TextLine))


def test_patients_who_share_a_scan_are_reported_by_the_folds_that_they_are_in(tmp_path):
    study, lines = features_study(tmp_path / "study", "A"), set()
    bring(study, "A", tmp_path / "a", {f"s{k}": (f"p{k}", draw_features(k % 7)) for k in range(8)})
    for seed in range(6):
        sets = ["train.folds=2", "train.fold=1", f"train.seed={seed}"]
        with RunContext.create(study, study.load_pipeline(study.pipeline_name(None), sets), "proxyfl") as context:
            data = context.open_data("A")
            (line,) = describe_copies(context.list_scans(data))
            test_patients = set(data.cohort.patient[data.cohort.obs["split"] == "test"].tolist())
        leaks = len(test_patients & {"p0", "p7"}) == 1
        own_fold = f"all are in fold {1 if 'p0' in test_patients else 2}"
        assert ("it is in fold 1 and in fold 2, so scores are too good" if leaks else own_fold) in line
        lines.add(leaks)
    assert lines == {True, False}


@pytest.mark.usefixtures("lone_exchange")
def test_duplicates_of_a_real_hospital_are_reported_in_its_local_log_only(tmp_path):
    study = features_study(tmp_path / "study", "A")
    bags = {f"s{k}": (f"p{k}", draw_features(k)) for k in range(8)} | {"again": ("other", draw_features(2))}
    bring(study, "A", tmp_path / "a", bags)
    (study.root / "sites" / "A.toml").write_text('name = "A"\nreal = true\nmax_epsilon = 9.0\ndelta = 1e-3\n')
    heads = [f"model.{role}=mean_head" for role in ("private", "proxy")]
    made = train(study, method="oneshot", overrides=[*heads, "train.local_baseline=false"], backend="local")
    run = study.root / made["run"]
    log = (run / "sites" / "A" / "log.txt").read_text()
    assert "again (patient other)" in log and "are one scan" in log
    shared = [path for path in run.rglob("*") if path.is_file() and path.parent.name != "A"]
    assert shared and not any(b"patient other" in path.read_bytes() for path in shared)
