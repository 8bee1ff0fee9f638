"""Communication graphs: pure functions of the number of sites and the round.

A topology returns the hops of a round, each a column-stochastic mixing matrix P float64[n, n]: P[i, j] is the share of
its mass that site j sends to site i, so the nonzeros off the diagonal are the messages. P may change from round to
round (ProxyFL, section 3.4), so sites may leave and return: `list_hops` restricts a topology to the sites present,
`build_handover` and `build_welcome` move the PushSum mass of leaving and returning sites, and preserve its total.

A graph may be read from a file, by site names:

    {"rounds": [[["S1", "S2"], ["S2", "S3"], ["S3", "S1"]], [["S1", "S3", 0.5], ["S3", "S1", 0.25]]]}

is JSON with the edges of each round as [sender, receiver] or [sender, receiver, weight]; after the last round comes the
first. The weight is the share of the sender's mass (P[receiver, sender]).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from wsi_fl.federation.message import GRAPH_HOPS
from wsi_fl.system.files import read_json
from wsi_fl.types import UsageError, WsiFlError, shorten_text

_ROUND_OFF = 1e-9  # tolerance of shares at 0 and 1


class Edge(NamedTuple):
    """A message of a round; without a weight an equal part of the mass that its sender does not keep."""

    sender: int
    receiver: int
    weight: float | None = None


@dataclass(frozen=True)
class Graph:
    """A topology whose edges are listed by round, as positions in `names`; after the last round comes the first.

    A site sends equal parts of 1 − self_weight along its edges and keeps the rest; with weights on its edges it keeps 1
    minus their sum; without edges it keeps all. Where sites were removed (`thinned`), a site that would keep nothing
    keeps half. `source` names the graph in messages.
    """

    names: tuple[str, ...]
    rounds: tuple[tuple[Edge, ...], ...]
    source: str = "graph"
    thinned: bool = False

    def __call__(self, n_sites: int, round_: int, self_weight: float = 0.0) -> list[NDArray[np.float64]]:
        """Return the hop of a round, P[n, n], or none without edges.

        Raises:
            UsageError: when a site would have no mass, a zero row of P.
        """
        assert n_sites == len(self.names)
        edges = self.rounds[round_ % len(self.rounds)]
        if not edges:
            return []
        matrix = _build_matrix(edges, n_sites, self_weight)
        if self.thinned:
            bare = np.flatnonzero(matrix.diagonal() == 0)
            matrix[:, bare] /= 2
            matrix[bare, bare] = 0.5
        for site in np.flatnonzero(matrix.sum(axis=1) == 0):
            raise UsageError(
                f"{self.source}: round {round_ % len(self.rounds) + 1}: {self.names[site]} sends all it has "
                "and gets nothing; give sites a weight of themselves (topology.self_weight), or "
                "weights that sum to less than 1"
            )
        return [matrix]

    def select_sites(self, present: Sequence[int]) -> Graph:
        """Return the graph of the sites at positions `present`, ascending, which become 0, 1, ….

        Edges from and to others are dropped, and edges without a way back (see `check_weights`); a site's other
        receivers get their mass.
        """
        if len(present) == len(self.names):
            return self
        positions = {site: k for k, site in enumerate(present)}
        reachable = np.eye(len(self.names), dtype=bool)
        for edge in (edge for edges in self.rounds for edge in edges):
            reachable[edge.receiver, edge.sender] |= edge.sender in positions and edge.receiver in positions
        reachable = _find_reachable(reachable)
        rounds = []
        for edges in self.rounds:
            kept_edges = [
                e for e in edges if e.sender in positions and reachable[e.receiver, e.sender] & reachable[e[:2]]
            ]
            total_before, total_after = _sum_weights(edges), _sum_weights(kept_edges)
            rounds.append(
                tuple(
                    Edge(positions[s], positions[r], None if w is None else w * total_before[s] / total_after[s])
                    for s, r, w in kept_edges
                )
            )
        return Graph(tuple(self.names[site] for site in present), tuple(rounds), self.source, thinned=True)

    def check_weights(self, self_weight: float) -> None:
        """Refuse a graph in which the weight of a site falls to 0, at once or gradually.

        PushSum divides by that weight. It stays above a bound where all mass that leaves a site over a course of the
        rounds can return (strong connectivity in the sense of Nedić and Olshevsky, 2015); separate groups of sites may
        each be connected in themselves.

        Raises:
            UsageError: one line with the round or the sites.
        """
        n_sites = len(self.names)
        reachable = np.eye(n_sites, dtype=bool)
        for round_ in range(len(self.rounds)):
            for hop in self(n_sites, round_, self_weight):
                reachable = (hop > 0) @ reachable
        reachable = _find_reachable(reachable)
        for to, site in np.argwhere(reachable & ~reachable.T)[:1]:
            raise UsageError(
                f"{self.source}: what {self.names[site]} sends gets to {self.names[to]}, but nothing ever comes back, "
                f"so that the weight of {self.names[site]} falls to 0; add edges that lead back to it"
            )


def _build_matrix(edges: Iterable[Edge], n_sites: int, self_weight: float) -> NDArray[np.float64]:
    """Return P[n, n] of a round, with columns summing to one."""
    matrix, open_ = np.zeros((n_sites, n_sites)), np.zeros(n_sites, dtype=bool)
    for sender, receiver, weight in edges:
        matrix[receiver, sender] = 1 if weight is None else weight
        open_[sender] |= weight is None
    sent = matrix.sum(axis=0)
    self_shares = np.where(open_, self_weight, 1 - sent)
    self_shares[self_shares < _ROUND_OFF] = 0
    matrix *= np.divide(1 - self_shares, sent, out=np.zeros(n_sites), where=sent > 0)
    np.fill_diagonal(matrix, self_shares)
    return matrix


def _find_reachable(reachable: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Return bool[n, n], whether mass of site j reaches site i in any number of steps."""
    reachable = reachable | np.eye(len(reachable), dtype=bool)
    for _ in range(len(reachable).bit_length()):
        reachable = reachable @ reachable
    return reachable


def _sum_weights(edges: Iterable[Edge]) -> dict[int, float]:
    """Return sender → sum of the weights of its edges."""
    total: dict[int, float] = {}
    for sender, _, weight in edges:
        total[sender] = total.get(sender, 0.0) + (weight or 0.0)
    return total


def read_graph(path: Path, names: Sequence[str], self_weight: float = 0.0) -> Graph:
    """Read a graph from a JSON file, for the sites of a run in their order.

    Raises:
        UsageError: one line with the file and the round when it is missing, malformed, names unknown sites, or lets a
            site's weight fall to 0 with this self-weight.
    """
    try:
        document = read_json(path)
    except (WsiFlError, OSError) as error:
        raise UsageError(str(error)) from None
    graph = parse_graph(document, names, source=path.name)
    graph.check_weights(self_weight)
    return graph


def parse_graph(document: object, names: Sequence[str], source: str = "graph") -> Graph:
    """Return the graph of a JSON document.

    Raises:
        UsageError: one line with the source and the round.
    """
    rounds = document.get("rounds") if isinstance(document, Mapping) and len(document) == 1 else None
    if not isinstance(rounds, list):
        raise UsageError(f'{source}: write {{"rounds": [[["S1", "S2"], …], …]}} with the names of the sites')
    parsed = tuple(_parse_round(edges, names, f"{source}: round {k + 1}") for k, edges in enumerate(rounds))
    if not any(parsed):
        raise UsageError(f"{source}: has no edges in any round")
    return Graph(tuple(names), parsed, source)


def _parse_round(edges: object, names: Sequence[str], where: str) -> tuple[Edge, ...]:
    if not isinstance(edges, list):
        raise UsageError(f"{where}: {_format_value(edges)} is no list of edges")
    edge_of_pair: dict[tuple[int, int], Edge] = {}
    for item in edges:
        edge = _parse_edge(item, names, where)
        if edge[:2] in edge_of_pair:
            raise UsageError(f"{where}: {_format_value(item)} is there twice; write every edge once")
        edge_of_pair[edge[:2]] = edge
    parsed = tuple(edge_of_pair.values())
    for sender, sent in _sum_weights(parsed).items():
        has_weight = [edge.weight is not None for edge in parsed if edge.sender == sender]
        if any(has_weight) and not all(has_weight):
            raise UsageError(f"{where}: give all edges of {names[sender]} a weight, or none")
        if sent > 1 + _ROUND_OFF:
            raise UsageError(f"{where}: {names[sender]} sends {sent:g} of what it has; at most 1")
    return parsed


def _parse_edge(item: object, names: Sequence[str], where: str) -> Edge:
    if not isinstance(item, list) or len(item) not in (2, 3):
        raise UsageError(f'{where}: {_format_value(item)} is no edge; write ["sender", "receiver"] or add a weight')
    for name in item[:2]:
        if name not in names:
            raise UsageError(f"{where}: unknown site {_format_value(name)}; the run has {', '.join(names)}")
    sender, receiver = names.index(item[0]), names.index(item[1])
    if sender == receiver:
        raise UsageError(f"{where}: {item[0]} sends to itself; a site keeps what it does not send")
    if len(item) == 2:
        return Edge(sender, receiver)
    weight = item[2]
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight <= 1:
        raise UsageError(f"{where}: {_format_value(item)}: a weight is a number above 0 and at most 1")
    return Edge(sender, receiver, float(weight))


def _format_value(value: object) -> str:
    return shorten_text(json.dumps(value, ensure_ascii=False, default=str))


Matrix = NDArray[np.float64]
Topology = Callable[[int, int, float], list[Matrix]]
"""(number of sites, round from 0, self-weight P[i, i] where the graph does not set it) → hops."""


def exponential(n_sites: int, round_: int, self_weight: float = 0.0) -> list[Matrix]:
    """Return a hop of the directed exponential graph over permutations (Assran et al., 2019; ProxyFL, Fig. 2).

    In round t each site sends to the site 2^(t mod ⌈log2 n⌉) places further. With `self_weight` 0 (the paper)
    each P is a permutation; with 0.5 it is stochastic gradient push.

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
    """Return the hop in which each site sends all to the next one (cyclical weight transfer, Chang et al., 2018)."""
    del round_, self_weight
    return [np.roll(np.eye(n_sites), 1, axis=0)] if n_sites > 1 else []


def star(n_sites: int, round_: int, self_weight: float = 0.0) -> list[Matrix]:
    """Return two hops: all sites send all mass to site 0, which sends each an equal share of the sum."""
    del round_, self_weight
    if n_sites < 2:
        return []
    gather = np.zeros((n_sites, n_sites))
    gather[0] = 1
    broadcast = np.eye(n_sites)
    broadcast[:, 0] = 1 / n_sites
    return [gather, broadcast]


def random_permutation(seed: int) -> Topology:
    """Return a topology with a new random ring through all sites in each round.

    The order depends on the seed, the round and the number of sites alone, so all sites draw the same.
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


def _complete_graph(n_sites: int, round_: int, self_weight: float = 0.0) -> list[Matrix]:
    """Return the hop in which each site sends to all, in equal shares."""
    del round_, self_weight
    return [np.full((n_sites, n_sites), 1 / n_sites)] if n_sites > 1 else []


TOPOLOGIES: dict[str, Callable[[int], Topology]] = {
    "none": lambda _: lambda n_sites, round_, self_weight: [],
    "star": lambda _: star,
    "ring": lambda _: ring,
    "exponential": lambda _: exponential,
    "complete": lambda _: _complete_graph,
    "random": random_permutation,
}
"""Name → (seed → topology); only `random` uses the seed."""


def find_topology(name: str, seed: int = 0) -> Topology:
    """Return a topology by name.

    Raises:
        UsageError: when the name is unknown.
    """
    if name not in TOPOLOGIES:
        raise UsageError(f"unknown topology {name!r}; known: {', '.join(TOPOLOGIES)}")
    return TOPOLOGIES[name](seed)


def list_hops(
    topology: Topology,
    n_sites: int,
    present: Sequence[int],
    round_: int,
    self_weight: float = 0.0,
    *,
    listening: Sequence[int] = (),
    max_hops: int = GRAPH_HOPS,
) -> list[Matrix]:
    """Return the hops of a round among the sites present, as P[n, n] of all; absent sites keep their mass.

    The topology is built for the present sites in ascending order: the hub of a star is the first of them, and an
    exponential graph of five becomes one of four. A `Graph` loses the edges of absent sites. Sites that are `listening`
    come last, and send nothing.

    Raises:
        UsageError: in one line, when the topology has too many hops.
    """
    positions = [*sorted(present), *sorted(listening)]
    reduced = topology
    if isinstance(topology, Graph):  # of named sites without an order
        positions = sorted(positions)
        reduced = topology.select_sites(positions)
    hops = []
    for hop in reduced(len(positions), round_, self_weight):
        matrix = np.eye(n_sites)
        matrix[np.ix_(positions, positions)] = hop
        matrix[:, listening] = np.eye(n_sites)[:, listening]
        hops.append(matrix)
    if len(hops) > max_hops:
        raise UsageError(f"the graph of round {round_ + 1} has {len(hops)} hops; at most {max_hops}")
    return hops


def build_handover(n_sites: int, leaving: Sequence[int], present: Sequence[int]) -> Matrix:
    """Return the hop in which each leaving site sends all its mass to the next one present, cyclically.

    So it stays in the mean of PushSum. Where no site stays, each keeps its mass.
    """
    matrix, staying = np.eye(n_sites), set(present) - set(leaving)
    for site in leaving:
        if staying:
            matrix[site, site] = 0
            matrix[_find_nearest(site, staying, n_sites, step=1), site] = 1
    return matrix


def build_welcome(n_sites: int, returning: Sequence[int], present: Sequence[int]) -> Matrix:
    """Return the hop in which each returning site, without mass, gets half of the site before it, cyclically.

    Returning sites with the same host share evenly with it: two of them and the host get a third each.
    """
    matrix, hosts = np.eye(n_sites), set(present) - set(returning)
    guests: dict[int, list[int]] = {}
    for site in returning:
        if hosts:
            guests.setdefault(_find_nearest(site, hosts, n_sites, step=-1), []).append(site)
    for host, returning_sites in guests.items():
        matrix[[host, *returning_sites], host] = 1 / (1 + len(returning_sites))
    return matrix


def _find_nearest(site: int, candidates: set[int], n_sites: int, *, step: int) -> int:
    """Return the first of `candidates` from `site` on, cyclically."""
    return min(candidates, key=lambda other: (other - site) * step % n_sites)


def list_receivers(matrix: Matrix, sender: int) -> list[int]:
    """Return the receivers of messages from `sender`."""
    return [int(i) for i in np.flatnonzero(matrix[:, sender]) if i != sender]


def list_senders(matrix: Matrix, receiver: int) -> list[int]:
    """Return the senders of messages to `receiver`."""
    return [int(j) for j in np.flatnonzero(matrix[receiver]) if j != receiver]
