"""Method mpcpa as a whole: denoisers travel once, classifiers learn from own and generated images, 9 transfers."""

import json
from shutil import copytree

import numpy as np
import pytest
import torch
from conftest import SHARED, check, patches_of, refused, train_generator
from safetensors.numpy import load_file

from wsi_fl.stages.answers.evaluate import evaluate
from wsi_fl.stages.answers.report import report
from wsi_fl.stages.prepare.partition import partition
from wsi_fl.stages.training.train import resume, train
from wsi_fl.stages.work.console import Silent
from wsi_fl.stores.images import read_data_set
from wsi_fl.stores.patches import PatchStore
from wsi_fl.study.folder import Study
from wsi_fl.synthesis.stages.baselines import baselines
from wsi_fl.synthesis.stages.mpcpa import _ready
from wsi_fl.system.files import read_json, read_lines
from wsi_fl.types import WsiFlError

PIPELINE = """
[synthesis]
generator = "ddpm"
[ddpm]
resolution = 8
channels = [8, 16]
chain = 20
steps = 6
batch_size = 4
checkpoint_every = 3
sampling_steps = 3
samples_per_class = 5
[train]
rounds = 2
batch_size = 8
augment = "none"
[model]
private = "cnn1"
[privacy]
enabled = false
[evaluate]
bootstrap = 20
"""


def make_study(root, *, n_sites=3, n=180):
    for name in ("pipelines", "sites"):
        (root / name).mkdir(parents=True)
    (root / "pipelines" / "mpcpa_tiny.toml").write_text(PIPELINE)
    rng = np.random.default_rng(0)
    y = np.arange(n) % 2
    np.savez(root / "data.npz", x=patches_of(rng, y, 16, (0, 0, 0)), y=y)
    study = Study(root)
    partition(study, root / "data.npz", n_sites=n_sites, test_fraction=0.4)
    return study


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    study = make_study(tmp_path_factory.mktemp("mpcpa") / "study")
    return study, train(study, method="mpcpa", backend="local")


def folder(study, summary):
    return study.root / summary["run"]


def test_nine_transfers_for_three_sites_and_each_is_written_down(trained):
    study, summary = trained
    assert summary["communication"]["messages"] == 3 * 3
    lines = [
        line for k in (1, 2, 3) for line in read_lines(folder(study, summary) / f"sites/S{k}/transfers.jsonl")
    ]
    assert sorted({(line["what"], line["from"], line["to"]) for line in lines}) == sorted(
        [(what, f"S{k}", "server") for what in ("denoiser", "model") for k in (1, 2, 3)]
        + [("package", "server", f"S{k}") for k in (1, 2, 3)]
    )
    sizes = {line["what"]: line["bytes"] for line in lines}
    header = sizes["package"] - 2 * (sizes["package"] - sizes["denoiser"])
    assert sizes["package"] - header == 2 * (sizes["denoiser"] - header)


def test_classifiers_learn_from_own_and_the_others_images(trained):
    study, summary = trained
    for row in summary["sites"]:
        package = read_json(folder(study, summary) / f"sites/{row['site']}/package.json")["images"]
        assert sorted(package) == sorted({"S1", "S2", "S3"} - {row["site"]})
        assert row["n_train"] == 36 + 2 * 2 * 5
        for key in package.values():
            with PatchStore(study.generated(key)) as store:
                assert np.bincount(store.table.label).tolist() == [5, 5]
                assert store.meta.generator is not None


def test_releases_are_on_record_without_privacy_and_the_server_has_every_classifier(trained):
    study, summary = trained
    for row in summary["sites"]:
        assert row["epsilon"] is None and row["guarantee"] == "none"
        lines = read_lines(study.ledger(row["site"]))
        released = [line["released"].split()[0] for line in lines if line.get("released")]
        assert released == ["generator", "model"]
        held = load_file(folder(study, summary) / f"aggregate/{row['site']}.safetensors")["parameters"]
        own = load_file(folder(study, summary) / f"sites/{row['site']}/private.safetensors")
        assert held.size == sum(value.size for value in own.values()) and set(own["0.bias"]) <= set(held)
    claim = ["privacy.enabled=true"]
    refused(lambda: train(study, method="mpcpa", backend="local", overrides=claim), "privacy.enabled=false")


def test_an_external_set_is_measured_with_every_row_of_it(trained, tmp_path):
    study = Study(copytree(trained[0].root, tmp_path / "study"))
    rng = np.random.default_rng(5)
    y = np.arange(30) % 2
    np.savez(study.root / "other.npz", x=patches_of(rng, y, 16, (9, 0, 0)), y=y)
    partition(study, study.root / "other.npz", n_sites=1, prefix="X")
    settings = ['sites=["S1", "S2", "S3"]', 'evaluate.external=["X1"]']
    summary = train(study, method="regular", backend="local", overrides=settings)
    found = evaluate(study, summary["run"])["external_set"]
    assert found["n"] == 30
    assert [row["site"] for row in found["rows"]] == ["S1", "S2", "S3"]
    assert found["aggregated"]["relative"]["n"] == 30
    again = train(study, method="regular", backend="local", overrides=[*settings, 'evaluate.external=["S1"]'])
    refused(lambda: evaluate(study, again["run"]), "S1 took part")


def test_a_finished_run_and_a_lost_package_are_resumed(trained, tmp_path):
    study, summary = trained
    copy = Study(copytree(study.root, tmp_path / "study"))
    run = folder(copy, summary)
    (run / "summary.json").unlink()
    before = read_lines(copy.ledger("S1"))
    again = resume(copy, summary["run"], backend="local")
    assert again["communication"]["messages"] == 9
    after = read_lines(copy.ledger("S1"))  # nothing new left, and what was sent again is on record
    assert after[: len(before)] == before and all(line.get("again") for line in after[len(before) :])
    own = [load_file(folder(s, summary) / "sites/S2/private.safetensors") for s in (study, copy)]
    assert all(np.array_equal(own[0][name], own[1][name]) for name in own[0])


@pytest.mark.parametrize("missing", ["generator", "model"])
def test_a_real_site_must_allow_both_by_name(trained, tmp_path, missing):
    study = Study(copytree(trained[0].root, tmp_path / "study"))
    allowed = [what for what in ("generator", "model", "patches") if what != missing]
    (study.root / "sites" / "S2.toml").write_text(
        f'name = "S2"\nreal = true\nallow = {json.dumps(allowed)}\n'
    )
    refused(lambda: train(study, method="mpcpa", backend="local"), "sites/S2.toml", f"a {missing} without")


def test_the_ledger_itself_refuses_a_generator(trained, tmp_path, monkeypatch):
    """Were the plan's check forgotten, nothing would leave all the same."""
    study = Study(copytree(trained[0].root, tmp_path / "study"))
    (study.root / "sites" / "S2.toml").write_text('name = "S2"\nreal = true\nallow = ["patches", "model"]\n')
    monkeypatch.setattr("wsi_fl.stages.training.checks._check_leave", lambda *_: None)
    refused(
        lambda: train(study, method="mpcpa", backend="local"),
        "sites/S2.toml",
        "generator without differential privacy",
        error=WsiFlError,
    )


def test_a_memorising_denoiser_is_caught_and_stays_at_home(trained, tmp_path, monkeypatch):
    """Planted: what it draws are its training images, all but invisibly changed."""
    study = Study(copytree(trained[0].root, tmp_path / "study"))

    def planted(denoiser, labels, sampling, *, seed, told=None):
        with PatchStore(study.store("S1")) as store:
            rows = np.flatnonzero(store.table.split == "train")[: len(labels)]
            pixels = store.read(rows).reshape(len(rows), 8, 2, 8, 2, 3).mean((2, 4)).round().astype(int)
        noisy = pixels + np.random.default_rng(seed).integers(-2, 3, pixels.shape)
        yield torch.from_numpy(noisy.clip(0, 255).astype(np.uint8).transpose(0, 3, 1, 2).copy())

    monkeypatch.setattr("wsi_fl.synthesis.stages.ddpm.drawn", planted)
    document = check(study, site="S1", overrides=["ddpm.seed=0", "ddpm.samples_per_class=6"])
    assert not document["passed"]
    assert document["memorization"]["copies"] == 12
    assert document["memorization"]["held_out_copies"] == 0
    failing = lambda: train(study, method="mpcpa", backend="local", overrides=["ddpm.samples_per_class=6"])  # noqa: E731
    refused(failing, "S1", "is not released", "copies of training images", error=WsiFlError)
    assert not [e for e in read_lines(study.ledger("S1")) if e.get("released") and "00004" in e["run"]]
    both = ["ddpm.samples_per_class=6", "mpcpa.unchecked=true"]
    assert train(study, method="mpcpa", backend="local", overrides=both)["communication"]["messages"] == 9
    path = study.root / "sites" / "S1.toml"
    path.write_text(path.read_text().replace("real = false", 'real = true\nallow = ["generator", "model"]'))
    pipeline = study.pipeline(study.pipeline_name(None), both)
    refused(lambda: _ready(study, pipeline, "S1", Silent()), "S1", "is not released", error=WsiFlError)


@pytest.mark.slow
def test_one_command_trains_every_baseline_and_the_curve_joins_own_and_all(trained, tmp_path):
    study = Study(copytree(trained[0].root, tmp_path / "study"))
    document = baselines(study, backend="local", overrides=["mpcpa.curve=[2]"])
    labels = [row["row"] for row in document["rows"]]
    assert labels == [
        *(f"A{k}" for k in (1, 2, 3)),
        *(f"B{k}" for k in (1, 2, 3)),
        "mean A",
        "mean B",
        "aggregated A",
        "aggregated B",
        "all original",
        "all generated",
        "FedAvg",
    ]
    assert all(0 <= row["accuracy"] <= 1 for row in document["rows"])
    assert document["transfers"] == {"mpcpa": 9, "fedavg": 2 * 3 * 2}  # the paper counts as much
    assert [row["site"] for row in document["memorization"]] == ["S1", "S2", "S3"]
    rows = {row["row"]: row["accuracy"] for row in document["rows"]}
    assert [point["per_class"] for point in document["curve"]] == [0, 2, 5]
    assert document["curve"][0]["mean"] == rows["mean A"]
    assert document["curve"][-1]["aggregated"] == rows["aggregated B"]
    assert set(document["curve"][1]["sites"]) == {"S1", "S2", "S3"}
    n_runs = len(list(study.runs.glob("0*")))
    baselines(study, backend="local", overrides=["mpcpa.curve=[2]"])
    assert len(list(study.runs.glob("0*"))) == n_runs, "runs that are there are not made again"
    refused(
        lambda: baselines(study, backend="local", overrides=["mpcpa.curve=[6]"]), "6 images", "5 are drawn"
    )
    page = report(study, document["run"]).read_text(encoding="utf-8")
    assert "How many generated images" in page
    assert "9 transfers" in page
    assert page.count("generated by the denoiser of") == 3 * 2 * 5, (
        "five images of each class of each denoiser"
    )
    regular = report(study, document["runs"]["regular"]).read_text(encoding="utf-8")
    fewer = sorted(path.name for path in study.runs.glob("0*-mpcpa-*"))[-1]
    assert document["run"].split("/")[-1] in regular
    assert fewer not in document["run"]
    assert fewer not in regular, "a point of the curve is no method of its own"
    path = study.root / document["run"] / "mpcpa.json"
    table = json.loads(path.read_text())
    assert "mpcpa.unchecked</code> although" not in page
    table["memorization"][0]["passed"] = False
    path.write_text(json.dumps(table))
    assert "mpcpa.unchecked</code> although" in report(study, document["run"]).read_text(encoding="utf-8")


@pytest.mark.slow
def test_over_mpi_each_rank_gets_its_package(trained, tmp_path, wsi_fl):
    study = Study(copytree(trained[0].root, tmp_path / "study"))
    said = wsi_fl("train", "--method", "mpcpa", "--json", cwd=study.root)
    assert said.returncode == 0, said.stderr
    summary = json.loads(said.stdout)
    assert summary["communication"]["messages"] == 9
    local = folder(study, trained[1])
    for k in (1, 2, 3):
        a, b = (load_file(run / f"sites/S{k}/private.safetensors") for run in (folder(study, summary), local))
        assert all(np.allclose(a[name], b[name], atol=1e-5) for name in a)


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "data" / "chest_xray").exists(), reason="no radiographs beside the project")
def test_a_denoiser_that_saw_a_dozen_images_a_thousand_times_is_caught(tmp_path):
    """Not planted: it memorises by itself. Ten minutes on one core."""
    images = read_data_set(SHARED / "data" / "chest_xray", 32).train
    order = np.random.default_rng(0).permutation(len(images))
    few, others = order[:12], order[12:137]
    data = {
        "x_train": images.x[few],
        "y_train": images.y[few],
        "x_test": images.x[others],
        "y_test": images.y[others],
    }
    study = make_study(tmp_path / "study")
    np.savez(tmp_path / "dozen.npz", **data)
    partition(study, tmp_path / "dozen.npz", n_sites=1, prefix="D")
    settings = ["ddpm.resolution=32", "ddpm.channels=[32,64,64]", "ddpm.chain=1000", "ddpm.sampling_steps=25"]
    settings += [
        "ddpm.checkpoint_every=500",
        "ddpm.steps=1500",
        "ddpm.batch_size=16",
        "ddpm.lr=2e-3",
        "ddpm.samples_per_class=50",
    ]
    train_generator(study, site="D1", overrides=settings)
    document = check(study, site="D1", overrides=settings)
    assert not document["passed"], document["memorization"]
    print(document["reasons"], document["memorization"])
