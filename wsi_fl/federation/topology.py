"""Communication graphs: pure functions of the number of sites and the round.

A topology returns the hops of a round, each a column-stochastic mixing matrix P float64[n, n]: P[i, j] is the
share of its mass that site j sends to site i, so the nonzeros off the diagonal are the messages.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Topology = Callable[[int, int, float], list[Matrix]]
"""(number of sites, round from 0, self-weight P[i, i] where the graph leaves it open) → hops."""


def none(n_sites: int, round_: int, self_weight: float = 0.0) -> list[Matrix]:
    """Nobody sends anything."""
    del n_sites, round_, self_weight
    return []


def exponential(n_sites: int, round_: int, self_weight: float = 0.0) -> list[Matrix]:
    """The directed exponential graph over permutations (Assran et al., 2019; ProxyFL, Fig. 2).

    In round t every site sends to the one 2^(t mod ⌈log2 n⌉) places further. With `self_weight` 0 (the paper)
    each P is a permutation and models only travel; with 0.5 it is stochastic gradient push.

    Example:
        >>> exponential(4, 0)[0].argmax(axis=0).tolist(), exponential(4, 1)[0].argmax(axis=0).tolist()
        ([1, 2, 3, 0], [2, 3, 0, 1])
    """
    if n_sites < 2:
        return []
    n_strides = (n_sites - 1).bit_length()
    stride = 2 ** (round_ % n_strides)
    sites = np.arange(n_sites)
    matrix = np.zeros((n_sites, n_sites))
    matrix[(sites + stride) % n_sites, sites] = 1 - self_weight
    matrix[sites, sites] += self_weight
    return [matrix]


def ring(n_sites: int, round_: int, self_weight: float = 0.0) -> list[Matrix]:
    """Every site hands all it has to the next one (cyclical weight transfer, Chang et al., 2018)."""
    del round_, self_weight
    if n_sites < 2:
        return []
    sites = np.arange(n_sites)
    matrix = np.zeros((n_sites, n_sites))
    matrix[(sites + 1) % n_sites, sites] = 1
    return [matrix]


def star(n_sites: int, round_: int, self_weight: float = 0.0) -> list[Matrix]:
    """Two hops: all sites send what they have to site 0, which sends everybody an equal share of the sum.

    Example:
        >>> gather, broadcast = star(3, 0)
        >>> (broadcast @ gather).round(2).tolist()[2]
        [0.33, 0.33, 0.33]
    """
    del round_, self_weight
    if n_sites < 2:
        return []
    gather = np.zeros((n_sites, n_sites))
    gather[0] = 1
    broadcast = np.eye(n_sites)
    broadcast[:, 0] = 1 / n_sites
    return [gather, broadcast]


def receivers(matrix: Matrix, sender: int) -> list[int]:
    """The sites that get a message from `sender`."""
    return [int(i) for i in np.flatnonzero(matrix[:, sender]) if i != sender]


def senders(matrix: Matrix, receiver: int) -> list[int]:
    """The sites whose messages `receiver` waits for."""
    return [int(j) for j in np.flatnonzero(matrix[receiver]) if j != receiver]
