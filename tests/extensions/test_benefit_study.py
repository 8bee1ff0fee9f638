"""The benefit study draws hospitals by its settings, and pairs gains by seed and test row."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

from wsi_fl.evidence.benefit_figure import _VERDICT_WORDS as words_of_verdicts
from wsi_fl.evidence.verdict import Estimate, decide_verdict
from wsi_fl.stores.bag_store import BagMeta, BagStore
from wsi_fl.types import GridSpec

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "worth.py"


@pytest.fixture(scope="module")
def worth():
    spec = importlib.util.spec_from_file_location("worth_study", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_simulated_hospitals_match_the_setting_and_no_row_is_drawn_twice(worth):
    label = np.repeat([0, 1], 1500)
    for setting in worth.SETTINGS:
        parts, test = worth.drawn(setting, label, seed=1)
        every = np.concatenate([*parts, test])
        assert len(set(every.tolist())) == len(every)
        rows = setting.rows if isinstance(setting.rows, tuple) else [setting.rows] * setting.sites
        assert [len(part) for part in parts] == list(rows)
        for k, part in enumerate(parts):
            share = setting.shares[k % len(setting.shares)]
            assert label[part].sum() == round(share * rows[k])
        assert len(test) >= (setting.receives or 500) or "class 1 is 5 %" in setting.name
        assert label[test].mean() == 0.5
    parts, test = worth.drawn(setting, label, seed=1)
    again, other = worth.drawn(setting, label, seed=1)[1], worth.drawn(setting, label, seed=2)[1]
    assert test.tolist() == again.tolist() != other.tolist()
    with pytest.raises(ValueError, match="too few"):
        worth.drawn(worth.Setting("s", 4, 400, (0.05,)), label, 0)


def test_a_drawn_study_goes_through_training_and_evaluation(worth, tmp_path):
    rng = np.random.default_rng(0)
    label = np.tile([0, 1], 60)
    x = rng.normal(size=(120, 12)) + 2 * np.outer(2 * label - 1, np.arange(12) < 2)
    meta = BagMeta("S1", ("0", "1"), "tiny sha256:0", GridSpec(8, 0, 8), "features")
    pool = worth.Pool(x.astype(np.float32), label, meta)
    parts, test = worth.drawn(worth.Setting("s", 2, 20), label, 0)
    study = worth.study_of(pool, parts, test, tmp_path / "drawn", "row")
    with BagStore(study.features_path("S01")) as store:
        np.testing.assert_array_equal(store.read(np.arange(100)), pool.x[np.concatenate([parts[0], test])])
    lone = next(variant for variant in worth.VARIANTS if variant.name == "lone")
    found = worth.measured(study, lone, 0)
    assert len(found["right"]) == len(test) == 80 and max(found["right"]) <= 2
    assert sum(found["right"]) / 160 == pytest.approx(found["accuracy"]) and found["accuracy"] > 0.7


def around(mean, half):
    return Estimate(mean, mean - half, mean + half)


def test_a_verdict_states_only_what_the_intervals_show():
    assert decide_verdict(around(0.1, 0.05), around(0.2, 0.1)) == "join"
    assert decide_verdict(around(-0.1, 0.05), around(0.2, 0.1)) == "local"
    assert decide_verdict(around(0.02, 0.03), around(0.1, 0.1)) == "inconclusive"
    assert decide_verdict(around(0.001, 0.03), around(0.005, 0.01)) == "nothing to gain"
    assert decide_verdict(around(0.03, 0.08), around(0.002, 0.15)) == "inconclusive"  # nobody knows what there is
    assert decide_verdict(around(0.004, 0.001), around(0.1, 0.1)) == "inconclusive"  # sure, and next to nothing
    assert decide_verdict(Estimate(0.3, None, None), None) == "inconclusive"  # a single patient
    assert decide_verdict(None, None) == "inconclusive"
    assert {"join", "local", "nothing to gain", "inconclusive"} == set(words_of_verdicts)
