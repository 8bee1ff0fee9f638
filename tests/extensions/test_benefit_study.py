"""The benefit study of `benchmarks/worth.py` draws hospitals by its settings, and no row twice."""

import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
import worth

LABEL = np.repeat([0, 1], 1500)


@pytest.mark.parametrize("setting", worth.SETTINGS, ids=lambda setting: setting.name)
def test_simulated_hospitals_match_the_setting_and_no_row_is_drawn_twice(setting):
    parts, test = worth.drawn(setting, LABEL, seed=1)
    every = np.concatenate([*parts, test])
    assert len(set(every.tolist())) == len(every)
    rows = setting.rows if isinstance(setting.rows, tuple) else [setting.rows] * setting.sites
    ones = [round(setting.shares[k % len(setting.shares)] * n) for k, n in enumerate(rows)]
    assert [(len(part), LABEL[part].sum()) for part in parts] == list(zip(rows, ones, strict=True))
    assert len(test) >= (setting.receives or 500) or "class 1 is 5 %" in setting.name
    assert LABEL[test].mean() == 0.5
    again, other = (worth.drawn(setting, LABEL, seed)[1].tolist() for seed in (1, 2))
    assert test.tolist() == again != other


def test_a_pool_with_too_few_rows_is_refused():
    with pytest.raises(ValueError, match="too few"):
        worth.drawn(worth.Setting("s", 4, 400, (0.05,)), LABEL, 0)
