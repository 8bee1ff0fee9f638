"""PushSum against the dense matrix product, and against the mean it promises."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from wsi_fl.federation.mixing import PushSum, mix
from wsi_fl.federation.topology import exponential, receivers, senders


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


@settings(deadline=None, max_examples=40)
@given(connected_graph(), st.integers(0, 10**6))
def test_without_training_every_site_reaches_the_exact_mean_and_mass_is_conserved(matrix, seed):
    n = len(matrix)
    start = np.random.default_rng(seed).normal(size=(n, 3)).astype(np.float32)
    states = [PushSum(row, 1.0) for row in start]
    for _ in range(400):
        states = exchange(states, matrix)
        assert sum(s.w for s in states) == pytest.approx(n, rel=1e-6)
    np.testing.assert_allclose(sum(s.x.astype(float) for s in states), start.sum(0), atol=1e-3)
    for state in states:
        np.testing.assert_allclose(state.z, start.mean(0), atol=2e-4)


@settings(deadline=None, max_examples=40)
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
