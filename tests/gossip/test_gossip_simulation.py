"""PowerGossip on virtual workers: the same settings learn on any graph, and there may be many nodes."""

import pytest
import torch

from thinwire.gossip import GossipSimulation, graphs


@pytest.mark.parametrize("graph", [graphs.ring(16), graphs.torus(4, 4), graphs.social()], ids=lambda graph: graph.name)
def test_the_same_settings_learn_on_any_graph(graph):
    """Least squares whose solution no worker has alone: each sees 6 equations for 12 unknowns per column."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(12, 9, generator=generator)
    inputs = torch.randn(graph.nodes, 6, 12, generator=generator)
    outputs = inputs @ truth
    weights = [{"w": torch.zeros(12, 9)} for _ in range(graph.nodes)]
    gossip = GossipSimulation(weights, graph, "powergossip", equal=True)
    for _ in range(200):
        gradients = [x.t() @ (x @ w["w"] - y) / 6 for x, y, w in zip(inputs, outputs, weights, strict=True)]
        gossip.mix()
        for w, gradient in zip(weights, gradients, strict=True):
            w["w"].sub_(gradient, alpha=0.1)
    assert float((gossip.mean()["w"] - truth).norm() / truth.norm()) < 0.05
    assert gossip.consensus() < 0.05 * float(truth.norm())


def test_256_nodes():
    generator = torch.Generator().manual_seed(0)
    replicas = [{"m": torch.randn(6, 5, generator=generator)} for _ in range(256)]
    gossip = GossipSimulation(replicas, graphs.hypercube(8), "powergossip(factor_rank=5)")
    before = gossip.consensus()
    for _ in range(6):
        gossip.mix()
    assert gossip.consensus() < 0.2 * before
