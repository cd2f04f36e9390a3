"""What the authors' code gave when it was run again: consensus step by step, bytes, and any graph."""

from __future__ import annotations

import math

import torch

from thinwire.gossip import GossipSimulation, graphs
from thinwire.lab.repro.claims import OURS, PAPER, RERUN, Claim, Listing, Progress, told

MARKS = (100, 500, 1000, 2000)
CONSENSUS = {  # log10 of the relative squared distance to the mean at MARKS: 8-ring, rank 1, one iteration
    "powergossip(step=1.308)": (-0.51, -1.86, -3.11, -5.46),
    "powergossip(step=1.308, warm=False)": (-0.42, -1.43, -2.47, -4.57),
    "powergossip(step=1.0)": (-0.48, -1.67, -2.71, -4.61),
}
RESNET20_BYTES = {"dpsgd": 1_089_896, "powergossip": 19_410, "powergossip(iterations=2)": 32_508}


def consensus_table(marks: tuple[int, ...], claims: list[Claim], progress: Progress) -> Listing:
    """Everybody has a 100x100 matrix of N(0, 1), float64; only gossip, no training."""
    rows = []
    for mixer, listed in CONSENSUS.items():
        progress(f"consensus: {mixer}")
        generator = torch.Generator().manual_seed(0)
        replicas = [{"x": torch.randn(100, 100, generator=generator, dtype=torch.float64)} for _ in range(8)]
        gossip = GossipSimulation(replicas, graphs.ring(8), mixer)
        start, before = gossip.mean()["x"], gossip.consensus()
        found = []
        for step in range(1, marks[-1] + 1):
            gossip.mix()
            if step in marks:
                found.append(2 * math.log10(gossip.consensus() / before))
        drift = float((gossip.mean()["x"] - start).abs().max())
        rows.append([mixer, *(round(value, 2) for value in found), f"{drift:.1e}"])
        far = max(abs(value - expected) for value, expected in zip(found, listed, strict=False))
        claims.append(
            Claim(
                claim=f"consensus on the 8-ring, {mixer}: log10 errors at {', '.join(map(str, marks))}",
                measured=", ".join(f"{value:.2f}" for value in found),
                expected=", ".join(map(str, listed[: len(marks)])) + " within 0.15",
                verdict=told(far <= 0.15),
                source=RERUN,
            )
        )
        claims.append(
            Claim(
                claim=f"{mixer}: the mean of all replicas stays, float64",
                measured=f"drift {drift:.1e}",
                expected="below 1e-12",
                verdict=told(drift < 1e-12),
                source=OURS,
            )
        )
    columns = ["mixer", *(f"log10 error at {mark}" for mark in marks), "drift of the mean"]
    return Listing("Consensus on the 8-ring", columns, rows)


def bytes_table(claims: list[Claim]) -> Listing:
    """Two mixes, so that an odd and an even iteration are counted; per step and neighbour."""
    rows = []
    for mixer, listed in RESNET20_BYTES.items():
        replicas = [{name: torch.randn(shape) for name, shape in resnet20_shapes().items()} for _ in range(2)]
        gossip = GossipSimulation(replicas, graphs.ring(2), mixer)
        gossip.mix()
        gossip.mix()
        sent = gossip.bytes_sent / 4
        rows.append([mixer, round(sent), f"{RESNET20_BYTES['dpsgd'] / sent:.1f}"])
        claims.append(
            Claim(
                claim=f"bytes per step and neighbour, ResNet-20, {mixer}",
                measured=f"{sent:,.0f}",
                expected=f"{listed:,}",
                verdict=told(sent == listed),
                source=RERUN,
            )
        )
    columns = ["mixer", "bytes per step and neighbour", "times fewer than exact"]
    return Listing("ResNet-20's shapes", columns, rows)


def graph_table(claims: list[Claim], progress: Progress) -> Listing:
    """The same settings everywhere: how many steps until the squared distance is a thousandth."""
    rows = []
    for graph in (graphs.ring(16), graphs.torus(4, 4), graphs.social()):
        progress(f"any graph: {graph.name}")
        generator = torch.Generator().manual_seed(0)
        replicas = [{"x": torch.randn(8, 8, generator=generator)} for _ in range(graph.nodes)]
        gossip = GossipSimulation(replicas, graph, "powergossip")
        before, steps = gossip.consensus(), 0
        while gossip.consensus() ** 2 > 1e-3 * before**2 and steps < 3000:
            for _ in range(10):
                gossip.mix()
            steps += 10
        rows.append([graph.name, graph.nodes, f"{graph.spectral_gap:.3f}", steps])
        claims.append(
            Claim(
                claim=f"PowerGossip, rank 1, untuned, reaches consensus on {graph.name}",
                measured=f"squared distance 1e-3 after {steps} steps",
                expected="below 3000 steps",
                verdict=told(steps < 3000),
                source=PAPER,
            )
        )
    columns = ["graph", "nodes", "spectral gap", "steps to 1e-3"]
    return Listing("Any graph, the same settings", columns, rows)


def resnet20_shapes() -> dict[str, tuple[int, ...]]:
    """The parameters of ResNet-20 with 1x1 convolutions in its two shortcuts: 272,474 weights."""
    shapes: dict[str, tuple[int, ...]] = {"conv": (16, 3, 3, 3), "norm.weight": (16,), "norm.bias": (16,)}
    inputs = 16
    for stage, outputs in enumerate((16, 32, 64)):
        for block in range(3):
            name = f"stage{stage}.block{block}"
            convolutions = {"conv0": (outputs, inputs, 3, 3), "conv1": (outputs, outputs, 3, 3)}
            if inputs != outputs:
                convolutions["shortcut"] = (outputs, inputs, 1, 1)
            for part, shape in convolutions.items():
                shapes[f"{name}.{part}"] = shape
                shapes[f"{name}.{part}.norm.weight"] = shapes[f"{name}.{part}.norm.bias"] = (outputs,)
            inputs = outputs
    return shapes | {"linear.weight": (10, 64), "linear.bias": (10,)}
