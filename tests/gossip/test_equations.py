"""Mixers against the papers' equations, written down here once more in the plainest way."""

import pytest
import torch

from thinwire import schemes
from thinwire.core.scheme import Codec
from thinwire.gossip import GossipSimulation, graphs

GRAPH = graphs.grid(2, 3)  # weights differ from edge to edge, and nodes have two or three neighbours
CODECS = [name for name, scheme in schemes.registry().items() if issubclass(scheme, Codec)]


def replicas(shape, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [{"x": torch.randn(shape, dtype=torch.float64, generator=generator)} for _ in range(GRAPH.nodes)]


def sign_and_norm(x):
    return torch.where(x >= 0, 1, -1) * x.abs().mean()


def top_quarter(x):
    kept = x.flatten().abs().topk(x.numel() // 4).indices
    return torch.zeros_like(x).flatten().index_copy(0, kept, x.flatten()[kept]).view(x.shape)


COMPRESSORS = {"signsgd": sign_and_norm, "topk(density=0.25, values='fp32')": top_quarter}


@pytest.mark.parametrize("codec", COMPRESSORS)
def test_choco(codec):
    """q = C(x - h); h += q; z += W q; x += step (z - h)."""
    compress, step = COMPRESSORS[codec], 0.4
    xs = replicas((8, 5))
    gossip = GossipSimulation(xs, GRAPH, f'choco(codec="{codec}", step={step})')
    w, x = torch.tensor(GRAPH.weights), torch.stack([r["x"] for r in replicas((8, 5))])
    estimates, sums = torch.zeros_like(x), torch.zeros_like(x)
    for _ in range(8):
        corrections = torch.stack([compress(one) for one in x - estimates])
        estimates += corrections
        sums += torch.einsum("ij,jab->iab", w, corrections)
        x += step * (sums - estimates)
        gossip.mix()
    assert torch.allclose(torch.stack([r["x"] for r in xs]), x, atol=1e-5)


@pytest.mark.parametrize("codec", COMPRESSORS)
def test_deepsqueeze(codec):
    """v = x + e; e = v - C(v); x += step (sum over j != i of w_ij C(v_j) - (1 - w_ii) C(v_i))."""
    compress, step = COMPRESSORS[codec], 0.1
    xs = replicas((8, 5))
    gossip = GossipSimulation(xs, GRAPH, f'deepsqueeze(codec="{codec}", step={step})')
    w, x = torch.tensor(GRAPH.weights), torch.stack([r["x"] for r in replicas((8, 5))])
    errors = torch.zeros_like(x)
    for _ in range(8):
        owed = x + errors
        said = torch.stack([compress(one) for one in owed])
        errors = owed - said
        x += step * (torch.einsum("ij,jab->iab", w, said) - said)
        gossip.mix()
    assert torch.allclose(torch.stack([r["x"] for r in xs]), x, atol=1e-5)


def test_dpsgd():
    """x = W x."""
    xs = replicas((8, 5))
    GossipSimulation(xs, GRAPH, "dpsgd").mix()
    expected = torch.einsum("ij,jab->iab", torch.tensor(GRAPH.weights), torch.stack([r["x"] for r in replicas((8, 5))]))
    assert torch.allclose(torch.stack([r["x"] for r in xs]), expected, atol=1e-14)


@pytest.mark.parametrize("factor_rank", [1, 3])
def test_powergossip(factor_rank):
    """With D = X_hi - X_lo formed, as no node can: both ends step along D projected on the known side's basis.

    The basis is the other side's product of the iteration before, and a kernel is a matrix of out x the rest.
    """
    step, iterations, mixes = 1.3, 2, 3
    xs = replicas((6, 2, 3, 2))
    spec = f"powergossip(factor_rank={factor_rank}, iterations={iterations}, step={step})"
    gossip = GossipSimulation(xs, GRAPH, spec)
    right = {(lo, hi): gossip.nodes[lo].edge(hi)["x", "right"].clone() for lo, hi in GRAPH.edges}
    left = {}
    x = torch.stack([r["x"].flatten(1) for r in replicas((6, 2, 3, 2))])
    for iteration in range(iterations * mixes):
        before = x.clone()
        for lo, hi in GRAPH.edges:
            difference = before[hi] - before[lo]
            if iteration % 2 == 0:
                basis = torch.linalg.qr(right[lo, hi]).Q
                left[lo, hi] = difference @ basis
                found = difference @ basis @ basis.t()
            else:
                basis = torch.linalg.qr(left[lo, hi]).Q
                right[lo, hi] = difference.t() @ basis
                found = basis @ basis.t() @ difference
            x[hi] -= step * GRAPH.weights[lo, hi] * found
            x[lo] += step * GRAPH.weights[lo, hi] * found
    for _ in range(mixes):
        gossip.mix()
    assert torch.allclose(torch.stack([r["x"].flatten(1) for r in xs]), x, atol=1e-11)


def test_powergossip_averages_vectors_exactly_whatever_its_step_and_iterations():
    xs = replicas((7,))
    GossipSimulation(xs, GRAPH, "powergossip(step=1.3, iterations=3)").mix()
    expected = torch.tensor(GRAPH.weights) @ torch.stack([r["x"] for r in replicas((7,))])
    assert torch.allclose(torch.stack([r["x"] for r in xs]), expected, atol=1e-14)


@pytest.mark.parametrize("mixer", ["choco", "deepsqueeze"])
@pytest.mark.parametrize("codec", CODECS)
def test_every_codec_of_thinwire_serves(mixer, codec):
    """Its message is as long as it says, the mean stays, and both ends of an edge know the same."""
    xs = replicas((40, 30))
    gossip = GossipSimulation(xs, GRAPH, f"{mixer}(codec='{codec}', step=0.05)")
    mean, distance = gossip.mean()["x"], gossip.consensus()
    for _ in range(30):
        gossip.mix()
    layout = gossip.nodes[0].layout
    used = schemes.parse(codec)
    assert gossip.bytes_sent == 30 * 2 * len(GRAPH.edges) * used.nbytes(layout, used.level)
    assert torch.allclose(gossip.mean()["x"], mean, atol=1e-12)
    assert gossip.consensus() < distance
    if mixer == "choco":
        for lo, hi in GRAPH.edges:
            known = gossip.nodes[lo].edge(hi)["x", "estimate"]
            assert torch.equal(known, gossip.nodes[hi].own["x", "estimate"])
