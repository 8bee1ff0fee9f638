"""Tests of `[target]`: a column of a table as classes, number or survival, per slide or per patient."""

import json
import re
import shutil
from functools import reduce
from pathlib import Path
from unicodedata import normalize

import numpy as np
import pandas as pd
import pytest
import torch
from conftest import REAL, metrics, refused, slow_intervals
from file_changes import make_real
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binomtest
from sklearn.metrics import r2_score
from training_runs import answers

from wsi_fl.data.cross_site_counts import MIN_EXAMPLES
from wsi_fl.data.survival import compute_risk, kaplan_meier, logrank_test
from wsi_fl.data.tasks import CLASSES, NumberTask, SurvivalTask, mutual_loss, score_intervals, target_columns
from wsi_fl.evidence.clinical import describe_clinically
from wsi_fl.evidence.compare import compare_methods
from wsi_fl.report.cross_site_section import render_coordinator
from wsi_fl.report.run_page import _risk_chart
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.evaluation.evaluation_lines import render_evaluation_lines
from wsi_fl.stages.evaluation.export_model import export_model
from wsi_fl.stages.evaluation.predict import predict
from wsi_fl.stages.evaluation.write_report import write_report
from wsi_fl.stages.site.site_data import open_data
from wsi_fl.stages.training import checks
from wsi_fl.stages.training.train import train
from wsi_fl.stores.bag_store import Bag, BagMeta, write_bags
from wsi_fl.study.folder import Study
from wsi_fl.types import BagTable, GridSpec

try:
    from sksurv import compare, nonparametric
    from sksurv import metrics as sksurv
except ModuleNotFoundError:
    sksurv = None
judged = pytest.mark.skipif(sksurv is None, reason="scikit-survival is the judge; it has no wheel for this Python")
ENDS = (1.0, 2.0, 4.0)
D, N = 8, 24
PIPELINE = """
[model]
private = "deepset"
proxy = "mean_head"
[train]
data = "mosaics"
rounds = 3
batch_size = 6
lr = 0.01
[evaluate]
bootstrap = 20
"""
SURVIVAL = ('target.time="months"', 'target.event="dead"', "target.intervals=[6, 12, 24, 36]")
NUMBER = ('target.column="burden"', "target.range=[0, 1]")
GRADE = ('target.column="grade"', 'target.classes=["low", "high"]')
OPEN = "privacy.enabled=false"
LONG = [*SURVIVAL, OPEN, "train.rounds=12"]


def test_the_likelihood_of_survival_is_the_sum_over_the_intervals_that_a_patient_reached():
    task, x = SurvivalTask(ENDS), torch.tensor([[0.3, -1.0, 0.5]], dtype=torch.float64)
    h = x.sigmoid()[0]
    by_hand = {
        (0.5, 1.0): -h[0].log(),
        (0.0, 1.0): -h[0].log(),
        (1.0, 1.0): -h[0].log(),  # intervals hold their end
        (3.0, 1.0): -(1 - h[0]).log() - (1 - h[1]).log() - h[2].log(),
        (9.0, 1.0): -((1 - h).log().sum()),  # after the last end nobody looks
        (0.4, 0.0): torch.tensor(0.0),  # left in the first half of an interval: nothing is known of it
        (0.6, 0.0): -(1 - h[0]).log(),
        (3.5, 0.0): -((1 - h).log().sum()),
    }
    for truth, wanted in by_hand.items():
        (found,) = task.compute_losses(x, torch.tensor([truth]))
        assert float(found) == pytest.approx(float(wanted), abs=1e-9), truth
    np.testing.assert_allclose(task.predict(x)[0], np.cumprod(1 - h.numpy()))


@pytest.mark.parametrize("task", [CLASSES, NumberTask(0.0, 50.0), SurvivalTask(ENDS)], ids=lambda t: t.kind)
def test_every_loss_is_of_its_example_alone_and_divergence_vanishes_between_equals(task):
    torch.manual_seed(0)
    x, other = torch.randn(5, 3, dtype=torch.float64), torch.randn(5, 3, dtype=torch.float64)
    truth = {
        "classes": torch.tensor([0, 2, 1, 1, 0]),
        "number": torch.tensor([3.0, 50.0, 0.0, 7.5, 20.0]),
        "survival": torch.tensor([[0.5, 1], [3, 0], [9, 0], [2, 1], [1, 1]]),
    }[task.kind]
    together = task.compute_losses(x, truth)
    alone = torch.cat([task.compute_losses(x[k : k + 1], truth[k : k + 1]) for k in range(5)])
    torch.testing.assert_close(together, alone)
    assert float(task.compute_divergence(x, x)) == pytest.approx(0, abs=1e-12)
    assert float(task.compute_divergence(x, other)) > 0
    half = mutual_loss(x, truth, other, 0.5, task=task)
    torch.testing.assert_close(half, (together.mean() + task.compute_divergence(x, other)) / 2)
    assert np.isfinite(task.baseline_prediction(3)).all() and len(task.baseline_prediction(3)) == 3


def test_a_number_stays_within_the_range_that_was_agreed_on():
    task = NumberTask(10.0, 30.0)
    assert task.predict(torch.tensor([[-9.0], [0.0], [0.5], [9.0]])).flatten().tolist() == [10, 20, 25, 30]
    assert float(task.compute_losses(torch.tensor([[0.5]]), torch.tensor([25.0]))) == 0
    exact = task.compute_scores(np.array([[10.0], [20.0]]), np.array([10.0, 20.0]))
    assert exact == {"r2": 1.0, "mae": 0.0, "rmse": 0.0}
    assert task.compute_scores(np.array([[10.0]]), np.array([12.0]))["r2"] is None


def concordance(risk, truth):
    """Compute Harrell's concordance by scikit-survival; None where no pair's order is known."""
    time, seen = truth[:, 0], truth[:, 1] > 0.5
    if not any(((time > t) | (~seen & (time == t))).any() for t in time[seen]):
        return None
    return sksurv.concordance_index_censored(seen, time, risk)[0]


def integrated_brier(said, truth, ends):
    """Compute the integrated Brier score by scikit-survival over the observed interval ends; None for fewer than two
    ends or no events."""
    known = np.array([(bool(e), t) for t, e in truth], [("event", bool), ("time", float)])
    within = [k for k, end in enumerate(ends) if truth[:, 0].min() <= end < truth[:, 0].max()]
    if len(within) < 2 or not known["event"].any():
        return None
    return sksurv.integrated_brier_score(known, known, said[:, within], np.array(ends)[within])


def near(found, expected):
    return found == {k: v if v is None else pytest.approx(v, rel=1e-9) for k, v in expected.items()}


@judged
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31))
def test_scores_and_intervals_of_survival_are_scikit_survivals(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(2, 30))
    truth = np.stack([rng.integers(1, 8, n) / 2, rng.random(n) < rng.random()], 1).astype(float)
    said = np.cumprod(rng.integers(1, 5, (n, len(ENDS))) / 5, axis=1)
    patient = rng.integers(0, 8, n).astype(str)
    task = SurvivalTask(ENDS)

    def slowly(rows):
        return {
            "concordance": concordance(compute_risk(said, ENDS)[rows], truth[rows]),
            "integrated_brier": integrated_brier(said[rows], truth[rows], ENDS),
        }

    assert near(task.compute_scores(said, truth), slowly(np.arange(n)))
    found = score_intervals(said, truth, patient, task, repeats=12)

    def exact(name, value):
        pairs = len(set(patient))
        if name == "concordance" and 0 < value < 1:
            return [value, value]
        if name == "concordance":  # of two patients each, one of them with the event
            pairs = min(pairs // 2, len(set(patient[truth[:, 1] == 1])))
        return list(binomtest(round(value * pairs), pairs).proportion_ci(method="exact"))

    assert near(found, slow_intervals(slowly, patient, exact, repeats=12))


@judged
@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31))
def test_survival_curves_and_their_test_are_scikit_survivals(seed):
    rng = np.random.default_rng(seed)
    n = int(rng.integers(1, 25))
    truth = np.stack([rng.integers(0, 6, n) / 2, rng.random(n) < rng.random()], 1).astype(float)
    known = np.array([(bool(e), t) for t, e in truth], [("event", bool), ("time", float)])
    times, share = kaplan_meier(truth)
    known_times, known_share = nonparametric.kaplan_meier_estimator(known["event"], known["time"])
    last = np.searchsorted(times, known_times, "right") - 1  # the curve is constant where patients are censored
    np.testing.assert_allclose(share[last], known_share)
    assert times[-1] == known_times[-1] and times[0] == 0 and (np.diff(times) >= 0).all()
    group = rng.random(n) < 0.5
    try:
        expected = compare.compare_survival(known, group)[1] if known["event"].any() and len({*group}) > 1 else None
    except np.linalg.LinAlgError:
        expected = None
    found = logrank_test(truth, group)
    assert found == (expected if expected is None else pytest.approx(expected, abs=1e-9))


def test_a_p_value_of_the_page_is_never_zero():
    times = np.arange(40.0)
    truth, early = np.stack([times, np.ones(40)], 1), np.clip(times[:, None] / 40, 0, 1)
    chart, said = _risk_chart("S0", truth, early, [40.0])
    assert said == "Log-rank p < 0.001." and said in chart.alt


def test_a_single_event_in_order_proves_little():
    truth = np.array([[1.0, 1.0]] + [[5.0, 0.0]] * 39)
    said = np.linspace(0.1, 0.9, 40)[:, None] ** np.arange(1, len(ENDS) + 1)
    found = score_intervals(said, truth, np.arange(40).astype(str), SurvivalTask(ENDS), repeats=40)
    assert found["concordance"] == pytest.approx([0.025, 1.0])


def test_intervals_of_numbers_are_those_of_the_rows_that_were_drawn():
    rng = np.random.default_rng(0)
    truth, said = rng.integers(0, 11, 60).astype(np.float32), rng.random((60, 1)) * 10
    patient = np.repeat(np.arange(12), 5).astype(str)

    def slowly(rows):
        p, t = said[rows, 0], truth[rows].astype(float)
        return {"r2": r2_score(t, p), "mae": np.abs(p - t).mean(), "rmse": np.sqrt(((p - t) ** 2).mean())}

    task = NumberTask(0, 10)
    assert near(task.compute_scores(said, truth), slowly(np.arange(60)))
    found = score_intervals(said, truth, patient, task, repeats=20)
    assert near(found, slow_intervals(slowly, patient, repeats=20))
    constant = np.full(60, 0.1, np.float32)
    assert score_intervals(said, constant, patient, task, repeats=20)["r2"] is None


def write_site(study, site, seed):
    """Write two slides of every patient; the mean of feature 0 over a slide's patches is its share of tumour."""
    rng = np.random.default_rng(seed)
    burden = rng.uniform(0, 1, N)
    bags, who = [], []
    for k in range(N):
        for s in range(2):
            m = int(rng.integers(20, 40))
            features = rng.normal(0, 0.3, (m, D)).astype(np.float32)
            features[: round(burden[k] * m), 0] += 4
            bags.append(Bag(features, np.zeros((m, 2), np.int64)))
            who.append((f"{site}_{k}_{s}", f"P{k}", "test" if k % 3 == 0 else "train"))
    table = BagTable(np.zeros(2 * N, np.int64), np.full(2 * N, ""), *np.array(who).T)
    path = study.mosaic_path(site)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bags(path, BagMeta(site, ("healthy", "tumor"), "e", GridSpec(64, 1.0, 64)), table, bags)
    time = rng.exponential(40 * np.exp(-4 * burden))
    left = rng.uniform(10, 60, N)
    return [
        {
            "patient": f"P{k}",
            "burden": f"{burden[k]:.4f}",
            "grade": "high" if burden[k] > 0.5 else "low",
            "months": f"{min(time[k], left[k]):.3f}",
            "dead": "yes" if time[k] < left[k] else "no",
        }
        for k in range(N)
    ]


def make(root, n_sites=2):
    (root / "pipelines").mkdir(parents=True)
    (root / "sites").mkdir()
    (root / "pipelines" / "q.toml").write_text(PIPELINE)
    study = Study(root)
    for k in range(n_sites):
        pd.DataFrame(write_site(study, f"S{k}", seed=k)).to_csv(root / f"S{k}.csv", index=False)
        (root / "sites" / f"S{k}.toml").write_text(f'name = "S{k}"\nreal = false\nclinical = "S{k}.csv"\n')
    return study


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    return make(tmp_path_factory.mktemp("made") / "study")


@pytest.fixture
def study(made, tmp_path):
    return Study(shutil.copytree(made.root, tmp_path / "study"))


def trained(study, *overrides, method="regular"):
    return train(study, method=method, overrides=overrides, backend="local")["run"]


@pytest.fixture(scope="module")
def survival_run(tmp_path_factory):
    study = make(tmp_path_factory.mktemp("questions") / "study")
    run = trained(study, *LONG, method="proxyfl")
    return study, run, evaluate(study, run)


def open_target_data(study, *overrides):
    return open_data(study, "S0", study.load_pipeline("q", list(overrides)))


def edit(study, **changes):
    """Rewrite the first line of S0's table."""
    path = study.root / "S0.csv"
    table = pd.read_csv(path, dtype=str)
    table.loc[0, [*changes]] = [*changes.values()]
    table.to_csv(path, index=False)


def substitute(study, *changes):
    """Replace patterns in S0's table."""
    path = study.root / "S0.csv"
    path.write_text(reduce(lambda text, change: re.sub(*change, text), changes, path.read_text()), encoding="utf-8")


def test_a_bag_holds_all_slides_of_a_patient_or_a_single_slide(study):
    with (
        open_target_data(study, *NUMBER) as slides,
        open_target_data(study, *NUMBER, 'target.per="patient"') as patients,
    ):
        assert (len(slides.cohort), len(patients.cohort)) == (2 * N, N)
        assert patients.cohort.slide.tolist() == patients.cohort.patient.tolist()
        one = patients.load_examples("train")
        whole = one.read(np.array([0]))[0]
        rows = np.flatnonzero(slides.store.table.patient == one.patient[0])
        bags = np.concatenate([slides.store.read_bag(int(row)).features for row in rows])
        np.testing.assert_array_equal(whole[:, :-1], bags)
        assert whole[:, -1].all() and one.task == NumberTask(0, 1) and one.label.dtype == np.float64
    with open_target_data(study, *SURVIVAL) as survival:
        assert len(survival.cohort) == N and survival.cohort.label.shape == (N, 2)


@pytest.mark.parametrize(
    ("settings", "digest"),
    [
        ([], "b0832c92008d"),
        (['train.example="patch"'], "971ac1e64982"),
        (['train.example="patient"'], "da6b8948d3de"),
        (NUMBER, "0a9546b1b365"),
        ([*NUMBER, 'target.per="patient"'], "29b8b9261968"),
    ],
)
def test_a_store_has_the_digest_that_runs_of_earlier_versions_recorded(study, settings, digest):
    """Names have a fixed width in it, also where the longest ones, of patients without a label, are left out."""
    substitute(study, ("P10,", "X10,"), ("P23,", "X23,"))
    with open_target_data(study, *settings) as data:
        assert data.digest()[:12] == digest


def test_survival_is_trained_evaluated_and_plotted(survival_run):
    study, run, document = survival_run
    assert (document["task"], document["scores"]) == ("survival", ["concordance", "integrated_brier"])
    assert document["merged"]["concordance"]["mean"] > 0.7
    for row in document["sites"]:
        low, high = row["intervals"]["concordance"]
        assert low <= row["concordance"] <= high and "confusion" not in row
    rows = pd.read_csv(study.find_run(run) / "sites/S0/predictions.csv")
    assert {"patient", "time", "event"} < {*rows}
    said = rows[[f"without_event_{end}" for end in (6, 12, 24, 36)]].to_numpy()
    assert (np.diff(said) <= 0).all() and (said > 0).all() and (said < 1).all()
    assert document["examples"] == "patients"
    page = write_report(study, run).read_text()
    assert "patients of one patient" not in page and "a patient is the bag of its slides" in page
    assert "Concordance" in page and "Log-rank p" in page and "accuracy" not in page.split("<pre")[0].lower()


@pytest.mark.slow
def test_methods_with_the_same_target_are_compared_by_its_scores(survival_run):
    study, run, _ = survival_run
    document = compare_methods(study, [run, trained(study, *LONG)])
    worth, rows = document["benefit"], {row["label"]: row for row in document["rows"]}
    assert document["scores"] == ["concordance", "integrated_brier"] and worth["measure"] == "concordance"
    joined, gain = worth["all"]["federated"], worth["all"]["gain"]
    assert joined["mean"] == pytest.approx(rows[worth["federated"]]["concordance"]["mean"])
    assert gain["low"] <= gain["mean"] <= gain["high"]
    assert all(row["concordance"]["mean"] > 0.6 for row in document["rows"])
    assert "own_concordance_mean" in (study.root / document["table"]).read_text().splitlines()[0]


def test_runs_with_different_targets_are_not_compared(survival_run):
    study, run, _ = survival_run
    other = trained(study, *NUMBER, OPEN, "train.rounds=1")
    said = (f"{other}: has another target (column 'burden'", f"than {run} (time until 'dead'")
    refused(lambda: compare_methods(study, [run, other]), *said)


def test_a_slide_is_predicted_with_its_event_free_probability(survival_run):
    study, run, _ = survival_run
    (row,) = predict(study, run, site="S0", slides=[Path("S0_3_1")])["slides"]
    chances = list(row["without_event"].values())
    assert list(row["without_event"]) == ["6", "12", "24", "36"] and chances == sorted(chances, reverse=True)
    assert -36 <= row["risk"] <= 0 and "class" not in row
    patches = pd.read_csv(study.root / row["csv"])
    assert len(patches) == row["patches"] and patches["without_event_36"].between(0, 1).all()


def test_wsinfer_which_takes_the_softmax_of_outputs_gets_no_model_of_survival(survival_run, tmp_path):
    study, run, _ = survival_run
    words = ("--format wsinfer is for classes", "time until 'dead'", "use onnx or monai-bundle")
    refused(lambda: export_model(study, run, model_name="proxy", form="wsinfer", out=tmp_path / "out"), *words)


def test_a_numeric_target_is_trained(study):
    run = trained(study, *NUMBER, OPEN, "train.rounds=8")
    merged = evaluate(study, run)["merged"]
    assert merged["r2"]["mean"] > 0.5 and merged["mae"]["mean"] < 0.2
    page = write_report(study, run).read_text()
    assert "Each dot is a test" in page and "Merged test set, R²" in page and " r²" not in page


def test_the_best_model_on_validation_rows_predicts_a_number_and_the_local_one_is_a_candidate(study, capsys):
    for more, n in ((["train.val_fraction=0.3"], 1), ([], 0)):
        run = trained(study, *NUMBER, OPEN, "train.rounds=2", *more, method="proxyfl")
        said = " ".join(capsys.readouterr().err.split())  # before anything is spent
        assert ("the local model predicts numbers" in said) == (not n)
        for row in evaluate(study, run)["sites"]:
            choice = json.loads((study.root / run / f"sites/{row['site']}/prediction_model.json").read_text())
            reached = choice.get("r2", {"local": 0.0})
            assert set(reached) == ({"local", "private", "proxy", "mean"} if n else {"local"})
            assert reached[choice["model"]] == max(reached.values()) and (choice["n"] > 0) == bool(n)
            assert row["model"] == choice["model"] and "local" in row["models"] and "ensemble" not in row["models"]


def test_survival_trains_with_differential_privacy_at_the_epsilon_of_classes(study):
    spent = []
    for target in (SURVIVAL, (*GRADE, 'target.per="patient"')):
        dp = ["privacy.unit=patient", "privacy.insecure_seed=1", "train.rounds=1"]
        line = metrics(study.root / trained(study, *target, *dp, method="proxyfl"), "S0")[-1]
        spent.append(line["epsilon"])
        assert np.isfinite(line["loss"]["proxy"])
    assert spent[0] == spent[1] is not None


@pytest.mark.parametrize(
    ("target", "change", "said"),
    [
        (GRADE, {"grade": "Low"}, "grade = 'Low' is none of target.classes (low, high)"),
        (NUMBER, {"burden": "7"}, "burden = 7; it must be 0 to 1 (target.range)"),
        (NUMBER, {"burden": "much"}, "burden = 'much' is no number"),
        (NUMBER, {"burden": "0,25"}, "burden = '0,25' is no number; write 0.25"),
        (NUMBER, {"burden": "inf"}, "it must be 0 to 1"),
        (SURVIVAL, {"months": "-3"}, "months = -3; it must be 0 or more"),
        (SURVIVAL, {"dead": "perhaps"}, "dead = 'perhaps' is none of"),
        (("target.range=[0, 1]", 'target.column="size"'), {}, "column 'size' is missing"),
        (NUMBER, {"patient": "P1", "burden": "0"}, "patient P1 has another value"),
        (('target.column="x"',), {}, "say column with classes"),
        (('target.column="x"', 'target.classes=["a", "a"]'), {}, "named twice"),
        (('target.column="x"', 'target.classes=["a", "b"]', 'target.ignore=["b"]'), {}, "target.ignore too"),
        (('target.column="x"', "target.range=[1, 0]"), {}, "the smallest number comes first"),
        (('target.time="t"',), {}, "survival needs time, event and intervals"),
        (('target.time="t"', 'target.event="e"', "target.intervals=[2, 1]"), {}, "the ends must rise"),
    ],
)
def test_an_invalid_target_or_a_table_without_it_is_refused_in_one_line(study, target, change, said):
    edit(study, **change)
    refused(lambda: open_target_data(study, *target), said)


@pytest.mark.parametrize(
    ("target", "column", "word"),
    [
        *((NUMBER, "burden", word) for word in ("nan", "NA", "<NA>", "None")),
        *((GRADE, "grade", word) for word in ("N/A", "-")),
        (SURVIVAL, "months", "null"),
    ],
)
def test_placeholder_values_are_no_labels(study, target, column, word):
    edit(study, **{column: word})
    with open_target_data(study, *target) as data:
        assert set(data.cohort.patient) == {f"P{k}" for k in range(1, N)} and "S0_0_0" in data.remark


def test_a_placeholder_value_is_a_class_where_the_target_names_it(study):
    substitute(study, (",low,", ",-,"), (",high,", ",+,"))
    with open_target_data(study, 'target.column="grade"', 'target.classes=["-", "+"]') as data:
        assert len(data.cohort) == 2 * N and not data.remark


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("\nP", "\np"), "p0 and P0 differ in upper and lower case"),
        (("\nP", "\nP0"), "P00 and P0 differ in leading zeros"),
        (("\nP", "\nXP"), "the table has XP0, XP1, XP10 and 21 more, the site P0"),
        ((r"(P\d+),[\d.]+", r"\1,NA"), "none of its lines has a value"),
    ],
)
def test_a_table_that_matches_no_patient_is_refused_with_names_of_both(study, change, said):
    substitute(study, change)
    refused(lambda: open_target_data(study, *NUMBER), "has a label for [target] for none of the 48 slides", said)


def test_patients_classes_and_columns_match_in_any_unicode_form(study):
    names = (("grade", "Größe"), (",low,", ",süß,"), (",high,", ",säuer,"))
    substitute(study, *((old, normalize("NFD", new)) for old, new in names))
    named = [normalize(form, text) for form, text in (("NFC", 'target.column="Größe"'), ("NFD", '["süß", "säuer"]'))]
    with open_target_data(study, named[0], f"target.classes={named[1]}") as data:
        assert len(data.cohort) == 2 * N and set(data.cohort.label.tolist()) == {0, 1}


def test_the_value_that_a_refusal_names_is_accepted_in_both_proposed_places(study):
    edit(study, grade="Low")
    refused(lambda: open_target_data(study, *GRADE), "add it there, or to target.ignore")
    with open_target_data(study, *GRADE, 'target.ignore=["Low"]') as data:
        assert len(data.cohort) == 2 * N - 2
    with open_target_data(study, *GRADE, 'target.classes=["low", "high", "Low"]') as data:
        assert len(data.cohort) == 2 * N


def test_slides_without_a_label_are_excluded_and_named(study, capsys):
    edit(study, burden="")
    with open_target_data(study, *NUMBER) as data:
        assert len(data.cohort) == 2 * N - 2 and data.remark.endswith("left out: S0_0_0, S0_0_1")
    with open_target_data(study, *GRADE, 'target.ignore=["none"]') as data:
        assert len(data.cohort) == 2 * N
    trained(study, *NUMBER, OPEN, "train.rounds=1")
    said = " ".join(capsys.readouterr().err.split())
    assert "site S0: 2 of 48 slides have no label in S0.csv and are left out: S0_0_0, S0_0_1" in said


def test_a_real_hospitals_page_shows_no_single_patient(survival_run, tmp_path):
    study, run = Study(shutil.copytree(survival_run[0].root, tmp_path / "study")), survival_run[1]
    make_real(study, "S0", says="real = true")
    for pictures, shown in ((False, 1), (True, 2)):
        page = write_report(study, run, pictures=pictures).read_text()
        assert page.count("Log-rank p") + page.count("Too few patients") >= shown
        assert ("The test patients of S0" in page) is not pictures


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.data=features", "set train.data = 'mosaics'"),
        ("train.balance=true", "excludes train.balance: it works with classes alone"),
        ("audit.canaries=4", "excludes audit.canaries: it works with classes alone"),
        ("predict.model=ensemble", "excludes predict.model = ensemble: it works with classes alone"),
    ],
)
def test_settings_for_classes_only_are_refused_for_other_targets(study, override, said):
    refused(lambda: trained(study, *SURVIVAL, OPEN, override, method="proxyfl"), said)


@pytest.mark.parametrize("n_classes", [3, 5])
def test_cross_site_scores_cover_any_number_of_classes(study, monkeypatch, n_classes):
    """Both accuracies follow from the counts; an AUROC does not, and no page shows one."""
    monkeypatch.setattr(checks, "_check_stores_stay_apart", lambda *_: None)
    make_real(study, says=f'{REAL}\nallow = ["scores"]')
    names = [f"g{k}" for k in range(n_classes)]
    for site in study.site_names():
        table = pd.read_csv(study.root / f"{site}.csv")
        table["grade"] = [names[int(burden * n_classes)] for burden in table["burden"]]
        table.to_csv(study.root / f"{site}.csv", index=False)
    target = ('target.column="grade"', f"target.classes={json.dumps(names)}", "train.local_baseline=false")
    run = trained(study, *target, method="oneshot")
    document, truth = evaluate(study, run), []
    for site in study.site_names():
        rows = answers(study.root / run, site)
        told = [row for row in rows if sum(one["truth"] == row["truth"] for one in rows) >= MIN_EXAMPLES]
        truth += [row["truth"] for row in told]
    merged = document["cross_site"]["models"]["shared"]["merged"]
    assert (merged["n"], merged["auroc"], merged["auroc_within"]) == (len(truth), None, None)
    folder = RunFolder(study.root / run)
    kept = folder.site_folder("S0").read_document("scores")
    table = np.sum([one["confusion"] for one in kept["counts"]["shared"].values()], axis=0)
    recalls = [row[k] / row.sum() for k, row in enumerate(table) if row.sum()]
    assert merged["accuracy"] == table.trace() / len(truth)
    assert merged["macro_accuracy"] == pytest.approx(np.mean(recalls))
    assert any("cross-site accuracy" in str(line) for line in render_evaluation_lines(document))
    parts = document["cross_site"]["models"]["shared"]["hospitals"]
    assert all(0 < part["n_classes"] < n_classes for part in parts.values())  # of few examples nothing is told
    for page in (write_report(study, run).read_text(), render_coordinator(folder.read("summary"), kept)):
        assert "Only counts left the hospitals" in page
        assert "Macro-accuracy is the mean over the classes that occur, at" in page
    described = describe_clinically(study, [run])["sites"][0]
    assert [*described["classes"]] == names and described["point"] is None


YEARS = [0.1, 0.1, 0.3, 0.3, 0.3, 0.7, 0.7, 1.1, 1.1, 1.5]


@judged
@pytest.mark.parametrize("unit", [1.0, 1 / 365.25, 30.4375 / 365.25, 0.1])
@pytest.mark.parametrize("kind", [np.float64, np.float32])
def test_an_event_at_the_end_of_an_interval_is_before_it_whatever_the_unit(unit, kind):
    """Decimals of years, days in years, months in years: what single precision can't hold; by scikit-survival."""
    event = np.array([1, 1, 1, 0, 1, 1, 1, 0, 1, 0])
    times, ends = np.array(YEARS) * unit, [end * unit for end in (0.1, 0.3, 0.7, 1.1)]
    said = np.tile([0.8, 0.6, 0.4, 0.2], (10, 1))
    known = np.array([*zip(event.astype(bool), times, strict=True)], dtype=[("e", bool), ("t", float)])
    right = sksurv.integrated_brier_score(known, known, said, ends)
    task, truth = SurvivalTask(tuple(ends)), np.stack([times, event], axis=1).astype(kind)
    assert task.compute_scores(said, truth)["integrated_brier"] == pytest.approx(right, rel=1e-6)
    at_end = torch.from_numpy(truth)[[0, 2, 5, 8]]  # who had the event at the end of each interval
    assert target_columns(task, at_end).tolist() == [0, 1, 2, 3]


def test_times_and_numbers_of_a_table_reach_the_score_with_all_their_digits(study):
    edit(study, months="1.1", burden="20240115.123456")
    with open_target_data(study, *SURVIVAL[:2], "target.intervals=[0.1, 1.1, 365.2501, 365.2502]") as data:
        assert data.cohort.label.dtype == np.float64 and 1.1 in data.cohort.label[:, 0]
        assert len(set(data.classes)) == 4  # a column of predictions.csv each
    with open_target_data(study, NUMBER[0], "target.range=[0, 30000000]") as data:
        assert 20240115.123456 in data.cohort.label
    seconds = NumberTask(1.7e9, 1.7e9 + 1000)
    outputs, truth = torch.tensor([[0.5], [-1.0]]), torch.tensor([1.7e9 + 750, 1.7e9], dtype=torch.float64)
    assert seconds.compute_losses(outputs, truth).tolist() == [0, 0]
    assert seconds.predict(outputs.double()).flatten().tolist() == truth.tolist()


@pytest.mark.parametrize(
    ("target", "change"),
    [
        (GRADE, {"grade": "medium"}),
        (NUMBER, {"burden": "7"}),
        (NUMBER, {"burden": "much"}),
        (SURVIVAL, {"dead": "perhaps"}),
        (SURVIVAL, {"months": "-3"}),
    ],
)
def test_a_real_site_excludes_unexpected_values_and_its_disclosed_n_is_unchanged(study, target, change):
    """A failure or a changed n would disclose the value to others; the local log names line and value."""

    def seen():
        with open_data(study, "S0", study.load_pipeline("q", target)) as data:
            return data.remark, set(data.full_cohort.patient), data.list_eligible().patient.tolist()

    make_real(study, "S0")
    _, everybody, counted = seen()
    edit(study, **change)
    (key, value), (remark, left, still) = next(iter(change.items())), seen()
    assert len(everybody - left) == 1 and left < everybody and still == counted
    assert "values were not agreed on, such as S0.csv" in remark and f"{key} = " in remark and value in remark
