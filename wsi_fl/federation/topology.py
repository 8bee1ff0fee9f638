"""Communication graphs: pure functions of the number of sites and the round.

A topology returns the hops of a round, each a column-stochastic mixing matrix P float64[n, n]: P[i, j] is the
share of its mass that site j sends to site i, so the nonzeros off the diagonal are the messages. P may change
from round to round (ProxyFL, section 3.4), so sites may leave and come back: `over` is a topology among those
present, `handover` and `welcome` move the PushSum mass of those who go and come, of which none is lost.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from wsi_fl.federation.graph import Graph
from wsi_fl.federation.message import GRAPH_HOPS
from wsi_fl.types import UsageError

Matrix = NDArray[np.float64]
Topology = Callable[[int, int, float], list[Matrix]]
"""(number of sites, round from 0, self-weight P[i, i] where the graph leaves it open) → hops."""


def none(n_sites: int, round_: int, self_weight: float = 0.0) -> list[Matrix]:
    """Return no hop: nobody sends anything."""
    del n_sites, round_, self_weight
    return []


def exponential(n_sites: int, round_: int, self_weight: float = 0.0) -> list[Matrix]:
    """Return a hop of the directed exponential graph over permutations (Assran et al., 2019; ProxyFL, Fig. 2).

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
    """Return the hop in which every site hands all to the next one (cyclical weight transfer, Chang et al., 2018)."""
    del round_, self_weight
    if n_sites < 2:
        return []
    sites = np.arange(n_sites)
    matrix = np.zeros((n_sites, n_sites))
    matrix[(sites + 1) % n_sites, sites] = 1
    return [matrix]


def star(n_sites: int, round_: int, self_weight: float = 0.0) -> list[Matrix]:
    """Return two hops: all sites send what they have to site 0, which sends everybody an equal share of the sum.

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


def random_permutation(seed: int) -> Topology:
    """Return a topology with a new random ring through all sites in every round.

    The order depends on the seed, the round and the number of sites alone, so all sites draw the same.

    Example:
        >>> (matrix,) = random_permutation(0)(5, 3)
        >>> sorted(receivers(matrix, site)[0] for site in range(5)), float(matrix.trace())
        ([0, 1, 2, 3, 4], 0.0)
    """

    def ring_of_round(n_sites: int, round_: int, self_weight: float = 0.0) -> list[Matrix]:
        if n_sites < 2:
            return []
        keys = np.random.SeedSequence((seed, round_, n_sites)).generate_state(n_sites, np.uint64)
        order = keys.argsort(kind="stable")
        matrix = np.eye(n_sites) * self_weight
        matrix[np.roll(order, -1), order] = 1 - self_weight
        return [matrix]

    return ring_of_round


def complete(n_sites: int, round_: int, self_weight: float = 0.0) -> list[Matrix]:
    """Return the hop in which everybody sends to everybody, in equal shares."""
    del round_, self_weight
    return [np.full((n_sites, n_sites), 1 / n_sites)] if n_sites > 1 else []


TOPOLOGIES: dict[str, Callable[[int], Topology]] = {
    "none": lambda _: none,
    "star": lambda _: star,
    "ring": lambda _: ring,
    "exponential": lambda _: exponential,
    "complete": lambda _: complete,
    "random": random_permutation,
}
"""Name → (seed → topology); only `random` looks at the seed."""


def named(name: str, seed: int = 0) -> Topology:
    """Return a topology of the table.

    Raises:
        UsageError: when the name is unknown.

    Example:
        >>> named("exponential") is exponential
        True
    """
    if name not in TOPOLOGIES:
        raise UsageError(f"unknown topology {name!r}; known: {', '.join(TOPOLOGIES)}")
    return TOPOLOGIES[name](seed)


def over(
    topology: Topology,
    n_sites: int,
    present: Sequence[int],
    round_: int,
    self_weight: float = 0.0,
    *,
    room: int = GRAPH_HOPS,
) -> list[Matrix]:
    """Return the hops of a round among the sites present, as P[n, n] of all; absent sites keep what they have.

    The topology sees the present sites alone, in ascending order: the hub of a star is the first of them, and an
    exponential graph of five becomes one of four. A `Graph` loses the edges of those absent.

    Args:
        room: the most hops that a round may have; those of leaving, returning and buffers come after them.

    Raises:
        UsageError: in one line, when the topology has more hops.

    Example:
        >>> (matrix,) = over(exponential, 4, [0, 1, 3], 0)
        >>> matrix.argmax(axis=0).tolist()
        [1, 3, 2, 0]
    """
    places = sorted(present)
    among = topology.among(places) if isinstance(topology, Graph) else topology
    hops = []
    for hop in among(len(places), round_, self_weight):
        matrix = np.eye(n_sites)
        matrix[np.ix_(places, places)] = hop
        hops.append(matrix)
    if len(hops) > room:
        raise UsageError(
            f"the graph of round {round_ + 1} has {len(hops)} hops, and a round has room for {room}"
        )
    return hops


def handover(n_sites: int, leaving: Sequence[int], present: Sequence[int]) -> Matrix:
    """Return the hop in which each leaving site gives all it has to the next one present, cyclically.

    So the mean that PushSum reaches still counts it. Where nobody stays, everybody keeps what it has.

    Example:
        >>> handover(4, leaving=[1], present=[0, 3])[:, 1].tolist()
        [0.0, 0.0, 0.0, 1.0]
    """
    matrix, staying = np.eye(n_sites), set(present) - set(leaving)
    for site in leaving:
        if staying:
            matrix[site, site] = 0
            matrix[_nearest(site, staying, n_sites, step=1), site] = 1
    return matrix


def welcome(n_sites: int, returning: Sequence[int], present: Sequence[int]) -> Matrix:
    """Return the hop in which each returning site, which holds nothing, gets half of the one before it, cyclically.

    Returning sites with the same host share evenly with it: two of them and the host get a third each.

    Example:
        >>> welcome(4, returning=[1, 2], present=[0, 3])[:, 0].round(2).tolist()
        [0.33, 0.33, 0.33, 0.0]
    """
    matrix, hosts = np.eye(n_sites), set(present) - set(returning)
    guests: dict[int, list[int]] = {}
    for site in returning:
        if hosts:
            guests.setdefault(_nearest(site, hosts, n_sites, step=-1), []).append(site)
    for host, mine in guests.items():
        matrix[[host, *mine], host] = 1 / (1 + len(mine))
    return matrix


def _nearest(site: int, among: set[int], n_sites: int, *, step: int) -> int:
    """Return the first of `among` that is met from `site` on, going round."""
    return min(among, key=lambda other: (other - site) * step % n_sites)


def receivers(matrix: Matrix, sender: int) -> list[int]:
    """Return the sites that get a message from `sender`."""
    return [int(i) for i in np.flatnonzero(matrix[:, sender]) if i != sender]


def senders(matrix: Matrix, receiver: int) -> list[int]:
    """Return the sites whose messages `receiver` waits for."""
    return [int(j) for j in np.flatnonzero(matrix[receiver]) if j != receiver]
