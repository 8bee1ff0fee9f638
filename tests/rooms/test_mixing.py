"""PushSum against the dense matrix product, and against the mean it promises."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wsi_fl.federation.mixing import PushSum, mix
from wsi_fl.federation.topology import (
    exponential,
    handover,
    named,
    over,
    random_permutation,
    receivers,
    ring,
    senders,
    star,
    welcome,
)


def exchange(states, matrix):
    """What the loop does, site by site."""
    return [
        mix(
            states[i],
            float(matrix[i, i]),
            [
                PushSum(states[j].x * np.float32(matrix[i, j]), states[j].w * matrix[i, j])
                for j in senders(matrix, i)
            ],
        )
        for i in range(len(states))
    ]


@st.composite
def connected_graph(draw):
    """A random column-stochastic matrix over a ring: strongly connected and, with self loops, aperiodic."""
    n = draw(st.integers(2, 7))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    matrix = rng.uniform(0.1, 1, (n, n)) * (rng.random((n, n)) < 0.3)
    matrix += np.eye(n) * rng.uniform(0.2, 1) + np.roll(np.eye(n), 1, axis=0) * rng.uniform(0.2, 1)
    return matrix / matrix.sum(axis=0)


@settings(deadline=None, max_examples=10)
@given(connected_graph(), st.integers(0, 10**6))
def test_with_training_between_rounds_it_is_the_dense_product_of_the_biased_numerators(matrix, seed):
    """X ← P (X + ΔZ), w ← P w, Z = X / w: the increment enters unscaled."""
    rng = np.random.default_rng(seed)
    n = len(matrix)
    x, w = rng.normal(size=(n, 4)), np.ones(n)
    states = [PushSum(row.astype(np.float32), 1.0) for row in x]
    for _ in range(8):
        delta = rng.normal(size=(n, 4))
        x, w = matrix @ (x + delta), matrix @ w
        trained = [s.trained((s.z + d).astype(np.float32)) for s, d in zip(states, delta, strict=True)]
        states = exchange(trained, matrix)
        for k, state in enumerate(states):
            assert state.w == pytest.approx(w[k])
            np.testing.assert_allclose(state.x, x[k], atol=2e-3)
            np.testing.assert_allclose(state.z, x[k] / w[k], atol=2e-3 / w[k])


@settings(deadline=None)
@given(
    st.sampled_from([*(named(name, 5) for name in ("ring", "star", "exponential", "random"))]),
    st.integers(1, 17),
    st.integers(0, 30),
    st.sampled_from([0.0, 0.25, 0.5]),
    st.data(),
)
def test_mixing_over_any_graph_and_attendance_is_the_dense_product(topology, n, round_, self_weight, data):
    present = data.draw(st.sets(st.integers(0, n - 1)))
    rng = np.random.default_rng(n + round_)
    x, w = rng.normal(size=(n, 3)).astype(np.float32), rng.uniform(0.2, 2, n)
    states = [PushSum(row, weight) for row, weight in zip(x, w, strict=True)]
    for matrix in over(topology, n, sorted(present), round_, self_weight):
        states, x, w = exchange(states, matrix), matrix @ x, matrix @ w
    np.testing.assert_allclose([s.x for s in states], x, atol=1e-5)
    np.testing.assert_allclose([s.w for s in states], w, rtol=1e-12)
    assert sum(s.w for s in states) == pytest.approx(w.sum(), rel=1e-12)


def test_every_increment_counts_the_same_in_the_mean_however_uneven_the_weights():
    """Dividing in place, as Algorithm 1 is printed, would let light sites speak louder."""
    matrix = np.array([[0.5, 0.0, 0.9], [0.5, 0.5, 0.0], [0.0, 0.5, 0.1]])
    states = [PushSum(np.zeros(1, np.float32), 1.0) for _ in range(3)]
    added = 0.0
    for round_ in range(60):
        move = [3.0, -1.0, 0.5] if round_ < 5 else [0.0] * 3
        added += sum(move)
        states = exchange([s.trained(s.z + np.float32(m)) for s, m in zip(states, move, strict=True)], matrix)
    assert {round(s.w, 2) for s in states} != {1.0}
    for state in states:
        assert float(state.z[0]) == pytest.approx(added / 3, abs=1e-4)


@given(st.integers(2, 16), st.integers(0, 10))
def test_a_permutation_hands_models_on_bit_for_bit(n, round_):
    (matrix,) = exponential(n, round_)
    states = [PushSum(np.float32([k, 0.1 * k]), 1.0) for k in range(n)]
    mixed = exchange(states, matrix)
    for k in range(n):
        assert mixed[receivers(matrix, k)[0]].x.tobytes() == states[k].x.tobytes()
    assert {s.w for s in mixed} == {1.0}


# sites that leave and come back


def random_digraph(seed):
    """A topology: in every round another strongly connected, aperiodic, unevenly weighted graph."""

    def graph(n, round_, self_weight):
        rng = np.random.default_rng((seed, n, round_))
        order = rng.permutation(n)
        matrix = rng.uniform(0.1, 1, (n, n)) * (rng.random((n, n)) < 0.3)
        matrix[np.roll(order, -1), order] += rng.uniform(0.1, 1, n)
        np.fill_diagonal(matrix, 0)
        sent = matrix.sum(axis=0)
        if n < 2:
            return []
        return [matrix / sent * (1 - self_weight) + np.eye(n) * self_weight]

    return graph


GRAPHS = {
    "digraph": random_digraph(3),
    "exponential": exponential,
    "random": random_permutation(3),
    "star": star,
}


def mass(states):
    """Σ x float64[d] and Σ w."""
    return sum(s.x.astype(float) for s in states), sum(s.w for s in states)


def mixed(states, topology, present, rounds, self_weight=0.4):
    """The states after some rounds among those present; each round keeps all mass."""
    x, w = mass(states)
    for round_ in rounds:
        for hop in over(topology, len(states), present, round_, self_weight):
            states = exchange(states, hop)
        assert mass(states)[1] == pytest.approx(w, rel=1e-12)
        np.testing.assert_allclose(mass(states)[0], x, atol=1e-4)
    return states


def assert_all_hold(states, present, mean):
    for k in present:
        np.testing.assert_allclose(states[k].z, mean, atol=3e-4)


def some_sites(n, seed, n_away):
    """Random starts of n sites, who stays and who does not; at least one stays."""
    rng = np.random.default_rng(seed)
    start = rng.normal(size=(n, 3)).astype(np.float32)
    away = sorted(rng.permutation(n)[: min(n_away, n - 1)].tolist())
    return start, [PushSum(row, 1.0) for row in start], away, [k for k in range(n) if k not in away]


cases = given(st.sampled_from(list(GRAPHS)), st.integers(2, 8), st.integers(1, 3), st.integers(0, 10**6))


@settings(deadline=None, max_examples=8)
@cases
def test_those_who_stay_reach_the_mean_of_all_when_others_hand_over_and_leave(name, n, n_away, seed):
    start, states, leaving, staying = some_sites(n, seed, n_away)
    states = mixed(states, GRAPHS[name], range(n), range(3))
    states = exchange(states, handover(n, leaving, staying))
    assert [states[k].w for k in leaving] == [0] * len(leaving)
    states = mixed(states, GRAPHS[name], staying, range(3, 120))
    assert sum(states[k].w for k in staying) == pytest.approx(n, rel=1e-12)
    assert_all_hold(states, staying, start.mean(0))


@settings(deadline=None, max_examples=8)
@cases
def test_those_who_come_back_start_from_their_host_and_reach_the_mean_of_all(name, n, n_away, seed):
    start, states, away, staying = some_sites(n, seed, n_away)
    states = exchange(mixed(states, GRAPHS[name], range(n), range(2)), handover(n, away, staying))
    states = mixed(states, GRAPHS[name], staying, range(2, 6))
    before = states
    states = exchange(states, welcome(n, away, staying))
    for k in staying:
        np.testing.assert_allclose(states[k].z, before[k].z, rtol=1e-5, atol=1e-6)
    for k in away:
        host = next(j % n for j in range(k - 1, k - n, -1) if j % n in staying)
        np.testing.assert_allclose(states[k].z, before[host].z, rtol=1e-5, atol=1e-6)
        assert states[k].w == states[host].w > 0
    states = mixed(states, GRAPHS[name], range(n), range(6, 120))
    assert mass(states)[1] == pytest.approx(n, rel=1e-12)
    assert_all_hold(states, range(n), start.mean(0))


@settings(deadline=None, max_examples=8)
@cases
def test_what_a_crashed_site_held_is_lost_and_the_others_reach_the_mean_of_the_rest(name, n, n_away, seed):
    _, states, crashed, staying = some_sites(n, seed, n_away)
    states = mixed(states, GRAPHS[name], range(n), range(2))
    x, w = mass([states[k] for k in staying])
    assert w < n
    states = [s if k in staying else PushSum(np.zeros_like(s.x), 0.0) for k, s in enumerate(states)]
    states = mixed(states, GRAPHS[name], staying, range(2, 120))
    assert_all_hold(states, staying, x / w)
    states = exchange(states, welcome(n, crashed, staying))
    assert mass(states)[1] == pytest.approx(w, rel=1e-12)
    states = mixed(states, GRAPHS[name], range(n), range(120, 240))
    assert_all_hold(states, range(n), x / w)


def test_a_ring_never_averages_but_loses_nothing_when_sites_come_and_go():
    states = [PushSum(np.float32([k]), 1.0) for k in range(4)]
    states = exchange(mixed(states, ring, range(4), range(3)), handover(4, [1], [0, 2, 3]))
    states = exchange(mixed(states, ring, [0, 2, 3], range(3)), welcome(4, [1], [0, 2, 3]))
    x, w = mass(states)
    assert (x.tolist(), w) == ([6.0], 4.0)
