"""The cost model: how long a training step takes, from what was measured of its parts.

A step is played through on a virtual clock, by the lane's own code where it takes the lane (`playing`):

1. The worker computes. The time at which each bucket of gradients is ready was measured (`BucketTrace.ready`).
2. The lane takes the buckets in order and computes (encodes, decodes, copies): measured seconds, turn by turn.
3. After a turn its messages go onto the wire, which carries one after the other: bytes_sent x seconds_per_byte each,
   and the message is there latency_seconds after it has left. Bytes never overlap, latencies do: a gloo group works on
   CHANNELS messages at a time, the others wait.
4. After the last bucket is back, the rest of the step (copying gradients back, the optimizer) follows.

Processors: measured seconds are those with all workers of a machine at work. A worker has `cores / workers` of them.
The training thread, the lane and the moving of messages (processor seconds of each: measured) share that: where there
is plenty they overlap, and where there is none each slows the others; only true waiting for the wire can be hidden.

Waiting for each other: workers rehearse in step, and of each turn the slowest one's seconds count (`survey.slowest`).
What a step in which workers only meet takes beyond that is measured, and added to all schemes alike (`Survey.predict`).

What bounds a step: training's own seconds (compute), or what it waits for the lane, divided into encode and wire as the
lane's own time divides.

The model does not know: links that differ from each other, and other traffic.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from thinwire.exchange.collectives import AllReduced, Collective

FLOATS = "AllReduced float32"
INSIDE, BETWEEN = "inside", "between"  # the two levels of machines with several workers


def kind_of(collective: Collective) -> str:
    """What a collective costs depends on what it does and, where gloo adds, on what it adds: float16 is slow.

    And where there are two levels, on its level.
    """
    name = type(collective).__name__
    if isinstance(collective, AllReduced):
        name = f"{name} {str(collective.tensor.dtype).removeprefix('torch.')}"
    level = getattr(getattr(collective, "group", None), "level", "")  # only a rehearsal's groups have one
    return f"{level} {name}" if level else name


def level_of(kind: str) -> str:
    """The level that a kind of collective is of, which has a wire of its own; empty, where there is but one."""
    first = kind.partition(" ")[0]
    return first if first in (INSIDE, BETWEEN) else ""


@dataclass(frozen=True)
class Message:
    """One collective, as one worker sees it."""

    kind: str  # the class name in exchange.collectives, and the dtype where numbers are added: see `kind_of`
    bytes_sent: float


@dataclass(frozen=True)
class Turn:
    """The lane computes, then asks for something (at the end of a conversation for nothing)."""

    encode_seconds: float
    messages: tuple[Message, ...] = ()


@dataclass(frozen=True)
class BucketTrace:
    """One bucket's conversation. `ready`: when the training thread hands it over, in its own seconds."""

    ready: float
    turns: tuple[Turn, ...]

    def since(self, began: float) -> BucketTrace:
        return replace(self, ready=self.ready - began)


@dataclass(frozen=True)
class Step:
    """One step of training: its own seconds, lane not counted, and what the lane has to do."""

    compute_seconds: float
    buckets: tuple[BucketTrace, ...]
    plain: bool = False  # takes the direct way, not the lane

    def as_lists(self) -> list[Any]:
        """What workers can tell each other of it."""
        traces = [
            [b.ready, [[t.encode_seconds, [[m.kind, m.bytes_sent] for m in t.messages]] for t in b.turns]]
            for b in self.buckets
        ]
        return [self.compute_seconds, traces, self.plain]

    @classmethod
    def of_lists(cls, lists: list[Any]) -> Step:
        compute_seconds, traces, plain = lists
        buckets = (
            BucketTrace(ready, tuple(Turn(encode, tuple(Message(*each) for each in said)) for encode, said in turns))
            for ready, turns in traces
        )
        return cls(compute_seconds, tuple(buckets), plain)

    def computing(self, seconds: float) -> Step:
        """The same step with another computation of its own; buckets are ready at the same share of it."""
        scale = seconds / self.compute_seconds
        buckets = tuple(replace(bucket, ready=bucket.ready * scale) for bucket in self.buckets)
        return replace(self, compute_seconds=seconds, buckets=buckets)

    @property
    def exchange(self) -> Step:
        """What the lane has to do, by itself: nothing is computed meanwhile."""
        return Step(0.0, tuple(replace(bucket, ready=0.0) for bucket in self.buckets))

    @property
    def messages(self) -> list[Message]:
        return [message for bucket in self.buckets for turn in bucket.turns for message in turn.messages]

    @property
    def bytes_sent(self) -> float:
        return sum(message.bytes_sent for message in self.messages)

    @property
    def encode_seconds(self) -> float:
        return sum(turn.encode_seconds for bucket in self.buckets for turn in bucket.turns)


@dataclass(frozen=True)
class LinkCost:
    """What it takes to carry one kind of collective."""

    latency_seconds: float
    seconds_per_byte: float  # of bytes that leave a worker
    processor_seconds_per_byte: float = 0.0  # of this worker's processors, while they are carried
    processor_seconds: float = 0.0  # the same for a message without bytes, while it is under way


@dataclass(frozen=True)
class Link:
    """What connects a group of workers, as measured by `links.measure`, or on paper."""

    workers: int
    kinds: dict[str, LinkCost]
    local: int = 1  # workers that share a machine's link

    def cost(self, kind: str) -> LinkCost:
        """Of a kind that was not measured: as floats are added."""
        return self.kinds.get(kind) or self.kinds[f"{level_of(kind)} {FLOATS}".strip()]

    @property
    def bits_per_second(self) -> float:
        """Of a machine's link, by what leaves a worker whose group is flat."""
        return 8 / min(cost.seconds_per_byte for kind, cost in self.kinds.items() if not level_of(kind))

    def at(self, bits_per_second: float, host: Host) -> Link:
        """The same link with another bandwidth; no faster than processors can move bytes."""

        def limited(kind: str, cost: LinkCost) -> LinkCost:
            seconds = 8 * self._share(kind) / bits_per_second
            return replace(cost, seconds_per_byte=max(seconds, cost.processor_seconds_per_byte / host.share))

        return replace(self, kinds={kind: limited(kind, cost) for kind, cost in self.kinds.items()})

    def _share(self, kind: str) -> float:
        """Bytes on a machine's link for each that leaves a worker."""
        if level_of(kind) == INSIDE:
            return 0.0
        if level_of(kind) == BETWEEN:
            return self.local
        if kind == "AllToAll":
            return self.local * (self.workers - self.local) / max(1, self.workers - 1)
        return 1.0  # of a ring, one worker's bytes leave the machine


@dataclass(frozen=True)
class Host:
    """The processors of one machine and who shares them."""

    cores: int
    workers: int = 1  # on this machine
    threads: int = 1  # of each worker, when it computes

    @property
    def share(self) -> float:
        """Cores that one worker can have."""
        return self.cores / self.workers

    def rate(self, busy: int, moving: float) -> float:
        """How fast each of a worker's `busy` threads gets on, against one alone; `moving`: cores that move bytes."""
        alone = min(self.threads, self.share)
        left = max(self.share - moving, 0.05 * self.share)  # a system that only moves bytes does not exist
        return min(self.threads, left / max(busy, 1)) / alone


@dataclass(frozen=True)
class Prediction:
    """Seconds of one step, by what they go into; bytes and messages of one worker."""

    compute_seconds: float
    encode_seconds: float
    wire_seconds: float
    bytes_sent: float
    messages: float

    @property
    def seconds(self) -> float:
        return self.compute_seconds + self.encode_seconds + self.wire_seconds

    def times(self, share: float) -> Prediction:
        return Prediction(*(share * getattr(self, name) for name in self.__dataclass_fields__))

    def waiting(self, seconds: float) -> Prediction:
        """The same, and so many seconds more of waiting for others."""
        return replace(self, wire_seconds=self.wire_seconds + seconds)

    @property
    def bound(self) -> str:
        """What most of the step goes into."""
        phases = {"compute": self.compute_seconds, "encode": self.encode_seconds, "wire": self.wire_seconds}
        return max(phases, key=lambda phase: phases[phase])
