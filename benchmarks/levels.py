"""Two levels against one, and a codec between FSDP2's shards against none, over thin links: seconds per step.

    python benchmarks/levels.py                    # the table: needs root, for links of their own
    python benchmarks/levels.py --json FILE

Two machines of two workers each, one thin link a machine: DDP over all four with PyTorch's own fp16_compress_hook, with
qsgd(bits=4), with qsgd(bits=4) on two levels, and with two levels of which the upper one is a machine by itself: that
sends nothing over the link, so nothing that is sent there can be faster. Then four machines of one worker each: a
transformer sharded by FSDP2, plain, with qsgd(bits=4) between shards, and with no gradients sent at all, for no codec
can be faster than that; each with weights gathered again for backward, and with weights kept. All sides of a link take
turns on the same ranks; figures are medians of the repeats, ratios medians of the repeats' ratios. "alone" is a step
that exchanges nothing, on the same ranks at the same time; "cores" is the processor time of all four ranks divided by
this machine's cores: no step can be faster.
"""

from __future__ import annotations

import argparse
import json
import os

import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import Progress
from rich.table import Table
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from turns import Side, over, ratio, side

import thinwire as tw

LINKS = ("100mbit", "1gbit")
QSGD = "qsgd(bits=4)"
FLAT, LEVELS, APART = f"flat, {QSGD}", f"two levels, {QSGD}", "two levels, nothing between machines"
PLAIN, BETWEEN, UNSAID, KEPT = "plain FSDP2", "qsgd(bits=4) between shards", "no gradients sent", ", weights kept"
RATIOS = {
    "two levels": [
        (LEVELS, FLAT),
        (APART, FLAT),
        ("fp16_compress_hook", LEVELS),
    ],
    "fsdp": [(name + kept, PLAIN + kept) for kept in ("", KEPT) for name in (BETWEEN, UNSAID)],
}  # fmt: skip


def perceptron() -> nn.Module:
    """8.4 M weights in eight matrices, each a bucket of its own, so that one travels while another is computed."""
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(1024, 1024), nn.ReLU())))


def transformer() -> nn.Module:
    """3.2 M weights in four blocks."""
    torch.manual_seed(0)
    return nn.Sequential(*(nn.TransformerEncoderLayer(256, 4, 1024, 0.0, batch_first=True) for _ in range(4)))


def two_levels() -> dict[str, Side]:
    """What is timed on machines of two workers each."""
    x = torch.randn(16, 1024)
    inner = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3])][dist.get_rank() // 2]
    alone = [dist.new_group([rank]) for rank in range(4)][dist.get_rank()]
    hook, flat, levels = (DDP(perceptron(), bucket_cap_mb=4) for _ in range(3))
    apart = DDP(perceptron(), bucket_cap_mb=4, process_group=inner)
    hook.register_comm_hook(None, fp16_compress_hook)
    return {
        "alone": side(perceptron(), x),
        "fp16_compress_hook": side(hook, x),
        FLAT: side(flat, x, tw.attach(flat, QSGD)),
        LEVELS: side(levels, x, tw.attach(levels, QSGD, exchange=tw.Hierarchical.of_nodes(2))),
        APART: side(apart, x, tw.attach(apart, QSGD, exchange=tw.Hierarchical(inner=inner, outer=alone))),
    }


class Unsaid:
    """In a reduce-scatter's place: nobody hears of anybody's gradients."""

    def allocate(self, size: list[int], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: object, **__: object) -> None:
        output_tensor.copy_(input_tensor[: output_tensor.numel()])


def fsdp() -> dict[str, Side]:
    """What is timed on machines of one worker each."""
    x = torch.randn(4, 32, 256)
    sides = {"alone": side(transformer(), x)}
    for kept in ("", KEPT):
        for name in (PLAIN, BETWEEN, UNSAID):
            model = transformer()
            for block in model:
                fully_shard(block, reshard_after_forward=not kept)
                if name == UNSAID:
                    block.set_custom_reduce_scatter(Unsaid())
            fully_shard(model, reshard_after_forward=not kept)
            if name == UNSAID:
                model.set_custom_reduce_scatter(Unsaid())
            sides[name + kept] = side(model, x, tw.attach(model, QSGD) if name == BETWEEN else None)
    return sides


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeats", type=int, default=12, help="of every side; default: %(default)s")
    options.add_argument("--only", choices=RATIOS, help="this half")
    options.add_argument("--link", action="append", help=f"between machines; repeatable; default: {', '.join(LINKS)}")
    options.add_argument("--json", metavar="FILE", help="also write every time to FILE")
    given = options.parse_args()

    found = {}
    cells = [(name, link) for name in RATIOS if given.only in (None, name) for link in given.link or LINKS]
    with Progress(transient=True) as progress:
        bar = progress.add_task("measuring", total=len(cells))
        for name, link in cells:
            build, local = {"two levels": (two_levels, 2), "fsdp": (fsdp, 1)}[name]
            found[name, link] = over(link, build, given.repeats, local)
            progress.advance(bar)

    table = Table("link", "what", "ms a step", "cores", title="seconds per step, and ratios of the repeats")
    for (name, link), took in found.items():
        for what, each in took.items():
            table.add_row(link, what, f"{each.milliseconds:.0f}", f"{each.cores:.0f}")
        for one, other in RATIOS[name]:
            table.add_row(link, f"[bold]{one} / {other}[/]", f"[bold]{ratio(took[one], took[other]):.2f}[/]", "")
        table.add_section()
    Console().print(table)
    if given.json:
        record = [
            {"what": name, "link": link, "took": {what: each._asdict() for what, each in took.items()}}
            for (name, link), took in found.items()
        ]
        with open(given.json, "w") as file:
            json.dump({"cores": os.cpu_count(), "torch": torch.__version__, "cells": record}, file, indent=2)


if __name__ == "__main__":
    main()
