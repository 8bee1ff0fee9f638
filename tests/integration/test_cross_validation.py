"""Tests of cross-validation over patients and over sites."""

import json
from collections import Counter

import numpy as np
import pytest
from conftest import make_study, refused
from hypothesis import given
from hypothesis import strategies as st
from test_slide_bags import make_bag_study
from training_runs import trained

from wsi_fl.data.validation import assign_folds
from wsi_fl.evidence.compare import _require_one_store, compare_methods
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.runs.site_folder import SiteFolder
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.evaluation.write_predictions import read_example_scores, read_predictions, write_predictions
from wsi_fl.stages.site.site_data import SiteData, open_data
from wsi_fl.stages.training import train as training
from wsi_fl.stages.training.train import train_series
from wsi_fl.study.folder import load_run_pipeline
from wsi_fl.study.pipeline import pipeline_model
from wsi_fl.system.files import read_lines
from wsi_fl.types import WsiFlError

OPEN, FEW = "privacy.enabled=false", "train.rounds=1"


def hospitals(root, n):
    """Make sites of twelve slides, one per patient, half of them healthy."""
    return make_bag_study(root, n_sites=n, classes=("healthy", "tumor"))


@pytest.fixture
def study(tmp_path):
    return hospitals(tmp_path / "study", 2)


@pytest.fixture
def three(tmp_path):
    return hospitals(tmp_path / "three", 3)


def train_folds(study, *overrides, method="proxyfl", **given):
    return train_series(study, method=method, overrides=overrides, backend="local", **given)


@pytest.fixture(scope="module")
def finished_series(tmp_path_factory):
    """A study, three folds of ProxyFL and the comparison with the local baseline."""
    study = hospitals(tmp_path_factory.mktemp("folds") / "study", 2)
    document = train_folds(study, "train.folds=3", "train.stratify=true", OPEN, FEW)
    return study, document, compare_methods(study, [run["run"] for run in document["runs"]])


def list_test_patients(study, run, site="S0"):
    """Return the test patients of a run at a site."""
    table = read_predictions(RunFolder(study.root / run).site_folder(site))
    return table.local_rows.patient.tolist()


def config(study, run):
    return load_run_pipeline(study.root / run / "config.toml")


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 3)), min_size=40, max_size=150),
    st.integers(2, 6),
    st.integers(0, 5),
)
def test_folds_are_of_whole_patients_of_all_classes_alike(rows, n, seed):
    patient, label = np.array([f"p{who}" for who, _ in rows]), np.array([kind for _, kind in rows])
    if len(set(patient)) < n:
        return
    fold = assign_folds(patient, label, n_folds=n, seed=seed, stratified=True)
    assert set(fold.tolist()) == set(range(n))
    where, kind = dict(zip(patient, fold, strict=True)), {}
    assert all(where[name] == one for name, one in zip(patient, fold, strict=True))
    for name, one in zip(patient, label, strict=True):
        kind[name] = max(one, kind.get(name, 0))
    for group in [set(kind), *({name for name in kind if kind[name] == one} for one in range(4))]:
        counts = Counter(where[name] for name in group)
        sizes = [counts[k] for k in range(n)]
        assert max(sizes) - min(sizes) <= 1
    turned = np.arange(len(rows))[::-1]
    again = assign_folds(patient[turned], label[turned], n_folds=n, seed=seed, stratified=True)
    np.testing.assert_array_equal(again, fold[turned])


def test_removing_a_patient_moves_no_other_patient_to_another_fold():
    """ε requires it; a division by labels or by other patients would move a third of them."""
    patient, label = np.array([f"p{k}" for k in range(60)]), np.arange(60) % 2
    given = {"n_folds": 5, "seed": 0, "stratified": False}
    whole = assign_folds(patient, label, **given)
    for one in (0, 30, 59):
        rest = np.arange(60) != one
        np.testing.assert_array_equal(assign_folds(patient[rest], label[rest], **given), whole[rest])
    np.testing.assert_array_equal(assign_folds(patient, 1 - label, **given), whole)
    assert Counter(whole.tolist()).keys() == set(range(5))


@pytest.mark.parametrize("data", ["patches", "mosaics"])
def test_a_reopened_store_has_the_same_folds_and_its_stored_split_is_ignored(tmp_path, study, data):
    if data == "patches":
        study = make_study(tmp_path / "patches", n_sites=1)
    found = []
    for fold in (1, 2, 2):
        sets = ["train.folds=2", f"train.fold={fold}", f'train.data="{data}"']
        pipeline = study.load_pipeline(study.pipeline_name(None), sets)
        with open_data(study, "S0", pipeline) as one:
            parts = [set(one.load_examples(split).patient.tolist()) for split in ("train", "test", "val")]
            assert parts[0] | parts[1] == set(one.store.table.patient.tolist())
            assert not parts[0] & parts[1] and not parts[2]
            assert set(one.test_examples.patient.tolist()) == parts[1]
            found.append((parts[1], one.digest()))
    assert found[1] == found[2] and not found[0][0] & found[1][0]
    assert found[0][1] == found[1][1]  # a digest is of the store


def test_every_patient_is_tested_once_at_every_site(finished_series):
    study, document, _ = finished_series
    assert document["folds"] == 3 and document["seeds"] == [0] and document["left_out"] == []
    runs = [run["run"] for run in document["runs"]]
    assert [config(study, run).train.fold for run in runs] == [1, 2, 3]
    for site in study.site_names():
        patients = [name for run in runs for name in list_test_patients(study, run, site)]
        assert len(patients) == len(set(patients)) == 12
        assert [len(list_test_patients(study, run, site)) for run in runs] == [4, 4, 4]
        assert all(row["n_train"] == 8 for run in document["runs"] for row in run["sites"])


def test_compare_takes_folds_like_seeds_and_tests_by_patient(finished_series):
    study, _, compared = finished_series
    row = next(row for row in compared["rows"] if row["method"] == "proxyfl")
    alone = next(row for row in compared["rows"] if row["label"] == compared["baseline"])
    assert (row["folds"], row["seeds"], len(row["runs"])) == ([1, 2, 3], [0], 3)
    assert alone["folds"] == [1, 2, 3] and row["accuracy"]["n"] == 6  # two sites, three folds
    tests = {test["metric"]: test for test in compared["paired"]}
    assert (tests["accuracy"]["unit"], tests["accuracy"]["n"]) == ("patient", 24)
    assert (tests["own_accuracy"]["unit"], tests["own_accuracy"]["n"]) == ("patient", 24)
    assert (tests["auroc"]["unit"], tests["auroc"]["n"]) == ("fold", 3)
    gain = row["accuracy"]["mean"] - alone["accuracy"]["mean"]
    assert tests["accuracy"]["difference"] == pytest.approx(gain)
    joined = compared["benefit"]["all"]["federated"]
    assert joined["mean"] == pytest.approx(row["accuracy"]["mean"]) and joined["low"] is not None
    assert "sites, seeds and folds" in (study.root / compared["page"]).read_text()


def test_examples_are_matched_across_seeds_whatever_their_row(finished_series, tmp_path):
    study, document, _ = finished_series
    folder = RunFolder(study.root / document["runs"][0]["run"]).site_folder("S0")
    table = read_predictions(folder)
    (tmp_path / "S0").mkdir()
    other = SiteFolder(tmp_path / "S0")
    write_predictions(other, table[np.arange(len(table))[::-1]])
    said = read_example_scores(folder, "own")
    assert len(said) == len(table.local_rows) and said == read_example_scores(other, "own")


def test_runs_that_test_other_patients_are_not_compared(finished_series):
    study, document, _ = finished_series
    both = [document["runs"][0]["run"], trained(study, "regular", OPEN)["run"]]
    refused(lambda: compare_methods(study, both), "tests other patients", "3 folds", "own split")


def test_each_fold_is_charged_by_itself(study, capsys):
    document = train_folds(study, "train.folds=2")
    said = " ".join(capsys.readouterr().err.split())
    assert "every run is charged on the ledgers by itself: 2 runs cost a site about 2 times as much" in said
    assert len({line["run"].split()[0] for line in read_lines(study.ledger_path("S0")) if line.get("run")}) == 2
    first, second = (run["sites"][0]["epsilon"] for run in document["runs"])
    assert first == pytest.approx(second)


def test_folds_are_refused_where_they_would_mislead(study, monkeypatch):
    def asking(*overrides, method="proxyfl"):
        return lambda: trained(study, method, *overrides)

    three = ("train.folds=3", "train.fold=1")
    refused(asking(*three, "train.stratify=true"), "train.stratify", "excludes privacy.enabled")
    refused(asking("train.folds=3"), "train.folds = 3 needs train.fold", "--folds N")
    refused(asking("train.folds=3", "train.fold=4"), "there are train.folds = 3")
    refused(asking("train.fold=1"), "train.fold = 1 needs train.folds")
    refused(asking(*three, "train.from_released=true", method="oneshot"), "train.from_released", "own split")
    refused(asking("train.fold=1", "train.folds=13"), "12 patients cannot be divided into 13 folds")
    monkeypatch.setattr(training, "count_ranks", lambda: 2)
    refused(lambda: train_folds(study, "train.folds=3"), "leave out mpiexec or srun")


def test_the_store_of_a_site_that_is_left_out_is_not_opened_in_training(three, monkeypatch):
    real, opened = SiteData.__init__, set()

    def noted(self, study, site, *args):
        opened.add(site)
        real(self, study, site, *args)

    monkeypatch.setattr(SiteData, "__init__", noted)
    trained(three, "proxyfl", OPEN, "train.left_out=S1")
    assert opened == {"S0", "S2"}


@pytest.mark.end_to_end
def test_each_site_is_left_out_once_and_tests_all_models(three):
    study = three
    document = train_folds(study, OPEN, FEW, leave_site_out=True)
    assert document["left_out"] == ["S0", "S1", "S2"]
    for name, summary in zip(document["left_out"], document["runs"], strict=True):
        run = RunFolder(study.root / summary["run"])
        assert name not in {row["site"] for row in summary["sites"]} and not run.site_folder(name).path.exists()
        assert config(study, summary["run"]).train.left_out == name
        outside = evaluate(study, summary["run"])["external_set"]
        assert outside["sites"] == [name] and outside["n"] == 12 and len(outside["rows"]) == 2
    compared = compare_methods(study, [run["run"] for run in document["runs"]])
    row = next(row for row in compared["rows"] if row["method"] == "proxyfl")
    assert compared["on"] == "left_out" and list(row["sites"]) == row["left_out"] == ["S0", "S1", "S2"]
    assert row["accuracy"]["n"] == 3
    (test,) = [test for test in compared["paired"] if test["metric"] == "accuracy"]
    assert (test["unit"], test["n"]) == ("site", 3)


def test_a_site_left_out_has_separate_scores_beside_other_external_sites(three):
    settings = [OPEN, 'sites=["S0", "S1"]', "train.left_out=S1", 'evaluate.external=["S2"]']
    run = trained(three, "regular", *settings)["run"]
    both = evaluate(three, run)["external_set"]
    assert both["sites"] == ["S2", "S1"] and (both["n"], both["left_out"]["site"]) == (24, "S1")
    other = trained(three, "regular", *settings[:3], "evaluate.external=[]")
    alone = evaluate(three, other["run"])["external_set"]
    assert alone["n"] == 12 and alone["rows"] == alone["left_out"]["rows"] == both["left_out"]["rows"]
    damaged = {**alone, "left_out": {**alone["left_out"], "store": "another"}}
    runs = [{"run": "runs/1", "external_set": both}, {"run": "runs/2", "external_set": damaged}]
    refused(lambda: _require_one_store(runs), "runs/2", "other slides of S1", error=WsiFlError)


def test_a_site_that_keeps_its_patches_cannot_be_left_out(tmp_path):
    study = make_bag_study(tmp_path / "study", n_sites=2, real=True)
    out = lambda: train_folds(study, OPEN, method="regular", leave_site_out=True)  # noqa: E731
    refused(out, "sites/S0.toml", 'allow = ["patches"]')
    assert not list(study.runs_path.glob("0*"))


@pytest.mark.slow
def test_train_and_compare_run_folds_from_the_command_line(study, wsi_fl):
    command = ["train", "--method", "regular", "--folds", "2", "--backend", "local", "--json"]
    done = wsi_fl(*command, "--set", OPEN, "--set", FEW, cwd=study.root)
    assert json.loads(done.stdout)["folds"] == 2
    for arguments, words in (
        (("--folds", 1), "train.folds"),
        (("--resume", 1, "--folds", 2), "leave out"),
        (("--leave-site-out", "--folds", 2), "--leave-site-out tests whole sites"),
    ):
        done = wsi_fl("train", "--method", "regular", *arguments, cwd=study.root)
        assert (done.returncode, words in done.stderr) == (2, True), done.stderr


@pytest.mark.parametrize(
    ("n_patients", "n_folds", "way_on"),
    [(0, 5, "leave the site out"), (1, 5, "leave the site out"), (2, 5, "to 2 or less"), (4, 5, "to 4 or less")],
)
def test_the_advice_for_too_few_patients_works(n_patients, n_folds, way_on):
    patient = np.array([f"P{k}" for k in range(n_patients)], str)

    def divided(n_folds):
        return assign_folds(patient, np.zeros(n_patients, np.int64), n_folds=n_folds, seed=0, stratified=True)

    refused(lambda: divided(n_folds), f"{n_patients} patients", way_on)
    if way_on.startswith("to"):
        fewest = pipeline_model().model_json_schema()["$defs"]["TrainSettings"]["properties"]["folds"]["anyOf"][0][
            "minimum"
        ]
        assert n_patients >= fewest and sorted(divided(n_patients)) == list(range(n_patients))
