"""`thinwire bench --device cuda`: every operation on a device against a copy there, in the same rounds."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from thinwire.kernels import Shapes
from thinwire.kernels.warm import calls
from thinwire.lab.doctor import backends_of

NUMEL = 25_000_000


@dataclass(frozen=True)
class DeviceRow:
    operation: str
    backend: str
    milliseconds: float
    copies: float  # the time of so many copies of the buffer


def benchmark(device: torch.device, numel: int = NUMEL, repeats: int = 20, only: str = "") -> list[DeviceRow]:
    """The fastest of so many rounds of copy and call in turn, by the device's own clock."""
    source, target = torch.ones(numel, device=device), torch.zeros(numel, device=device)
    taken, rows = backends_of(device.type), []
    for name, call in calls(device, Shapes(numel=numel)).items():
        if only in name:
            call()  # compiles
            rounds = [(_milliseconds(lambda: target.copy_(source)), _milliseconds(call)) for _ in range(repeats)]
            copy, best = (min(times) for times in zip(*rounds, strict=True))
            rows.append(DeviceRow(name, taken[name.split(",")[0]], best, best / copy))
    return rows


def _milliseconds(call: Callable[[], object]) -> float:
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def bench_device(
    name: str, *, numel: int = NUMEL, repeats: int = 20, only: str = "", json_file: Path | None = None
) -> None:
    """Print the table, and write it to `json_file` where asked for."""
    device = torch.device(name)
    if device.type != "cuda":
        raise ValueError(f"--device must be cpu or cuda, got {name}")
    if not torch.cuda.is_available():
        raise ValueError("there is no CUDA device here: --device cuda runs where PyTorch finds one")
    with torch.cuda.device(device):
        rows = benchmark(device, numel, repeats, only)
        title = f"{torch.cuda.get_device_name(device)}, {numel:,} elements"
    table = Table("operation", "by", "ms", "copies", title=title)
    for row in rows:
        table.add_row(row.operation, row.backend, f"{row.milliseconds:.3f}", f"{row.copies:.2f}")
    Console().print(table)
    if json_file:
        json_file.write_text(json.dumps([asdict(row) for row in rows], indent=2) + "\n")
