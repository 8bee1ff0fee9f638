"""Topologies as matrices keep mass, send one message a site, and reach every present site."""

import json

import numpy as np
import pytest
from conftest import refused
from hypothesis import given, settings
from hypothesis import strategies as st

from wsi_fl.federation import topology as graphs
from wsi_fl.federation.message import GRAPH_HOPS
from wsi_fl.federation.topology import (
    exponential,
    find_topology,
    list_hops,
    list_receivers,
    list_senders,
    parse_graph,
    random_permutation,
)

n_sites = st.integers(2, 64)
rounds = st.integers(0, 40)
self_weights = st.sampled_from([0.0, 0.25, 0.5])
topologies = st.builds(find_topology, st.sampled_from(list(graphs.TOPOLOGIES)), st.integers(0, 2**32))


def names_of(n):
    return [f"S{k}" for k in range(1, n + 1)]


def assert_column_stochastic(matrix, n):
    assert matrix.shape == (n, n) and (matrix >= 0).all()
    np.testing.assert_allclose(matrix.sum(axis=0), 1, rtol=0, atol=1e-12)


@st.composite
def documents(draw, n):
    """Draw a file over a ring and some more edges, some of them with weights."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    chosen = []
    for _ in range(draw(st.integers(1, 3))):
        edges = {(k, (k + 1) % n) for k in range(n)}
        edges |= {(int(a), int(b)) for a, b in rng.integers(0, n, (draw(st.integers(0, 6)), 2)) if a != b}
        weigh, degree = rng.random(n) < 0.4, np.bincount([a for a, _ in edges], minlength=n)
        weights = {a: [rng.uniform(0.1, 0.9) / int(degree[a])] if weigh[a] else [] for a in range(n)}
        chosen.append([[f"S{a + 1}", f"S{b + 1}", *weights[a]] for a, b in sorted(edges)])
    return {"rounds": chosen}


@given(topologies, st.integers(1, 17), rounds, self_weights)
def test_every_column_sums_to_one_and_a_single_site_sends_no_message(topology, n, round_, self_weight):
    for matrix in topology(n, round_, self_weight):
        assert_column_stochastic(matrix, n)
    assert topology(1, round_, 0.5) == find_topology("none")(4, round_, 0.0) == []


permutations = st.one_of(st.just(exponential), st.builds(random_permutation, st.integers(0, 2**32)))


@given(permutations, n_sites, rounds, st.sampled_from([0.0, 0.5]))
def test_every_site_sends_one_message_and_gets_one(topology, n, round_, self_weight):
    (matrix,) = topology(n, round_, self_weight)
    assert np.array_equal(matrix, topology(n, round_, self_weight)[0])
    assert np.allclose(matrix.diagonal(), self_weight)
    assert self_weight or set(np.unique(matrix)) == {0.0, 1.0}  # then models only travel
    for site in range(n):
        (to,) = list_receivers(matrix, site)
        assert to != site and list_senders(matrix, to) == [site]


@given(n_sites, st.integers(0, 9))
def test_peers_are_powers_of_two_away_in_turn(n, start):
    """ProxyFL, section 4: 2^0, 2^1, …, 2^⌊log2(n − 1)⌋ steps away, periodically."""
    strides = [(list_receivers(exponential(n, start + t)[0], 0)[0]) % n for t in range(2 * len(bin(n - 1)))]
    powers = [2**k for k in range(len(bin(n - 1)) - 2)]
    assert max(powers) <= n - 1 < 2 * max(powers)
    assert strides == [powers[(start + t) % len(powers)] % n for t in range(len(strides))]


@settings(max_examples=10)
@given(st.integers(2, 12), st.integers(0, 2**32), st.integers(0, 100))
def test_random_peers_reach_every_site_in_the_end(n, seed, start):
    drawn = random_permutation(seed)
    met = {list_receivers(drawn(n, start + t, 0.0)[0], 0)[0] for t in range(40 * n)}
    assert met == set(range(1, n))


def test_random_peers_differ_between_rounds_and_seeds_and_are_the_same_on_every_machine():
    drawn = {tuple(random_permutation(seed)(9, t, 0.0)[0].argmax(0).tolist()) for seed in range(3) for t in range(20)}
    assert len(drawn) == 60
    assert random_permutation(7)(6, 2, 0.0)[0].argmax(axis=0).tolist() == [2, 0, 5, 4, 1, 3]


@st.composite
def attendance(draw):
    n = draw(st.integers(1, 12))
    return n, draw(st.sets(st.integers(0, n - 1)))


@given(topologies, attendance(), rounds, self_weights)
def test_the_graph_of_present_sites_is_the_smaller_graph_and_absent_sites_keep_their_mass(
    topology, who, round_, self_weight
):
    n, present = who
    places, absent = sorted(present), sorted(set(range(n)) - present)
    hops = list_hops(topology, n, list(present)[::-1], round_, self_weight)
    smaller = topology(len(places), round_, self_weight) if places else []
    assert len(hops) == len(smaller)
    for hop, small in zip(hops, smaller, strict=True):
        assert_column_stochastic(hop, n)
        assert np.array_equal(hop[np.ix_(places, places)], small)
        assert np.array_equal(hop[:, absent], np.eye(n)[:, absent])
        assert np.array_equal(hop[absent], np.eye(n)[absent])


def test_the_hub_of_a_star_is_the_first_present_site_and_a_ring_links_present_sites():
    gather, broadcast = list_hops(graphs.star, 5, [4, 2, 3], 0)
    assert [list_senders(gather, site) for site in range(5)] == [[], [], [3, 4], [], []]
    assert list_receivers(broadcast, 2) == [3, 4]
    assert [list_receivers(list_hops(graphs.ring, 5, [0, 2, 3], 0)[0], site) for site in (0, 2, 3)] == [[2], [3], [0]]


@st.composite
def coming_and_going(draw):
    n = draw(st.integers(1, 10))
    roles = draw(st.lists(st.sampled_from(["present", "moving", "absent"]), min_size=n, max_size=n))
    return n, *([k for k in range(n) if roles[k] == role] for role in ("moving", "present"))


@given(coming_and_going(), st.booleans())
def test_a_leaving_site_hands_all_mass_to_the_next_present_site(who, listed):
    """`present` may or may not contain the leaving sites."""
    n, leaving, present = who
    matrix = graphs.build_handover(n, leaving, present + leaving if listed else present)
    assert_column_stochastic(matrix, n)
    for site in range(n):
        heir = site
        while present and heir not in present and site in leaving:
            heir = (heir + 1) % n
        assert matrix[:, site].tolist() == np.eye(n)[heir].tolist()


@given(coming_and_going(), st.booleans())
def test_a_returning_site_shares_evenly_with_its_host_and_other_returning_sites(who, listed):
    n, returning, present = who
    matrix = graphs.build_welcome(n, returning, present + returning if listed else present)
    assert_column_stochastic(matrix, n)
    host = {}
    for site in returning if present else []:
        host[site] = site
        while host[site] not in present:
            host[site] = (host[site] - 1) % n
    for site in range(n):
        party = [site, *(guest for guest in host if host[guest] == site)]
        wanted = np.zeros(n)
        wanted[party] = 1 / len(party)
        np.testing.assert_allclose(matrix[:, site], wanted)


@given(st.integers(2, 7).flatmap(lambda n: st.tuples(st.just(n), documents(n))), rounds, self_weights)
def test_a_graph_file_gives_each_edge_its_weight_or_an_equal_share_of_the_rest(case, round_, self_weight):
    n, document = case
    (matrix,) = parse_graph(document, names_of(n))(n, round_, self_weight)
    assert_column_stochastic(matrix, n)
    edges = document["rounds"][round_ % len(document["rounds"])]
    for k, site in enumerate(names_of(n)):
        mine = [edge for edge in edges if edge[0] == site]
        assert list_receivers(matrix, k) == sorted(int(edge[1][1:]) - 1 for edge in mine)
        for edge in mine:
            wanted = edge[2] if len(edge) == 3 else (1 - self_weight) / len(mine)
            assert matrix[int(edge[1][1:]) - 1, k] == pytest.approx(wanted)


def test_a_site_without_edges_keeps_all_and_a_round_without_edges_sends_nothing():
    graph = parse_graph({"rounds": [[["S1", "S2"], ["S2", "S1"]], []]}, names_of(3))
    assert graph(3, 0, 0.0)[0].tolist() == [[0, 1, 0], [1, 0, 0], [0, 0, 1]] and graph(3, 1, 0.5) == []
    assert graph(3, 4, 0.0)[0].tolist() == graph(3, 0, 0.0)[0].tolist()


@settings(max_examples=20)
@given(
    st.integers(2, 7).flatmap(lambda n: st.tuples(st.just(n), documents(n), st.sets(st.integers(0, n - 1)))),
    self_weights,
)
def test_no_weight_vanishes_in_a_custom_graph_with_any_sites_absent(case, self_weight):
    """The bound of a strongly connected part is its shares' product along any path, far above 1e-40."""
    n, document, present = case
    graph = parse_graph(document, names_of(n))
    weight = np.ones(n)
    for round_ in range(80):
        for hop in list_hops(graph, n, sorted(present), round_, self_weight or 0.5):
            assert_column_stochastic(hop, n)
            absent = sorted(set(range(n)) - present)
            assert np.array_equal(hop[absent], np.eye(n)[absent])
            weight = hop @ weight
    assert weight.min() > 1e-9 and weight.sum() == pytest.approx(n)


CIRCLE = [["S1", "S2"], ["S2", "S3"], ["S3", "S1"]]
BOTH_WAYS = [["S1", "S2", 0.2], ["S1", "S3", 0.4], ["S2", "S1"], ["S2", "S3"], ["S3", "S1"], ["S3", "S2"]]


@pytest.mark.parametrize(
    ("edges", "present", "self_weight", "wanted"),
    [
        (BOTH_WAYS, [0, 2], 0.25, [[[0.4, 0, 0.75], [0, 1, 0], [0.6, 0, 0.25]]]),
        # a site that stays keeps half while others are missing
        ([*CIRCLE, ["S2", "S1"]], [0, 1], 0.0, [[[0.5, 0.5, 0], [0.5, 0.5, 0], [0, 0, 1]]]),
        # edges without a way back rest until the absent return
        (CIRCLE, [0, 1], 0.5, []),
        (CIRCLE, [0], 0.5, []),
        (CIRCLE, [], 0.5, []),
    ],
)
def test_the_share_of_absent_receivers_goes_to_the_present_receivers(edges, present, self_weight, wanted):
    graph = parse_graph({"rounds": [edges]}, names_of(3))
    np.testing.assert_allclose(list_hops(graph, 3, present, 0, self_weight), wanted)
    assert list_hops(graph, 3, [0, 1, 2], 0, 0.25)[0].tolist() == graph(3, 0, 0.25)[0].tolist()


TWO = [["S1", "S2"], ["S2", "S1"]]


@pytest.mark.parametrize(
    ("document", "words"),
    [
        ("", ["not valid JSON"]),
        ([TWO], ['write {"rounds": ']),
        ({}, ['write {"rounds": ']),
        ({"rounds": {"1": TWO}}, ['write {"rounds": ']),
        ({"rounds": [TWO], "weights": []}, ['write {"rounds": ']),
        ({"rounds": []}, ["no edges in any round"]),
        ({"rounds": [[], []]}, ["no edges in any round"]),
        ({"rounds": [TWO, "S1"]}, ["round 2", '"S1" is no list']),
        ({"rounds": [["S1", "S2"]]}, ["round 1", '"S1" is no edge', '["sender", "receiver"]']),
        ({"rounds": [[["S1", "S2", 0.5, 1]]]}, ["round 1", "no edge"]),
        ({"rounds": [[["S1", "C4"]]]}, ["round 1", 'unknown site "C4"', "S1, S2, S3"]),
        ({"rounds": [[[1, "S2"]]]}, ["round 1", "unknown site 1"]),
        ({"rounds": [[["S1", ["S2"]]]]}, ["round 1", 'unknown site ["S2"]']),
        ({"rounds": [[["S2", "S2"]]]}, ["round 1", "S2 sends to itself"]),
        ({"rounds": [[["S1", "S2"], ["S1", "S2", 0.5]]]}, ["round 1", "twice"]),
        ({"rounds": [[["S1", "S2"], ["S1", "S3", 0.5]]]}, ["round 1", "all edges of S1 a weight, or none"]),
        ({"rounds": [[["S1", "S2", 0.7], ["S1", "S3", 0.5]]]}, ["round 1", "S1 sends 1.2 of what it has"]),
        *(
            ({"rounds": [[["S1", "S2", weight]]]}, ["round 1", "above 0 and at most 1"])
            for weight in (0, -0.5, 1.5, True, None, "0.5", float("nan"), float("inf"))
        ),
        ({"rounds": [[["S1", "S2"], ["S3", "S2"]]]}, ["round 1", "S1 sends all", "topology.self_weight"]),
        ({"rounds": [TWO, [["S3", "S1"]]]}, ["round 2", "S3 sends all", "gets nothing"]),
        ({"rounds": [[["S1", "S2", 0.5]]]}, ["S1 sends gets to S2", "nothing ever comes back"]),
    ],
)
def test_a_file_that_is_no_graph_is_refused_in_one_line(tmp_path, document, words):
    path = tmp_path / "graph.json"
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    refused(lambda: graphs.read_graph(path, names_of(3)), "graph.json", *words)


def test_vanishing_of_weights_depends_on_the_self_weight_and_on_all_rounds():
    merge = graphs.Graph(("A", "B"), ((graphs.Edge(0, 1),),), "g.json")
    refused(lambda: merge.check_weights(0.0), "g.json: round 1", "A sends all")
    refused(lambda: merge.check_weights(0.5), "A sends gets to B")
    there_and_back = graphs.Graph(("A", "B"), ((graphs.Edge(0, 1),), (graphs.Edge(1, 0),)))
    there_and_back.check_weights(0.5)
    refused(lambda: there_and_back.check_weights(0.0), "round 1", "A sends all")
    graphs.Graph(
        tuple("ABCD"), ((graphs.Edge(0, 1), graphs.Edge(1, 0), graphs.Edge(2, 3), graphs.Edge(3, 2)),)
    ).check_weights(0.0)


def test_the_order_of_rounds_can_drain_a_site_though_every_edge_has_a_way_back():
    """Without self-weight the mass of A and B is never at the start of an edge to C."""
    drain = [["B", "C"], ["C", "B"]], [["A", "B"], ["B", "A"], ["B", "C"], ["C", "A"]]
    graph = parse_graph({"rounds": list(drain)}, ["A", "B", "C"])
    refused(lambda: graph.check_weights(0.0), "what C sends gets to A")
    graph.check_weights(0.25)


def test_a_graph_with_too_many_hops_for_a_round_is_refused():
    def hops(number):
        return lambda n_sites, round_, self_weight=0.0: graphs.ring(n_sites, round_) * number

    assert len(list_hops(hops(GRAPH_HOPS), 4, range(4), 2)) == GRAPH_HOPS
    words = f"the graph of round 3 has {GRAPH_HOPS + 1} hops; at most {GRAPH_HOPS}"
    refused(lambda: list_hops(hops(GRAPH_HOPS + 1), 4, range(4), 2), words)
    refused(lambda: list_hops(hops(2), 4, range(4), 2, max_hops=1), "has 2 hops; at most 1")


def test_a_listening_site_sends_no_message_in_a_custom_graph():
    graph = parse_graph({"rounds": [[["L", "A"], ["A", "B"], ["B", "L"], ["B", "A"]]]}, ["L", "A", "B"], "g")
    (matrix,) = list_hops(graph, 3, [1, 2], 0, 0.5, listening=[0])
    assert list_receivers(matrix, 0) == [] and list_receivers(matrix, 1) == [2] and list_receivers(matrix, 2) == [0, 1]
