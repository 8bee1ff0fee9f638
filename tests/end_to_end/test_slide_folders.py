"""Slides that are folders: every command takes the same folders as slides, under the folder's name."""

import shutil

import numpy as np
import pytest
from test_dicom import write_pyramid
from training_runs import trained

from wsi_fl.demo import simulated_slides
from wsi_fl.oneshot.build_projection import build_projection
from wsi_fl.stages.evaluation.predict import predict
from wsi_fl.stages.prepare.build_bags import make_features, make_mosaics
from wsi_fl.stages.prepare.check_stores import check_sites
from wsi_fl.stages.prepare.estimate_tiling import estimate_tiling
from wsi_fl.stages.prepare.init_study import init_study
from wsi_fl.stages.prepare.tile import tile_slides
from wsi_fl.stages.site.site_data import open_store
from wsi_fl.stores.bag_store import BagStore
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import Study

NAMES = ("1.2.840.113.1", "1.2.840.113.2", "case c")
"""As archives of DICOM call folders: the last dot begins no suffix."""

TRAINING = [
    "train.rounds=1",
    "train.input_px=24",
    "privacy.enabled=false",
    "model.private=gn_cnn_small",
    "evaluate.bootstrap=0",
]


@pytest.fixture(scope="module")
def archive(tmp_path_factory):
    """Three slides, a folder of DICOM files each."""
    root = tmp_path_factory.mktemp("folders") / "archive"
    plans = simulated_slides.plan_slides(1, 2, 512, 0)
    for k, name in enumerate(NAMES):
        picture = np.ascontiguousarray(simulated_slides.simulate_slide(plans[k])[:512, :512])
        write_pyramid(root / "slides" / name, picture=picture, series=f"1.2.3.8{k}")
    (root / "slides" / "notes").mkdir()
    (root / "slides" / "notes" / "read me.txt").write_text("no slide")
    rows = [f"{name},p{k},A,{'negative' if k else 'positive'}" for k, name in enumerate(NAMES)]
    (root / "slides.csv").write_text("\n".join(["slide,patient,site,label", *rows]) + "\n")
    return root


def settings(weights):
    given = {"size_px": 64, "mpp": 1.0, "encoder": "test_efficientnet", "weights": weights}
    return [
        *(f"mosaic.{key}={value}" for key, value in given.items()),
        "tile.size_px=64",
        "tile.mpp=1.0",
        "tile.balance=false",
        f"features.weights={weights}",
        "features.encoder=test_efficientnet",
        "slides.test_fraction=0",
    ]


def test_every_command_takes_a_folder_as_a_slide_of_its_name(archive, tiny_weights, tmp_path):
    init_study(tmp_path / "study", archive=archive)
    study, how = Study(tmp_path / "study"), settings(tiny_weights)
    (row,) = tile_slides(study, site="A", overrides=how)["sites"]
    assert row["slides"] == 3 and not row["failed"] and row["patches"] > 9
    assert estimate_tiling(study, site="A", overrides=how)["patches"] == row["patches"]
    with PatchStore(study.store_path("A")) as store:
        assert sorted(set(store.table.slide.tolist())) == sorted(NAMES)
    (bags,) = make_mosaics(study, site="A", overrides=how)["sites"]
    (deep,) = make_features(study, site="A", overrides=how)["sites"]
    assert not bags["failed"] and deep["slides"] == 3
    for path in (study.mosaic_path("A"), study.features_path("A")):
        with BagStore(path) as store:
            assert sorted(store.table.slide.tolist()) == sorted(NAMES)
    assert check_sites(study, site="A")["sites"][0]["damaged"] == []
    run = trained(study, "regular", *how, *TRAINING)["run"]
    slides = [archive / "slides" / name for name in NAMES]
    document = predict(study, run, site="A", slides=slides)
    assert [one["slide"] for one in document["slides"]] == list(NAMES) and not document["failed"]
    one_file = predict(study, run, site="A", slides=[slides[0] / "0.dcm"], out=tmp_path / "out")["slides"][0]
    assert one_file["slide"] == "0" and one_file["patches"] == document["slides"][0]["patches"]
    made = build_projection(study, slides, out=tmp_path / "projection.safetensors", n_dimensions=4, overrides=how)
    assert [one["name"] for one in made["sources"]] == list(NAMES) and not made["excluded"]


def test_pixels_that_stay_in_a_folder_are_read_from_it_also_after_a_move(archive, tmp_path):
    shutil.copytree(archive, tmp_path / "archive")
    init_study(tmp_path / "study", archive=tmp_path / "archive")
    study, how = Study(tmp_path / "study"), ["tile.size_px=64", "tile.mpp=1.0", "tile.balance=false"]
    tile_slides(study, site="A", overrides=how)
    raw = pixels_of(study)
    tile_slides(study, site="A", overrides=[*how, "store.pixels=none"])
    np.testing.assert_array_equal(pixels_of(study), raw)
    shutil.move(tmp_path / "archive" / "slides", tmp_path / "moved")
    site = tmp_path / "study" / "sites" / "A.toml"
    site.write_text(site.read_text().replace(str(tmp_path / "archive" / "slides"), str(tmp_path / "moved")))
    np.testing.assert_array_equal(pixels_of(study), raw)


def pixels_of(study):
    with open_store(study, "A") as store:
        return store.read(np.arange(len(store)))
