"""Tests of `compare`: paired tests, rows of methods, the local baseline, verdicts and the page."""

import copy
import html
import io
import json
import os
import re
import shlex
import shutil
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
from conftest import REAL, make_study, refused, write_store
from PIL import Image
from scipy import stats
from test_report import Document
from training_runs import csv_rows, trained

from wsi_fl.evidence import benefit, benefit_figure, compare_runs, comparison_findings, comparison_page
from wsi_fl.evidence.benefit import build_score_table, estimate_benefit
from wsi_fl.evidence.compare import _list_local_answers, compare_methods, render_comparison_lines
from wsi_fl.evidence.comparison_page import ChartRow, render_comparison_png
from wsi_fl.evidence.verdict import Estimate, decide_verdict, holm_adjust
from wsi_fl.report.figures import load_palette
from wsi_fl.stages.evaluation.evaluate import evaluate
from wsi_fl.stages.evaluation.evaluation_lines import render_evaluation_lines
from wsi_fl.stages.evaluation.write_report import write_report
from wsi_fl.stages.runtime.console import TextTable
from wsi_fl.stages.training.finished_runs import FinishedRun
from wsi_fl.study.pipeline import Pipeline
from wsi_fl.system.files import write_sealed
from wsi_fl.types import WsiFlError

QUICK = ["train.rounds=1", "train.lr=0.002", "evaluate.bootstrap=0", "model.private=mlp"]
KINDS = ("local", "federated", "pooled")


def test_a_test_that_could_not_be_made_does_not_count_in_holms_correction():
    assert holm_adjust([0.01, 0.04, None, 0.03, 0.005]) == pytest.approx([0.03, 0.06, None, 0.06, 0.02])
    assert holm_adjust([None]) == [None]


def run(study, method, *overrides):
    return trained(study, method, *QUICK, *overrides)["run"]


@pytest.fixture(scope="module")
def series(tmp_path_factory):
    """(study, document) of two methods with three seeds each and a baseline trained by `compare`."""
    study = make_study(tmp_path_factory.mktemp("compare") / "study", n_sites=2)
    for seed in range(3):
        for method in ("proxyfl", "fedavg"):
            run(study, method, f"train.seed={seed}")
    return study, compare_methods(study, ["1-6"])


def evaluation(study, name):
    return json.loads((study.runs_path / name / "evaluation.json").read_text())


def find_row(document, method):
    (row,) = [row for row in document["rows"] if row["method"] == method]
    return row


def test_rows_hold_mean_and_sd_over_sites_and_seeds(series):
    study, document = series
    assert document["on"] == "merged"
    labels = {"ProxyFL with DP", "FedAvg with DP", "Regular without DP"}
    assert {row["label"] for row in document["rows"]} == labels
    means = [row["accuracy"]["mean"] for row in document["rows"]]
    assert means == sorted(means, reverse=True)
    for row in document["rows"]:
        assert (row["seeds"], row["n_sites"], len(row["runs"])) == ([0, 1, 2], 2, 3)
        sites = pd.DataFrame([site for name in row["runs"] for site in evaluation(study, name)["sites"]])
        for metric in ("accuracy", "macro_accuracy", "auroc"):
            mean, sd = sites[metric].mean(), sites[metric].std(ddof=0)
            assert row[metric] == pytest.approx({"mean": mean, "sd": sd, "n": 6})
        assert row["own_accuracy"]["mean"] == pytest.approx(np.mean([own["accuracy"] for own in sites["own"]]))
        assert row["sites"]["S1"] == pytest.approx(sites["accuracy"][sites["site"] == "S1"].mean())


def test_rows_hold_privacy_and_communication(series):
    study, document = series
    summaries = [json.loads(path.read_text()) for path in study.runs_path.glob("*-proxyfl-*/summary.json")]
    proxyfl, fedavg, alone = (find_row(document, method) for method in ("proxyfl", "fedavg", "regular"))
    assert (proxyfl["dp"], proxyfl["guarantee"]) == (True, "guaranteed")
    assert proxyfl["epsilon"] == max(site["epsilon"] for s in summaries for site in s["sites"])
    assert (alone["dp"], alone["guarantee"], alone["epsilon"]) == (False, "none", None)
    sent, hub = proxyfl["communication"], fedavg["communication"]
    total = summaries[0]["communication"]
    assert sent["messages"] == hub["messages"] == 1  # the hub sends to the other site, which sends to it
    assert sent["bytes"] == sent["busiest_bytes"] == total["bytes"] / total["messages"]
    assert alone["communication"]["bytes"] == 0
    assert proxyfl["seconds_per_round"] == pytest.approx(np.mean([s["seconds"] for s in summaries]))


def test_differences_are_paired_by_seed_and_corrected(series):
    study, document = series
    assert (document["baseline"], document["reference"]) == ("Regular without DP", "ProxyFL with DP")
    runs = {row["label"]: row["runs"] for row in document["rows"]}

    def by_seed(label, metric):
        return [np.mean([s[metric] for s in evaluation(study, name)["sites"]]) for name in runs[label]]

    for metric in ("accuracy", "macro_accuracy", "auroc"):  # and "own_accuracy"
        tests = [test for test in document["paired"] if test["metric"] == metric]
        assert {(test["a"].split()[0], test["b"].split()[0]) for test in tests} == {
            ("ProxyFL", "Regular"), ("FedAvg", "Regular"), ("FedAvg", "ProxyFL"),
        }  # fmt: skip
        for test in tests:
            sides = [by_seed(test[side], metric) for side in ("a", "b")]
            assert (test["n"], test["unit"]) == (3, "seed")
            assert test["difference"] == pytest.approx(np.mean(sides[0]) - np.mean(sides[1]))
            assert test["sd"] == pytest.approx(np.subtract(*sides).std(ddof=1), abs=1e-9)
            varies = np.ptp(np.subtract(*sides)) > 1e-9
            assert test["p"] == (pytest.approx(stats.ttest_rel(*sides).pvalue) if varies else None)
        assert [test["p_holm"] for test in tests] == holm_adjust([test["p"] for test in tests])


def test_a_missing_baseline_is_trained_like_the_runs_and_reused_the_next_time(series):
    study, document = series
    trained = sorted(study.runs_path.glob("*-regular-*"))
    assert [path.name for path in trained] == find_row(document, "regular")["runs"]
    assert "seeds 0, 1, 2 was trained for this comparison" in document["notes"][0]
    for path in trained:
        config = (path / "config.toml").read_text()
        assert "enabled = false" in config and "rounds = 1" in config and "lr = 0.002" in config
        assert json.loads((path / "manifest.json").read_text())["pipeline"] == "small"
    again = compare_methods(study, ["1-6"])
    assert sorted(study.runs_path.glob("*-regular-*")) == trained
    assert again["rows"] == document["rows"] and again["page"] == document["page"]
    assert not any("trained for this" in note for note in again["notes"])


def test_the_first_run_is_the_reference_and_may_be_the_baseline(series):
    study, document = series
    first = find_row(document, "regular")["runs"][0]
    turned = compare_methods(study, [first, "00001", "runs/*-fedavg-*"])
    assert turned["reference"] == turned["baseline"] == "Regular without DP"
    units = {t["a"]: t["unit"] for t in turned["paired"] if t["metric"] == "auroc"}
    assert units == {"FedAvg with DP": "seed", "ProxyFL with DP": "site"}
    assert any("fewer than three common seeds" in note for note in turned["notes"])
    assert find_row(turned, "regular")["seeds"] == [0, 1, 2], "completed for the seeds of the others"


def test_page_figure_and_table_are_written(series):
    study, document = series
    page = (study.root / document["page"]).read_text()
    seen = Document(page)
    table = seen.table("Method", "Macro-accuracy", "ε")
    assert set(table) == {"ProxyFL with DP", "FedAvg with DP", "Regular (baseline) without DP"}
    assert table["Regular (baseline) without DP"][-2] == "nothing"
    assert len(seen.table("Method", "against")) >= 2
    for finding in document["findings"]:
        assert finding["text"] in seen.text
        assert "take part" not in finding["text"]  # a verdict on all sites
    assert sum(tag == "svg" for tag, _ in seen.tags) == 4
    assert page.index("Benefit of federation for each hospital") < page.index(document["findings"][0]["text"][:40])
    assert "script" not in {tag for tag, _ in seen.tags}
    assert "http://www" not in page.replace("http://www.w3.org", "")
    for path, width in ((document["benefit"]["figure"], 1000), (document["figure"], 1500)):
        with Image.open(study.root / path) as image:
            assert image.size[0] > width and len(image.convert("RGB").getcolors(2**20)) > 50, "drawn in colour"
    rows = csv_rows(study.root / document["table"])
    assert [row["label"] for row in rows] == [row["label"] for row in document["rows"]]
    assert float(rows[0]["accuracy_mean"]) == document["rows"][0]["accuracy"]["mean"]
    assert {row["method"] for row in rows if row["epsilon"] == ""} == {"regular"}


def test_the_benefit_of_federation_is_paired_by_seed_and_patch(series):
    found = (document := series[1])["benefit"]
    assert [found[kind] for kind in KINDS] == [document["baseline"], "ProxyFL with DP", None]
    assert [site["site"] for site in found["sites"]] == ["S0", "S1"]
    rows = {row["label"]: row for row in document["rows"]}
    for site in [*found["sites"], {**found["all"], "site": None}]:
        for kind in ("local", "federated"):
            row = rows[found[kind]]
            expected = row["sites"][site["site"]] if site["site"] else row["accuracy"]["mean"]
            assert site[kind]["mean"] == pytest.approx(expected)
            assert 0 <= site[kind]["low"] <= site[kind]["mean"] <= site[kind]["high"] <= 1
        assert site["gain"]["mean"] == pytest.approx(site["federated"]["mean"] - site["local"]["mean"])
        assert site["gain"]["low"] <= site["gain"]["mean"] <= site["gain"]["high"]
    assert all(site["guarantee"] == "guaranteed" and site["epsilon"] > 0 for site in found["sites"])
    said = [line.text for line in render_comparison_lines(document) if not isinstance(line, TextTable)]
    by_site = [line for line in said if "by federation" in line]
    assert len(by_site) == 3 and all("by federation (ProxyFL with DP); " in line for line in by_site)


@pytest.fixture
def study_copy(series, tmp_path):
    """A copy of the study for a test to change."""
    shutil.copytree(series[0].root, tmp_path / "study")
    return type(series[0])(tmp_path / "study")


def test_the_pooled_gain_pairs_a_site_with_itself_where_another_lacks_predictions(series, study_copy):
    rows = {row["method"]: row["runs"] for row in series[1]["rows"]}
    for name in rows["regular"]:
        (study_copy.runs_path / name / "sites" / "S0" / "predictions.csv").unlink()
    kinds = {"local": rows["regular"], "federated": rows["proxyfl"]}
    runs = {kind: [FinishedRun.load(study_copy.runs_path / name) for name in names] for kind, names in kinds.items()}
    by_site = benefit.compare_by_site(runs, "merged")[1]
    assert by_site["S0"]["gain"] is None
    assert benefit.measure_benefit(runs, "merged")["gain"]["mean"] == pytest.approx(by_site["S1"]["gain"]["mean"])


def test_a_rare_class_at_one_site_makes_all_scores_balanced_accuracy(monkeypatch):
    labels = {"S0": "ttttffffff", "S1": "tfffffffff"}

    def score(name, *_):  # healthy in all cases; the store of S2 is at another hospital
        keys = [("S", f"p{k}", "", str(k)) for k in range(10)]
        return dict(zip(keys, [(float(c == "f"), c) for c in labels[name]], strict=True)) if name in labels else None

    monkeypatch.setattr(benefit, "read_example_scores", score)
    folder = SimpleNamespace(read=lambda _: None, site_folder=lambda name: name)
    for names in (("S0", "S1"), ("S2", "S1")):
        summary = {"sites": [{"site": name} for name in names]}
        run = SimpleNamespace(pipeline=Pipeline(), folder=folder, seed=0, summary=summary)
        measure, sites = benefit.compare_by_site({"local": [run], "federated": [run]}, "own")
        assert measure == "balanced accuracy"
        assert all(sites[name]["local"]["mean"] == pytest.approx(0.5) for name in names if name in labels)


def newer_than(path, other):
    later = other.stat().st_mtime + 1
    os.utime(path, (later, later))


def test_a_dropped_out_site_is_excluded_from_both_sides_of_a_pair(series, study_copy):
    study, document = study_copy, series[1]
    folder = study.runs_path / "00002-fedavg-small"
    for name, more in (("evaluation", {}), ("summary", {"lost": ["S0"]})):
        whole = json.loads((folder / f"{name}.json").read_text())
        write_sealed(folder / f"{name}.json", whole | more | {"sites": whole["sites"][1:]})
    newer_than(folder / "evaluation.json", folder / "summary.json")
    metrics = folder / "sites" / "S1" / "metrics.jsonl"  # its only line, for a site that sends more than others
    line = json.loads(metrics.read_text())
    metrics.write_text(json.dumps(line | {"bytes": 10 * line["bytes"]}) + "\n")
    found = compare_methods(study, ["1-6"])
    assert "Dropped out during training in some run: S0." in found["notes"]
    assert find_row(found, "fedavg")["accuracy"]["n"] == 5
    sent, before = (find_row(one, "fedavg")["communication"]["busiest_bytes"] for one in (found, document))
    assert sent == pytest.approx((10 + 1 + 1) / 3 * before)

    def means(method, seed, sites):
        run = find_row(document, method)["runs"][seed]
        return np.mean([s["accuracy"] for s in evaluation(study, run)["sites"] if s["site"] in sites])

    both = [("S1",), ("S0", "S1"), ("S0", "S1")]
    expected = np.mean([means("fedavg", k, s) - means("regular", k, s) for k, s in enumerate(both)])
    (test,) = [t for t in found["paired"] if t["a"][:6] == "FedAvg" and t["b"][:7] == "Regular"][:1]
    assert (test["metric"], test["n"]) == ("accuracy", 3)
    assert test["difference"] == pytest.approx(expected)


@pytest.mark.slow
def test_a_run_resumed_after_its_evaluation_is_evaluated_again(series, study_copy):
    study, document = study_copy, series[1]
    folder = study.runs_path / "00002-fedavg-small"
    early = evaluation(study, folder.name)
    write_sealed(folder / "evaluation.json", early | {"sites": early["sites"][:1]})
    newer_than(folder / "summary.json", folder / "evaluation.json")
    assert find_row(compare_methods(study, ["1-6"]), "fedavg")["accuracy"] == find_row(document, "fedavg")["accuracy"]


def test_differing_settings_make_rows_and_labels(pair):
    for alpha in (0.3, 0.9):
        run(pair, "proxyfl", f"train.alpha={alpha}", "train.beta=0.7")
    run(pair, "proxyfl", "train.alpha=0.9", "train.seed=1")
    run(pair, "regular", "train.alpha=0.5", "train.tune=true", "privacy.enabled=false", "privacy.sigma=9.0")
    document = compare_methods(pair, ["1-4"], baseline=False)
    rows = {row["label"]: row for row in document["rows"]}
    low, high = ("ProxyFL with DP, train.alpha=0.3", "ProxyFL with DP, train.alpha=0.9")
    assert set(rows) == {low, high, "Regular without DP"}
    assert (rows[high]["settings"], rows[high]["seeds"]) == ({"train.alpha": 0.9}, [0, 1])
    assert (rows["Regular without DP"]["seeds"], document["baseline"]) == ([0], "Regular without DP")
    (note,) = [note for note in document["notes"] if "not trained" in note]
    assert "seed 1" in note and len(list(pair.runs_path.glob("*-regular-*"))) == 1
    assert "train.alpha=0.3" in Document((pair.root / document["page"]).read_text()).text


def test_seeds_with_other_settings_of_a_site_file_are_not_averaged(study_copy):
    for name, line in (("00001-proxyfl-small", "batch_size = 9"), ("00004-fedavg-small", 'private_model = "cnn1"')):
        snapshot = study_copy.runs_path / name / "sites" / "S1" / "site.toml"
        snapshot.write_text(f"{snapshot.read_text()}{line}\n")
    rows = compare_methods(study_copy, ["1-6"], baseline=False)["rows"]
    assert {row["label"]: row["seeds"] for row in rows if row["seeds"]} == {
        "ProxyFL with DP, sites.S1.batch_size=9": [0],
        "ProxyFL with DP, sites.S1.batch_size=default": [1, 2],
        "FedAvg with DP, sites.S1.batch_size=default": [0, 1, 2],  # private_model has no effect on it
        "Regular without DP, sites.S1.batch_size=default": [0, 1, 2],
    }


def test_an_untuned_local_baseline_is_listed_beside_the_missing_tuned_one(pair):
    name = run(pair, "regular", "train.tune=false", "privacy.enabled=false")
    document = compare_methods(pair, [name], baseline=False)
    mine, missing = sorted(document["rows"], key=lambda row: not row["seeds"])
    assert mine["label"] == document["reference"] == "Regular without DP"
    assert missing["label"] == document["baseline"] and missing["settings"] == {"train.tune": True}


@pytest.mark.slow
def test_a_baseline_left_out_is_null_and_its_command_is_named(pair):
    name = run(pair, "proxyfl", "train.seed=4")
    document = compare_methods(pair, [name], baseline=False)
    row = find_row(document, "regular")
    assert document["baseline"] == row["label"] == document["rows"][-1]["label"]
    assert row["accuracy"] == {"mean": None, "sd": None, "n": 0}
    assert (row["seeds"], row["runs"], row["communication"]["bytes"]) == ([], [], None)
    assert document["paired"] == [] and not list(pair.runs_path.glob("*-regular-*"))
    assert "the benefit of federation is unknown" in document["findings"][0]["text"]
    Document((pair.root / document["page"]).read_text())
    words = shlex.split(re.search("`(.*)`", document["notes"][0])[1])
    assert words[:6] == ["wsi-fl", "train", "--method", "regular", "--pipeline", "small"]
    trained(pair, "regular", *words[7::2])
    assert find_row(compare_methods(pair, [name], baseline=False), "regular")["seeds"] == [4]


@pytest.mark.slow
def test_the_baseline_is_not_trained_on_a_rebuilt_store(pair):
    name = run(pair, "proxyfl")
    evaluate(pair, name)
    write_store(pair, "S1", seed=9, n_per_slide=10)
    document = compare_methods(pair, [name])
    assert "the store of S1 was rewritten since these runs" in document["notes"][0]
    other = run(pair, "proxyfl")
    refused(lambda: compare_methods(pair, [name, other]), "00002-proxyfl-small", "other patches", "site S1")


def test_unfinished_and_unknown_runs_are_refused(study_copy):
    (study_copy.runs_path / "00002-fedavg-small" / "summary.json").unlink()
    unfinished = "wsi-fl train --resume 00002-fedavg-small"
    refused(lambda: compare_methods(study_copy, ["1-6"]), unfinished, error=WsiFlError)
    refused(lambda: compare_methods(study_copy, []), "needs runs")
    for word in ("70-80", "*-cwt-*", "77"):
        refused(lambda word=word: compare_methods(study_copy, [word]), f"no run '{word}'")


def test_hospitals_that_keep_their_patches_train_the_baseline_in_separate_ranks(pair, monkeypatch):
    name = run(pair, "proxyfl")
    for path in (pair.root / "sites").glob("*.toml"):
        path.write_text(path.read_text().replace("real = false", REAL))
    asked = {}

    def instead_of_train(pair, **arguments):
        asked.update(arguments)
        raise WsiFlError("stop")

    monkeypatch.setattr(compare_runs, "train", instead_of_train)
    refused(lambda: compare_methods(pair, [name]), "stop", error=WsiFlError)
    assert (asked["backend"], asked["method"], asked["pipeline_name"]) == ("mpi", "regular", "small")
    assert "privacy.enabled=false" in asked["overrides"]
    shutil.rmtree(pair.root / "stores" / "S1")
    refused(lambda: compare_methods(pair, [name]), "stop", error=WsiFlError)
    assert asked["backend"] == "local" and 'sites=["S0"]' in asked["overrides"]
    document = compare_methods(pair, [name], baseline=False)
    assert document["on"] == "own" and """--set 'sites=["S0"]'""" in document["notes"][0]
    assert any("own site's test part" in note for note in document["notes"])
    assert "on each site's local test part" in Document((pair.root / document["page"]).read_text()).text
    row = find_row(document, "proxyfl")
    assert row["sites"].keys() == {"S0"} and row["accuracy"] == row["own_accuracy"]


def make_row(method, mean, *, dp=True, **more):
    """Make a row of the document."""
    scores = ("accuracy", "macro_accuracy", "auroc", "own_accuracy")
    return {
        **{"label": f"{method} {'with' if dp else 'without'} DP", "method": method, "dp": dp, "settings": {}},
        **{"guarantee": "nominal" if dp else "none", "epsilon": 12.3 if dp else None},
        **{"seeds": [0, 1, 2], "runs": ["00001-x"], "n_sites": 4, "sites": {"A": mean, "B": mean}},
        **{score: {"mean": mean, "sd": 0.02, "n": 12} for score in scores},
        "communication": {"messages": 1.0, "bytes": 8e5, "busiest_bytes": 8e5, "seconds": 0.1},
        "seconds_per_round": 2.0,
        **more,
    }


ALONE = make_row("regular", 0.73, dp=False)


def make_paired_test(row, difference, p, unit="seed", n=3):
    pair = {"a": row["label"], "b": ALONE["label"], "metric": "accuracy", "unit": unit}
    return pair | {"difference": difference, "sd": 0.01, "n": n, "p": p, "p_holm": p}


def of_all(gain, room):
    known, space = (one and Estimate(*one) for one in (gain, room))
    told = {"gain": known.build_document(), "pooled_gain": space and space.build_document(), "gap_closed": None}
    told |= {"local": {"mean": 0.6}, "federated": {"mean": 0.6 + gain[0]}, "pooled": {"mean": 0.6 + (room or [0])[0]}}
    return told | {"measure": "AUROC", "verdict": decide_verdict(known, space)}


PAYS, LOSES = "on average federation pays.", "on average federation does not pay."
UNKNOWN = "these runs do not show whether federation pays on average."


@pytest.mark.parametrize(
    ("difference", "sd", "unit", "gains", "tone", "said"),
    [
        (-0.29, 0.01, "seed", None, "bad", f"−0.290 (−0.315 to −0.265) over {{}}: {LOSES}"),
        (0.05, 0.01, "seed", None, "good", f"+0.050 (+0.025 to +0.075) over {{}}: {PAYS}"),
        (0.05, 0.01, "site", None, "unclear", f"+0.050 over {{}}: {UNKNOWN}"),
        (0.05, 0.03, "seed", None, "unclear", UNKNOWN),
        (0.004, 0.0001, "seed", None, "unclear", UNKNOWN),
        (-0.3, None, "seed", None, "unclear", UNKNOWN),
        (0.05, 0.01, "seed", ((0.05, 0.03, 0.07), None), "good", f"+0.050 (+0.030 to +0.070) over {{}}: {PAYS}"),
        (0.05, 0.01, "seed", ((-0.05, -0.07, -0.03), None), "bad", LOSES),
        (0.05, 0.01, "seed", ((0.05, -0.01, 0.12), None), "unclear", UNKNOWN),
        (0.05, 0.01, "seed", ((0.0, -0.01, 0.01), (0.0, -0.01, 0.01)), "unclear", "there is nothing to gain"),
    ],
)
def test_the_verdict_rests_on_the_gain_where_it_is_known_and_else_on_the_seeds(difference, sd, unit, gains, tone, said):
    ours = make_row("proxyfl", 0.73 + difference)
    test = make_paired_test(ours, difference, 1e-9, unit) | {"sd": sd}
    known = {ours["label"]: of_all(*gains)} if gains else None
    first, second = comparison_findings.list_comparison_findings([ours, ALONE], [test], ALONE["label"], gains=known)
    assert second.tone == tone and said.format(comparison_findings.LOCAL_BASELINE) in second.text, second.text
    reached, where = 0.73 + difference, "0.73"
    if gains:  # the means whose difference is the gain
        reached, where = 0.6 + gains[0][0], "0.60 in AUROC over all test patches"
    assert first.text == f"A local model without DP reaches {where} (4 sites, 3 seeds)."
    assert second.text.startswith(f"{ours['label']} reaches {reached:.2f} (ε nominal 12.3), ")
    assert second.text.count("reaches") == 1 and "p <" not in second.text


def test_the_pooled_gain_has_the_interval_of_the_verdict_and_no_reference_is_called_federation():
    rows = [make_row("proxyfl", 0.78), make_row("joint", 0.9, dp=False), make_row("regular", 0.55)]
    tests = [make_paired_test(row, row["accuracy"]["mean"] - 0.73, 0.2) for row in rows]
    gains = {rows[0]["label"]: of_all((0.05, 0.03, 0.07), (0.17, 0.12, 0.22))}
    *_, third, fourth = comparison_findings.list_comparison_findings([ALONE, *rows], tests, ALONE["label"], gains=gains)
    assert "reaches 0.77, +0.170 (+0.120 to +0.220) over" in third.text and "p =" not in third.text
    assert "reaches 0.55 (ε nominal 12.3) as a mean over sites and seeds, 0.18 below" in fourth.text
    assert "privacy forbids" in third.text and "what its noise costs" in fourth.text
    assert "federation" not in third.text + fourth.text


def test_the_report_of_a_run_agrees_with_the_comparison(series):
    study, _ = series
    document = compare_methods(study, ["1"])
    gain = document["benefit"]["all"]
    verdict = benefit_figure.verdict_words(gain, benefit_figure.ALL_SITES)
    said = f"{benefit_figure.gain_words(gain)} over {comparison_findings.LOCAL_BASELINE}: {verdict}."
    assert said in " ".join(one["text"] for one in document["findings"])
    page = html.unescape(write_report(study, "1").read_text(encoding="utf-8"))
    assert said in page
    assert f"Gain in {gain['measure']}" in page and "federation helped" not in page


@pytest.mark.parametrize(
    ("pooled", "share"), [((0.9, 0.9, 0.8, 0.9), True), ((0.9, 0.2, 0.1, 0.5), False), (None, False)]
)
def test_the_gap_closed_is_reported_only_where_pooling_has_a_gain(pooled, share):
    def answers(values, n):  # of n patients with two examples each: two alone prove nothing, however alike
        names = [f"S\np{k // 2}\n{k}" for k in range(2 * n)]
        frame = pd.DataFrame({"value": np.resize(values, 2 * n), "weight": 1.0}, names)
        return build_score_table({0: frame}, "accuracy", {})

    for n, verdict in ((24, "join"), (2, "inconclusive")):
        known = {"local": answers([0.4] * 4, n), "federated": answers([0.6] * 4, n)}
        found = estimate_benefit(known | ({"pooled": answers(pooled, n)} if pooled else {}))
        assert found["verdict"] == verdict and (found["gain"]["low"] < 0) == (n == 2)
        assert n == 2 or (found["gap_closed"] is not None) == share


def test_cautions_name_the_flaws_of_a_comparison():
    a, b = make_row("proxyfl", 0.7), make_row("fedavg", 0.6, epsilon=2.0, seeds=[0], guarantee="guaranteed")
    text = " ".join(comparison_findings.list_cautions([ALONE, a, b], [make_paired_test(a, -0.03, 0.2, "site", 4)]))
    for said in ("too small", "different ε (2.0–12.3)", "nominal ε is no guarantee", "same seeds", "a single run"):
        assert said in text
    assert "a single run" not in " ".join(comparison_findings.list_cautions([ALONE, a], []))
    (always,) = comparison_findings.list_cautions([ALONE, ALONE], [make_paired_test(ALONE, 0.0, None)])
    assert "chose their regularisation" in always


def test_a_note_tells_for_which_methods_local_models_answer_in_place_of_their_own():
    runs = [SimpleNamespace(method=name) for name in ("fedavg", "fedavg", "proxyfl", "regular")]
    answers = [("local", "private"), ("local", "local"), ("ensemble", "private"), ("local", "local")]
    evaluations = [{"sites": [{"model": model} for model in models]} for models in answers]
    (note,) = _list_local_answers(runs, evaluations)
    assert note.startswith("FedAvg: 3 of 4 prediction models are local models") and "predict.model=private" in note


def test_a_single_shared_model_is_one_line_of_scores_without_a_spread(series, study_copy):
    study = study_copy
    shared = run(study, "fedavg", "privacy.enabled=false", "train.local_baseline=false")
    document = evaluate(study, shared)
    assert document["shared"] and document["merged"]["accuracy"]["sd"] == 0
    (table,) = [line for line in render_evaluation_lines(document) if isinstance(line, TextTable)]
    first = [row and row[0] for row in table.rows]
    assert "shared model" in table.title and first == ["S0", "S1", None, "all"]
    page = write_report(study, shared).read_text()
    assert "their shared model reaches" in " ".join(page.split())
    assert "± 0.00" not in page.split("Against the other runs")[0]
    assert not evaluation(study, find_row(series[1], "regular")["runs"][0])["shared"]


def test_the_figure_of_the_benefit_has_its_whole_legend():
    mean = {"mean": 0.8, "low": 0.7, "high": 0.9}
    row = {"site": "A", "local": mean, "federated": mean, "pooled": mean, "gain": mean, "epsilon": 3.0}
    document = {"sites": [row | {"guarantee": "guaranteed"}], "measure": "accuracy"}
    label = "ProxyFL with DP, privacy.clip = 0.7, model.proxy = mlp"
    png = benefit_figure.render_benefit_png(document | {"federated": label})
    with Image.open(io.BytesIO(png)) as image:
        edge = np.asarray(image.convert("RGB"))[:, -12:]
    assert (edge == edge[0, 0]).all(), "nothing is cut off at the right"


def test_many_methods_and_hostile_names_neither_break_the_page_nor_hide_its_text(series):
    document, rng = copy.deepcopy(series[1]), np.random.default_rng(0)
    found = document["benefit"] | {"pooled": "Joint without DP"}
    for site in found["sites"]:
        site["site"] = f"<b>hospital {site['site']}</b>"
    for row in (*found["sites"], found["all"]):
        row["pooled"] = {"mean": 0.75, "low": 0.7, "high": 0.8}
    found["sites"][-1] |= {"gain": {"mean": -0.01, "low": None, "high": None}, "epsilon": None}
    rows, drawn = [ALONE], []
    for k in range(11):  # more than colours
        change = {"train.alpha": k / 10, "privacy.clip": 0.7, "model.proxy": "<b>gn_cnn_small</b>"}
        label = f"ProxyFL with DP, {comparison_findings.settings_words(change)}"
        rows.append(make_row("proxyfl", 0.5 + k / 40, label=label, settings=change))
    for row in rows:
        mean = row["accuracy"]["mean"]
        curves = [[(r, mean - 0.3 / r + rng.normal(0, 0.01)) for r in range(1, 7)] for _ in range(4)]
        values = {seed: (mean + rng.normal(0, 0.02, 4)).tolist() for seed in range(3)}
        drawn.append(ChartRow(row, not row["dp"], row["accuracy"], values, curves))
    paired = [make_paired_test(row, row["accuracy"]["mean"] - 0.7, 0.01) for row in rows[1:]]
    document |= {"rows": rows, "baseline": ALONE["label"], "reference": rows[1]["label"], "paired": paired}
    document |= {"findings": [], "notes": ["<i>a note</i>"], "benefit": found, "examples": "patients"}
    page = comparison_page.render_comparison_page(document, drawn, created="today", sites=["A", "B", "<u>C</u>"])
    seen, first = Document(page), found["sites"][0]
    assert "−0.010 no differential privacy" in seen.text
    assert f"{benefit_figure.gain_words(first)} for ε = {first['epsilon']:.3g}, guaranteed" in seen.text
    assert "paired by seed and patient" in seen.text, "gains are paired by what is asked about"
    assert "more methods than colours" in seen.text
    assert not {"b", "i", "u"} & {tag for tag, _ in seen.tags}
    assert not re.search(r"\b(None|nan|Undefined)\b", seen.text)
    fixed = re.findall(r"(?:stroke|fill): #\w+", page.split("</style>")[1])
    assert not fixed, "colours are the page's variables"
    chart = benefit_figure.plot_benefit(found)
    assert "all sites" in chart.svg and "pooled" in chart.alt
    assert benefit_figure.render_benefit_png(found)
    with Image.open(io.BytesIO(render_comparison_png(drawn, "Accuracy"))) as image:
        colors = {color for _, color in image.convert("RGB").getcolors(2**20)}
    for name in ("ink", "s0", "paper"):
        assert tuple(bytes.fromhex(load_palette()[name][1:])) in colors


def test_the_command_prints_one_document(series, wsi_fl):
    done = wsi_fl("compare", "1-6", "--json", cwd=series[0].root)
    assert json.loads(done.stdout)["rows"] == series[1]["rows"]
