"""Graphs as matrices: mass is kept, one message a site, everyone hears of everyone."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wsi_fl.federation.topology import exponential, none, receivers, senders

n_sites = st.integers(2, 64)


@given(st.integers(1, 64), st.integers(0, 40), st.sampled_from([0.0, 0.25, 0.5]))
def test_every_column_sums_to_one(n, round_, self_weight):
    for matrix in exponential(n, round_, self_weight):
        assert (matrix >= 0).all()
        np.testing.assert_allclose(matrix.sum(axis=0), 1)


@given(n_sites, st.integers(0, 40), st.sampled_from([0.0, 0.5]))
def test_every_site_sends_one_message_and_gets_one(n, round_, self_weight):
    (matrix,) = exponential(n, round_, self_weight)
    for site in range(n):
        (to,) = receivers(matrix, site)
        assert to != site
        assert senders(matrix, to) == [site]


@given(n_sites, st.integers(0, 9))
def test_without_self_weight_models_only_travel(n, round_):
    (matrix,) = exponential(n, round_)
    assert set(np.unique(matrix)) == {0.0, 1.0}
    assert (matrix.sum(axis=1) == 1).all()


@given(n_sites, st.integers(0, 9))
def test_peers_are_powers_of_two_away_in_turn(n, start):
    """ProxyFL, section 4: 2^0, 2^1, …, 2^⌊log2(n − 1)⌋ steps away, periodically."""
    strides = [(receivers(exponential(n, start + t)[0], 0)[0]) % n for t in range(2 * len(bin(n - 1)))]
    powers = [2**k for k in range(len(bin(n - 1)) - 2)]
    assert max(powers) <= n - 1 < 2 * max(powers)
    assert strides == [powers[(start + t) % len(powers)] % n for t in range(len(strides))]


@given(n_sites)
def test_everyone_has_heard_of_everyone_after_log2_n_rounds(n):
    known = np.eye(n)
    for round_ in range(int(np.ceil(np.log2(n)))):
        known = exponential(n, round_, 0.5)[0] @ known
    assert (known > 0).all()


@pytest.mark.parametrize("graph", [none, exponential])
def test_one_site_alone_sends_nothing(graph):
    assert graph(1, 3) == []
    assert none(4, 3) == []
