"""`compare`: paired tests against their definition, rows from runs, the baseline that is always there, the page."""

import csv
import html
import io
import json
import os
import re
import shlex
import shutil

import numpy as np
import pytest
from conftest import REAL, make_study, nightly, refused, write_store
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image
from scipy import stats
from test_report import Document

from wsi_fl.learning.verdict import Estimate, holm, paired, verdict
from wsi_fl.report import comparison, worth
from wsi_fl.report.comparison import Series, png
from wsi_fl.report.figures import palette
from wsi_fl.stages.answers import compare_runs
from wsi_fl.stages.answers.compare import compare
from wsi_fl.stages.answers.compare_runs import settings
from wsi_fl.stages.answers.compare_worth import Said, _compared
from wsi_fl.stages.answers.evaluate import evaluate, evaluation_lines
from wsi_fl.stages.answers.report import report
from wsi_fl.stages.training.train import train
from wsi_fl.stages.work.console import Line, Table
from wsi_fl.study.pipeline import Pipeline, Privacy
from wsi_fl.system.files import write_sealed
from wsi_fl.types import WsiFlError

QUICK = ["train.rounds=1", "train.lr=0.002", "evaluate.bootstrap=0"]
KINDS = ("alone", "joined", "pooled")
probability = st.floats(0, 1)


def test_the_paired_test_is_students():
    a, b = [0.71, 0.74, 0.70, 0.69], [0.64, 0.70, 0.66, 0.70]
    found, differences = paired(a, b), np.subtract(a, b)
    assert found.difference == pytest.approx(differences.mean())
    assert found.sd == pytest.approx(differences.std(ddof=1))
    assert found.p == pytest.approx(stats.ttest_1samp(differences, 0).pvalue)
    assert (paired(b, a).difference, paired(b, a).p) == pytest.approx((-found.difference, found.p))


@given(st.lists(st.one_of(st.none(), probability), max_size=8))
def test_holm_by_its_definition_and_a_test_that_could_not_be_made_does_not_count(p_values):
    corrected = holm(p_values)
    assert [p is None for p in p_values] == [c is None for c in corrected]
    pairs = sorted((p, c) for p, c in zip(p_values, corrected, strict=True) if p is not None)
    p, found = np.array(pairs).reshape(-1, 2).T
    by_hand = np.maximum.accumulate(np.minimum(1, p * np.arange(len(p), 0, -1)))
    assert found == pytest.approx(by_hand)
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])


def run(study, method, *overrides):
    return train(study, method=method, backend="local", overrides=[*QUICK, *overrides])["run"]


@pytest.fixture(scope="module")
def series(tmp_path_factory):
    """(study, document) of two methods with three seeds each, whose baseline was still to be trained."""
    study = make_study(tmp_path_factory.mktemp("compare") / "study", n_sites=3)
    for seed in range(3):
        for method in ("proxyfl", "fedavg"):
            run(study, method, f"train.seed={seed}")
    return study, compare(study, ["1-6"])


def evaluation(study, name):
    return json.loads((study.runs / name / "evaluation.json").read_text())


def row_of(document, method):
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
        assert (row["seeds"], row["n_sites"], len(row["runs"])) == ([0, 1, 2], 3, 3)
        sites = [site for name in row["runs"] for site in evaluation(study, name)["sites"]]
        for metric in ("accuracy", "macro_accuracy", "auroc"):
            values = [site[metric] for site in sites]
            assert row[metric] == pytest.approx({"mean": np.mean(values), "sd": np.std(values), "n": 9})
        assert row["own_accuracy"]["mean"] == pytest.approx(np.mean([s["own"]["accuracy"] for s in sites]))
        mine = [s["accuracy"] for s in sites if s["site"] == "S1"]
        assert row["sites"]["S1"] == pytest.approx(np.mean(mine))


def test_rows_hold_privacy_and_communication(series):
    study, document = series
    summaries = [json.loads(path.read_text()) for path in study.runs.glob("*-proxyfl-*/summary.json")]
    proxyfl, fedavg, alone = (row_of(document, method) for method in ("proxyfl", "fedavg", "regular"))
    assert (proxyfl["dp"], proxyfl["guarantee"]) == (True, "guaranteed")
    assert proxyfl["epsilon"] == max(site["epsilon"] for s in summaries for site in s["sites"])
    assert (alone["dp"], alone["guarantee"], alone["epsilon"]) == (False, "none", None)
    per_message = summaries[0]["communication"]["bytes"] / summaries[0]["communication"]["messages"]
    assert proxyfl["communication"]["messages"] == 1
    assert proxyfl["communication"]["bytes"] == proxyfl["communication"]["busiest_bytes"] == per_message
    assert fedavg["communication"]["messages"] == pytest.approx(4 / 3)  # the hub sends to two, who send to it
    ratio = fedavg["communication"]["busiest_bytes"] / fedavg["communication"]["bytes"]
    assert ratio == pytest.approx(2 / (4 / 3))
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
            varies = np.ptp(np.subtract(*sides)) > 1e-9
            assert test["p"] == (pytest.approx(stats.ttest_rel(*sides).pvalue) if varies else None)
        assert [test["p_holm"] for test in tests] == holm([test["p"] for test in tests])


def test_a_missing_baseline_is_trained_like_the_runs_and_found_the_next_time(series):
    study, document = series
    trained = sorted(study.runs.glob("*-regular-*"))
    assert [path.name for path in trained] == row_of(document, "regular")["runs"]
    assert "seeds 0, 1, 2 was trained for this comparison" in document["notes"][0]
    for path in trained:
        config = (path / "config.toml").read_text()
        assert "enabled = false" in config and "rounds = 1" in config and "lr = 0.002" in config
        assert json.loads((path / "manifest.json").read_text())["pipeline"] == "small"
    again = compare(study, ["1-6"])
    assert sorted(study.runs.glob("*-regular-*")) == trained
    assert again["rows"] == document["rows"] and again["page"] == document["page"]
    assert not any("trained for this" in note for note in again["notes"])


def test_the_first_run_is_the_reference_and_may_be_the_baseline(series):
    study, document = series
    first = row_of(document, "regular")["runs"][0]
    turned = compare(study, [first, "00001", "runs/*-fedavg-*"])
    assert turned["reference"] == turned["baseline"] == "Regular without DP"
    units = {t["a"]: t["unit"] for t in turned["paired"] if t["metric"] == "auroc"}
    assert units == {"FedAvg with DP": "seed", "ProxyFL with DP": "site"}
    assert any("fewer than three seeds" in note for note in turned["notes"])
    assert row_of(turned, "regular")["seeds"] == [0, 1, 2], "completed for the seeds of the others"


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
        assert "federation" not in finding["text"]  # the verdict is that of the figure, by the same words
    joined = next(one["text"] for one in document["findings"] if one["text"].startswith("ProxyFL with DP"))
    for words in (worth.gain_words, lambda row: worth.verdict_words(row, worth.ALL)):
        assert words(document["worth"]["all"]) in joined
    assert sum(tag == "svg" for tag, _ in seen.tags) == 4
    assert page.index("What joining brings each hospital") < page.index(document["findings"][0]["text"][:40])
    with Image.open(study.root / document["worth"]["figure"]) as image:
        assert len(image.convert("RGB").getcolors(2**20)) > 50
    assert "script" not in {tag for tag, _ in seen.tags}
    assert "http://www" not in page.replace("http://www.w3.org", "")
    with Image.open(study.root / document["figure"]) as image:
        assert image.size[0] > 1500
        assert len(image.convert("RGB").getcolors(2**20)) > 50
    rows = list(csv.DictReader(io.StringIO((study.root / document["table"]).read_text())))
    assert [row["label"] for row in rows] == [row["label"] for row in document["rows"]]
    assert float(rows[0]["accuracy_mean"]) == document["rows"][0]["accuracy"]["mean"]
    assert {row["method"] for row in rows if row["epsilon"] == ""} == {"regular"}


def test_what_joining_brings_is_paired_by_seed_and_patch(series):
    found = (document := series[1])["worth"]
    assert [found[kind] for kind in KINDS] == [document["baseline"], "ProxyFL with DP", None]
    assert [site["site"] for site in found["sites"]] == ["S0", "S1", "S2"]
    rows = {row["label"]: row for row in document["rows"]}
    for site in [*found["sites"], {**found["all"], "site": None}]:
        for kind in ("alone", "joined"):
            row = rows[found[kind]]
            expected = row["sites"][site["site"]] if site["site"] else row["accuracy"]["mean"]
            assert site[kind]["mean"] == pytest.approx(expected)
            assert 0 <= site[kind]["low"] <= site[kind]["mean"] <= site[kind]["high"] <= 1
        assert site["gain"]["mean"] == pytest.approx(site["joined"]["mean"] - site["alone"]["mean"])
        assert site["gain"]["low"] <= site["gain"]["mean"] <= site["gain"]["high"]
        assert site["pooled"] is None
    for site in found["sites"]:
        assert (site["guarantee"], site["epsilon"] > 0) == ("guaranteed", True)


@pytest.fixture
def copied(series, tmp_path):
    """A copy of the study that a test may change."""
    shutil.copytree(series[0].root, tmp_path / "study")
    return type(series[0])(tmp_path / "study")


@pytest.mark.slow
def test_where_a_run_has_no_merged_test_set_all_are_measured_on_their_own_part(series, copied):
    study, document = copied, series[1]
    path = study.runs / "00002-fedavg-small" / "evaluation.json"
    write_sealed(path, json.loads(path.read_text()) | {"merged": None})
    own = compare(study, ["1-6"])
    assert own["on"] == "own"
    assert any("own site's test part" in note for note in own["notes"])
    for row in own["rows"]:
        assert row["accuracy"] == row["own_accuracy"] == row_of(document, row["method"])["own_accuracy"]
    assert "on each site's own test part" in Document((study.root / own["page"]).read_text()).text


def test_a_lost_site_is_left_out_of_both_sides_of_a_pair(series, copied):
    study, document = copied, series[1]
    name = "00002-fedavg-small"
    whole = evaluation(study, name)
    write_sealed(study.runs / name / "evaluation.json", whole | {"sites": whole["sites"][1:]})
    summary = json.loads((study.runs / name / "summary.json").read_text())
    summary |= {"lost": ["S0"], "sites": summary["sites"][1:]}
    write_sealed(study.runs / name / "summary.json", summary)
    later = (study.runs / name / "summary.json").stat().st_mtime + 1
    os.utime(study.runs / name / "evaluation.json", (later, later))
    found = compare(study, ["1-6"])
    assert "Lost during training in some run: S0." in found["notes"]
    assert row_of(found, "fedavg")["accuracy"]["n"] == 8

    def means(method, seed, sites):
        run = row_of(document, method)["runs"][seed]
        return np.mean([s["accuracy"] for s in evaluation(study, run)["sites"] if s["site"] in sites])

    both = [("S1", "S2"), ("S0", "S1", "S2"), ("S0", "S1", "S2")]
    expected = np.mean([means("fedavg", k, s) - means("regular", k, s) for k, s in enumerate(both)])
    (test,) = [t for t in found["paired"] if t["a"][:6] == "FedAvg" and t["b"][:7] == "Regular"][:1]
    assert (test["metric"], test["n"]) == ("accuracy", 3)
    assert test["difference"] == pytest.approx(expected)


@pytest.mark.slow
def test_a_run_that_went_on_after_its_evaluation_is_evaluated_again(series, copied):
    study, document = copied, series[1]
    folder = study.runs / "00002-fedavg-small"
    early = json.loads((folder / "evaluation.json").read_text())
    write_sealed(folder / "evaluation.json", early | {"sites": early["sites"][:1]})
    later = (folder / "evaluation.json").stat().st_mtime + 1
    os.utime(folder / "summary.json", (later, later))
    assert row_of(compare(study, ["1-6"]), "fedavg")["accuracy"] == row_of(document, "fedavg")["accuracy"]


def test_differing_settings_make_rows_and_labels(tmp_path):
    study = make_study(tmp_path / "study", n_sites=2)
    for alpha in (0.3, 0.9):
        run(study, "proxyfl", f"train.alpha={alpha}", "train.beta=0.7")
    run(study, "proxyfl", "train.alpha=0.9", "train.seed=1")
    run(study, "regular", "train.alpha=0.5", "train.tune=true", "privacy.enabled=false", "privacy.sigma=9.0")
    document = compare(study, ["1-4"], baseline=False)
    rows = {row["label"]: row for row in document["rows"]}
    low, high = ("ProxyFL with DP, train.alpha=0.3", "ProxyFL with DP, train.alpha=0.9")
    assert set(rows) == {low, high, "Regular without DP"}
    assert (rows[high]["settings"], rows[high]["seeds"]) == ({"train.alpha": 0.9}, [0, 1])
    assert (rows["Regular without DP"]["seeds"], document["baseline"]) == ([0], "Regular without DP")
    (note,) = [note for note in document["notes"] if "not trained" in note]
    assert "seed 1" in note and len(list(study.runs.glob("*-regular-*"))) == 1
    assert "train.alpha=0.3" in Document((study.root / document["page"]).read_text()).text


def test_hospitals_alone_that_were_not_tuned_stand_beside_the_tuned_ones_that_are_missing(tmp_path):
    study = make_study(tmp_path / "study", n_sites=2)
    name = run(study, "regular", "train.tune=false", "privacy.enabled=false")
    document = compare(study, [name], baseline=False)
    mine, missing = sorted(document["rows"], key=lambda row: not row["seeds"])
    assert mine["label"] == document["reference"] == "Regular without DP"
    assert missing["label"] == document["baseline"] and missing["settings"] == {"train.tune": True}


def test_only_settings_that_matter_to_a_method_count():
    strict, off = Pipeline(), Pipeline(privacy=Privacy(enabled=False))
    weight = "topology.self_weight"
    for method, pipeline, has, lacks in (
        ("proxyfl", strict, {"train.alpha", "privacy.sigma", "model.proxy", weight}, {"train.beta"}),
        ("proxyfl", off, {"train.beta"}, {"privacy.sigma", "privacy.mode"}),
        ("fedavg", strict, {"privacy.clip", "train.lr"}, {"train.alpha", "model.proxy"}),
        ("regular", off, {"train.rounds", "model.private"}, {"train.alpha", "privacy.clip", weight}),
    ):
        found = settings(method, pipeline)
        assert has <= found.keys() and not lacks & found.keys(), method
        assert not {"sites", "train.seed", "tile.size_px", "evaluate.bootstrap"} & found.keys()


@pytest.mark.slow
def test_a_baseline_left_out_is_null_and_its_command_is_named(tmp_path):
    study = make_study(tmp_path / "study", n_sites=2)
    name = run(study, "proxyfl", "train.seed=4")
    document = compare(study, [name], baseline=False)
    row = row_of(document, "regular")
    assert document["baseline"] == row["label"] == document["rows"][-1]["label"]
    assert row["accuracy"] == {"mean": None, "sd": None, "n": 0}
    assert (row["seeds"], row["runs"], row["communication"]["bytes"]) == ([], [], None)
    assert document["paired"] == []
    assert "nothing here says whether federation pays" in document["findings"][0]["text"]
    assert not list(study.runs.glob("*-regular-*"))
    Document((study.root / document["page"]).read_text())
    words = shlex.split(re.search("`(.*)`", document["notes"][0])[1])
    assert words[:6] == ["wsi-fl", "train", "--method", "regular", "--pipeline", "small"]
    train(study, method="regular", pipeline_name="small", overrides=words[7::2], backend="local")
    assert row_of(compare(study, [name], baseline=False), "regular")["seeds"] == [4], (
        "the command made what was missing"
    )


@pytest.mark.slow
def test_without_its_pipeline_the_baseline_is_trained_from_the_run(tmp_path):
    study = make_study(tmp_path / "study", n_sites=2)
    name = run(study, "proxyfl", "train.seed=4")
    (study.root / "pipelines" / "small.toml").unlink()
    assert row_of(compare(study, [name]), "regular")["seeds"] == [4]


@pytest.mark.slow
def test_a_store_made_anew_is_no_place_for_the_baseline(tmp_path):
    study = make_study(tmp_path / "study", n_sites=2)
    name = run(study, "proxyfl")
    evaluate(study, name)
    write_store(study, "S1", seed=9, n_per_slide=10)
    document = compare(study, [name])
    assert "the store of S1 was made anew since these runs" in document["notes"][0]
    other = run(study, "proxyfl")
    refused(lambda: compare(study, [name, other]), "00002-proxyfl-small", "other patches", "site S1")


def test_unfinished_and_unknown_runs_are_refused(copied):
    (copied.runs / "00002-fedavg-small" / "summary.json").unlink()
    unfinished = "wsi-fl train --resume 00002-fedavg-small"
    refused(lambda: compare(copied, ["1-6"]), unfinished, error=WsiFlError)
    refused(lambda: compare(copied, []), "needs runs")
    for word in ("70-80", "*-cwt-*", "77"):
        refused(lambda word=word: compare(copied, [word]), f"no run '{word}'")


def test_hospitals_that_show_nobody_their_patches_train_the_baseline_in_ranks_of_their_own(
    tmp_path, monkeypatch
):
    study = make_study(tmp_path / "study", n_sites=2)
    name = run(study, "proxyfl")
    for path in (study.root / "sites").glob("*.toml"):
        path.write_text(path.read_text().replace("real = false", REAL))
    asked = {}

    def instead_of_train(study, **arguments):
        asked.update(arguments)
        raise WsiFlError("stop")

    monkeypatch.setattr(compare_runs, "train", instead_of_train)
    refused(lambda: compare(study, [name]), "stop", error=WsiFlError)
    assert (asked["backend"], asked["method"], asked["pipeline_name"]) == ("mpi", "regular", "small")
    assert "privacy.enabled=false" in asked["overrides"]
    shutil.rmtree(study.root / "stores" / "S1")
    refused(lambda: compare(study, [name]), "stop", error=WsiFlError)
    assert asked["backend"] == "local" and 'sites=["S0"]' in asked["overrides"]
    document = compare(study, [name], baseline=False)
    assert document["on"] == "own" and """--set 'sites=["S0"]'""" in document["notes"][0]
    assert row_of(document, "proxyfl")["sites"].keys() == {"S0"}


def made_up(method, mean, *, dp=True, **more):
    """A row of the document."""
    scores, spread = (
        ("accuracy", "macro_accuracy", "auroc", "own_accuracy"),
        {"mean": mean, "sd": 0.02, "n": 12},
    )
    return {
        **{"label": f"{method} {'with' if dp else 'without'} DP", "method": method, "dp": dp, "settings": {}},
        **{"guarantee": "nominal" if dp else "none", "epsilon": 12.3 if dp else None},
        **{"seeds": [0, 1, 2], "runs": ["00001-x"], "n_sites": 4, "sites": {"A": mean, "B": mean}},
        **dict.fromkeys(scores, spread),
        "communication": {"messages": 1.0, "bytes": 8e5, "busiest_bytes": 8e5, "seconds": 0.1},
        "seconds_per_round": 2.0,
        **more,
    }


def against_alone(row, difference, p, unit="seed", n=3):
    alone = "regular without DP"
    return {
        "a": row["label"], "b": alone, "metric": "accuracy", "difference": difference, "sd": 0.01, "n": n,
        "unit": unit, "p": p, "p_holm": p,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("difference", "sd", "unit", "tone", "said"),
    [
        (-0.29, 0.01, "seed", "bad", "−0.290 (−0.315 to −0.265) over {}: on average joining does not pay."),
        (0.05, 0.01, "seed", "good", "+0.050 (+0.025 to +0.075) over {}: on average joining pays."),
        (0.05, 0.01, "site", "unclear", "+0.050 over {}: these runs do not show whether joining pays on average."),
        (0.05, 0.03, "seed", "unclear", "these runs do not show"),
        (0.004, 0.0001, "seed", "unclear", "these runs do not show"),
        (-0.3, None, "seed", "unclear", "these runs do not show"),
    ],
)  # fmt: skip
def test_sentences_say_what_the_numbers_say(difference, sd, unit, tone, said):
    alone, ours = made_up("regular", 0.73, dp=False), made_up("proxyfl", 0.73 + difference)
    test = against_alone(ours, difference, 0.001, unit) | {"sd": sd}
    first, second = comparison.findings([ours, alone], [test], alone["label"])
    assert first.text == "A hospital alone without DP reaches 0.73 (4 sites, 3 seeds)."
    assert second.tone == tone and said.format(comparison.ALONE) in second.text, second.text
    assert f"reaches {0.73 + difference:.2f} (ε nominal 12.3), " in second.text


def of_all(gain, room):
    known, space = (one and Estimate(*one) for one in (gain, room))
    told = {"gain": known.document(), "room": space and space.document(), "headroom": None}
    return told | {"verdict": verdict(known, space)}


@pytest.mark.parametrize(
    ("gain", "room", "tone", "said"),
    [
        ((0.05, 0.03, 0.07), None, "good", "+0.050 (+0.030 to +0.070) over {}: on average joining pays."),
        ((-0.05, -0.07, -0.03), None, "bad", "on average joining does not pay."),
        ((0.05, -0.01, 0.12), None, "unclear", "these runs do not show whether joining pays on average."),
        ((0.0, -0.01, 0.01), (0.0, -0.01, 0.01), "unclear", "there is nothing to gain"),
    ],
)
def test_where_the_gain_is_known_it_alone_is_the_verdict(gain, room, tone, said):
    alone, ours = made_up("regular", 0.73, dp=False), made_up("proxyfl", 0.78)
    gains = {ours["label"]: of_all(gain, room)}
    tests = [against_alone(ours, 0.05, 1e-9)]
    _, second = comparison.findings([ours, alone], tests, alone["label"], gains=gains)
    assert second.tone == tone and said.format(comparison.ALONE) in second.text, second.text
    assert "p <" not in second.text


def test_what_pooling_brings_has_the_interval_that_verdicts_use_and_no_reference_is_called_federation():
    alone, ours = made_up("regular", 0.73, dp=False), made_up("proxyfl", 0.78)
    noisy, pooled = made_up("regular", 0.55), made_up("joint", 0.9, dp=False)
    tests = [against_alone(row, row["accuracy"]["mean"] - 0.73, 0.2) for row in (ours, pooled, noisy)]
    gains = {ours["label"]: of_all((0.05, 0.03, 0.07), (0.17, 0.12, 0.22))}
    *_, third, fourth = comparison.findings([alone, ours, pooled, noisy], tests, alone["label"], gains=gains)
    assert "+0.170 (+0.120 to +0.220) over" in third.text and "p =" not in third.text
    assert "nobody may pool" in third.text and "what its noise costs" in fourth.text
    assert "federation" not in third.text + fourth.text


def test_the_report_of_a_run_says_what_the_comparison_says(series):
    study, _ = series
    document = compare(study, ["1"])
    (said,) = (one["text"] for one in document["findings"] if "ProxyFL" in one["text"])
    gain = document["worth"]["all"]
    assert said.endswith(f"over {comparison.ALONE}: {worth.verdict_words(gain, worth.ALL)}.")
    page = html.unescape(report(study, "1").read_text(encoding="utf-8"))
    said = f"{worth.gain_words(gain)} over a site alone without DP: {worth.verdict_words(gain, worth.ALL)}."
    assert said in page
    assert f"Gain in {gain['measure']}" in page and "federation helped" not in page


@pytest.mark.parametrize(
    ("pooled", "share"), [((0.9, 0.9, 0.8, 0.9), True), ((0.9, 0.2, 0.1, 0.5), False), (None, False)]
)
def test_a_share_of_the_headroom_is_told_only_where_there_is_room(pooled, share):
    def answers(values):
        return {0: Said({("S", "p" + str(k // 2), str(k)): (v, 1.0) for k, v in enumerate(values)})}

    known = {"alone": answers([0.4] * 4), "joined": answers([0.6] * 4)}
    found = _compared(known | ({"pooled": answers(pooled)} if pooled else {}))
    assert (found["headroom"] is not None) == share and found["verdict"] == "join"


def test_cautions_name_what_spoils_a_comparison():
    alone, a = made_up("regular", 0.73, dp=False), made_up("proxyfl", 0.7)
    b = made_up("fedavg", 0.6, epsilon=2.0, seeds=[0], guarantee="guaranteed")
    text = " ".join(comparison.cautions([alone, a, b], [against_alone(a, -0.03, 0.2, "site", 4)]))
    for said in ("too small", "same ε (2.0–12.3)", "nominal is no guarantee", "same seeds", "a single run"):
        assert said in text
    assert "a single run" not in " ".join(comparison.cautions([alone, a], []))
    (always,) = comparison.cautions([alone, alone], [against_alone(alone, 0.0, None)])
    assert "chose its regularisation" in always


def many(n=11, rounds=6):
    """A document and its charts' series: more methods than colours, long settings, hostile names."""
    rng = np.random.default_rng(0)
    rows, drawn = [made_up("regular", 0.7, dp=False)], []
    for k in range(n):
        change = {"train.alpha": k / 10, "privacy.clip": 0.7, "model.proxy": "<b>gn_cnn_small</b>"}
        label = f"ProxyFL with DP, {comparison.settings_words(change)}"
        rows.append(made_up("proxyfl", 0.5 + k / 40, label=label, settings=change))
    for row in rows:
        name = "Regular without DP" if row["method"] == "regular" else "ProxyFL with DP"
        mean = row["accuracy"]["mean"]
        curves = [[(r, mean - 0.3 / r + rng.normal(0, 0.01)) for r in range(1, rounds + 1)] for _ in range(4)]
        values = {seed: (mean + rng.normal(0, 0.02, 4)).tolist() for seed in range(3)}
        words = comparison.settings_words(row["settings"])
        drawn.append(
            Series(name, words, row["dp"], not row["dp"], mean, 0.02, values, curves, 8e5 * row["dp"], 8e5)
        )
    tests = [against_alone(row, row["accuracy"]["mean"] - 0.7, 0.01) for row in rows[1:]]
    document = {
        "runs": ["runs/00001-x"], "on": "merged", "rows": rows, "paired": tests, "baseline": rows[0]["label"],
        "reference": rows[1]["label"], "findings": [], "notes": ["<i>a note</i>"], "worth": worth_of(5),
        "scores": ["accuracy", "macro_accuracy", "auroc"], "examples": "patches",
    }  # fmt: skip
    return document, drawn


def worth_of(n_sites, *, pooled=True):
    """`worth` of a document, one site of it without intervals."""

    def value(mean, half=0.03):
        return {"mean": mean, "low": mean - half, "high": mean + half}

    sites = [
        {
            "site": f"<b>hospital {k}</b>", "alone": value(0.6 + k / 50), "joined": value(0.68),
            "pooled": value(0.75) if pooled else None, "gain": value(0.08 - k / 50),
            "epsilon": 2.99, "guarantee": "guaranteed",
        }
        for k in range(n_sites)
    ]  # fmt: skip
    sites[-1]["gain"] = {"mean": -0.01, "low": None, "high": None}
    sites[-1]["epsilon"] = None
    return {
        "alone": "Regular without DP", "joined": "ProxyFL with DP", "pooled": "Joint without DP" if pooled else None,
        "on": "merged", "measure": "accuracy", "sites": sites,
        "all": {key: sites[0][key] for key in ("alone", "joined", "pooled", "gain")},
    }  # fmt: skip


@pytest.mark.parametrize("n_sites, pooled", [(1, True), (3, False), *nightly((8, True))])
def test_the_figure_of_what_joining_brings_says_it_in_words(n_sites, pooled):
    found = worth_of(n_sites, pooled=pooled)
    drawn = worth.chart(found)
    document, series = many()
    seen = Document(
        comparison.render({**document, "worth": found}, series, created="today", sites=["A"])
    ).text
    assert "−0.010 no differential privacy" in seen
    assert ("+0.080 (+0.050 to +0.110) for ε = 2.99, guaranteed" in seen) == (n_sites > 1)
    assert ("all sites" in drawn.svg) == (n_sites > 1)
    assert ("pooled" in drawn.alt) == pooled
    with Image.open(io.BytesIO(worth.png(found))) as image:
        assert image.size[0] > 1000


def test_one_shared_model_is_one_line_of_scores_without_a_spread(tmp_path):
    study = make_study(tmp_path / "study", n_sites=3)
    shared = run(study, "fedavg", "privacy.enabled=false", "train.alone=false")
    document = evaluate(study, shared)
    assert document["shared"] and document["merged"]["accuracy"]["sd"] == 0
    (table,) = [line for line in evaluation_lines(document) if isinstance(line, Table)]
    first = [row and row[0] for row in table.rows]
    assert "shared model" in table.title and first == ["S0", "S1", "S2", None, "all"]
    page = report(study, shared).read_text()
    assert "their shared model reaches" in " ".join(page.split())
    assert "± 0.00" not in page.split("Against the other runs")[0]
    assert not evaluate(study, run(study, "regular", "privacy.enabled=false"))["shared"]


def test_what_nobody_can_say_of_a_part_is_said_in_words(series):
    document = evaluation(series[0], "00001-proxyfl-small")
    document["parts"]["S1"]["accuracy"] = {"mean": None, "sd": None}
    told = [one for one in evaluation_lines(document) if isinstance(one, Line)]
    (line,) = [one.text for one in told if "each site's part" in one.text]
    assert "S1 not known" in line and "–" not in line


def test_many_methods_and_names_do_not_break_the_page():
    document, drawn = many()
    document["examples"] = "patients"
    html = comparison.render(document, drawn, created="today", sites=["A", "B", "<u>C</u>"])
    seen = Document(html)
    assert "seed by seed and patient by patient" in seen.text, "gains are paired by what is asked about"
    assert not {"b", "i", "u"} & {tag for tag, _ in seen.tags}
    assert "more methods than colours" in seen.text
    assert not re.search(r"\b(None|nan|Undefined)\b", seen.text)
    assert not re.findall(r"(?:stroke|fill): #\w+", html.split("</style>")[1]), (
        "colours are the page's variables"
    )
    with Image.open(io.BytesIO(png(drawn, "Accuracy"))) as image:
        colors = {color for _, color in image.convert("RGB").getcolors(2**20)}
    for name in ("ink", "s0", "paper"):
        assert tuple(bytes.fromhex(palette()[name][1:])) in colors


def test_the_command_prints_one_document(series, wsi_fl):
    done = wsi_fl("compare", "1-6", "--json", cwd=series[0].root)
    assert json.loads(done.stdout)["rows"] == series[1]["rows"]
