"""Aggregated predictions against their definitions, by loops."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wsi_fl.learning.predictions import _REJECTED, _averaged, _decided, aggregated_scores


@st.composite
def said(draw):
    n_sites, n, k = draw(st.integers(2, 5)), draw(st.integers(1, 6)), draw(st.integers(2, 4))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    return [rng.dirichlet(np.ones(k), n) for _ in range(n_sites)], rng.integers(1, 20, n_sites).astype(float)


@given(said())
@settings(max_examples=60, deadline=None)
def test_votes_are_what_counting_says(case):
    sites, weights = case
    for i in range(len(sites[0])):
        votes = [int(p[i].argmax()) for p in sites]
        count = Counter(votes)
        (first, most), *rest = count.most_common()
        absolute = int(_decided(sites, "absolute")[i])
        assert absolute == (first if most > len(sites) / 2 else _REJECTED)
        relative = int(_decided(sites, "relative")[i])
        assert count[relative] == most
        if not rest or rest[0][1] < most:
            assert relative == first
        else:
            tied = [c for c in count if count[c] == most]
            mean = sum(p[i] for p in sites)
            assert relative == max(tied, key=lambda c: mean[c])
        weight = {c: sum(w for v, w in zip(votes, weights, strict=True) if v == c) for c in count}
        assert weight[int(_decided(sites, "weighted", weights)[i])] == pytest.approx(max(weight.values()))


@given(said())
@settings(max_examples=30, deadline=None)
def test_means_are_means(case):
    sites, weights = case
    assert np.allclose(_averaged(sites), sum(sites) / len(sites))
    by_hand = sum(w * p for w, p in zip(weights, sites, strict=True)) / weights.sum()
    assert np.allclose(_averaged(sites, weights), by_hand)
    assert (_decided(sites, "weighted_mean", weights) == by_hand.argmax(1)).all()
    assert (_decided(sites, "mean", weights) == _averaged(sites).argmax(1)).all(), (
        "weights are not for this rule"
    )


def test_two_weak_sites_outvote_a_sure_one_but_not_its_mean():
    sites = [np.array([[0.99, 0.01]]), np.array([[0.45, 0.55]]), np.array([[0.45, 0.55]])]
    assert _decided(sites, "relative").tolist() == _decided(sites, "absolute").tolist() == [1]
    assert _decided(sites, "mean").tolist() == [0]
    assert _decided(sites, "weighted", [5, 1, 1]).tolist() == [0]


def test_what_is_rejected_is_wrong():
    sites = [np.eye(3)[[0, 0]], np.eye(3)[[1, 0]], np.eye(3)[[2, 0]]]
    found = aggregated_scores(sites, np.array([0, 0]), [1, 1, 1])
    assert found["absolute"]["rejected"] == 1
    assert found["absolute"]["accuracy"] == 0.5
