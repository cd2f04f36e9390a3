"""What PowerSGD costs in a step: thinwire's against PyTorch's hook, on the same rank, in one run.

    python benchmarks/powersgd.py                  # the table
    python benchmarks/powersgd.py --json FILE

One rank, so that no wire is in the figures: what a step takes longer than under a hook that does nothing is
the scheme. One bucket, because PyTorch's hook needs that on gloo. One thread each, and time is the processor's, so
that neighbours on the machine count little. Rounds alternate between the sides; the best of each counts.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw

ONE_BUCKET = 1000  # MB
BATCH = 32


def mlp() -> nn.Module:
    """5.8 M weights."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10))


def nothing(state: object, bucket):  # DDP checks annotations by identity, and cannot read postponed ones
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def sides(factor_rank: int) -> dict[str, DDP]:
    models = {name: DDP(mlp(), bucket_cap_mb=ONE_BUCKET) for name in ("no hook's work", "PyTorch", "two", "one")}
    models["no hook's work"].register_comm_hook(None, nothing)
    state = powerSGD_hook.PowerSGDState(
        process_group=None, matrix_approximation_rank=factor_rank, start_powerSGD_iter=2
    )
    models["PyTorch"].register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for sided in ("two", "one"):
        tw.attach(models[sided], f"powersgd(factor_rank={factor_rank}, sided='{sided}')")
    return models


def step(model: DDP) -> float:
    """Processor seconds, of all threads, of forward and backward."""
    x, y = torch.randn(BATCH, 784), torch.randint(10, (BATCH,))
    began = time.process_time()
    nn.functional.cross_entropy(model(x), y).backward()
    return time.process_time() - began


def measure(factor_rank: int, rounds: int) -> dict[str, float]:
    """The best step of each side, in milliseconds."""
    models = sides(factor_rank)
    best = dict.fromkeys(models, float("inf"))
    for number in range(rounds):
        order = list(models) if number % 2 else list(models)[::-1]
        for name in order:
            seconds = step(models[name])
            if number >= 5:  # PyTorch compresses from its third step on; buckets are rebuilt after the first
                best[name] = min(best[name], seconds)
    return {name: 1000 * seconds for name, seconds in best.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--factor-rank", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--json", metavar="FILE")
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        best = measure(options.factor_rank, options.rounds)
        dist.destroy_process_group()

    bare = best.pop("no hook's work")
    theirs = best["PyTorch"] - bare
    table = Table(
        "PowerSGD",
        "step, CPU ms",
        "scheme, CPU ms",
        "against PyTorch",
        title=f"rank {options.factor_rank}, MLP of 5.8 M weights",
    )
    table.add_row("none", f"{bare:.1f}", "", "")
    for name, milliseconds in best.items():
        label = "PyTorch's hook" if name == "PyTorch" else f"thinwire, {name}-sided"
        scheme = milliseconds - bare
        table.add_row(label, f"{milliseconds:.1f}", f"{scheme:.1f}", f"{scheme / theirs:.2f}")
    Console().print(table)
    if options.json:
        with open(options.json, "w") as file:
            json.dump({"rank": options.factor_rank, "bare_ms": bare, "step_ms": best}, file, indent=1)


if __name__ == "__main__":
    main()
