"""The study of where joining pays: which patches a drawn hospital has, and paired intervals over seeds and patients."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from wsi_fl.learning.significance import clustered_ratio
from wsi_fl.report.worth import _MEANS as words_of_verdicts
from wsi_fl.report.worth import verdict_words
from wsi_fl.stages.answers.compare_worth import verdict

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "worth.py"


@pytest.fixture(scope="module")
def worth():
    spec = importlib.util.spec_from_file_location("worth_study", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_drawn_hospitals_are_as_the_setting_says(worth):
    labels = np.repeat([0, 1], 300)
    special = worth.Setting("s", (200,) * 4, share=0.9)
    for site in range(4):
        rows = worth.drawn_rows(special, site, labels, seed=1)
        assert len(rows) == len(set(rows.tolist())) == 200 and (np.diff(rows) > 0).all()
        assert (labels[rows] == site % 2).sum() == 180
    lacking = worth.Setting("s", (200,) * 4, missing=1)
    assert set(labels[worth.drawn_rows(lacking, 0, labels, 0)]) == {0}
    assert set(labels[worth.drawn_rows(lacking, 1, labels, 0)]) == {0, 1}
    uneven = worth.Setting("s", (500, 100, 100, 100))
    assert [len(worth.drawn_rows(uneven, site, labels, 0)) for site in range(4)] == [500, 100, 100, 100]
    drawn = [worth.drawn_rows(uneven, 1, labels, seed).tolist() for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]


def test_gains_are_paired_by_seed_and_their_interval_clustered_by_patient(worth):
    def row(seed, right):
        return {"seed": seed, "right": {f"C1/p{k}": [value, 10] for k, value in enumerate(right)}}

    alone = [row(0, [5, 5, 5]), row(1, [6, 6, 6]), row(2, [1, 1, 1])]
    joined = [row(0, [6, 7, 8]), row(1, [7, 8, 9])]
    mean, low, high = worth.paired_interval(joined, alone)
    assert mean == pytest.approx(0.2)
    assert (low, high) == (pytest.approx(0.1, abs=0.035), pytest.approx(0.3, abs=0.035))
    assert worth.paired_interval(joined, alone[2:]) is None


# ---- what follows for a hospital


def around(mean, half):
    return {"mean": mean, "low": mean - half, "high": mean + half}


def test_a_verdict_is_only_what_the_intervals_show():
    assert verdict(around(0.1, 0.05), around(0.2, 0.1)) == "join"
    assert verdict(around(-0.1, 0.05), around(0.2, 0.1)) == "stay"
    assert verdict(around(0.02, 0.03), around(0.1, 0.1)) == "not shown"
    assert verdict(around(0.001, 0.03), around(0.005, 0.01)) == "nothing to gain"
    assert verdict(around(0.004, 0.001), around(0.1, 0.1)) == "not shown"  # sure, and next to nothing
    assert verdict({"mean": 0.3, "low": None, "high": None}, None) == "not shown"  # a single patient
    assert verdict(None, None) == "not shown"
    assert {"join", "stay", "nothing to gain", "not shown"} == set(words_of_verdicts)


def test_the_headroom_is_the_gain_over_what_pooling_would_bring_with_an_interval():
    rng = np.random.default_rng(0)
    patients = np.repeat([f"p{i}" for i in range(20)], 10)
    whole = rng.normal(0.2, 0.05, (4, 200))
    part = 0.5 * whole + rng.normal(0, 0.02, (4, 200))
    low, high = clustered_ratio(part, whole, patients)
    assert low < 0.5 < high and high - low < 0.1
    assert clustered_ratio(part, whole - 0.2, patients) is None  # nothing to share out
    assert clustered_ratio(part, whole, np.full(200, "one")) is None
    mean, room = 0.1, 0.2
    assert verdict_words({"verdict": "join", "headroom": {"mean": mean / room, "low": 0.4, "high": 0.6}}) == (
        "this hospital should join (50 % of what pooling would bring, 40 to 60 %)"
    )
