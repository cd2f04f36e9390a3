"""Why one direction a step is enough: how few directions neighbours differ in."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

import torch
from torch import Tensor

from thinwire.lab.repro.claims import OURS, Claim, Listing, Progress, told
from thinwire.lab.repro.powergossip.training import Training

MIXERS = {"D-PSGD": "dpsgd", "PowerGossip, rank 1": "powergossip(step=1.308)"}
FIRST = (1, 2, 4)  # directions
AT = (0.1, 0.5, 0.9)  # of all steps
NOISE = "white noise"


def shares(matrix: Tensor) -> list[float]:
    """The part of a matrix's squared norm that its FIRST directions hold, and its stable rank behind them."""
    energy = torch.linalg.svdvals(matrix.flatten(1).double()).square()
    return [*(float(energy[:count].sum() / energy.sum()) for count in FIRST), float(energy.sum() / energy[0])]


def of_neighbours(replicas: Sequence[dict[str, Tensor]], edges: Sequence[tuple[int, int]]) -> dict[str, list[float]]:
    """`shares` of what neighbours differ in, matrix by matrix: the mean over all edges."""
    found = {}
    for name, tensor in replicas[0].items():
        if tensor.ndim > 1:
            each = [shares(replicas[hi][name] - replicas[lo][name]) for lo, hi in edges]
            found[name] = [mean(column) for column in zip(*each, strict=True)]
    return found


def table(training: Training, steps: int, claims: list[Claim], progress: Progress) -> Listing:
    """The differences in the course of training, seed 0, beside noise of the same shapes."""
    edges, rows = training.graph.edges, []
    marks = {max(1, round(share * steps)) for share in AT}
    seen: dict[str, dict[str, list[float]]] = {}
    for name, mixer in MIXERS.items():
        progress(f"spectrum of neighbours' differences: {name}")

        def look(step: int, replicas: Sequence[dict[str, Tensor]], name: str = name) -> None:
            if step in marks:
                found = of_neighbours(replicas, edges)
                rows.extend([name, step, matrix, *_texts(values)] for matrix, values in found.items())
                seen[name] = found

        replace(training, steps=steps).run(mixer, 0, watch=look)
    generator = torch.Generator().manual_seed(0)
    noise = [{n: torch.randn(s, generator=generator) for n, s in _shapes(training).items()} for _ in range(2)]
    seen[NOISE] = of_neighbours(noise, [(0, 1)])
    rows.extend([NOISE, "", matrix, *_texts(values)] for matrix, values in seen[NOISE].items())
    claims += claims_of(seen)
    columns = ["mixer", "step", "matrix", *(f"first {count}" for count in FIRST), "stable rank"]
    return Listing(
        f"What neighbours differ in: squared norm held by its first directions, {steps} steps", columns, rows
    )


def claims_of(seen: dict[str, dict[str, list[float]]]) -> list[Claim]:
    """At the last look: of every matrix one direction holds more than it would of noise."""
    claims = []
    for name in MIXERS:
        more = {matrix: values[0] / seen[NOISE][matrix][0] for matrix, values in seen[name].items()}
        least = min(more, key=lambda matrix: more[matrix])
        claims.append(
            Claim(
                claim=f"{name}: one direction holds more of what neighbours differ in than of noise",
                measured=f"{more[least]:.1f} times (matrix {least}) to {max(more.values()):.1f} times as much",
                expected="more, in every matrix",
                verdict=told(more[least] > 1),
                source=OURS,
            )
        )
    return claims


def _shapes(training: Training) -> dict[str, torch.Size]:
    return {name: parameter.shape for name, parameter in training.model(0).named_parameters()}


def _texts(values: Sequence[float]) -> list[str]:
    return [*(f"{value:.0%}" for value in values[:-1]), f"{values[-1]:.1f}"]
