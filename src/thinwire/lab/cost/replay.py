"""Plays a step of training through on a virtual clock: the mechanism of the cost model that `model` describes."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from statistics import median

from thinwire.exchange import hierarchical
from thinwire.exchange.collectives import Collective, Started
from thinwire.exchange.lane import Rounds, Threaded
from thinwire.exchange.transport import Transport
from thinwire.lab.cost.model import BucketTrace, Host, Link, LinkCost, Prediction, Step, level_of

CHANNELS = 2  # collectives that a gloo process group works on at a time: its threads


def predict(steps: Sequence[Step], link: Link, host: Host) -> Prediction:
    """The typical step: each of `steps` played through, and the median of every figure."""
    played = [play(step, link, host) for step in steps]
    return Prediction(*(median(getattr(each, name) for each in played) for name in Prediction.__dataclass_fields__))


def predict_rounds(steps: Sequence[Step], link: Link, host: Host, *, every: int, delay: int = 0) -> Prediction:
    """The typical of `every` steps that share one exchange, under way while `delay` more are made (local steps).

    T = every x step + max(0, exchange - delay x step), of which a step has 1 / every. Of the weights' own arithmetic
    at an exchange, a few passes over them, nothing is in it.
    """
    alone = predict([replace(step, buckets=()) for step in steps], link, host)
    exchange = predict([step.exchange for step in steps], link, host)
    exposed = max(0.0, 1 - delay * alone.seconds / exchange.seconds) if exchange.seconds else 0.0
    round_ = replace(exchange.times(exposed), bytes_sent=exchange.bytes_sent, messages=exchange.messages)
    return replace(round_.times(1 / every), compute_seconds=alone.seconds)


def play(step: Step, link: Link, host: Host) -> Prediction:
    """One step on the virtual clock."""
    clock = _Clock(max((bucket.ready for bucket in step.buckets), default=0.0), host, inline=step.plain)
    (_go_direct if step.plain else _take_lane)(step, clock, link)
    lane_ended = clock.now
    clock.until_computed(clock.backward_seconds)
    exposed = clock.stalled_seconds + max(0.0, lane_ended - clock.backward_ended)
    encoded = clock.encoding_seconds / ((clock.encoding_seconds + clock.waiting_seconds) or 1.0)
    return Prediction(
        clock.now - exposed + step.compute_seconds - clock.backward_seconds,
        exposed * encoded,
        exposed * (1 - encoded),
        step.bytes_sent,
        len(step.messages),
    )


def _take_lane(step: Step, clock: _Clock, link: Link) -> None:
    """Driven by a real lane, so that its order is the real one."""
    lane = Threaded(Replayed(clock), "thinwire-replay")
    if link.local > 1:
        lane.depth = hierarchical.DEPTH
    try:
        jobs = [
            lane.submit(
                lambda scratch, bucket=bucket: _rounds(bucket, clock, link),
                last=bucket is step.buckets[-1],
                done=lambda error: None,
            )
            for bucket in step.buckets
        ]
        for job in jobs:
            job.wait()
            if job.error is not None:
                raise job.error
    finally:
        lane.close()


def _go_direct(step: Step, clock: _Clock, link: Link) -> None:
    """Training starts every bucket's sum itself, as soon as it can, and at the last bucket waits for all."""
    transport = Replayed(clock)
    buckets = [_rounds(bucket, clock, link) for bucket in step.buckets]
    arrivals = [[transport.start(sending) for sending in next(bucket, ())] for bucket in buckets]
    for bucket, expected in zip(buckets, arrivals, strict=True):
        for arrival in expected:
            arrival.wait()
        next(bucket, None)


def _rounds(bucket: BucketTrace, clock: _Clock, link: Link) -> Rounds:
    clock.until_computed(bucket.ready)
    for turn in bucket.turns:
        clock.encode(turn.encode_seconds)
        if turn.messages:
            yield [_Sending(each.bytes_sent, link.cost(each.kind), level_of(each.kind)) for each in turn.messages]


@dataclass(frozen=True)
class _Sending:
    """A message on the virtual wire, with a collective's interface."""

    nbytes: float
    cost: LinkCost
    level: str

    def amounts(self) -> dict[str, float]:
        return {"bytes_sent": self.nbytes}

    def start(self) -> Started:
        raise AssertionError("only a virtual clock can carry this")


class Replayed(Transport):
    """Puts messages on a virtual wire."""

    def __init__(self, clock: _Clock):
        super().__init__()
        self._clock = clock

    def launch(self, collective: Collective) -> Started:
        assert isinstance(collective, _Sending)
        return _Arrival(self._clock, self._clock.carry(collective.nbytes, collective.cost, collective.level))


@dataclass(frozen=True)
class _Arrival:
    clock: _Clock
    at: float

    def wait(self) -> None:
        self.clock.wait(self.at)


class _Clock:
    """Virtual time: the lane's computing and waiting make it pass, and training and wire get on meanwhile.

    inline: there is no lane; training computes and waits itself, and does not get on meanwhile.
    """

    def __init__(self, backward_seconds: float, host: Host, inline: bool):
        self.now = 0.0
        self.computed = 0.0  # seconds of its own that the training thread has done
        self.backward_seconds = backward_seconds  # as many of them can overlap with the lane
        self.backward_ended = 0.0 if backward_seconds == 0 else math.inf
        self.encoding_seconds = 0.0  # the lane's, like the next
        self.waiting_seconds = 0.0
        self.stalled_seconds = 0.0  # that training computed for the lane, in the middle of backward
        self._inline = inline
        self._host = host
        # By level, when each channel of its groups is free, and its wire.
        self._channels: dict[str, list[float]] = defaultdict(lambda: [0.0] * CHANNELS)
        self._wire_free: dict[str, float] = defaultdict(float)
        self._moved: list[tuple[float, float, float]] = []  # (from, to, cores) that move messages

    def until_computed(self, seconds: float) -> None:
        self._pass(until_computed=seconds)

    def encode(self, seconds: float) -> None:
        before, stalls = self.now, self._inline and self.computed < self.backward_seconds
        self._pass(encoding=seconds)
        self.encoding_seconds += self.now - before
        if stalls:
            self.stalled_seconds += self.now - before

    def wait(self, until: float) -> None:
        self.waiting_seconds += max(0.0, until - self.now)
        self._pass(until=until)

    def carry(self, nbytes: float, cost: LinkCost, level: str) -> float:
        """Put bytes on a level's wire; when they arrive."""
        channels = self._channels[level]
        channels.sort()
        begin = max(self.now, channels[0], self._wire_free[level])
        self._wire_free[level] = end = begin + nbytes * cost.seconds_per_byte
        channels[0] = arrival = end + cost.latency_seconds
        self._occupy(begin, end, nbytes * cost.processor_seconds_per_byte)
        self._occupy(end, arrival, cost.processor_seconds)
        return arrival

    def _occupy(self, begin: float, end: float, processor_seconds: float) -> None:
        if end > begin:
            self._moved.append((begin, end, processor_seconds / (end - begin)))

    def _pass(self, *, until: float = math.inf, until_computed: float = math.inf, encoding: float = math.inf) -> None:
        """Let time pass until the first of the three is reached, in pieces in which all rates are constant."""
        left = encoding
        while left > 0 and self.now < until and self.computed < until_computed:
            training = self.computed < self.backward_seconds and not (self._inline and encoding < math.inf)
            rate = self._host.rate(training + (encoding < math.inf), self._moving())
            piece = min(left / rate, until - self.now, *self._edges())
            if training:
                goal = min(until_computed, self.backward_seconds)
                piece = min(piece, (goal - self.computed) / rate)
                self.computed += piece * rate
                if self.computed >= goal * (1 - 1e-12):
                    self.computed = goal
                if self.computed == self.backward_seconds:
                    self.backward_ended = self.now + piece
            assert piece < math.inf, "nothing would ever happen"
            left -= piece * rate
            if left < 1e-12:
                left = 0.0
            self.now += piece

    def _moving(self) -> float:
        return sum(cores for begin, end, cores in self._moved if begin <= self.now < end)

    def _edges(self) -> Iterator[float]:
        """Seconds until the wire's next message begins or ends."""
        for begin, end, _ in self._moved:
            yield from (edge - self.now for edge in (begin, end) if edge > self.now)


def break_even(ours: Callable[[float], float], theirs: Callable[[float], float]) -> float | None:
    """The bandwidth, in bits per second, below which `ours` is faster than `theirs` (seconds of a bandwidth).

    None: not even on the thinnest link, whoever is faster on thick ones; infinity: on every link.
    """
    grid = [10 ** (exponent / 2) for exponent in range(10, 25)]  # 100 kbit .. 1 Tbit
    faster = list(takewhile(lambda bandwidth: ours(bandwidth) < theirs(bandwidth), grid))
    if not faster:
        return None
    low = faster[-1]
    if low == grid[-1]:
        return math.inf
    high = grid[grid.index(low) + 1]
    for _ in range(10):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if ours(middle) < theirs(middle) else (low, middle)
    return low
