"""Graphs: the weights every builder makes are right, and wrong ones are refused by name."""

import networkx as nx
import numpy as np
import pytest

from thinwire.gossip import graphs

BUILT = [
    graphs.ring(2), graphs.ring(3), graphs.ring(8), graphs.torus(4, 4), graphs.torus(1, 5), graphs.torus(2,
    3), graphs.grid(3, 4), graphs.star(6), graphs.complete(5), graphs.hypercube(4), graphs.exponential(2),
    graphs.exponential(12), graphs.erdos_renyi(20, 0.3, seed=1), graphs.social(),
]  # fmt: skip


@pytest.mark.parametrize("graph", BUILT, ids=lambda graph: graph.name)
def test_builders_give_symmetric_doubly_stochastic_connected_weights(graph):
    assert np.array_equal(graph.weights, graph.weights.T)
    assert np.abs(graph.weights.sum(0) - 1).max() < 1e-12
    assert (graph.weights >= 0).all()
    assert graph.connected
    assert 0 < graph.spectral_gap <= 1 + 1e-12
    for lo, hi in graph.edges:
        assert graph.neighbours(lo)[hi] == graph.neighbours(hi)[lo] > 0
    assert all(node not in graph.neighbours(node) for node in range(graph.nodes))


def test_the_papers_weights():
    assert set(graphs.ring(8).neighbours(0).values()) == {1 / 3}
    assert set(graphs.torus(4, 4).neighbours(5).values()) == {1 / 5}
    assert len(graphs.torus(4, 4).neighbours(0)) == 4


def test_shapes():
    assert list(graphs.star(4).neighbours(0)) == [1, 2, 3]
    assert list(graphs.hypercube(3).neighbours(0)) == [1, 2, 4]
    assert list(graphs.exponential(8).neighbours(0)) == [1, 2, 4, 6, 7]
    assert graphs.social().nodes == 32
    assert len(graphs.social().edges) == 89
    assert graphs.complete(5).spectral_gap == pytest.approx(1)


def test_best_step_of_the_8_ring_and_that_it_is_best():
    graph = graphs.ring(8)
    assert graph.best_step == pytest.approx(1.308, abs=5e-4)
    assert graph.spectral_gap == pytest.approx(2 / 3 * (1 - np.cos(np.pi / 4)))

    def slowest(step):
        return np.abs(1 + step * (graph.eigenvalues[1:] - 1)).max()

    assert slowest(graph.best_step) < min(slowest(graph.best_step - 0.01), slowest(graph.best_step + 0.01))


def test_users_graphs_and_matrices():
    named = nx.Graph([("b", "a"), ("a", "c")])
    assert graphs.of(named).neighbours(1) == {0: 1 / 3, 2: 1 / 3}, "numbers follow the graph's own order: b, a, c"
    matrix = [[0.5, 0.5], [0.5, 0.5]]
    assert graphs.of(matrix).neighbours(0) == {1: 0.5}


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ([[0.5, 0.5], [0.4, 0.6]], "symmetric"),
        ([[0.5, 0.4], [0.4, 0.5]], "sum to 1"),
        ([[1.5, -0.5], [-0.5, 1.5]], "not negative"),
        ([[1.0, 0.0], [0.0, 1.0]], "2 parts"),
        ([[1.0, 0.0]], "square"),
        ([[float("nan"), 1.0], [1.0, 0.0]], "finite"),
        (nx.DiGraph([(0, 1)]), "undirected"),
        (nx.Graph([(0, 0), (0, 1)]), "itself"),
        (nx.Graph([(0, 1), (2, 3)]), "2 parts"),
        ("ring", "networkx graph or a weight matrix"),
    ],
)
def test_wrong_graphs_are_refused(wrong, says):
    with pytest.raises(ValueError, match=says):
        graphs.of(wrong)


@pytest.mark.parametrize(
    "build", [lambda: graphs.ring(1), lambda: graphs.erdos_renyi(5, 1.5), lambda: graphs.grid(0, 3)]
)
def test_wrong_sizes_are_refused(build):
    with pytest.raises(ValueError, match="got"):
        build()


def test_a_lost_nodes_weight_falls_to_its_neighbours_own():
    graph = graphs.ring(5).without([2])
    assert graph.neighbours(1) == {0: 1 / 3}
    assert graph.weights[1, 1] == pytest.approx(2 / 3)
    assert graph.neighbours(2) == {}
    assert np.abs(graph.weights.sum(0) - 1).max() < 1e-12


def test_survivors_connected():
    assert graphs.ring(6).survivors_connected([1])
    assert graphs.ring(6).survivors_connected([1, 2])
    assert not graphs.ring(6).survivors_connected([1, 4])
    assert not graphs.star(4).survivors_connected([0])


def test_digest_tells_weights_apart():
    assert graphs.ring(8).digest == graphs.ring(8).digest
    assert graphs.ring(8).digest != graphs.torus(2, 4).digest
