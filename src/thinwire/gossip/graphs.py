"""Who talks to whom, and how much each word counts: a graph with symmetric, doubly stochastic weights.

Every builder weighs edges by Metropolis' rule, w_ij = 1 / (1 + max(degree_i, degree_j)), which any graph
admits and which gives 1/3 on a ring and 1/5 on a torus, as the gossip papers have it. Pass a matrix to choose
your own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import cached_property
from typing import TYPE_CHECKING, Any, TypeAlias

import networkx as nx
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from thinwire.gossip.mixer import Mixer

_TOLERANCE = 1e-9


class Graph:
    """Nodes 0..n-1 and the matrix W that one exact gossip step multiplies the replicas by.

    W is symmetric and its rows sum to one, so gossip keeps the replicas' mean. A graph knows nothing about
    processes: that node i is rank i is the front door's business.
    """

    def __init__(self, weights: Any, *, name: str = "custom", connected: bool = True):
        """`connected=False` allows a graph that falls apart, as one step of a varying graph may."""
        self.weights: npt.NDArray[np.float64] = np.array(weights, dtype=np.float64)
        self.weights.setflags(write=False)
        self.name = name
        _check(self.weights)
        if connected and not self.connected:
            raise ValueError(f"{name}: the graph falls into {len(self.components)} parts: {self.components}")

    @property
    def nodes(self) -> int:
        return len(self.weights)

    @cached_property
    def edges(self) -> tuple[tuple[int, int], ...]:
        """(lo, hi) pairs with lo < hi, sorted."""
        lo, hi = np.nonzero(np.triu(self.weights, 1))
        return tuple(zip(lo.tolist(), hi.tolist(), strict=True))

    def neighbours(self, node: int) -> dict[int, float]:
        """The weight of each neighbour, in the neighbours' order."""
        row = self.weights[node]
        return {int(j): float(row[j]) for j in np.nonzero(row)[0] if j != node}

    @cached_property
    def components(self) -> list[list[int]]:
        graph = nx.Graph(self.edges)
        graph.add_nodes_from(range(self.nodes))
        return [sorted(part) for part in nx.connected_components(graph)]

    @property
    def connected(self) -> bool:
        return len(self.components) == 1

    @cached_property
    def eigenvalues(self) -> np.ndarray:
        """Of W, the largest (always 1) first."""
        return np.linalg.eigvalsh(self.weights)[::-1]

    @property
    def spectral_gap(self) -> float:
        """1 - max(|lambda_2|, |lambda_n|): how much disagreement one exact gossip step removes at least."""
        rest = self.eigenvalues[1:]
        return float(1 - np.abs(rest).max()) if len(rest) else 1.0

    @property
    def best_step(self) -> float:
        """2 / ((1 - lambda_2) + (1 - lambda_n)): the step at which x + step (W x - x) contracts fastest."""
        rest = self.eigenvalues[1:]
        return float(2 / ((1 - rest[0]) + (1 - rest[-1]))) if len(rest) else 1.0

    def without(self, lost: Iterable[int]) -> Graph:
        """The graph after `lost` fell silent: what an end gave a lost edge, it gives itself.

        That keeps W symmetric and doubly stochastic, and a node need know only its own neighbours to do it.
        Lost nodes keep their numbers and have no edges; `survivors_connected` says whether the rest hangs together.
        """
        weights = self.weights.copy()
        for node in lost:
            weights[np.arange(self.nodes), np.arange(self.nodes)] += weights[:, node] * (np.arange(self.nodes) != node)
            weights[node, :], weights[:, node] = 0.0, 0.0
            weights[node, node] = 1.0
        return Graph(weights, name=f"{self.name} without {sorted(lost)}", connected=False)

    def survivors_connected(self, lost: Iterable[int], broken: Iterable[tuple[int, int]] = ()) -> bool:
        """Whether news still reaches everybody once the nodes `lost` and the edges `broken` are gone."""
        graph = nx.Graph(self.edges)
        graph.add_nodes_from(range(self.nodes))
        graph.remove_edges_from(broken)
        graph.remove_nodes_from(lost)
        return nx.number_connected_components(graph) == 1

    @property
    def digest(self) -> bytes:
        """Equal on two ranks when, and only when, they weigh the same edges alike."""
        return hashlib.blake2b(self.weights.tobytes(), digest_size=16).digest()

    def __repr__(self) -> str:
        size = f"{self.nodes} nodes, {len(self.edges)} edges"
        return f"Graph({self.name}: {size}, spectral gap {self.spectral_gap:.3g})"


GraphLike: TypeAlias = "Graph | nx.Graph[Any] | np.ndarray | list[list[float]]"
Varying: TypeAlias = Callable[[int], GraphLike]


def of(graph: GraphLike, *, name: str | None = None, connected: bool = True) -> Graph:
    """A Graph of a networkx graph (Metropolis weights, numbered in its own order) or of a weight matrix."""
    if isinstance(graph, Graph):
        return graph if not connected else Graph(graph.weights, name=graph.name)
    if isinstance(graph, nx.Graph):
        return Graph(_metropolis(graph), name=name or graph.name or "custom", connected=connected)
    try:
        matrix = np.array(graph, dtype=np.float64)
    except (TypeError, ValueError):
        raise ValueError(f"a graph is a Graph, a networkx graph or a weight matrix, got {graph!r}") from None
    return Graph(matrix, name=name or "custom", connected=connected)


class Schedule:
    """The graph of every step: always the same one, or what a function of the step says."""

    def __init__(self, graph: GraphLike | Varying, *, nodes: int, mixer: Mixer):
        self.varying: bool = callable(graph)
        if self.varying and not mixer.varying:
            raise ValueError(f"{mixer.name} needs the same neighbours in every step; the graph given is a function")
        self._graph_of = graph if callable(graph) else None
        self._fixed = None if callable(graph) else self._checked(of(graph), nodes)
        self.nodes = nodes

    def at(self, step: int) -> Graph:
        if self._fixed is not None:
            return self._fixed
        assert self._graph_of is not None
        return self._checked(of(self._graph_of(step), connected=False), self.nodes)

    @staticmethod
    def _checked(graph: Graph, nodes: int) -> Graph:
        if graph.nodes != nodes:
            raise ValueError(f"{graph!r} does not fit {nodes} replicas")
        return graph


def ring(nodes: int) -> Graph:
    """Each node talks to the next and the previous one."""
    cycle = nx.cycle_graph(_at_least(nodes, 2, "ring"))
    return of(nx.Graph(cycle), name=f"ring {nodes}")


def torus(rows: int, columns: int) -> Graph:
    """A grid whose borders meet; four neighbours each."""
    return of(_lattice(rows, columns, periodic=True), name=f"torus {rows}x{columns}")


def grid(rows: int, columns: int) -> Graph:
    return of(_lattice(rows, columns, periodic=False), name=f"grid {rows}x{columns}")


def star(nodes: int) -> Graph:
    """Node 0 in the middle."""
    return of(nx.star_graph(_at_least(nodes, 2, "star") - 1), name=f"star {nodes}")


def complete(nodes: int) -> Graph:
    return of(nx.complete_graph(_at_least(nodes, 2, "complete")), name=f"complete {nodes}")


def hypercube(dimensions: int) -> Graph:
    """2^dimensions nodes; neighbours differ in one bit of their number."""
    nodes = 2 ** _at_least(dimensions, 1, "hypercube")
    edges = [(i, i ^ (1 << bit)) for i in range(nodes) for bit in range(dimensions)]
    return of(_numbered(nodes, edges), name=f"hypercube {nodes}")


def exponential(nodes: int) -> Graph:
    """Neighbours at distances 1, 2, 4, ... around a circle, both ways."""
    _at_least(nodes, 2, "exponential")
    hops = [1 << k for k in range((nodes - 1).bit_length())]
    edges = [(i, (i + hop) % nodes) for i in range(nodes) for hop in hops if hop % nodes]
    return of(_numbered(nodes, edges), name=f"exponential {nodes}")


def erdos_renyi(nodes: int, probability: float, *, seed: int = 0) -> Graph:
    """Every pair is an edge with `probability`. A draw that falls apart is an error."""
    if not 0 < probability <= 1:
        raise ValueError(f"erdos_renyi: probability must be in (0, 1], got {probability!r}")
    drawn = nx.gnp_random_graph(_at_least(nodes, 2, "erdos_renyi"), probability, seed=seed)
    return of(drawn, name=f"erdos_renyi {nodes} p={probability} seed={seed}")


def social() -> Graph:
    """Davis' southern women, 18 of them, and the 14 events they met at: the gossip papers' social network."""
    women = nx.davis_southern_women_graph()
    return of(nx.convert_node_labels_to_integers(women), name="social 32")


def _metropolis(graph: nx.Graph) -> np.ndarray:
    if graph.is_directed() or graph.is_multigraph():
        raise ValueError(f"a gossip graph is undirected, with one edge per pair; got a {type(graph).__name__}")
    loops = list(nx.selfloop_edges(graph))
    if loops:
        raise ValueError(f"a node does not talk to itself; the graph has the loops {loops[:3]}")
    number = {node: i for i, node in enumerate(graph.nodes)}
    weights = np.zeros((len(number), len(number)))
    for a, b in graph.edges:
        weights[number[a], number[b]] = weights[number[b], number[a]] = 1 / (1 + max(graph.degree[a], graph.degree[b]))
    np.fill_diagonal(weights, 1 - weights.sum(1))
    return weights


def _lattice(rows: int, columns: int, *, periodic: bool) -> nx.Graph:
    _at_least(rows, 1, "rows")
    _at_least(columns, 1, "columns")
    lattice = nx.grid_2d_graph(rows, columns, periodic=periodic)
    lattice.remove_edges_from(list(nx.selfloop_edges(lattice)))  # a periodic side of one node meets itself
    return nx.convert_node_labels_to_integers(lattice)


def _numbered(nodes: int, edges: Iterable[tuple[int, int]]) -> nx.Graph:
    graph = nx.empty_graph(nodes)  # first, so that node i is number i whatever the order of the edges
    graph.add_edges_from(edges)
    return graph


def _at_least(value: int, least: int, what: str) -> int:
    if not isinstance(value, int) or value < least:
        raise ValueError(f"{what} must be a whole number, at least {least}, got {value!r}")
    return value


def _check(weights: np.ndarray) -> None:
    if weights.ndim != 2 or weights.shape[0] != weights.shape[1] or not len(weights):
        raise ValueError(f"a weight matrix is square, got shape {weights.shape}")
    if not np.isfinite(weights).all() or (weights < -_TOLERANCE).any():
        raise ValueError(f"weights must be finite and not negative, got {weights[~(weights >= 0)][:3]}")
    if np.abs(weights - weights.T).max() > _TOLERANCE:
        i, j = np.unravel_index(np.abs(weights - weights.T).argmax(), weights.shape)
        raise ValueError(
            f"weights must be symmetric: w[{i},{j}] = {weights[i, j]:g} but w[{j},{i}] = {weights[j, i]:g}"
        )
    off = np.abs(weights.sum(1) - 1)
    if off.max() > _TOLERANCE:
        raise ValueError(
            f"every row of weights must sum to 1; row {off.argmax()} sums to {weights[off.argmax()].sum():g}"
        )
