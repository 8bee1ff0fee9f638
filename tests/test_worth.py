"""The study of where joining pays: which patches a drawn hospital has, and paired intervals over seeds and patients."""

import importlib.util
import sys
from pathlib import Path

import numpy as np
import pytest

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
