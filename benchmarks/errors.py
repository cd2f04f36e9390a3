"""The errors and sizes of messages that docs/papers/ has tables of and no reproduction prints.

    python benchmarks/errors.py                    # THC's saturation and rotation, Top-k's places: a minute
    python benchmarks/errors.py --json FILE

Simulated workers without error feedback; an error is |mean - exact|^2 / |exact|^2, the mean of several steps. Nothing
here depends on the machine's speed.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from statistics import fmean

import torch
from rich.console import Console
from rich.table import Table
from torch import Generator, Tensor

import thinwire as tw
from thinwire.core import theory
from thinwire.core.bucket import Bucket
from thinwire.core.scheme import Codec
from thinwire.lab.tasks.estimates import compressed
from thinwire.lab.tasks.tasks import load_task
from thinwire.schemes import parse

Draw = Callable[[int, int], Tensor]  # of a step and a worker
WORKERS, STEPS = 4, 6
FULL = 30  # stages: whole tensors


def seeded(step: int, worker: int) -> Generator:
    return Generator().manual_seed(1000 * step + worker)


def gaussian(size: int) -> Draw:
    return lambda step, worker: torch.randn(size, generator=seeded(step, worker))


def student(size: int) -> Draw:
    """Student-t with 3 degrees of freedom."""

    def draw(step: int, worker: int) -> Tensor:
        x = torch.randn(4, size, generator=seeded(step, worker))
        return x[0] / x[1:].square().mean(0).sqrt()

    return draw


def heavy(size: int) -> Draw:
    """Nearly all of the norm in a handful of elements, other ones on every worker."""

    def draw(step: int, worker: int) -> Tensor:
        x = torch.randn(size, generator=seeded(step, worker))
        return x.sign() * x.abs().exp() ** 3

    return draw


def trained(spec: str, first: int) -> Draw:
    """Gradients of a task's weight matrices, end to end, from a step of uncompressed training on."""
    task = load_task(spec)

    @cache
    def steps() -> list[list[Tensor]]:
        torch.manual_seed(0)
        model = task.model()
        optimizer = task.optimizer(model.parameters())
        batches = [task.dataset.train.batches(64, seed=worker) for worker in range(WORKERS)]
        kept = []
        for step in range(first + STEPS):
            gradients = []
            for each in batches:
                examples = next(each)
                model.zero_grad()
                task.loss(model(examples.inputs), examples.targets).backward()
                gradients.append([p.grad.clone() for p in model.parameters() if p.grad is not None])
            for p, *several in zip(model.parameters(), *gradients, strict=True):
                p.grad = torch.stack(several).mean(0)
            optimizer.step()
            if step >= first:
                kept.append([torch.cat([g.flatten() for g in worker if compressed(g)]) for worker in gradients])
        return kept

    return lambda step, worker: steps()[step][worker]


def error(spec: str, draw: Draw, workers: int = WORKERS, warm: int = 0) -> float:
    group = tw.Simulation(spec, workers=workers, feedback=False)
    errors = []
    for step in range(warm + STEPS):
        tensors = [draw(step, worker) for worker in range(workers)]
        exact = torch.stack(tensors).double().mean(0)
        errors.append(float((group.reduce(tensors) - exact).square().sum() / exact.square().sum()))
    return fmean(errors[warm:])


def saturation() -> tuple[str, list[str], list[list[str]]]:
    rows = []
    for workers in (4, 8, 32):
        row = [f"{workers}"]
        for bits in (4, 8):
            kappa = theory.saturation_kappa(bits, workers)
            measured = error(f"thc(bits={bits}, saturate=True)", gaussian(16_384), workers, warm=2)
            row += [f"{theory.saturation_error(kappa, bits, workers):.3g}", f"{measured:.3g}"]
        rows.append(row)
    columns = ["workers", "4 bits: theory", "measured", "8 bits: theory", "measured"]
    return "THC with saturation, Gaussian", columns, rows


def rotation() -> tuple[str, list[str], list[list[str]]]:
    stages = (10, 11, 12, 13)
    sources = [
        *(("Gaussian", gaussian(size), size) for size in (16_384, 131_072)),
        *(("Student-t(3)", student(size), size) for size in (16_384, 131_072)),
        *(("a handful of elements hold nearly all", heavy(size), size) for size in (8_192, 131_072)),
    ]
    mlp = trained("mlp(width=512)", 5)
    sources.append(("mlp(width=512), steps 6 to 11", mlp, mlp(0, 0).numel()))
    rows = []
    for name, draw, size in sources:
        full = error(f"thc(rotate={FULL})", draw)
        found = [error(f"thc(rotate={each})", draw) for each in stages]
        rows.append([name, f"{size:,}", *(f"{each:.3g} ({each / full:.2f})" for each in found), f"{full:.3g}"])
    title = f"THC's rotation, {WORKERS} workers, 4 bits; in parentheses over the full one's error"
    return title, ["gradient", "elements", *(f"rotate={each}" for each in stages), "full"], rows


def places() -> tuple[str, list[str], list[list[str]]]:
    n = 1_000_000
    x = torch.randn(n, generator=seeded(0, 0))
    rows = []
    for density in (0.001, 0.01, 0.1):
        scheme, k = parse(f"topk(density={density})"), round(density * n)
        assert isinstance(scheme, Codec)
        bits = 8 * (scheme.payload(Bucket.of(x.clone()), density).nbytes - 2 * k) / k
        entropy = (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2) / k
        rows.append([f"{density:.1%}", f"{bits:.2f}", f"{entropy:.2f}"])
    return "Top-k's places, of a million elements", ["density", "bits per place", "entropy"], rows


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*columns, title=title)
    for row in rows:
        table.add_row(*row)
    Console().print(table)


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--json", help="also write the tables to this file")
    file = options.parse_args().json
    found = [saturation(), rotation(), places()]
    for each in found:
        show(*each)
    if file:
        with open(file, "w") as out:
            json.dump([dict(zip(("title", "columns", "rows"), each, strict=True)) for each in found], out, indent=2)


if __name__ == "__main__":
    main()
