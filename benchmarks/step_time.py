"""What the machinery costs: thinwire's fp32 and fp16 against plain DDP and fp16_compress_hook, on loopback.

    python benchmarks/step_time.py                 # the table
    python benchmarks/step_time.py --json FILE

Every repeat times all sides one after the other on the same ranks, in changing order; the figure is the median of the
repeats' ratios. Two equal models in one process can differ by a few percent for as long as they live, by where their
memory happens to lie, so there are several rounds, each with new processes and another order of building.

Two more rows are measuring sticks. Plain DDP against itself shows the noise. PyTorch's own allreduce_hook, which does
what plain DDP does, shows what any hook costs: under a hook the division by the ranks is a pass of its own.

Below the table: peak memory of a process with and without thinwire, each in its own process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import tempfile
import time

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook, fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw


def cnn() -> nn.Module:
    """0.6 M weights."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(64 * 49, 184), nn.ReLU(), nn.Linear(184, 10),
    )  # fmt: skip


def mlp() -> nn.Module:
    """5.8 M weights."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )


MODELS = {"cnn": cnn, "mlp": mlp}
SIDES = {
    "plain DDP": None,
    "itself": None,
    "allreduce_hook": allreduce_hook,
    "fp32": "fp32",
    "fp16_compress_hook": fp16_compress_hook,
    "fp16": "fp16",
}
PAIRS = [
    ("fp32", "plain DDP"),
    ("plain DDP", "itself"),
    ("allreduce_hook", "plain DDP"),
    ("fp32", "allreduce_hook"),
    ("fp16", "fp16_compress_hook"),
]


def build(model: str, side: object) -> tuple[DDP, tw.Wire | None]:
    """A model with thinwire's scheme (text), PyTorch's hook (a function) or nothing."""
    torch.manual_seed(0)
    ddp = DDP(MODELS[model]())
    if isinstance(side, str):
        return ddp, tw.attach(ddp, side)
    if callable(side):
        ddp.register_comm_hook(None, side)
    return ddp, None


def seconds(model: nn.Module, x: torch.Tensor, steps: int) -> float:
    """Of `steps` steps, after one that brings this side's memory and connections back into caches."""
    for step in range(1 + steps):
        if step == 1:
            dist.barrier()
            began = time.perf_counter()
        model.zero_grad()
        model(x).square().mean().backward()
    dist.barrier()
    return time.perf_counter() - began


def measured(model: str, number: int, repeats: int, steps: int) -> dict[str, list[float]]:
    """One round: seconds of every repeat of every side."""
    sides = _turned(list(SIDES), number)
    built = {side: build(model, SIDES[side]) for side in sides}
    x = torch.randn(16, 1, 28, 28)
    for ddp, _ in built.values():
        seconds(ddp, x, 3)
    took: dict[str, list[float]] = {side: [] for side in sides}
    for repeat in range(repeats):
        order = _turned(sides, repeat)
        for side in order if repeat % 2 else reversed(order):
            took[side].append(seconds(built[side][0], x, steps))
    for _, wire in built.values():
        if wire is not None:
            wire.close()
    return took


def _turned(sides: list[str], by: int) -> list[str]:
    by %= len(sides)
    return sides[by:] + sides[:by]


def peak_memory(side: object, feedback: bool) -> tuple[float, float]:
    """(peak resident MB, bytes thinwire says it keeps in MB) of a few steps of the MLP."""
    torch.manual_seed(0)
    ddp = DDP(mlp())
    wire = tw.attach(ddp, side, feedback=feedback) if isinstance(side, str) else None
    seconds(ddp, torch.randn(16, 1, 28, 28), 5)
    with open("/proc/self/status") as file:
        peak = next(int(line.split()[1]) for line in file if line.startswith("VmHWM")) / 1024
    told = 0.0
    if wire is not None:
        stats = wire.stats()
        told = (stats["memory_bytes"] + stats["scratch_bytes"]) / 2**20
        wire.close()
    return peak, told


def _rank(function, args, rank, workers, store, results) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=workers)
    value = function(*args)
    if rank == 0:
        results.put(value)
    dist.barrier()
    dist.destroy_process_group()


def on_ranks(workers: int, function, *args):
    """function(*args) on every rank; rank 0's answer."""
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        ranks = [
            context.Process(target=_rank, args=(function, args, rank, workers, f"{folder}/store", results))
            for rank in range(workers)
        ]
        for process in ranks:
            process.start()
        value = results.get(timeout=600)
        for process in ranks:
            process.join()
        return value


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    rounds = 2 * len(SIDES)  # every order of building twice
    options.add_argument("--rounds", type=int, default=rounds, help="new processes for each; default: %(default)s")
    options.add_argument("--repeats", type=int, default=25, help="in every round; default: %(default)s")
    options.add_argument("--json", metavar="FILE", help="also write every time to FILE")
    given = options.parse_args()

    cells = [(model, workers) for workers in (2, 4) for model in MODELS]
    memory = [(None, False), ("fp32", False), ("fp16", False), ("qsgd(bits=4)", False), ("qsgd(bits=4)", True)]
    found, kept = {}, {}
    with Progress(transient=True) as progress:
        bar = progress.add_task("measuring", total=len(cells) * given.rounds + len(memory))
        for model, workers in cells:
            steps = 3 if model == "cnn" else 1  # short repeats, many of them: a busy moment spoils few ratios
            found[model, workers] = []
            for number in range(given.rounds):
                found[model, workers].append(on_ranks(workers, measured, model, number, given.repeats, steps))
                progress.advance(bar)
        for side, feedback in memory:
            kept[side, feedback] = on_ranks(2, peak_memory, side, feedback)
            progress.advance(bar)

    columns = ("model", "ranks", "step time of", "median ratio", "of single rounds")
    table = Table(*columns, title="seconds per step, one / the other")
    for (model, workers), rounds in found.items():
        for one, other in PAIRS:
            ratios = [[a / b for a, b in zip(took[one], took[other], strict=True)] for took in rounds]
            median = statistics.median(ratio for each in ratios for ratio in each)
            single = [statistics.median(each) for each in ratios]
            table.add_row(
                model, str(workers), f"{one} / {other}", f"{median:.3f}", f"{min(single):.3f} .. {max(single):.3f}"
            )
    Console().print(table)

    weights = sum(p.numel() for p in mlp().parameters()) * 4 / 2**20
    plain = kept[None, False][0]
    columns = ("scheme", "error feedback", "peak MB", "above plain DDP", "thinwire keeps")
    table = Table(*columns, title=f"memory, mlp ({weights:.1f} MB)")
    for (side, feedback), (peak, told) in kept.items():
        above = "" if side is None else f"{peak - plain:+.1f} MB"
        table.add_row(str(side or "plain DDP"), "on" if feedback else "off", f"{peak:.0f}", above, f"{told:.1f} MB")
    Console().print(table)
    if given.json:
        record = {
            "cores": os.cpu_count(), "torch": torch.__version__,
            "rounds": [{"model": m, "ranks": w, "seconds": s} for (m, w), rounds in found.items() for s in rounds],
            "memory": [{"scheme": s, "feedback": f, "peak_mb": p, "kept_mb": t} for (s, f), (p, t) in kept.items()],
        }  # fmt: skip
        with open(given.json, "w") as file:
            json.dump(record, file, indent=2)


if __name__ == "__main__":
    main()
