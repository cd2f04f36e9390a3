"""Measures what connects a group: every kind of collective at growing sizes, and the line that fits its seconds.

Every size is exchanged by the lane, as in training, so thread wake-ups and pacing count. What takes the direct way in
training (plain sums) saves those wake-ups; the cost model does not know that.
"""

from __future__ import annotations

import os
import resource
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from statistics import linear_regression, mean, median

import torch
import torch.distributed as dist

from thinwire.exchange.allreduce import AllReduce
from thinwire.exchange.collectives import AllGathered, AllReduced, AllToAll, Collective
from thinwire.exchange.exchange import CPU
from thinwire.exchange.hierarchical import node_groups
from thinwire.exchange.lane import Lane, Rounds
from thinwire.exchange.objects import all_gather_objects, device_of
from thinwire.exchange.shared import Shared, Told
from thinwire.lab.cost.model import BETWEEN, INSIDE, Host, Link, LinkCost, kind_of
from thinwire.schemes import parse

SIZES = tuple(4**power for power in range(5, 13))  # bytes that leave a worker: 1 KiB .. 16 MiB
LONG_SECONDS = 0.25  # a message that takes longer is the last of its kind: larger ones take as long per byte
REPEATS = 5
DTYPES = (torch.float32, torch.float16, torch.bfloat16)  # that schemes add


def settle(device: torch.device) -> None:
    """Wait until a device has done all that it was given: only then do the host's seconds say anything of it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def meet(group: dist.ProcessGroup, device: torch.device = CPU) -> None:
    """A barrier; for a group that has nothing but devices, on this worker's own."""
    where = device_of(group, device)
    if where.type == "cpu":
        dist.barrier(group)
        return
    dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=where), group=group)
    settle(where)


def measure_levels(
    exchange: Callable[[], AllReduce], group: dist.ProcessGroup, local: int, device: torch.device = CPU
) -> Link:
    """The links of machines of `local` workers each: flat, inside a machine, and between those of one place each."""
    if local == 1:
        return measure(exchange(), group, device=device)
    inner, outer = node_groups(local)
    flat = measure(exchange(), group, device=device)
    kinds = dict(flat.kinds)
    for level, each in ((INSIDE, inner), (BETWEEN, outer)):
        found = measure(exchange(), each, group, device, memory=level == INSIDE)
        kinds |= {f"{level} {kind}": cost for kind, cost in found.kinds.items()}
    return Link(flat.workers, kinds, local)


def measure(
    exchange: AllReduce, group: dist.ProcessGroup, everyone: dist.ProcessGroup | None = None,
    device: torch.device = CPU, *, memory: bool = False,
) -> Link:  # fmt: skip
    """The link of a group, over an exchange of its own. Every worker calls it and gets the same answer.

    everyone: several groups that are measured at the same time, and what all of them come to.
    device: of the buckets. Where they would come to the CPU first, the link is what they meet there.
    memory: and how long it takes to tell of what lies in memory that all of the group see.
    """
    exchange.open(group, parse("fp16"), device)  # any scheme
    shared: Shared | None = None
    group = everyone or group
    try:
        lane, workers = exchange.lane, exchange.workers
        assert lane is not None
        how = exchange.group, exchange.device
        sums = [partial(_all_reduced, *how, dtype) for dtype in DTYPES]
        makers = [*sums, partial(_all_gathered, *how), partial(_all_to_all, *how)]
        if memory and exchange.device.type == "cpu":
            shared = Shared.join(exchange.group, 0)
            makers += [partial(_told, shared, exchange.group)] if shared is not None else []
        kinds = [_sweep(make, lane, group, exchange.device) for make in makers]
    finally:
        exchange.close()
        if shared is not None:
            shared.close()
    return Link(workers, dict(kinds))


def _all_reduced(group: dist.ProcessGroup, device: torch.device, dtype: torch.dtype, nbytes: int) -> Collective:
    workers = group.size()
    numel = max(1, nbytes * workers // (2 * dtype.itemsize * (workers - 1)))
    return AllReduced(torch.zeros(numel, dtype=dtype, device=device), group)


def _all_gathered(group: dist.ProcessGroup, device: torch.device, nbytes: int) -> Collective:
    own = torch.zeros(nbytes // (group.size() - 1), dtype=torch.uint8, device=device)
    return AllGathered(own.new_zeros(own.numel() * group.size()), own, group)


def _all_to_all(group: dist.ProcessGroup, device: torch.device, nbytes: int) -> Collective:
    sizes = [nbytes // (group.size() - 1)] * group.size()
    whole = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
    return AllToAll(torch.zeros_like(whole), whole, sizes, sizes, group.rank(), group)


def _told(shared: Shared, group: dist.ProcessGroup, nbytes: int) -> Collective:
    """Of bytes that lie in memory: how many makes no difference to it."""
    return Told(shared, 0, nbytes, nbytes, group)


def _sweep(
    make: Callable[[int], Collective], lane: Lane, group: dist.ProcessGroup, device: torch.device = CPU
) -> tuple[str, LinkCost]:
    points, kind = [], ""
    for nbytes in SIZES:
        collective = make(nbytes)
        kind = kind_of(collective)
        seconds, processor = [], []
        for _ in range(REPEATS + 1):
            meet(group, device)
            began, worked = time.perf_counter(), _processor_seconds()
            job = lane.submit(lambda scratch, asked=collective: _asking(asked), last=True, done=lambda error: None)
            job.wait()
            if job.error is not None:
                raise job.error
            settle(device)
            seconds.append(time.perf_counter() - began)
            processor.append(_processor_seconds() - worked)
        # Everybody must stop at the same size, and the slowest worker is the one that training waits for.
        told = all_gather_objects([median(seconds[1:]), mean(processor[1:])], group, device)
        took, worked = max(s for s, _ in told), mean(p for _, p in told)
        points.append((collective.amounts()["bytes_sent"], took, worked))
        if took > LONG_SECONDS:
            break
    return kind, fit(points)


def fit(points: Sequence[tuple[float, float, float]]) -> LinkCost:
    """The line through (bytes, seconds, processor seconds) points of growing bytes.

    Its slope is that of the largest messages, because short ones slip through on a link's burst; its height is what
    the smaller ones take beyond their bytes, in the middle.
    """
    largest = points[-3:]
    per_byte = linear_regression([p[0] for p in largest], [p[1] for p in largest]).slope
    nbytes, seconds, worked = points[-1]
    per_byte = max(per_byte, 0.5 * seconds / nbytes)  # noise is not a link
    worked_per_byte = worked / nbytes
    latency = median(seconds - nbytes * per_byte for nbytes, seconds, _ in points[:-1])
    short = median(worked - nbytes * worked_per_byte for nbytes, _, worked in points[:-1])
    return LinkCost(max(0.0, latency), per_byte, worked_per_byte, max(0.0, short))


def host(group: dist.ProcessGroup, device: torch.device = CPU) -> Host:
    """This machine, and how many of the group's workers are on it: as many as have its name."""
    names = all_gather_objects(socket.gethostname(), group, device)
    return Host(cores(), max(names.count(name) for name in names), torch.get_num_threads())


def cores() -> int:
    """Those that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _asking(collective: Collective) -> Rounds:
    yield [collective]
    return torch.empty(0)


def _processor_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime
