"""A unit moves the sum of clipped updates by the bound at most, and noise is what the terms say."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import kstest

from wsi_fl.privacy.model_updates import UpdateTerms, privatize_update, sum_clipped

ROWS = arrays(np.float64, st.tuples(st.integers(1, 5), st.integers(1, 6)), elements=st.floats(width=64))


@given(rows=ROWS, clip=st.floats(1e-3, 1e3))
def test_a_row_moves_the_sum_by_the_clip_at_most_whatever_it_holds(rows, clip):
    for k in range(len(rows)):
        moved = sum_clipped(rows[k : k + 1], clip)
        assert np.isfinite(moved).all() and np.linalg.norm(moved) <= clip
    parts = sum(sum_clipped(row[None], clip) for row in rows)
    assert sum_clipped(rows, clip) == pytest.approx(parts, abs=1e-9 * clip * len(rows))


def test_rows_within_the_bound_are_summed_as_they_are():
    rows = np.random.default_rng(0).normal(size=(4, 3))
    assert sum_clipped(rows, 100.0) == pytest.approx(rows.sum(axis=0), rel=1e-12)


@pytest.mark.parametrize(("unit", "divisor"), [("site", 1), ("patient", 50)])
def test_noise_has_the_deviation_of_the_terms(unit, divisor):
    given_terms = {"site": "C1", "ledger": Path("C1.jsonl"), "delta": 1e-5, "max_epsilon": 3.0}
    terms = UpdateTerms(unit=unit, n=50, clip=0.5, sigma=6.0, **given_terms)
    values = privatize_update(np.zeros((1, 40_000)), terms)
    assert values.dtype == np.float32
    assert kstest(values / (6.0 * 0.5 / divisor), "norm").pvalue > 1e-6
