"""A rehearsal: training steps as they are, with a group that is only pretended.

Model, DDP, wire, scheme and exchange are the real ones; only the collectives are not started. Every other worker is
taken to be a copy of this one, so each answer can be made up on the spot. What is left is a `Step` to be costed: the
seconds that this worker computes, the seconds its lane computes for every bucket, and every message between, with its
bytes. So no scheme needs a formula of its own, and one machine can rehearse a group of thousands.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire.core.bucket import Bucket, Scratch
from thinwire.core.memory import Memory
from thinwire.core.request import Sum
from thinwire.core.scheme import Conversation, Scheme
from thinwire.exchange import arithmetic
from thinwire.exchange.allreduce import AllReduce, workplace
from thinwire.exchange.collectives import AllGathered, AllReduced, AllToAll, Collective, Started
from thinwire.exchange.exchange import CPU, Exchange
from thinwire.exchange.hierarchical import Hierarchical
from thinwire.exchange.lane import DEPTH, Done, Job, Lane, Rounds
from thinwire.exchange.shared import Shared, Told
from thinwire.exchange.transport import Transport
from thinwire.front import attach
from thinwire.lab.cost.link import settle
from thinwire.lab.cost.model import BETWEEN, INSIDE, BucketTrace, Message, Step, Turn, kind_of

_UNWATCHED = nullcontext()
WARM_STEPS = 2  # DDP makes its buckets anew after the first step; memory is touched for the first time


def rehearse(
    model: DistributedDataParallel,
    train: Callable[[], object],
    scheme: str | Scheme,
    *,
    workers: int,
    steps: int,
    local: int = 1,
    restore: Callable[[], object] = lambda: None,
    meet: Callable[[], object] = lambda: None,
    exchange: Exchange | None = None,
) -> list[Step]:
    """`steps` steps of `train()`, which runs `model` forward and backward once, as one of `workers` workers.

    local: on machines of so many workers each, on two levels.
    restore: called before every step.
    meet: called, off the record, before every step and wherever workers would wait for each other. A barrier there
        makes processes that share a machine slow each other down as they do when they train.
    exchange: a rehearsal of another kind.
    """
    if exchange is None:
        exchange = Rehearsal(workers, meet) if local == 1 else RehearsalOfLevels(workers, local, meet)
    wire = attach(model, scheme, exchange=exchange)
    lane = exchange.lane
    assert isinstance(lane, RehearsalLane)
    found = []
    try:
        for _ in range(WARM_STEPS + steps):
            restore()
            meet()
            lane.buckets.clear()
            began = lane.clock()
            train()
            buckets = tuple(bucket.since(began) for bucket in lane.buckets)
            found.append(Step(lane.clock() - began, buckets, wire.plain and local == 1))
    finally:
        wire.close()
    return found[WARM_STEPS:]


@dataclass(frozen=True)
class Barrier(Scheme):
    """Workers meet for every bucket, and exchange one number: what a step costs when there is nothing to send."""

    unbiased: ClassVar[bool] = True
    exact: ClassVar[bool] = True  # so nothing is exempt, and the number is all that travels
    any_float: ClassVar[bool] = True
    summary: ClassVar[str] = "nothing but the waiting for each other"

    def converse(self, bucket: Bucket, memory: Memory, level: float) -> Conversation:
        yield Sum(bucket.scratch.take("barrier", 1, torch.float32, bucket.flat.device).zero_())
        return bucket.flat


def perform(
    model: DistributedDataParallel,
    train: Callable[[], object],
    scheme: str | Scheme,
    *,
    exchange: Exchange,
    steps: int,
    restore: Callable[[], object] = lambda: None,
) -> list[float]:
    """The seconds of `steps` real steps of `train()`, over a real exchange."""
    seconds, device = [], next(model.parameters()).device
    with attach(model, scheme, exchange=exchange):
        for _ in range(WARM_STEPS + steps):
            restore()
            settle(device)
            began = time.perf_counter()
            train()
            settle(device)
            seconds.append(time.perf_counter() - began)
    return seconds[WARM_STEPS:]


class Rehearsal(AllReduce):
    """An AllReduce whose workers are all copies of worker 0, whoever rehearses."""

    def __init__(self, workers: int, meet: Callable[[], object]):
        super().__init__(transport=Rehearsed())
        self.workers = workers
        self._meet = meet
        self.worker = 0  # some schemes treat even and odd workers differently: THC's sums have room for n even ones

    def open(self, group: dist.ProcessGroup | None, scheme: Scheme, device: torch.device = CPU) -> None:
        arithmetic.check_route(self.route, scheme)
        self.device = CPU if group is None else workplace(group, scheme, device)
        self.group: dist.ProcessGroup = _PretendedGroup(self.workers)  # type: ignore[assignment]
        self.lane: Lane | None = RehearsalLane(self.transport, self._meet, device)

    def direct(self, scheme: Scheme) -> None:
        """All conversations go over the lane, the shortest too."""

    def agree(self, given: Mapping[str, str] | None) -> None:
        """Copies agree."""

    def close(self) -> None:
        self.lane = None


class RehearsalOfLevels(Hierarchical):
    """A Hierarchical whose workers are all copies of worker 0."""

    def __init__(self, workers: int, local: int, meet: Callable[[], object]):
        inner, outer = _PretendedGroup(local, INSIDE), _PretendedGroup(workers // local, BETWEEN)
        super().__init__(inner=inner, outer=outer, transport=Rehearsed())  # type: ignore[arg-type]
        self._meet = meet

    def open(self, group: dist.ProcessGroup | None, scheme: Scheme, device: torch.device = CPU) -> None:
        self._there.group, self._back.group, self._outer.group = *[self._given[0]] * 2, self._given[1]
        self._outer.workers, self._outer.worker = self._given[1].size(), 0
        self._everyone.device = CPU if group is None else workplace(group, scheme, device)
        self._shared = _OwnMemory(self._given[0].size()) if self.device.type == "cpu" else None
        self.lane: Lane | None = RehearsalLane(self.transport, self._meet, device)

    def agree(self, given: Mapping[str, str] | None) -> None:
        """Copies agree."""

    def close(self) -> None:
        self.lane = None


class _OwnMemory(Shared):
    """In everybody's memory is what this worker wrote."""

    def __init__(self, workers: int):
        super().__init__(0, [], [], 0.0)
        self.workers = workers
        self._regions: dict[int, torch.Tensor] = {}

    def memory(self, worker: int, region: int, nbytes: int) -> torch.Tensor:
        kept = self._regions.get(region)
        if kept is None or kept.numel() < nbytes:
            kept = self._regions[region] = torch.zeros(nbytes, dtype=torch.uint8)
        return kept[:nbytes]


@dataclass(frozen=True)
class _PretendedGroup:
    workers: int
    level: str = ""

    def size(self) -> int:
        return self.workers

    def rank(self) -> int:
        return 0


class Rehearsed(Transport):
    """Answers every collective where it is started, as if all workers had given what this one gave."""

    def launch(self, collective: Collective) -> Started:
        if isinstance(collective, AllReduced):
            if collective.op == dist.ReduceOp.SUM:
                collective.tensor.mul_(collective.group.size())
        elif isinstance(collective, AllGathered):
            collective.out.view(collective.group.size(), -1).copy_(collective.tensor.view(1, -1))
        elif isinstance(collective, AllToAll):
            start = sum(collective.sizes[: collective.worker])
            mine = collective.tensor[start : start + collective.sizes[collective.worker]]
            if mine.numel():
                collective.out.view(collective.group.size(), -1).copy_(mine.view(1, -1))
            else:  # nobody sends anything to himself there
                collective.out.zero_()
        elif not isinstance(collective, Told):
            raise AssertionError(f"a rehearsal has no answer for {type(collective).__name__}")
        return _Answered()


class _Answered:
    def wait(self) -> None:
        """It is there already."""


class RehearsalLane(Lane):
    """Holds a conversation from start to end where it is submitted, and keeps the time.

    `clock` stands still meanwhile: it shows the training thread's own seconds. No clock is read before a device has
    done all that it was given: so nothing overlaps there, and a job's seconds are those of its kernels.
    """

    def __init__(self, transport: Transport, meet: Callable[[], object], device: torch.device = CPU):
        super().__init__(transport)
        self._scratches = [Scratch() for _ in range(DEPTH)]  # in turn, as on a threaded lane
        self.buckets: list[BucketTrace] = []
        self.timer = time.perf_counter  # of what a job computes
        self.watch: Callable[[], AbstractContextManager[None]] | None = None  # entered while a job computes
        self._meet = meet
        self._device = device
        self._away = 0.0

    def clock(self) -> float:
        settle(self._device)
        return time.perf_counter() - self._away

    def submit(self, begin: Callable[[Scratch], Rounds], *, last: bool, done: Done, here: bool = False) -> Job:
        ready, began = self.clock(), time.perf_counter()
        job = Job(begin, last, done)
        rounds, turns, result = begin(self._memory_for(job)), [], None
        while result is None:
            before = self.timer()
            try:
                with self.watch() if self.watch else _UNWATCHED:
                    wanted = next(rounds)
            except StopIteration as stop:
                wanted, result = (), stop.value
            settle(self._device)
            computed = self.timer() - before
            messages = (Message(kind_of(collective), collective.amounts()["bytes_sent"]) for collective in wanted)
            turns.append(Turn(computed, tuple(messages)))
            for collective in wanted:
                self.transport.start(collective)
            settle(self._device)
            if wanted:
                self._meet()
        self.buckets.append(BucketTrace(ready, tuple(turns)))
        job.end(result, None)
        self._away += time.perf_counter() - began
        return job

    def close(self) -> None:
        """There is no thread to end."""
