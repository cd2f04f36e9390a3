"""Who agrees first, if all may send the same bytes? PowerGossip untuned, its peers tuned, on three kinds of data."""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import mean

import torch
from torch import Tensor
from torch.nn import functional

from thinwire.gossip import GossipSimulation, graphs
from thinwire.lab.report import intervals
from thinwire.lab.repro.claims import OURS, PAPER, Claim, Listing, Progress
from thinwire.lab.tasks import datasets

NODES, SIDE = 8, 100
BUDGET = 200_000  # bytes over each edge, each way; five exact exchanges of a 100x100 matrix of floats
DIRECTIONS, NOISE = 3, 0.02  # of structured differences: common directions, and the deviation of what is beside them
GRID = (1.308, 1.0, 0.5, 0.25, 0.1, 0.0375, 0.01)
TUNING_SEEDS = (1000, 1001)  # none that anything is evaluated on

STEP = 1.308  # what suits exact gossip on the 8-ring best: PowerGossip's, untuned
POWER = f"powergossip(step={STEP})"
UNTUNED = {
    "PowerGossip, rank 1": POWER,
    "PowerGossip, rank 1, cold": f"powergossip(step={STEP}, warm=False)",
    "exact gossip, best step": "dpsgd",
}
PEERS = {
    "CHOCO, sign": "choco(codec='signsgd', step={})",
    "CHOCO, top 1%": "choco(codec='topk(density=0.01)', step={})",
    "CHOCO, top 10%": "choco(codec='topk(density=0.1)', step={})",
}


def white_noise(seed: int) -> list[Tensor]:
    """Nothing that few directions could say."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SIDE, SIDE, generator=generator) for _ in range(NODES)]


def structured(seed: int) -> list[Tensor]:
    """Everybody's own mixture of the same few directions, and a little noise."""
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(SIDE, DIRECTIONS, generator=generator)
    right = torch.randn(DIRECTIONS, SIDE, generator=generator) / DIRECTIONS**0.5
    return [
        (left * torch.randn(DIRECTIONS, generator=generator)) @ right
        + NOISE * torch.randn(SIDE, SIDE, generator=generator)
        for _ in range(NODES)
    ]


def images(seed: int) -> list[Tensor]:
    """A hundred images each, one in a row, at half their size: matrices that nobody made up."""
    train = datasets.embedded_images().train.inputs
    order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))
    drawn = (train[rows].float() / 255 for rows in order[: NODES * SIDE].split(SIDE))
    return [functional.avg_pool2d(several, 2).flatten(1) for several in drawn]


DATA: dict[str, Callable[[int], list[Tensor]]] = {
    "white noise": white_noise,
    "structured": structured,
    "images": images,
}


def stepped(graph: graphs.Graph, step: float) -> graphs.Graph:
    """The graph on which exact gossip moves `step` times as far: D-PSGD itself has no step."""
    identity = torch.eye(graph.nodes, dtype=torch.float64).numpy()
    return graphs.Graph(identity - step * (identity - graph.weights), name=f"{graph.name}, step {step:g}")


def agreement(mixer: str, replicas: list[Tensor], budget: int = BUDGET) -> tuple[float, int]:
    """log10 of what is left of the squared distance to the mean when the bytes are spent, and the steps they paid for.

    A mixer that diverges has infinitely much left.
    """
    graph = stepped(graphs.ring(NODES), STEP) if mixer == "dpsgd" else graphs.ring(NODES)
    gossip = GossipSimulation([{"x": replica.clone()} for replica in replicas], graph, mixer)
    before, steps, spent = gossip.consensus(), 0, 0.0
    edges, per_step = 2 * len(graph.edges), 0.0
    while spent + per_step <= budget:
        gossip.mix()
        steps += 1
        spent, per_step = gossip.bytes_sent / edges, gossip.bytes_sent / edges / steps
    left = gossip.consensus()
    if not math.isfinite(left):
        return math.inf, steps
    return 2 * math.log10(max(left, 1e-30) / before), steps


def tables(quick: bool, seeds: int, claims: list[Claim], progress: Progress) -> list[Listing]:
    """What is left after equal bytes, and how the peers' steps were chosen."""
    grid, tuning_seeds, kinds = (GRID[1:5], TUNING_SEEDS[:1], 2) if quick else (GRID, TUNING_SEEDS, len(DATA))
    rows, tuning = [], []
    for kind, draw in list(DATA.items())[:kinds]:
        budget = BUDGET * draw(0)[0].numel() // SIDE**2  # always five exact exchanges
        mixers = dict(UNTUNED)
        for name, spec in PEERS.items():
            progress(f"consensus at equal bytes, {kind}: tuning {name}")
            tried = {
                step: mean(agreement(spec.format(step), draw(seed), budget)[0] for seed in tuning_seeds)
                for step in grid
            }
            best = min(tried, key=lambda step: tried[step])
            mixers[f"{name}, tuned"] = spec.format(best)
            tuning.append([kind, name, *(_left(tried[step]) for step in grid), f"{best:g}"])
        found: dict[str, list[float]] = {}
        for name, mixer in mixers.items():
            progress(f"consensus at equal bytes, {kind}: {name}")
            outcomes = [agreement(mixer, draw(seed), budget) for seed in range(seeds)]
            found[name] = [left for left, _ in outcomes]
            rows.append([kind, name, mixer, outcomes[0][1], intervals.interval(found[name]).text(".2f")])
        claims += claims_of(kind, found, first_share(draw(0)))
    title = f"Consensus on the {NODES}-ring at equal bytes (five exact exchanges), {seeds} seeds"
    chosen = f"The peers' steps, chosen on seeds {', '.join(map(str, tuning_seeds))}: log10 of what is left"
    return [
        Listing(title, ["data", "method", "mixer", "steps", "log10 of what is left"], rows),
        Listing(chosen, ["data", "peer", *(f"{step:g}" for step in grid), "chosen"], tuning),
    ]


def first_share(replicas: list[Tensor]) -> float:
    """The part of what two of them differ in that one direction can say."""
    energy = torch.linalg.svdvals(replicas[1] - replicas[0]).square()
    return float(energy[0] / energy.sum())


def claims_of(kind: str, found: dict[str, list[float]], share: float) -> list[Claim]:
    """ "Converges faster than prior methods": against each of them, and that the warm start is what does it."""
    ours, *peers = found
    claims = []
    for name in peers:
        ahead = intervals.paired(found[name], found[ours])
        claims.append(
            Claim(
                claim=f"at equal bytes, {kind}: {ours}, untuned, agrees further than {name}",
                measured=f"{ahead.text('+.2f')} decades, 95% interval",
                expected="above 0",
                verdict=intervals.verdict(ahead),
                source=OURS if "cold" in name else PAPER,
                reason=f"one direction says {share:.0%} of what two replicas differ in",
            )
        )
    return claims


def _left(value: float) -> str:
    return f"{value:.2f}" if math.isfinite(value) else "diverged"
