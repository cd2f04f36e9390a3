"""PowerGossip: consensus, bytes, any graph, and training against peers, tuned and untuned."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import torch

from thinwire.gossip import VirtualGossip, graphs
from thinwire.lab import datasets
from thinwire.lab.gossip_training import Outcome, Training

Progress = Callable[[str], None]

MARKS = (100, 500, 1000, 2000)
CONSENSUS = {  # log10 of the relative squared distance to the mean at MARKS: 8-ring, rank 1, one iteration
    "powergossip(step=1.308)": (-0.51, -1.86, -3.11, -5.46),
    "powergossip(step=1.308, warm=False)": (-0.42, -1.43, -2.47, -4.57),
    "powergossip(step=1.0)": (-0.48, -1.67, -2.71, -4.61),
}
RESNET20_BYTES = {"dpsgd": 1_089_896, "powergossip": 19_410, "powergossip(iterations=2)": 32_508}

# The steps that the peers are tuned over, on a third of the training. "Untuned" is 1, PowerGossip's own step.
STEPS = (1.0, 0.5, 0.25, 0.1, 0.0375, 0.01)
PEERS = {
    "CHOCO, sign": "choco(codec='signsgd', step={})",
    "CHOCO, top 1%": "choco(codec='topk(density=0.01)', step={})",
    "DeepSqueeze, sign": "deepsqueeze(codec='signsgd', step={})",
}
UNTUNED = {
    "all-reduce": None,
    "D-PSGD": "dpsgd",
    "PowerGossip, rank 1": "powergossip",
    "PowerGossip, rank 1, 2 iterations": "powergossip(iterations=2)",
}
POWER = ("PowerGossip, rank 1", "PowerGossip, rank 1, 2 iterations")
TUNING_SEED = 1000  # none of the seeds that count


def run(quick: bool, data: Path | None, seeds: int, progress: Progress) -> dict[str, Any]:
    """What was measured, and the tables. `quick`: half the consensus, and no training claims.

    data: where CIFAR-10 lies; the embedded images serve without it.
    """
    claims: list[dict[str, Any]] = []
    tables = [
        _consensus_table(MARKS[:2] if quick else MARKS, claims, progress),
        _bytes_table(claims),
        _graph_table(claims, progress),
    ]
    if not quick:
        dataset = datasets.embedded_images() if data is None else datasets.cifar10(data)
        for skew in (0.0, 0.5):
            training = Training(dataset, graphs.ring(8), 900 if data is None else 3000, skew=skew)
            tables.append(_training_table(training, seeds, claims, progress))
    return {"claims": claims, "tables": tables}


def _consensus_table(marks: tuple[int, ...], claims: list, progress: Progress) -> dict[str, Any]:
    """Everybody has a 100x100 matrix of N(0, 1), float64; only gossip, no training."""
    rows = []
    for mixer, listed in CONSENSUS.items():
        progress(f"consensus: {mixer}")
        generator = torch.Generator().manual_seed(0)
        replicas = [{"x": torch.randn(100, 100, generator=generator, dtype=torch.float64)} for _ in range(8)]
        gossip = VirtualGossip(replicas, graphs.ring(8), mixer)
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
            {
                "claim": f"consensus on the 8-ring, {mixer}: log10 errors at {', '.join(map(str, marks))}",
                "measured": ", ".join(f"{value:.2f}" for value in found),
                "expected": ", ".join(map(str, listed[: len(marks)])) + " within 0.15",
                "holds": far <= 0.15,
            }
        )
        claims.append(
            {
                "claim": f"{mixer}: the mean of all replicas stays, float64",
                "measured": f"drift {drift:.1e}",
                "expected": "below 1e-12",
                "holds": drift < 1e-12,
            }
        )
    columns = ["mixer", *(f"log10 error at {mark}" for mark in marks), "drift of the mean"]
    return {"title": "Consensus on the 8-ring", "columns": columns, "rows": rows}


def _bytes_table(claims: list) -> dict[str, Any]:
    """Two mixes, so that an odd and an even iteration are counted; per step and neighbour."""
    rows = []
    for mixer, listed in RESNET20_BYTES.items():
        replicas = [{name: torch.randn(shape) for name, shape in resnet20_shapes().items()} for _ in range(2)]
        gossip = VirtualGossip(replicas, graphs.ring(2), mixer)
        gossip.mix()
        gossip.mix()
        sent = gossip.bytes_sent / 4
        rows.append([mixer, round(sent), f"{RESNET20_BYTES['dpsgd'] / sent:.1f}"])
        claims.append(
            {
                "claim": f"bytes per step and neighbour, ResNet-20, {mixer}",
                "measured": f"{sent:,.0f}",
                "expected": f"{listed:,}",
                "holds": sent == listed,
            }
        )
    columns = ["mixer", "bytes per step and neighbour", "times fewer than exact"]
    return {"title": "ResNet-20's shapes", "columns": columns, "rows": rows}


def _graph_table(claims: list, progress: Progress) -> dict[str, Any]:
    """The same settings everywhere: how many steps until the squared distance is a thousandth."""
    rows = []
    for graph in (graphs.ring(16), graphs.torus(4, 4), graphs.social()):
        progress(f"any graph: {graph.name}")
        generator = torch.Generator().manual_seed(0)
        replicas = [{"x": torch.randn(30, 30, generator=generator)} for _ in range(graph.nodes)]
        gossip = VirtualGossip(replicas, graph, "powergossip")
        before, steps = gossip.consensus(), 0
        while gossip.consensus() ** 2 > 1e-3 * before**2 and steps < 3000:
            gossip.mix()
            steps += 1
        rows.append([graph.name, graph.nodes, f"{graph.spectral_gap:.3f}", steps])
        claims.append(
            {
                "claim": f"PowerGossip, rank 1, untuned, reaches consensus on {graph.name}",
                "measured": f"squared distance 1e-3 after {steps} steps",
                "expected": "below 3000 steps",
                "holds": steps < 3000,
            }
        )
    columns = ["graph", "nodes", "spectral gap", "steps to 1e-3"]
    return {"title": "Any graph, the same settings", "columns": columns, "rows": rows}


def _training_table(training: Training, seeds: int, claims: list, progress: Progress) -> dict[str, Any]:
    shards = "label-skewed shards" if training.skew else "i.i.d. shards"

    def measure(name: str, mixer: str | None) -> list[Outcome]:
        outcomes = []
        for seed in range(seeds):
            progress(f"training, {shards}: {name}, seed {seed}")
            outcomes.append(training.run(mixer, seed))
        return outcomes

    tuning = replace(training, steps=training.steps // 3)
    results = {name: measure(name, mixer) for name, mixer in UNTUNED.items()}
    for name, spec in PEERS.items():
        tried = {}
        for step in STEPS:
            progress(f"training, {shards}: tuning {name}, step {step}")
            tried[step] = tuning.run(spec.format(step), TUNING_SEED).accuracy
        best = max(tried, key=lambda step: tried[step])
        results[f"{name}, untuned (step 1)"] = measure(name, spec.format(1.0))
        results[f"{name}, tuned"] = measure(f"{name}, step {best}", spec.format(best))
        for power in POWER:
            claims.append(_on_par(power, f"{name}, tuned", results, f"{shards} (its best step is {best:g})"))
            claims.append(_beats(power, f"{name}, untuned (step 1)", results, shards))
    claims += [_on_par(power, "D-PSGD", results, shards) for power in POWER]
    rows = [
        [
            name,
            f"{mean(o.accuracy for o in outcomes):.2f}",
            f"{stdev(o.accuracy for o in outcomes):.2f}" if seeds > 1 else "",
            round(mean(o.bytes_per_step for o in outcomes)),
            f"{mean(o.seconds for o in outcomes):.1f}",
        ]
        for name, outcomes in results.items()
    ]
    columns = ["method", "accuracy %", "spread", "bytes per worker and step", "wall seconds"]
    title = f"Training on the 8-ring, {shards}, {training.steps} steps, {seeds} seeds"
    return {"title": title, "columns": columns, "rows": rows}


def _on_par(power: str, peer: str, results: dict[str, list[Outcome]], shards: str) -> dict[str, Any]:
    ahead = _ahead(results[power], results[peer])
    return {
        "claim": f"{power}, untuned, is on par with {peer}, {shards}",
        "measured": f"{ahead:+.2f} points",
        "expected": "not more than 1 point behind",
        "holds": ahead >= -1,
    }


def _beats(power: str, peer: str, results: dict[str, list[Outcome]], shards: str) -> dict[str, Any]:
    ahead = _ahead(results[power], results[peer])
    return {
        "claim": f"{power}, untuned, beats {peer}, {shards}",
        "measured": f"{ahead:+.2f} points",
        "expected": "above 0",
        "holds": ahead > 0,
    }


def _ahead(ours: list[Outcome], theirs: list[Outcome]) -> float:
    return mean(o.accuracy for o in ours) - mean(o.accuracy for o in theirs)


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
