"""A step of every scheme over thin links: milliseconds, and what they are made of.

    python benchmarks/thin_links.py                # the table: needs root, for links of their own
    python benchmarks/thin_links.py --json FILE

Four machines of one worker each, an MLP of 5.8 M weights; all sides take turns on the same ranks. "alone" exchanges
nothing. "wire" is what the link needs for a worker's bytes, "cores" the processor time of all four ranks divided by
this machine's cores: no step can be faster than the longest of the three. The last columns say how many times that
long, without and with "cores", a step is. PyTorch's own hooks count no bytes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from statistics import median

import torch
from rich.console import Console
from rich.progress import Progress
from rich.table import Column, Table
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook as powersgd
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel as DDP
from turns import Side, Took, over, side

import thinwire as tw
from thinwire.lab.network.network import parse_network

SCHEMES = ("fp16", "qsgd(bits=4)", "tnq(bits=4)", "topk(density=0.01)", "topkc(density=0.1)", "powersgd(factor_rank=4)")
BATCH = 48


def perceptron() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(784, 2048), nn.ReLU(), nn.Linear(2048, 2048), nn.ReLU(), nn.Linear(2048, 10)
    )  # fmt: skip


def sides() -> dict[str, Side]:
    x = torch.randn(BATCH, 784)
    hooked, low_rank = (
        DDP(perceptron()),
        DDP(perceptron(), bucket_cap_mb=100),
    )  # gloo mixes two up
    hooked.register_comm_hook(None, fp16_compress_hook)
    state = powersgd.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2)
    low_rank.register_comm_hook(state, powersgd.powerSGD_hook)
    built = {
        "alone": side(perceptron(), x),
        "PyTorch's fp16 hook": side(hooked, x),
        "PyTorch's PowerSGD hook": side(low_rank, x),
    }
    for scheme in SCHEMES:
        model = DDP(perceptron())
        built[scheme] = side(model, x, tw.attach(model, scheme))
    return built


def row(name: str, took: Took, alone: Took, rate: float) -> tuple[str, ...]:
    step, sent, cores = took.milliseconds, median(took.sent), took.cores
    wire = sent * 8e3 / rate
    return (
        name, f"{step:.0f}", f"{sent / 1e6:.2f}" if sent else "", f"{wire:.0f}" if sent else "",
        f"{cores:.0f}", f"{step / max(alone.milliseconds, wire):.2f}" if sent else "",
        f"{step / max(alone.milliseconds, wire, cores):.2f}" if sent else "",
    )  # fmt: skip


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--repeats", type=int, default=12, help="of every side; default: %(default)s")
    options.add_argument("--link", action="append", help="100mbit, none; repeatable; default: 100mbit and 1gbit")
    options.add_argument("--json", metavar="FILE", help="also write every time to FILE")
    given = options.parse_args()

    links, found = given.link or ["100mbit", "1gbit"], {}
    with Progress(transient=True) as progress:
        for link in progress.track(links, description="measuring"):
            found[link] = over(None if link == "none" else link, sides, given.repeats)

    for link, took in found.items():
        title = f"{link}, four machines, {os.cpu_count()} cores"
        table = Table(Column("scheme", no_wrap=True), "ms", "MB", "wire", "cores", "of two", "of three", title=title)
        rate = math.inf if link == "none" else parse_network(f"shaped:{link}").rate_of(0).up
        for name, each in took.items():
            table.add_row(*row(name, each, took["alone"], rate))
        Console().print(table)
    if given.json:
        cells = {link: {name: each._asdict() for name, each in took.items()} for link, took in found.items()}
        with open(given.json, "w") as file:
            json.dump({"cores": os.cpu_count(), "torch": torch.__version__, "links": cells}, file, indent=2)


if __name__ == "__main__":
    main()
