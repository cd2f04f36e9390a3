"""`thinwire bench`: every kernel against memcpy and against its own PyTorch reference, all in one run.

Rounds are interleaved (memcpy, kernel, memcpy, kernel ...) and the best round counts, because other work on the machine
only ever makes a round slower. Memory is kept between calls: fresh pages cost more than the kernels.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from thinwire.kernels import native
from thinwire.lab.bench.cases import Case, all_cases

REFERENCE_NUMEL = 1_000_000  # references are slow: they run on at most so many elements, and once per benchmark


@dataclass(frozen=True)
class BenchRow:
    """One kernel at one size on one number of threads."""

    kernel: str
    numel: int
    threads: int
    gigabytes_per_second: float  # of input: 4 bytes per element that is read or made
    memcpy_gigabytes_per_second: float
    share_of_memcpy: float
    times_reference: float  # how many times faster than the PyTorch reference, element by element
    target: float | None  # least share of memcpy on one thread at 25 M elements

    @property
    def verdict(self) -> str:
        if self.target is None or self.threads > 1 or self.numel < 20_000_000:
            return ""
        return "ok" if self.share_of_memcpy >= self.target else "below"


def benchmark(
    sizes: Iterable[int] = (1_000_000, 25_000_000),
    threads: Iterable[int] = (1,),
    repeats: int = 5,
    only: str = "",
) -> list[BenchRow]:
    """Measure every case whose name contains `only`."""
    if native.module() is None:
        raise RuntimeError(native.status())
    before, rows = torch.get_num_threads(), []
    cases = [case for case in all_cases() if only in case.name]
    try:
        reference = {case.name: _reference_seconds_per_entry(case) for case in cases}
        for numel in sizes:
            source, target = torch.randn(numel), torch.zeros(numel)
            for count in threads:
                torch.set_num_threads(count)
                for case in cases:
                    rows.append(_measure(case, numel, count, repeats, reference[case.name], source, target))
    finally:
        torch.set_num_threads(before)
    return rows


def _measure(case: Case, numel: int, threads: int, repeats: int, reference: float, source, target) -> BenchRow:
    kernel = case.native(numel)
    kernel()
    copies, calls = [], []
    for _ in range(repeats):
        copies.append(_seconds(lambda: target.copy_(source)))
        calls.append(_seconds(kernel))
    size, copy, call = 4 * numel, min(copies), min(calls)
    return BenchRow(
        case.name,
        numel,
        threads,
        size / call / 1e9,
        size / copy / 1e9,
        copy / call,
        reference * numel / call,
        case.target,
    )


def _reference_seconds_per_entry(case: Case) -> float:
    torch.set_num_threads(1)
    call = case.reference(REFERENCE_NUMEL)
    return min(_seconds(call) for _ in range(2)) / REFERENCE_NUMEL


def _seconds(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def tables(rows: list[BenchRow]) -> list[Table]:
    """One table for each size and number of threads."""
    found = []
    for numel, threads in dict.fromkeys((row.numel, row.threads) for row in rows):
        chosen = [row for row in rows if (row.numel, row.threads) == (numel, threads)]
        memcpy = statistics.median(row.memcpy_gigabytes_per_second for row in chosen)
        plural = "s" if threads > 1 else ""
        table = Table(title=f"{numel:,} elements, {threads} thread{plural}; memcpy {memcpy:.1f} GB/s")
        for name in ("kernel", "GB/s", "of memcpy", "target", "x reference"):
            table.add_column(name, justify="left" if name == "kernel" else "right", no_wrap=True)
        for row in chosen:
            target = f"{row.target} {row.verdict}" if row.verdict else ""
            table.add_row(
                row.kernel, f"{row.gigabytes_per_second:.2f}", f"{row.share_of_memcpy:.2f}", target,
                f"{row.times_reference:.1f}",
            )  # fmt: skip
        found.append(table)
    return found


def bench(
    sizes: tuple[int, ...] = (1_000_000, 25_000_000),
    repeats: int = 5,
    only: str = "",
    json_file: Path | None = None,
) -> None:
    """Print the table, on one thread and on all, and write it to `json_file` where asked for."""
    rows = benchmark(sizes, sorted({1, torch.get_num_threads()}), repeats, only)
    console = Console()
    for table in tables(rows):
        console.print(table)
    console.print(
        f"{native.status()}. GB/s of input, 4 bytes an element; shares are of memcpy in the same rounds, targets for "
        f"25 M elements on one thread. The reference is PyTorch on one thread, measured on {REFERENCE_NUMEL:,}."
    )
    if json_file:
        listed = [asdict(row) | {"verdict": row.verdict} for row in rows]
        document = {"kernels": native.status(), "reference_numel": REFERENCE_NUMEL, "rows": listed}
        json_file.write_text(json.dumps(document, indent=2) + "\n")
