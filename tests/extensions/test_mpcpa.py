"""Method mpcpa as a whole: denoisers are sent once, classifiers learn from local and generated images, 9 transfers."""

import json
import sys
from functools import partial
from pathlib import Path
from shutil import copytree

import numpy as np
import pytest
import torch
from conftest import SHARED, check, patches_of, refused, train_generator
from safetensors.numpy import load_file

from wsi_fl.hospitals.plans.build_plan import make_plan, parse_plan_document
from wsi_fl.learning.local_training import predict_examples
from wsi_fl.models import create_model
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.evaluation.write_report import write_report
from wsi_fl.stages.prepare.partition import partition_images
from wsi_fl.stages.runtime.console import SilentProgress
from wsi_fl.stages.site.site_data import load_patches, open_store
from wsi_fl.stages.training.train import resume_run, train
from wsi_fl.stores.images import read_data_set
from wsi_fl.stores.patch_store import PatchStore
from wsi_fl.study.folder import Study, find_shipped_folder
from wsi_fl.synthesis.stages.baselines import run_baselines, score_method
from wsi_fl.synthesis.stages.mpcpa import _prepare_denoiser
from wsi_fl.system.files import read_json, read_lines, read_sealed, write_sealed
from wsi_fl.types import Images, WsiFlError

sys.path.append(str(Path(__file__).parents[2] / "studies"))
from mpcpa import TABLE, list_hits

SITES = ("S1", "S2", "S3")
PIPELINE = """
[synthesis]
generator = "ddpm"
[ddpm]
resolution = 8
channels = [8, 16]
chain = 10
steps = 6
batch_size = 4
checkpoint_every = 6
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


def make_study(root, *, n_sites=3, n=180, text=PIPELINE):
    """Make sites of n 16-px patches in all, 40 % of them held out."""
    for name in ("pipelines", "sites"):
        (root / name).mkdir(parents=True)
    (root / "pipelines" / "tiny.toml").write_text(text)
    rng = np.random.default_rng(0)
    y = np.arange(n) % 2
    np.savez(root / "data.npz", x=patches_of(rng, y, 16, (0, 0, 0)), y=y)
    study = Study(root)
    partition_images(study, root / "data.npz", n_sites=n_sites, test_fraction=0.4)
    return study


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    study = make_study(tmp_path_factory.mktemp("mpcpa") / "study")
    return study, run(study)


def folder(study, summary):
    return study.root / summary["run"]


def run(study, *overrides):
    return train(study, method="mpcpa", backend="local", overrides=overrides)


@pytest.fixture
def own(trained, tmp_path):
    """A copy of the study that tests may change."""
    return Study(copytree(trained[0].root, tmp_path / "study"))


def weights_of(study, summary, site):
    return folder(study, summary) / f"sites/{site}/private.safetensors"


def real(study, site, allow):
    text = f'name = "{site}"\nreal = true\nallow = {json.dumps(allow)}\n'
    (study.root / "sites" / f"{site}.toml").write_text(text)


def test_three_sites_make_nine_transfers_and_each_is_logged(trained):
    study, summary = trained
    assert summary["communication"]["messages"] == 3 * 3
    files = [folder(study, summary) / f"sites/{site}/transfers.jsonl" for site in SITES]
    lines = [line for file in files for line in read_lines(file)]
    up = {(what, site, "server") for what in ("denoiser", "model") for site in SITES}
    down = {("package", "server", site) for site in SITES}
    assert {(line["what"], line["from"], line["to"]) for line in lines} == up | down
    sizes = {line["what"]: line["bytes"] for line in lines}
    header = sizes["package"] - 2 * (sizes["package"] - sizes["denoiser"])
    assert sizes["package"] - header == 2 * (sizes["denoiser"] - header)


def test_classifiers_learn_from_local_and_other_sites_images(trained):
    study, summary = trained
    for row in summary["sites"]:
        package = read_json(folder(study, summary) / f"sites/{row['site']}/package.json")["images"]
        assert set(package) == set(SITES) - {row["site"]} and row["n_train"] == 36 + 2 * 2 * 5
        for key in package.values():
            with PatchStore(study.synthetic_path(key)) as store:
                assert np.bincount(store.table.label).tolist() == [5, 5]
                assert store.meta.generator is not None


def test_releases_are_on_record_without_privacy_and_the_server_has_every_classifier(trained):
    study, summary = trained
    for row in summary["sites"]:
        assert row["epsilon"] is None and row["guarantee"] == "none"
        lines = read_lines(study.ledger_path(row["site"]))
        released = [line["released"].split()[0] for line in lines if line.get("released")]
        assert released == ["generator", "model"]
        held = load_file(folder(study, summary) / f"aggregate/{row['site']}.safetensors")["parameters"]
        own = load_file(folder(study, summary) / f"sites/{row['site']}/private.safetensors")
        assert held.size == sum(value.size for value in own.values()) and set(own["0.bias"]) <= set(held)
    refused(lambda: run(study, "privacy.enabled=true"), "privacy.enabled=false")


def test_an_external_set_is_evaluated_with_all_its_rows(own):
    study, y = own, np.arange(30) % 2
    np.savez(study.root / "other.npz", x=patches_of(np.random.default_rng(5), y, 16, (9, 0, 0)), y=y)
    partition_images(study, study.root / "other.npz", n_sites=1, prefix="X")
    settings = ['sites=["S1", "S2", "S3"]', "train.rounds=1", 'evaluate.external=["X1"]']
    summary = train(study, method="regular", backend="local", overrides=settings)
    found = evaluate(study, summary["run"])["external_set"]
    assert found["n"] == found["aggregated"]["relative"]["n"] == 30
    assert [row["site"] for row in found["rows"]] == list(SITES)
    again = train(study, method="regular", backend="local", overrides=[*settings, 'evaluate.external=["S1"]'])
    refused(lambda: evaluate(study, again["run"]), "S1 took part")


def test_a_finished_run_and_a_lost_package_are_resumed(trained, own):
    study, summary = trained
    (folder(own, summary) / "summary.json").unlink()
    before = read_lines(own.ledger_path("S1"))
    assert resume_run(own, summary["run"], backend="local")["communication"]["messages"] == 9
    after = read_lines(own.ledger_path("S1"))  # nothing new left, and what was sent again is on record
    assert after[: len(before)] == before and all(line.get("again") for line in after[len(before) :])
    a, b = (load_file(folder(one, summary) / "sites/S2/private.safetensors") for one in (study, own))
    assert all(np.array_equal(a[name], b[name]) for name in a)


def test_a_real_site_must_allow_both_by_name_and_the_ledger_refuses_otherwise(own, monkeypatch):
    for missing in ("model", "generator"):
        real(own, "S2", [what for what in ("generator", "model", "patches") if what != missing])
        refused(lambda: run(own), "sites/S2.toml", f"a {missing} without")
    monkeypatch.setattr("wsi_fl.stages.training.checks._check_disclosures", lambda *_: None)
    words = "sites/S2.toml", "generator without differential privacy"
    refused(lambda: run(own), *words, error=WsiFlError)


def test_the_longest_message_is_bounded_by_the_package_of_all_generators(own):
    for site in SITES:
        real(own, site, ["model", "generator"])
    plan = make_plan(own, method="mpcpa", out=own.root / "plan.json")
    one, package, classifier = [row for row in parse_plan_document(plan)["leaves"] if row["large"]]
    assert package["bytes"] == 2 * one["bytes"] > classifier["bytes"] > 0
    assert plan.most_bytes == 2 * package["bytes"] + 32_000_000


def test_a_memorising_denoiser_is_detected_and_not_released(own, monkeypatch):
    """A planted denoiser draws its training images, almost invisibly changed."""
    study, six = own, "ddpm.samples_per_class=6"

    def planted(denoiser, labels, sampling, *, seed, progress=None):
        with PatchStore(study.store_path("S1")) as store:
            rows = np.flatnonzero(store.table.split == "train")[: len(labels)]
            pixels = store.read(rows).reshape(len(rows), 8, 2, 8, 2, 3).mean((2, 4)).round().astype(int)
        noisy = pixels + np.random.default_rng(seed).integers(-2, 3, pixels.shape)
        yield torch.from_numpy(noisy.clip(0, 255).astype(np.uint8).transpose(0, 3, 1, 2).copy())

    monkeypatch.setattr("wsi_fl.synthesis.stages.ddpm.draw_images", planted)
    document = check(study, site="S1", overrides=["ddpm.seed=0", six])
    found = document["memorization"]
    assert not document["passed"] and (found["copies"], found["held_out_copies"]) == (12, 0)
    before = read_lines(study.ledger_path("S1"))
    refused(lambda: run(study, six), "S1", "is not released", "copies of training images", error=WsiFlError)
    assert [line for line in read_lines(study.ledger_path("S1")) if line.get("released")] == [
        line for line in before if line.get("released")
    ]
    pipeline = study.load_pipeline(study.pipeline_name(None), [six, "mpcpa.unchecked=true"])
    prepare = partial(_prepare_denoiser, study, pipeline, "S1", SilentProgress())
    prepare()
    real(study, "S1", ["generator", "model"])
    refused(prepare, "S1", "is not released", error=WsiFlError)


def test_the_row_of_fedavg_scores_the_shared_model_though_each_hospital_alone_answers(own):
    settings = ["train.local_baseline=true", "train.private_lr=1e-9", "train.rounds=8"]
    summary = train(own, method="fedavg", backend="local", overrides=settings)
    evaluation = evaluate(own, summary["run"], overrides=["predict.model=local"])
    model, sites, mean = score_method("fedavg", evaluation)
    assert model == "shared" and {row["model"] for row in evaluation["sites"]} == {"local"}
    shared = create_model("cnn1", n_classes=2, shape=Images(3, 16), seed=0)
    shared.load_state_dict({k: torch.from_numpy(v) for k, v in load_file(weights_of(own, summary, "S1")).items()})
    right = []
    for site in SITES:
        examples = load_patches(open_store(own, site), "test", 16)
        right += (predict_examples(shared.eval(), examples, torch.device("cpu")).argmax(1) == examples.label).tolist()
    assert mean["accuracy"] == pytest.approx(np.mean(right)) == sites["S3"]["accuracy"]
    assert mean["accuracy"] != evaluation["merged"]["accuracy"]["mean"]


@pytest.mark.parametrize("name", ["mpcpa", "mpcpa_small", "replay", "synthesis_small"])
def test_in_the_pipelines_of_papers_no_local_baseline_answers(own, name):
    assert not own.load_pipeline(str(find_shipped_folder("pipelines") / f"{name}.toml"), []).train.local_baseline


@pytest.mark.slow
def test_one_command_trains_every_baseline_and_the_curve_spans_local_to_pooled(own):
    study = own
    settings = ["mpcpa.curve=[2]", "mpcpa.fedavg_rounds=3"]
    document = run_baselines(study, backend="local", overrides=settings)
    rows = {row["row"]: row["accuracy"] for row in document["rows"]}
    fedavg = read_json(study.root / document["runs"]["fedavg"] / "evaluation.json")
    assert rows["FedAvg"] == fedavg["models"]["private"]["merged"]["accuracy"]["mean"]
    assert {row["model"] for row in document["rows"][-3::2]} == {"shared"}, "joint and FedAvg"
    for row, (method, _, _) in TABLE.items():
        path, aggregated = study.root / document["runs"][method], row.startswith("aggregated")
        assert list_hits(path, method, aggregated=aggregated).mean() == pytest.approx(rows[row]), row
    joined = ["mean A", "mean B", "aggregated A", "aggregated B", "all original", "all generated", "FedAvg"]
    assert list(rows) == [*(f"{kind}{k}" for kind in "AB" for k in (1, 2, 3)), *joined]
    assert all(0 <= accuracy <= 1 for accuracy in rows.values())
    assert document["transfers"] == {"mpcpa": 9, "fedavg": 2 * 3 * 3}  # the paper counts as much
    assert [row["site"] for row in document["memorization"]] == list(SITES)
    assert [point["per_class"] for point in document["curve"]] == [0, 2, 5]
    assert document["curve"][0]["mean"] == rows["mean A"]
    assert document["curve"][-1]["aggregated"] == rows["aggregated B"]
    assert set(document["curve"][1]["sites"]) == set(SITES)
    n_runs = len(list(study.runs_path.glob("0*")))
    run_baselines(study, backend="local", overrides=settings)
    assert len(list(study.runs_path.glob("0*"))) == n_runs, "runs that are there are not made again"
    more = lambda: run_baselines(study, backend="local", overrides=["mpcpa.curve=[6]"])  # noqa: E731
    refused(more, "6 images", "5 are drawn")
    page = write_report(study, document["run"]).read_text(encoding="utf-8")
    assert "How many generated images" in page and "9 transfers" in page
    assert page.count("generated by the denoiser of") == 3 * 2 * 5, "five of each class of each denoiser"
    regular = write_report(study, document["runs"]["regular"]).read_text(encoding="utf-8")
    fewer = sorted(path.name for path in study.runs_path.glob("0*-mpcpa-*"))[-1]
    assert document["run"].split("/")[-1] in regular and fewer not in document["run"]
    assert fewer not in regular, "a point of the curve is no method of its own"
    path = study.root / document["run"] / "mpcpa.json"
    table = read_sealed(path, ("memorization",), "")
    assert "mpcpa.unchecked</code> although" not in page
    table["memorization"][0]["passed"] = False
    write_sealed(path, table)
    assert "mpcpa.unchecked</code> although" in write_report(study, document["run"]).read_text(encoding="utf-8")


@pytest.mark.slow
def test_over_mpi_each_rank_gets_its_package(trained, own, wsi_fl):
    said = wsi_fl("train", "--method", "mpcpa", "--json", cwd=own.root)
    assert said.returncode == 0, said.stderr
    summary = json.loads(said.stdout)
    assert summary["communication"]["messages"] == 9
    runs = folder(own, summary), folder(own, trained[1])
    for site in SITES:
        a, b = (load_file(run / f"sites/{site}/private.safetensors") for run in runs)
        assert all(np.allclose(a[name], b[name], atol=1e-5) for name in a)


@pytest.mark.slow
@pytest.mark.skipif(not (SHARED / "data" / "chest_xray").exists(), reason="no radiographs beside the project")
def test_a_denoiser_trained_a_thousand_times_on_a_dozen_images_is_detected(tmp_path):
    """Not planted: it overfits by itself. Ten minutes on one core."""
    images = read_data_set(SHARED / "data" / "chest_xray", 32).train
    order = np.random.default_rng(0).permutation(len(images))
    few, others = order[:12], order[12:137]
    study = make_study(tmp_path / "study")
    data = {"x_train": images.x[few], "y_train": images.y[few]}
    np.savez(tmp_path / "dozen.npz", x_test=images.x[others], y_test=images.y[others], **data)
    partition_images(study, tmp_path / "dozen.npz", n_sites=1, prefix="D")
    settings = ["ddpm.resolution=32", "ddpm.channels=[32,64,64]", "ddpm.chain=1000", "ddpm.sampling_steps=25"]
    settings += ["ddpm.checkpoint_every=500", "ddpm.steps=1500", "ddpm.batch_size=16", "ddpm.lr=2e-3"]
    settings += ["ddpm.samples_per_class=50"]
    train_generator(study, site="D1", overrides=settings)
    document = check(study, site="D1", overrides=settings)
    assert not document["passed"], document["memorization"]
    print(document["reasons"], document["memorization"])
