"""Two levels against one, and a codec between FSDP2's shards against none, over thin links: seconds per step.

    python benchmarks/levels.py                    # the table: needs root, for links of their own
    python benchmarks/levels.py --json FILE

Two machines of two workers each, one thin link a machine, the loopback inside: DDP over all four with PyTorch's own
fp16_compress_hook, with qsgd(bits=4), and with qsgd(bits=4) on two levels. Then four machines of one worker each: a
transformer sharded by FSDP2, plain and with qsgd(bits=4) between shards; with weights gathered again for backward, and
with weights kept. All sides of a link take turns on the same ranks; figures are medians of the repeats, ratios medians
of the repeats' ratios. "alone" is a step that exchanges nothing, on the same ranks at the same time.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from thinwire.lab.network.network import parse_network
from thinwire.lab.network.shaped import Shaped
from thinwire.lab.runs import launch

LINKS = ("100mbit", "1gbit")
QSGD = "qsgd(bits=4)"
RATIOS = {
    "two levels": [
        ("two levels, qsgd(bits=4)", "flat, qsgd(bits=4)"),
        ("fp16_compress_hook", "two levels, qsgd(bits=4)"),
    ],
    "fsdp": [
        ("qsgd(bits=4) between shards", "plain FSDP2"),
        ("the same, weights kept", "plain FSDP2, weights kept"),
    ],
}  # fmt: skip
WARM = 3  # steps of every side that are not timed
Step = Callable[[], None]


def perceptron() -> nn.Module:
    """8.4 M weights in eight matrices, each a bucket of its own, so that one travels while another is computed."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())))


def transformer() -> nn.Module:
    """3.2 M weights in four blocks."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True) for _ in range(4)))


def step_of(model: nn.Module, x: torch.Tensor) -> Step:
    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    return step


def two_levels() -> dict[str, Step]:
    """What is timed on machines of two workers each."""
    x = torch.randn(16, 1024)
    hook, flat, levels = (DDP(perceptron(), bucket_cap_mb=4) for _ in range(3))
    hook.register_comm_hook(None, fp16_compress_hook)
    tw.attach(flat, QSGD)
    tw.attach(levels, QSGD, exchange=tw.Hierarchical.of_nodes(2))
    return {
        "alone": step_of(perceptron(), x),
        "fp16_compress_hook": step_of(hook, x),
        "flat, qsgd(bits=4)": step_of(flat, x),
        "two levels, qsgd(bits=4)": step_of(levels, x),
    }


def fsdp() -> dict[str, Step]:
    """What is timed on machines of one worker each."""
    x = torch.randn(4, 32, 256)
    sides = {"alone": step_of(transformer(), x)}
    for kept in (False, True):
        for scheme in (None, QSGD):
            model = transformer()
            for block in model:
                fully_shard(block, reshard_after_forward=not kept)
            fully_shard(model, reshard_after_forward=not kept)
            if scheme:
                tw.attach(model, scheme)
            name = {(False, None): "plain FSDP2", (True, None): "plain FSDP2, weights kept"}.get((kept, scheme))
            sides[name or ("the same, weights kept" if kept else "qsgd(bits=4) between shards")] = step_of(model, x)
    return sides


def timed(place: launch.Place, build: Callable[[], dict[str, Step]], repeats: int) -> dict[str, list[float]]:
    """Seconds of every repeat of every side, as the slowest rank has them; the order turns."""
    with place.joined():
        sides = build()
        names, took = list(sides), {side: [] for side in sides}
        for repeat in range(WARM + repeats):
            for side in names[repeat % len(names) :] + names[: repeat % len(names)]:
                dist.barrier()
                began = time.perf_counter()
                sides[side]()
                seconds = torch.tensor(time.perf_counter() - began)
                dist.all_reduce(seconds, dist.ReduceOp.MAX)
                if repeat >= WARM:
                    took[side].append(seconds.item())
        dist.barrier()
        return took


def measured(name: str, link: str, repeats: int) -> dict[str, list[float]]:
    build, local = {"two levels": (two_levels, 2), "fsdp": (fsdp, 1)}[name]
    with Shaped(parse_network(f"shaped:{link}"), 4, local=local) as links:
        return launch.on_ranks(timed, 4, build, repeats, namespaces=links.by_rank(), seconds=1800)[0]


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeats", type=int, default=12, help="of every side; default: %(default)s")
    options.add_argument("--json", metavar="FILE", help="also write every time to FILE")
    given = options.parse_args()

    found = {}
    cells = [(name, link) for name in RATIOS for link in LINKS]
    with Progress(transient=True) as progress:
        bar = progress.add_task("measuring", total=len(cells))
        for name, link in cells:
            found[name, link] = measured(name, link, given.repeats)
            progress.advance(bar)

    table = Table("link", "what", "ms a step", title="seconds per step, and ratios of the repeats")
    for (name, link), took in found.items():
        for side, seconds in took.items():
            table.add_row(link, side, f"{statistics.median(seconds) * 1e3:.0f}")
        for one, other in RATIOS[name]:
            ratio = statistics.median(a / b for a, b in zip(took[one], took[other], strict=True))
            table.add_row(link, f"[bold]{one} / {other}[/]", f"[bold]{ratio:.2f}[/]")
        table.add_section()
    Console().print(table)
    if given.json:
        record = [{"what": name, "link": link, "seconds": took} for (name, link), took in found.items()]
        with open(given.json, "w") as file:
            json.dump({"cores": os.cpu_count(), "torch": torch.__version__, "cells": record}, file, indent=2)


if __name__ == "__main__":
    main()
