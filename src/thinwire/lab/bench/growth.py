"""What a conversation costs per element as models grow, and as groups do."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from thinwire.kernels import native
from thinwire.lab.bench.schemes import measure, on_threads, plain_table
from thinwire.schemes import parse

SCHEMES = (
    "fp16", "qsgd(bits=4)", "tnq(bits=4)", "thc(bits=4)", "topk(density=0.01)", "topkc(density=0.1)",
    "powersgd(factor_rank=4)",
)  # fmt: skip
SIZES = (1, 10, 100)  # million weights, at 2 workers
WORKERS = (2, 8, 64)  # at 10 million weights
WIDTH = 1024  # of the square matrices that a model consists of here


@dataclass(frozen=True)
class Grown:
    """One scheme, at one size and number of workers, on one thread."""

    scheme: str
    weights: int
    workers: int
    nanoseconds: float  # of the median step, per element
    memcpys: float


def model_of(weights: int) -> nn.Module:
    """About so many weights, in square matrices that take no memory: only their shapes are looked at."""
    model = nn.Module()
    for number in range(max(1, round(weights / WIDTH**2))):
        model.register_parameter(f"matrix{number}", nn.Parameter(torch.zeros(()).expand(WIDTH, WIDTH)))
    return model


def grow(
    schemes: Sequence[str] = SCHEMES,
    sizes: Sequence[int] = SIZES,
    workers: Sequence[int] = WORKERS,
    repeats: int = 5,
    on_scheme: Callable[[str], object] = lambda text: None,
) -> list[Grown]:
    """Every scheme at every size with the fewest workers, and at the second size with every number of workers."""
    middle = sizes[min(1, len(sizes) - 1)]
    points = [(size, workers[0]) for size in sizes] + [(middle, count) for count in workers[1:]]
    found = []
    with on_threads(1):
        for size, count in points:
            model = model_of(size * 10**6)
            numel = sum(parameter.numel() for parameter in model.parameters())
            for scheme in schemes:
                on_scheme(f"{scheme}, {size} M weights, {count} workers")
                row = measure(model, scheme, count, 1, repeats)
                found.append(Grown(scheme, numel, count, 1e6 * row.milliseconds / numel, row.memcpys))
    return found


def table(rows: Sequence[Grown]) -> Table:
    """A row for each scheme, a column for each point."""
    shown = plain_table("one worker's step per element, on 1 thread: nanoseconds, memcpys")
    points = list(dict.fromkeys((row.weights, row.workers) for row in rows))
    for weights, workers in points:
        shown.add_column(f"{weights / 1e6:.0f} M, {workers}", justify="right", no_wrap=True)
    for scheme in dict.fromkeys(row.scheme for row in rows):
        own = {(row.weights, row.workers): row for row in rows if row.scheme == scheme}
        shown.add_row(scheme, *(f"{own[point].nanoseconds:.1f}, {own[point].memcpys:.1f}" for point in points))
    return shown


def bench_growth(schemes: Sequence[str] = (), *, repeats: int = 5, json_file: Path | None = None) -> None:
    """Print the table, and write it to `json_file` where asked for."""
    for scheme in schemes:
        parse(scheme)
    console = Console()
    with console.status("starting") as status:
        rows = grow(schemes or SCHEMES, repeats=repeats, on_scheme=status.update)
    console.print(table(rows))
    console.print(f"{native.status()}. Columns: million weights, workers; medians of {repeats} rounds.")
    if json_file:
        document = {"kernels": native.status(), "repeats": repeats, "rows": [asdict(row) for row in rows]}
        json_file.write_text(json.dumps(document, indent=2) + "\n")
