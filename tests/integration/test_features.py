"""Tests of patch features: agreement with timm, interruptions, and training on them."""

import shutil

import numpy as np
import pytest
import timm
import torch
from builders import compare_with_loop
from conftest import make_study, nightly, refused, write_features, write_store
from PIL import Image
from safetensors.torch import save_file
from test_mosaic import plain_features
from training_runs import csv_rows, trained

from wsi_fl.demo import simulated_slides
from wsi_fl.evidence.compare import compare_methods
from wsi_fl.models import IMAGE_BUILDERS, VECTOR_BUILDERS, create_model
from wsi_fl.models.encoder import build_preset_model
from wsi_fl.models.golden import cut_patches, project_features
from wsi_fl.models.presets import PRESETS
from wsi_fl.oneshot.build_projection import ExpectedStatistics, build_projection, render_projection_lines
from wsi_fl.oneshot.projection import read_projection
from wsi_fl.privacy.gradients import ENGINES
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.evaluation.predict import predict
from wsi_fl.stages.evaluation.write_report import write_report
from wsi_fl.stages.prepare.build_bags import make_features
from wsi_fl.stages.prepare.import_patches import import_patches
from wsi_fl.stages.prepare.init_study import init_study
from wsi_fl.stages.prepare.tile import tile_slides
from wsi_fl.stages.site.encoders import load_encoder
from wsi_fl.stages.site.site_data import open_data
from wsi_fl.stages.training.run_cost import dry_run
from wsi_fl.stages.training.train import resume_run
from wsi_fl.stores.bag_store import BagStore
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.study.slide_settings import MosaicSettings
from wsi_fl.types import Bags, Images, Vectors, WsiFlError, golden_distance

ROUGH = 1e-3 if torch.cuda.is_available() else 0.0
"""How far features are off where matrix products have half the bits."""
HEADS = ["train.data=features", "model.private=mlp_head", "model.proxy=linear_head", "train.rounds=2"]


@pytest.fixture(scope="session")
def settings(tiny_weights):
    return ["features.encoder=test_efficientnet", f"features.weights={tiny_weights}"]


@pytest.fixture(scope="session")
def made(tmp_path_factory, settings):
    """Two sites with features of 32-px patches."""
    study = make_study(tmp_path_factory.mktemp("features") / "study", n_sites=2, size_px=32)
    make_features(study, site=None, overrides=settings)
    return study


@pytest.fixture
def study(made, tmp_path):
    return Study(shutil.copytree(made.root, tmp_path / "study"))


def test_licence_and_memory_of_a_preset_are_reported(made, tmp_path):
    said, file = [], tmp_path / "weights.safetensors"
    state = build_preset_model(PRESETS["kaiko-vits16"]).state_dict()
    save_file({name: torch.zeros(one.shape) for name, one in state.items()}, file)
    pipeline = Pipeline(mosaic=MosaicSettings(encoder="kaiko-vits16", weights=str(file)))
    load_encoder(made, pipeline, "mosaic", 1, said.append)
    assert any("licence Kaiko non-commercial" in line and "1.2 GiB of memory" in line for line in said), said


@pytest.mark.parametrize("section", ["features", "mosaic"])
def test_an_encoder_without_weights_is_refused_with_the_key_to_set(made, section):
    no_weights = Pipeline(mosaic=MosaicSettings(encoder="test_efficientnet"))
    wanted = f"{section}.weights = 'FILE.safetensors'"
    refused(lambda: load_encoder(made, no_weights, section, 1), wanted, error=WsiFlError)


@pytest.mark.end_to_end
def test_a_public_projection_is_fitted_on_slides_or_stores_and_is_reproducible(study, settings, tmp_path):
    public = tmp_path / "public"
    public.mkdir()
    for slide in simulated_slides.plan_slides(1, 2, 640, seed=9):
        simulated_slides.write_pyramid(public / f"{slide.name}.tif", simulated_slides.simulate_slide(slide), 0.5)
    shutil.copy(study.features_path("S1"), tmp_path / "store.h5")
    both = public, tmp_path / "store.h5"

    def of(*sources, name="x", **more):
        sets = [*settings, "tile.size_px=64", "tile.mpp=1.0"]
        return build_projection(study, sources, out=tmp_path / name, overrides=sets, **{"n_dimensions": 8, **more})

    made = of(*both, name="d.safetensors")
    assert made["dimensions"] == 8 and len(made["sources"]) == 5 and not made["excluded"]
    assert "test_efficientnet sha256:" in made["encoder"]
    for name in ("README.md", "labels.csv"):
        (public / name).write_text("slide,patient\na,b\n")
    Image.new("RGB", (64, 64), "white").save(public / "thumbnail.png")
    again = of(*both, name="e.safetensors")
    assert again["digest"] == made["digest"]
    assert (
        of(*both, name="f.safetensors", n_dimensions=None, statistics=ExpectedStatistics(10**6, 4, 1.0))["dimensions"]
        > 32
    )
    assert again["excluded"] == ["README.md", "labels.csv", "thumbnail.png"]
    (said,) = (line.text for line in render_projection_lines(again) if "were skipped" in line.text)
    assert "3 other files were skipped: README.md, labels.csv, thumbnail.png" in said
    read = read_projection(tmp_path / "d.safetensors", "d")
    assert read.digest == made["digest"] and read.components.shape == (256, 8)
    lost = [settings[0], "features.weights=lost.safetensors", "tile.size_px=64", "tile.mpp=1.0"]
    refused(lambda: build_projection(study, [public], out=tmp_path / "x", overrides=lost), "lost.safetensors")
    for slide in public.glob("*.tif"):
        slide.unlink()
    write_features(study, "S0", np.ones((9, 5)), np.arange(9) % 2, ["p"] * 9, ["train"] * 9)
    for source, *words in (
        (public, "no slide", "README.md"),
        (public / "README.md", "README.md"),
        (tmp_path / "none", "none"),
        (study.features_path("S0"), "features of tiny sha256:0"),
    ):
        refused(lambda source=source: of(source), *words, error=WsiFlError)
    assert not (tmp_path / "x").exists()


def test_features_are_those_of_timm_in_the_rows_of_the_patch_store(made, tiny_weights):
    with BagStore(made.features_path("S0")) as store, PatchStore(made.store_path("S0")) as patches:
        assert len(store.patch_table) == len(patches) and store.n_features == 256
        for name in ("xy_l0", "label", "slide", "patient", "split", "tumor_fraction"):
            ours, theirs = getattr(store.patch_table, name), getattr(patches.table, name)
            assert np.array_equal(ours, theirs, equal_nan=name[0] == "t")
        rows = np.arange(len(patches))
        expected = plain_features("test_efficientnet", tiny_weights, patches.read(rows))
        np.testing.assert_allclose(store.read(rows), expected, atol=ROUGH or 1e-4)
        mixed = np.array([5, 0, 40, 5])
        assert np.array_equal(store.read(mixed), store.read(rows)[mixed])
        assert "test_efficientnet sha256:" in store.meta.encoder


def test_a_store_of_features_has_the_vectors_of_the_golden_patches(made, tiny_weights):
    pipeline = made.load_pipeline("small", HEADS)
    with BagStore(made.features_path("S0")) as store, open_data(made, "S0", pipeline) as data:
        patches = cut_patches(store.meta.spec)
        features = plain_features("test_efficientnet", tiny_weights, patches)
        assert len(patches) == 32 and golden_distance(store.meta.golden, project_features(features)) < 1e-3
        assert data.describe_inputs()["golden"] == list(store.meta.golden)
        assert "golden" not in data.describe_store()


def test_a_second_run_writes_nothing_and_changes_are_noticed(study, settings, tmp_path, capsys):
    before = study.features_path("S0").read_bytes()
    assert [row["made"] for row in make_features(study, site=None, overrides=settings)["sites"]] == [0, 0]
    assert study.features_path("S0").read_bytes() == before
    write_store(study, "S0", n_per_slide=14, size_px=32)
    assert make_features(study, site="S0", overrides=settings)["sites"][0]["made"] == 4
    assert capsys.readouterr().err.count("made again") == 4


@pytest.mark.parametrize("name", VECTOR_BUILDERS)
@pytest.mark.parametrize("mode", ENGINES)
def test_per_example_gradients_of_heads_are_those_of_a_loop(name, mode):
    x = torch.randn(5, 10, generator=torch.Generator().manual_seed(1))
    compare_with_loop(ENGINES[mode], create_model(name, n_classes=3, shape=Vectors(10), seed=0), x, torch.arange(5) % 3)


@pytest.mark.parametrize("method", [*nightly("fedavg"), "proxyfl"])
def test_methods_train_on_features(study, method):
    overrides = [*HEADS, "train.val_fraction=0.3"]
    summary = trained(study, method, *overrides)
    assert [row["rounds"] for row in summary["sites"]] == [2] * 2
    found = evaluate(study, summary["run"])
    assert found["examples"] == "patches" and found["merged"]["accuracy"]["mean"] is not None
    assert found["sites"][0]["slides"]["n"] == 2
    assert write_report(study, summary["run"]).exists()


def test_models_for_other_inputs_are_refused_in_one_line(study):
    refused(lambda: create_model("cnn1", n_classes=2, shape=Vectors(4), seed=0), "linear_head, mlp_head")
    refused(lambda: create_model("linear_head", n_classes=2, shape=Bags(4), seed=0), "does not take bags")
    refused(lambda: create_model("linear_head", n_classes=2, shape=Images(3, 8), seed=0), "train.data = 'features'")
    assert not set(VECTOR_BUILDERS) & set(IMAGE_BUILDERS)
    wrong = ["train.data=features"]
    refused(lambda: trained(study, "regular", *wrong), "linear_head")
    study.features_path("S1").unlink()
    words = "run `wsi-fl features --site S1`"
    refused(lambda: trained(study, "regular", *HEADS), words, error=WsiFlError)


@pytest.mark.parametrize("pixels", ["native", *nightly("none")])
def test_slides_behind_any_kind_of_store_are_encoded_and_predicted(pixels, settings, tiny_weights, tmp_path):
    archive = simulated_slides.simulate_archive(tmp_path / "archive", n_sites=1, patients_per_site=2, size_px=512)
    init_study(tmp_path / "study", archive=archive)
    study = Study(tmp_path / "study")
    cut = [f"store.pixels={pixels}", "tile.size_px=64", "tile.mpp=1.0", "tile.min_tissue=0.1"]
    tile_slides(study, site="C1", overrides=cut)
    (row,) = make_features(study, site="C1", overrides=settings)["sites"]
    with BagStore(study.root / row["store"]) as store, PatchStore(study.store_path("C1")) as patches:
        assert len(store.patch_table) == row["patches"] == len(patches) > 0
        assert store.meta.spec == patches.meta.spec and store.meta.recipe == {"min_tissue": 0.1}
    of_pixels = "train.input_px=24"  # and not of features
    run = trained(study, "regular", *settings, *HEADS, "privacy.enabled=false", of_pixels)["run"]
    evaluate(study, run)
    tested = csv_rows(study.root / run / "sites/C1/predictions.csv")
    slide = next(path for path in archive.rglob("*.tif") if path.stem == tested[0]["slide"])
    (known,) = predict(study, run, site="C1", slides=[slide])["slides"]
    assert all((study.root / known[name]).exists() for name in ("heatmap", "geojson", "csv"))
    said = {(p["x_l0"], p["y_l0"]): float(p["p_tumor"]) for p in csv_rows(study.root / known["csv"])}
    for p in (p for p in tested if p["slide"] == slide.stem):
        assert said[p["x_l0"], p["y_l0"]] == pytest.approx(float(p["p_tumor"]), abs=ROUGH or 1e-5)
    other = tmp_path / "other.safetensors"
    torch.manual_seed(1)
    save_file(timm.create_model("test_efficientnet", num_classes=7).state_dict(), other)
    config = study.root / run / "config.toml"
    config.write_text(config.read_text().replace(str(tiny_weights), str(other)))
    words = "was trained on features of"
    refused(lambda: predict(study, run, site="C1", slides=[slide]), words, error=WsiFlError)
    there = [f"features.weights={tiny_weights}"]
    assert predict(study, run, site="C1", slides=[slide], overrides=there)["slides"]


def test_features_of_a_site_tiled_again_are_refused_by_new_runs_only(study):
    run = study.root / trained(study, "proxyfl", *HEADS)["run"]
    write_store(study, "S1", n_per_slide=14, size_px=32)
    refused(lambda: trained(study, "proxyfl", *HEADS), "tiled again; run `wsi-fl features --site S1`")
    assert [path.name for path in study.runs_path.glob("0*")] == [run.name]
    (run / "summary.json").unlink()
    resume_run(study, run.name, backend="local")
    evaluate(study, run.name)
    assert "the features of S1 are of patches before" in compare_methods(study, [run.name])["notes"][0]


def test_features_of_imported_images_are_computed_anew_only_for_other_images(tmp_path, settings):
    study, file = make_study(tmp_path / "study", n_sites=1), tmp_path / "images.npz"
    x = np.random.default_rng(0).integers(0, 256, (10, 32, 32, 3)).astype(np.uint8)

    def encode(images):
        np.savez(file, x=images, y=np.arange(10) % 2)
        import_patches(study, file, site="S0", pipeline_name=None, overrides=[])
        (row,) = make_features(study, site="S0", overrides=settings)["sites"]
        with BagStore(study.features_path("S0")) as store:
            return row["made"], np.concatenate([store.read_bag(k).features for k in range(len(store))])

    made, features = encode(x)
    made_of_others, others = encode(255 - x)
    assert (made, made_of_others) == (2, 2) and not np.isclose(features, others).all(1).any()
    assert encode(255 - x)[0] == 0


@pytest.mark.parametrize("method", ["proxyfl", "oneshot"])
def test_a_patient_is_one_row_and_one_privacy_unit(method, tmp_path):
    study, rng, n = make_study(tmp_path / "study", n_sites=2), np.random.default_rng(0), 18
    patients = np.repeat([f"p{k}" for k in range(n)], 5)
    slides = [f"{name}-{k > 2}" for name in dict.fromkeys(patients) for k in range(5)]  # of 3 and 2 patches
    labels = np.repeat(np.arange(n) % 2, 5)
    splits = np.where(np.repeat(np.arange(n), 5) < 12, "train", "test")
    for site in study.site_names():
        x = rng.normal(size=(5 * n, 6)) + np.outer(6 * labels - 3, np.arange(6) < 3)
        write_features(study, site, x, labels, patients, splits, slides)
    rows = ["train.data=features", "train.example=patient", "model.private=linear_head", "privacy.sigma=1"]
    overrides = [*rows, "model.proxy=linear_head", "train.rounds=3", "train.lr=0.05"]
    with open_data(study, "S1", study.load_pipeline("small", overrides)) as data:
        train_rows = data.load_examples("train")
        assert train_rows.patient.tolist() == train_rows.slide.tolist() == [f"p{k}" for k in range(12)]
        means = x.astype(np.float32).reshape(n, 5, 6).mean(axis=1)
        np.testing.assert_allclose(train_rows.read(np.arange(12)), means[:12], atol=1e-6)
        assert train_rows.label.tolist() == [0, 1] * 6
    planned = dry_run(study, method=method, overrides=overrides)["sites"]
    summary = trained(study, method, *overrides)
    for row, before in zip(summary["sites"], planned, strict=True):
        assert (row["unit"], row["n_units"]) == ("patient", 12)
        assert row["epsilon"] == before["epsilon"] > 0
    found = evaluate(study, summary["run"])
    assert found["examples"] == "patients"
    assert method == "proxyfl" or found["internal"]["accuracy"]["mean"] > 0.9
    rows = csv_rows(study.root / summary["run"] / "sites/S1/predictions.csv")
    told = [row for row in rows if row["part"] == "S1"]
    names = {f"p{k}" for k in range(12, n)}
    assert {row["patient"] for row in told} == {row["slide"] for row in told} == names
    refused(lambda: dry_run(study, method=method, overrides=["train.example=patient"]), "is for features")


def test_patients_of_a_single_class_are_reported(pair, capsys):
    patients = np.repeat([f"p{k}" for k in range(12)], 2)
    slides = [f"{name}-{k % 2}" for k, name in enumerate(patients)]  # one with, one without
    for site in pair.site_names():
        x = np.random.default_rng(0).normal(size=(24, 6))
        write_features(pair, site, x, np.arange(24) % 2, patients, ["train"] * 24, slides)
    for example, head in (("patient", "linear_head"), ("slide", "mean_head")):
        heads = [f"model.private={head}", f"model.proxy={head}", "privacy.sigma=1", "train.data=features"]
        dry_run(pair, method="fedavg", overrides=[*heads, f"train.example={example}"])
        told = "each of 12 patients has some tumor, so all are labelled tumor"
        assert (told in capsys.readouterr().err) is (example == "patient")
