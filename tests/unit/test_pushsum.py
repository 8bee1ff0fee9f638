"""PushSum against the dense matrix product, and against the mean of all sites."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wsi_fl.federation import topology as graphs
from wsi_fl.federation.push_sum import PushSum, mix_states
from wsi_fl.federation.topology import exponential, list_hops, list_receivers, list_senders


def exchange(states, matrix):
    """Exchange models as the training loop does, site by site."""

    def sent(j, i):
        return PushSum(states[j].x * np.float32(matrix[i, j]), states[j].w * matrix[i, j])

    return [
        mix_states(state, float(matrix[i, i]), [sent(j, i) for j in list_senders(matrix, i)])
        for i, state in enumerate(states)
    ]


@st.composite
def connected_graph(draw):
    """Draw a random column-stochastic matrix over a ring: strongly connected and, with self loops, aperiodic."""
    n = draw(st.integers(2, 7))
    rng = np.random.default_rng(draw(st.integers(0, 10**6)))
    matrix = rng.uniform(0.1, 1, (n, n)) * (rng.random((n, n)) < 0.3)
    matrix += np.eye(n) * rng.uniform(0.2, 1) + np.roll(np.eye(n), 1, axis=0) * rng.uniform(0.2, 1)
    return matrix / matrix.sum(axis=0)


@settings(deadline=None, max_examples=10)
@given(connected_graph(), st.integers(0, 10**6))
def test_with_training_between_rounds_it_is_the_dense_product_of_the_biased_numerators(matrix, seed):
    """X ← P (X + ΔZ), w ← P w, Z = X / w: the increment enters unscaled, or light sites would weigh more."""
    rng, n = np.random.default_rng(seed), len(matrix)
    x, w = rng.normal(size=(n, 4)), np.ones(n)
    states = [PushSum(row.astype(np.float32), 1.0) for row in x]
    for _ in range(8):
        delta = rng.normal(size=(n, 4))
        x, w = matrix @ (x + delta), matrix @ w
        trained = [s.add_training((s.z + d).astype(np.float32)) for s, d in zip(states, delta, strict=True)]
        states = exchange(trained, matrix)
        for k, state in enumerate(states):
            assert state.w == pytest.approx(w[k])
            np.testing.assert_allclose(state.x, x[k], atol=2e-3)
            np.testing.assert_allclose(state.z, x[k] / w[k], atol=2e-3 / w[k])


@settings(deadline=None)
@given(
    st.sampled_from([graphs.find_topology(name, 5) for name in ("ring", "star", "exponential", "random")]),
    st.integers(1, 17),
    st.integers(0, 30),
    st.sampled_from([0.0, 0.25, 0.5]),
    st.data(),
)
def test_mixing_over_any_graph_and_attendance_is_the_dense_product(topology, n, round_, self_weight, data):
    present = data.draw(st.sets(st.integers(0, n - 1)))
    rng = np.random.default_rng(n + round_)
    x, w = rng.normal(size=(n, 3)).astype(np.float32), rng.uniform(0.2, 2, n)
    states, total = [PushSum(row, weight) for row, weight in zip(x, w, strict=True)], w.sum()
    for matrix in list_hops(topology, n, sorted(present), round_, self_weight):
        states, x, w = exchange(states, matrix), matrix @ x, matrix @ w
    np.testing.assert_allclose([s.x for s in states], x, atol=1e-5)
    np.testing.assert_allclose([s.w for s in states], w, rtol=1e-12)
    assert sum(s.w for s in states) == pytest.approx(total, rel=1e-12)


@given(st.integers(2, 16), st.integers(0, 10))
def test_a_permutation_passes_models_on_bit_for_bit(n, round_):
    (matrix,) = exponential(n, round_)
    states = [PushSum(np.float32([k, 0.1 * k]), 1.0) for k in range(n)]
    mixed = exchange(states, matrix)
    for k in range(n):
        assert mixed[list_receivers(matrix, k)[0]].x.tobytes() == states[k].x.tobytes()
    assert {s.w for s in mixed} == {1.0}


def random_digraph(n, round_, self_weight):
    """A topology: in every round another strongly connected, aperiodic, unevenly weighted graph."""
    rng = np.random.default_rng((3, n, round_))
    order = rng.permutation(n)
    matrix = rng.uniform(0.1, 1, (n, n)) * (rng.random((n, n)) < 0.3)
    matrix[np.roll(order, -1), order] += rng.uniform(0.1, 1, n)
    np.fill_diagonal(matrix, 0)
    return [matrix / matrix.sum(axis=0) * (1 - self_weight) + np.eye(n) * self_weight] if n > 1 else []


GRAPHS = [random_digraph, exponential, graphs.random_permutation(3), graphs.star]


def mass(states):
    """Return Σ x float64[d] and Σ w."""
    return sum(s.x.astype(float) for s in states), sum(s.w for s in states)


def mixed(states, topology, present, rounds, self_weight=0.4):
    """Return the states after some rounds among the present sites; each round keeps all mass."""
    x, w = mass(states)
    for round_ in rounds:
        for hop in list_hops(topology, len(states), present, round_, self_weight):
            states = exchange(states, hop)
        assert mass(states)[1] == pytest.approx(w, rel=1e-12)
        np.testing.assert_allclose(mass(states)[0], x, atol=1e-4)
    return states


def assert_all_hold(states, present, mean):
    for k in present:
        np.testing.assert_allclose(states[k].z, mean, atol=3e-4)


def draw_sites(n, seed, n_away):
    """Return random starts of n sites, the remaining sites and the others; at least one remains."""
    rng = np.random.default_rng(seed)
    start = rng.normal(size=(n, 3)).astype(np.float32)
    away = sorted(rng.permutation(n)[: min(n_away, n - 1)].tolist())
    return start, [PushSum(row, 1.0) for row in start], away, [k for k in range(n) if k not in away]


def cases(test):
    given_ = given(st.sampled_from(GRAPHS), st.integers(2, 8), st.integers(1, 3), st.integers(0, 10**6))
    return settings(deadline=None, max_examples=8)(given_(test))


@cases
def test_remaining_sites_reach_the_mean_of_all_after_others_hand_over_and_leave(graph, n, n_away, seed):
    start, states, leaving, staying = draw_sites(n, seed, n_away)
    states = exchange(mixed(states, graph, range(n), range(3)), graphs.build_handover(n, leaving, staying))
    assert [states[k].w for k in leaving] == [0] * len(leaving)
    states = mixed(states, graph, staying, range(3, 120))
    assert sum(states[k].w for k in staying) == pytest.approx(n, rel=1e-12)
    assert_all_hold(states, staying, start.mean(0))


@cases
def test_returning_sites_start_from_their_host_and_reach_the_mean_of_all(graph, n, n_away, seed):
    start, states, away, staying = draw_sites(n, seed, n_away)
    states = exchange(mixed(states, graph, range(n), range(2)), graphs.build_handover(n, away, staying))
    before = mixed(states, graph, staying, range(2, 6))
    states = exchange(before, graphs.build_welcome(n, away, staying))
    for k in range(n):
        host = next(j % n for j in range(k, k - n, -1) if j % n in staying)
        np.testing.assert_allclose(states[k].z, before[host].z, rtol=1e-5, atol=1e-6)
        assert states[k].w == states[host].w > 0
    states = mixed(states, graph, range(n), range(6, 120))
    assert mass(states)[1] == pytest.approx(n, rel=1e-12)
    assert_all_hold(states, range(n), start.mean(0))


@cases
def test_the_mass_of_a_crashed_site_is_lost_and_the_others_reach_the_mean_of_the_rest(graph, n, n_away, seed):
    _, states, crashed, staying = draw_sites(n, seed, n_away)
    states = mixed(states, graph, range(n), range(2))
    x, w = mass([states[k] for k in staying])
    assert w < n
    states = [s if k in staying else PushSum(np.zeros_like(s.x), 0.0) for k, s in enumerate(states)]
    states = mixed(states, graph, staying, range(2, 120))
    assert_all_hold(states, staying, x / w)
    states = exchange(states, graphs.build_welcome(n, crashed, staying))
    assert mass(states)[1] == pytest.approx(w, rel=1e-12)
    states = mixed(states, graph, range(n), range(120, 240))
    assert_all_hold(states, range(n), x / w)
