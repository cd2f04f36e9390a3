"""Sides that take turns on the same ranks: seconds and processor seconds of every step, repeat by repeat."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from thinwire.lab.network.network import parse_network
from thinwire.lab.network.shaped import Shaped
from thinwire.lab.runs import launch

WARM = 3  # steps of every side that are not timed


class Side(NamedTuple):
    """What is timed: a step of it, and where it counts its bytes, if it does."""

    step: Callable[[], None]
    wire: tw.Wire | None = None

    def sent(self) -> float:
        return self.wire.stats()["bytes_sent"] if self.wire else 0.0


class Took(NamedTuple):
    """One side's steps."""

    seconds: list[float]  # as the slowest rank has them
    busy: list[float]  # processor seconds, of all ranks together
    sent: list[float]  # bytes of a rank, by its ledger

    @property
    def milliseconds(self) -> float:
        return median(self.seconds) * 1e3

    @property
    def cores(self) -> float:
        """Milliseconds that all cores of this machine are busy with a step: no step can be faster."""
        return median(self.busy) * 1e3 / (os.cpu_count() or 1)


def side(model: nn.Module, x: torch.Tensor, wire: tw.Wire | None = None) -> Side:
    def step() -> None:
        model.zero_grad()
        model(x).square().mean().backward()

    return Side(step, wire)


def ratio(one: Took, other: Took) -> float:
    """Of the seconds of steps that followed each other."""
    return median(a / b for a, b in zip(one.seconds, other.seconds, strict=True))


def timed(place: launch.Place, build: Callable[[], dict[str, Side]], repeats: int) -> dict[str, Took]:
    """Every side's steps; the order turns."""
    with place.joined():
        sides = build()
        names, took = list(sides), {name: Took([], [], []) for name in sides}
        for repeat in range(WARM + repeats):
            for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
                seconds, busy, sent = _step(sides[name])
                if repeat >= WARM:
                    took[name].seconds.append(seconds)
                    took[name].busy.append(busy)
                    took[name].sent.append(sent)
        dist.barrier()
        for each in sides.values():
            if each.wire:
                each.wire.close()
        return took


def _step(side: Side) -> tuple[float, float, float]:
    before = side.sent()
    dist.barrier()
    began, worked = time.perf_counter(), time.process_time()
    side.step()
    seconds, busy = torch.tensor(time.perf_counter() - began), torch.tensor(time.process_time() - worked)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    dist.all_reduce(busy)
    return seconds.item(), busy.item(), side.sent() - before


def over(link: str | None, build: Callable[[], dict[str, Side]], repeats: int, local: int = 1) -> dict[str, Took]:
    """Four ranks, `local` of them a machine, with such a link between machines; None: on loopback."""
    if link is None:
        return launch.on_ranks(timed, 4, build, repeats, seconds=1800)[0]
    with Shaped(parse_network(f"shaped:{link}"), 4, local=local) as links:
        return launch.on_ranks(timed, 4, build, repeats, namespaces=links.by_rank(), seconds=1800)[0]
