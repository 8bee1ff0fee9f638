"""The prediction table reads back as written, and every score of an evaluation is a group of its rows."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
from conftest import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.metrics import balanced_accuracy_score, roc_auc_score

from wsi_fl.data.cohort import tabulate_truth
from wsi_fl.data.prediction_table import PredictionTable, score_voting_rules
from wsi_fl.data.tasks import CLASSES, NumberTask, SurvivalTask
from wsi_fl.runs.run_folder import RunFolder
from wsi_fl.runs.site_folder import SiteFolder
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.evaluation.write_predictions import (
    compute_seal,
    read_example_scores,
    read_predictions,
    write_predictions,
)
from wsi_fl.stages.training.train import train
from wsi_fl.types import WsiFlError


def table_of(task, truth, outputs, **about):
    n, rng = len(truth), np.random.default_rng(0)
    said = {m: rng.random((n, len(outputs))) for m in ("private", "proxy")}
    if task.kind == "classes":
        said = {m: one / one.sum(1, keepdims=True) for m, one in said.items()}
    names = np.array(['a, "b"\nc', "ünder 1%d", "plain", "plain"])[np.arange(n) % 4]
    part = np.array(["S1", "S0"])[np.arange(n) // 3 % 2]
    obs = pd.DataFrame({"part": part, "slide": names, "patient": names[::-1], **about}).assign(**tabulate_truth(truth))
    return PredictionTable("S0", "proxy", obs, said, outputs, task)


@pytest.mark.parametrize(
    ("task", "truth", "outputs"),
    [
        (CLASSES, np.array([0, 1, 1, 0, 1, 0]), ("healthy", "p_tumor, solid")),
        (NumberTask(0, 9e9), np.linspace(0, 8.7654321e9, 6).round() + 0.1, ("cells",)),
        (SurvivalTask((6, 12.5)), np.array([[0.1, 1], [1.1, 0]] * 3), ("6", "12.5")),
    ],
)
def test_a_written_table_reads_back(tmp_path, task, truth, outputs):
    folder = SiteFolder(tmp_path / "S0")
    table = table_of(task, truth, outputs, x_l0=np.arange(6), y_l0=np.arange(6) * 7)
    write_predictions(folder, table)
    found = read_predictions(folder, task)
    assert (found.site, found.model, found.outputs, set(found.predictions)) == ("S0", "proxy", outputs, {"proxy"})
    for name in ("part", "slide", "patient"):
        assert found.obs[name].tolist() == table.obs[name].tolist()
    assert np.array_equal(found.model_predictions, table.model_predictions) and np.array_equal(found.truth, truth)
    assert found.obs["y_l0"].tolist() == ["0", "7", "14", "21", "28", "35"]
    assert (len(found.local_rows), [*found.group_by("part")]) == (3, ["S1", "S0"])
    assert read_predictions(folder, NumberTask(0, 1) if task is CLASSES else CLASSES) is None
    assert (read_example_scores(folder, "own") is None) == (task is not CLASSES)
    assert read_predictions(SiteFolder(tmp_path / "S1"), task) is None


def test_an_empty_table_reads_back_empty_and_another_version_is_refused(tmp_path):
    folder = SiteFolder(tmp_path / "S0")
    write_predictions(folder, table_of(CLASSES, np.zeros(0, np.int64), ("a", "b")))
    found = read_predictions(folder)
    unknown = dict.fromkeys(("accuracy", "macro_accuracy", "auroc"))
    assert len(found) == 0 and found.compute_scores() == {"n": 0, **unknown}
    (folder.path / "predictions.csv").write_text("site,slide,patient,label,p_a,p_b\nS0,s,p,a,0.6,0.4\n")
    refused(lambda: read_predictions(folder), "evaluate the run again", error=WsiFlError)


def test_every_score_of_an_evaluation_is_a_group_by_in_pandas(pair):
    run = train(pair, method="proxyfl", overrides=["privacy.enabled=false", "train.rounds=1"], backend="local")
    document, folders = evaluate(pair, run["run"]), RunFolder(pair.find_run(run["run"]))

    def scores(rows):
        best = rows.filter(like="p_").idxmax(axis=1).str.removeprefix("p_")
        return {
            "n": len(rows),
            "accuracy": pytest.approx((best == rows.truth).mean()),
            "macro_accuracy": pytest.approx(balanced_accuracy_score(rows.truth, best)),
            "auroc": pytest.approx(roc_auc_score(rows.truth == "tumor", rows.p_tumor)),
        }

    for row in document["sites"]:
        table = pd.read_csv(folders.site_folder(row["site"]).path / "predictions.csv")
        mine = table[table.selected]
        own = mine.part == row["site"]
        for rows, told in ((mine, row), (mine[own], row["own"]), (mine[~own], row["external"])):
            assert {name: told[name] for name in scores(rows)} == scores(rows)
        assert {part: scores(rows) for part, rows in mine.groupby("part")} == row["parts"]
        assert table.groupby("model").apply(scores).to_dict() == {
            model: {name: one[name] for name in ("n", "accuracy", "macro_accuracy", "auroc")}
            for model, one in row["models"].items()
        }


@st.composite
def said(draw):
    n_sites, n, k = draw(st.integers(2, 5)), draw(st.integers(1, 6)), draw(st.integers(2, 4))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    return [rng.dirichlet(np.ones(k), n) for _ in range(n_sites)], rng.integers(1, 20, n_sites).astype(float)


def decide(sites, rule, weights, row):
    """Return the class of an example under a rule: the only label that makes it correct, None where it is rejected."""
    one = [p[row : row + 1] for p in sites]
    labels = range(sites[0].shape[1])
    return next((c for c in labels if score_voting_rules(one, np.array([c]), weights)[rule]["accuracy"]), None)


@given(said())
@settings(max_examples=20, deadline=None)
def test_votes_match_counting_and_means_averaging(case):
    sites, weights = case
    by_weight = sum(w * p for w, p in zip(weights, sites, strict=True))
    for i in range(len(sites[0])):
        votes, mean = [int(p[i].argmax()) for p in sites], sum(p[i] for p in sites)
        count = Counter(votes)
        first, most = count.most_common(1)[0]
        assert decide(sites, "absolute", weights, i) == (first if most > len(sites) / 2 else None)
        tied = [c for c in count if count[c] == most]
        assert decide(sites, "relative", weights, i) == max(tied, key=lambda c: mean[c])
        weight = {c: sum(w for v, w in zip(votes, weights, strict=True) if v == c) for c in count}
        assert weight[decide(sites, "weighted", weights, i)] == pytest.approx(max(weight.values()))
        assert decide(sites, "mean", weights, i) == mean.argmax()
        assert decide(sites, "weighted_mean", weights, i) == by_weight[i].argmax()


def test_two_uncertain_sites_win_the_vote_not_the_mean_and_rejected_examples_count_as_wrong():
    sites = [np.array([[0.99, 0.01]]), np.array([[0.45, 0.55]]), np.array([[0.45, 0.55]])]
    found = {rule: decide(sites, rule, [5, 1, 1], 0) for rule in ("relative", "absolute", "mean", "weighted")}
    assert found == {"relative": 1, "absolute": 1, "mean": 0, "weighted": 0}
    found = score_voting_rules([np.eye(3)[[k, 0]] for k in range(3)], np.array([0, 0]), [1, 1, 1])
    assert (found["absolute"]["rejected"], found["absolute"]["accuracy"]) == (1, 0.5)


def evaluate_table(root, task, table, *, sealed):
    """Return a site's folder in an evaluated run; unsealed ones are from a version without seals."""
    run = RunFolder(root / "runs" / "00001-x")
    folder = run.site_folder("S0")
    write_predictions(folder, table)
    row = {"site": "S0", "n": len(table), **({"predictions": compute_seal(folder)} if sealed else {})}
    run.write("evaluation", {"run": "runs/00001-x", "model": "proxy", "merged": None, "sites": [row], "models": {}})
    return folder


def cut(lines):
    return [*lines[:-1], lines[-1][: len(lines[-1]) // 2]]


def replace_cell(column, value):
    def change(lines):
        cells = lines[2].split(",")
        cells[column] = value
        return [*lines[:2], ",".join(cells), *lines[3:]]

    return change


DAMAGE = {
    "half": lambda lines: lines[: len(lines) // 2],
    "first line alone": lambda lines: lines[:1],
    "doubled": lambda lines: [lines[0], *[line for line in lines[1:] for _ in range(2)]],
    "empty": lambda lines: [],
    "cut off": cut,
    "2.0": replace_cell(-1, "2.0"),
    "NaN": replace_cell(-1, "nan"),
    "inf": replace_cell(-2, "inf"),
    "negative": replace_cell(-1, "-0.25"),
    "no sum": replace_cell(-1, "0.123"),
    "no number": replace_cell(-1, "0,5"),
    "strange class": replace_cell(-3, "benign"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
@pytest.mark.parametrize("sealed", [True, False])
def test_a_table_that_is_not_as_it_was_evaluated_is_refused(tmp_path, damage, sealed):
    """Length and digest are checked, or the contents for earlier versions, which kept neither."""
    table = table_of(CLASSES, np.array([0, 1, 1, 0, 1, 0]), ("healthy", "tumor"), x_l0=np.arange(6))
    table = replace(table, obs=table.obs.assign(slide=[f"s{k}" for k in range(6)], patient=[*"abcdef"]))
    folder = evaluate_table(tmp_path, CLASSES, table, sealed=sealed)
    path = folder.path / "predictions.csv"
    lines = path.read_text().splitlines()
    assert len(read_predictions(folder)) == 6
    path.write_text("\n".join(damage(lines)) + "\n" * bool(damage(lines)))
    refused(lambda: read_predictions(folder), "predictions.csv", "wsi-fl evaluate 00001-x", error=WsiFlError)


@pytest.mark.parametrize(
    ("task", "truth", "value"),
    [
        (NumberTask(0, 9), np.arange(6) / 7, "inf"),
        (SurvivalTask((6, 12.5)), np.array([[0.1, 1], [1.1, 0]] * 3), "1.5"),
        (SurvivalTask((6, 12.5)), np.array([[0.1, 1], [1.1, 0]] * 3), "nan"),
    ],
)
def test_impossible_values_and_probabilities_are_refused(tmp_path, task, truth, value):
    outputs = ("burden",) if task.kind == "number" else ("6", "12.5")
    folder = evaluate_table(tmp_path, task, table_of(task, truth, outputs, x_l0=np.arange(6)), sealed=False)
    path = folder.path / "predictions.csv"
    assert len(read_predictions(folder, task)) == 6
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:-1], ",".join([*lines[-1].split(",")[:-1], value])]) + "\n")
    refused(lambda: read_predictions(folder, task), "predictions.csv", error=WsiFlError)
