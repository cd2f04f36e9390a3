"""`thinwire bench --schemes`: what one worker computes in a step, scheme by scheme, in copies of the gradient.

One worker goes through the whole pipeline (exemptions, feedback, encode, decode) in buckets as DDP makes them; only the
wire is pretended. Every other worker is taken to be a copy of this one (`lab.cost.rehearsal`), and the answers are made
up while the clock stands still. Before every step the gradient is copied into its buckets: that copy, of the same bytes
in the same rounds, is the memcpy that all is measured in. So a figure means the same on any machine. On one thread the
thread's own seconds count, on several the clock's.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from thinwire.core.layout import Layout
from thinwire.kernels import native
from thinwire.lab.bench.breakdown import OPERATIONS, Breakdown
from thinwire.lab.cost.rehearsal import Rehearsal, RehearsalLane
from thinwire.lab.tasks import models
from thinwire.reducer import Reducer
from thinwire.schemes import parse

SCHEMES = (
    "fp32", "fp16", "bf16", "qsgd(bits=4)", "tnq(bits=4)", "tnq(bits=8)", "signsgd", "eden(bits=2)", "thc(bits=4)",
    "topk(density=0.01)", "regtopk(density=0.01)", "topkc(density=0.1)", "randomk(density=0.01)",
    "powersgd(factor_rank=4)",
)  # fmt: skip
FIRST_BUCKET, BUCKET = 1 << 20, 25 << 20  # bytes: DDP's own limits
WARM = 2


@dataclass(frozen=True)
class SchemeRow:
    """One scheme on one number of threads."""

    scheme: str
    threads: int
    milliseconds: float  # the median step
    memcpys: float  # median step / median copy
    least_memcpys: float  # fastest step / fastest copy: other work on the machine only ever adds
    operations: dict[str, float]  # memcpys, of a watched step
    allocated_bytes: int  # of fresh tensors in a step, leaving out those under breakdown.SMALL
    scratch_bytes: int  # kept from step to step


def buckets_of(model: nn.Module) -> list[Layout]:
    """DDP's buckets after its first step: parameters as gradients come, from the last on; full ones are closed."""
    layouts: list[Layout] = []
    shapes: list[tuple[str, Sequence[int]]] = []
    size = 0
    for name, parameter in reversed(list(model.named_parameters())):
        shapes.append((name, tuple(parameter.shape)))
        size += 4 * parameter.numel()
        if size >= (BUCKET if layouts else FIRST_BUCKET):
            layouts.append(Layout.of(shapes))
            shapes, size = [], 0
    return [*layouts, Layout.of(shapes)] if shapes else layouts


class Stage:
    """A model's gradient in its buckets, and one worker that exchanges it with its copies."""

    def __init__(self, model: nn.Module, scheme: str, workers: int) -> None:
        self.layouts = buckets_of(model)
        numel = sum(layout.numel for layout in self.layouts)
        self._source, self._flat = _gradient(numel), torch.zeros(numel)
        self._buckets = self._flat.split([layout.numel for layout in self.layouts])
        exchange = Rehearsal(workers, lambda: None)
        self._reducer = Reducer(dict(model.named_parameters()), scheme, None, exchange=exchange)
        assert isinstance(exchange.lane, RehearsalLane)
        self.lane = exchange.lane
        # On one thread its own seconds: what else the machine does then shows only in the caches.
        self.lane.timer = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def copy(self) -> float:
        """Put the gradient into its buckets; the seconds it takes."""
        began = self.lane.timer()
        self._flat.copy_(self._source)
        return self.lane.timer() - began

    def converse(self) -> float:
        """One step: the seconds that this worker computes."""
        self.lane.buckets.clear()
        self._reducer.begin_step()
        for number, (buffer, layout) in enumerate(zip(self._buckets, self.layouts, strict=True)):
            self._reducer.submit(buffer, layout, last=number == len(self.layouts) - 1, done=_raise)
        self._reducer.end_step()
        return sum(turn.encode_seconds for bucket in self.lane.buckets for turn in bucket.turns)

    def close(self) -> None:
        self._reducer.close()


def benchmark(
    schemes: Sequence[str] = SCHEMES,
    threads: Sequence[int] = (1,),
    repeats: int = 15,
    *,
    model: nn.Module | None = None,
    workers: int = 2,
    on_scheme: Callable[[str], object] = lambda text: None,
) -> list[SchemeRow]:
    """Every scheme on every number of threads."""
    model = model or models.mlp(2048)
    rows = []
    for count in threads:
        with on_threads(count):
            for scheme in schemes:
                on_scheme(f"{scheme}, {_counted(count, 'thread')}")
                rows.append(measure(model, scheme, workers, count, repeats))
    return rows


def measure(model: nn.Module, scheme: str, workers: int, threads: int, repeats: int) -> SchemeRow:
    stage = Stage(model, scheme, workers)
    try:
        for _ in range(WARM):
            stage.copy()
            stage.converse()
        copies, steps = [], []
        for _ in range(repeats):
            copies.append(stage.copy())
            steps.append(stage.converse())
        copy, step = statistics.median(copies), statistics.median(steps)
        operations, allocated = _watched(stage, step / copy)
        return SchemeRow(
            scheme, threads, 1e3 * step, step / copy, min(steps) / min(copies), operations, allocated,
            stage.lane.scratch_bytes,
        )  # fmt: skip
    finally:
        stage.close()


def _watched(stage: Stage, memcpys: float) -> tuple[dict[str, float], int]:
    """A step's operations, which together take so many memcpys, and its fresh memory."""
    best: Breakdown | None = None
    for _ in range(3):
        stage.copy()
        breakdown = Breakdown()
        stage.lane.watch = breakdown.watching
        try:
            stage.converse()
        finally:
            stage.lane.watch = None
        if best is None or sum(breakdown.seconds.values()) < sum(best.seconds.values()):
            best = breakdown
    assert best is not None
    total = sum(best.seconds.values())
    return {name: memcpys * spent / total for name, spent in best.seconds.items()}, best.allocated


@lru_cache(maxsize=1)
def _gradient(numel: int) -> Tensor:
    """Laplace of scales that differ from place to place, as gradients are. To be read only."""
    generator = torch.Generator().manual_seed(0)
    u = torch.rand(numel, generator=generator) - 0.5
    scale = torch.exp2(4 * torch.rand(-(-numel // 4096), generator=generator)).repeat_interleave(4096)[:numel]
    return -1e-3 * scale * torch.sign(u) * torch.log1p(-2 * u.abs().clamp(max=0.4999999))


@contextmanager
def on_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _raise(error: BaseException | None) -> None:
    if error is not None:
        raise error


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" + "s" * (number != 1)


def tables(rows: Sequence[SchemeRow]) -> list[Table]:
    """What a step costs on each number of threads, and where that goes on the fewest."""
    counts = sorted({row.threads for row in rows})
    total = plain_table("one worker's step, in copies of the gradient, by threads")
    for count in counts:
        for name in ("ms", "memcpys", "least"):
            total.add_column(f"on {count}\n{name}", justify="right", no_wrap=True)
    total.add_column("fresh\nMB", justify="right", no_wrap=True)
    total.add_column("kept\nMB", justify="right", no_wrap=True)
    by_scheme = {scheme: [row for row in rows if row.scheme == scheme] for scheme in {row.scheme: 0 for row in rows}}
    for scheme, found in by_scheme.items():
        cells = [f(row) for row in found for f in (_milliseconds, _memcpys, _least)]
        total.add_row(scheme, *cells, _size(found[0].allocated_bytes), f"{found[0].scratch_bytes / 1e6:.0f}")
    parts = plain_table(f"where it goes, in memcpys, {_counted(counts[0], 'thread')}")
    used = [name for name in OPERATIONS if any(row.operations[name] >= 0.05 for row in rows)]
    for name in used:
        parts.add_column(_SHORT.get(name, name), justify="right", no_wrap=True)
    for row in rows:
        if row.threads == counts[0]:
            cells = [f"{row.operations[name]:.1f}" if row.operations[name] >= 0.05 else "" for name in used]
            parts.add_row(row.scheme, *cells)
    return [total, parts]


def plain_table(title: str) -> Table:
    table = Table(title=title, box=SIMPLE_HEAD, padding=0, show_edge=False, pad_edge=False)
    table.add_column("scheme", no_wrap=True)
    return table


_SHORT = {
    "copy": "cop", "statistics": "sta", "select": "sel", "rotate": "rot", "quantise": "qua", "pack": "pac",
    "products": "pro", "orthonormalise": "ort", "feedback": "fee", "decode": "dec", "other": "els", "python": "py",
}  # fmt: skip


def _milliseconds(row: SchemeRow) -> str:
    return f"{row.milliseconds:.1f}"


def _memcpys(row: SchemeRow) -> str:
    return f"{row.memcpys:.1f}"


def _least(row: SchemeRow) -> str:
    return f"{row.least_memcpys:.1f}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 1e6:.3f}" if nbytes else "0"


def bench_schemes(
    schemes: Sequence[str] = (),
    *,
    repeats: int = 15,
    workers: int = 2,
    model: nn.Module | None = None,
    json_file: Path | None = None,
) -> None:
    """Print the tables, on one thread and on all, and write them to `json_file` where asked for."""
    for scheme in schemes:
        parse(scheme)
    console = Console()
    model = model or models.mlp(2048)
    counts = sorted({1, torch.get_num_threads()})
    with console.status("starting") as status:
        rows = benchmark(schemes or SCHEMES, counts, repeats, model=model, workers=workers, on_scheme=status.update)
    for table in tables(rows):
        console.print(table)
    numel = sum(parameter.numel() for parameter in model.parameters())
    console.print(
        f"{native.status()}. {numel:,} weights in {_counted(len(buckets_of(model)), 'bucket')}, worker 0 of {workers}; "
        f"medians of {_counted(repeats, 'round')} of copy and step in turn, on 1 thread in processor seconds; least: "
        "the fastest step over the fastest copy. The wire takes no time here, and answers are made up while the clock "
        "stands still."
    )
    if json_file:
        document = {
            "kernels": native.status(), "weights": numel, "workers": workers, "repeats": repeats,
            "rows": [asdict(row) for row in rows],
        }  # fmt: skip
        json_file.write_text(json.dumps(document, indent=2) + "\n")
