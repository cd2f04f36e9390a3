"""`thinwire simulate`: what schemes would cost with more workers than there are, on paper.

Seconds and bytes: every scheme is rehearsed as one of n workers (see `rehearsal`: one worker's part of the real
exchange's code, on this machine, one thread), and the step is replayed (see `model`) over a link on paper: every worker
on a machine of its own, all links alike. Messages travel as gloo's do: an all-reduce is a ring, 2 (n - 1)
hops one after the other; an all-gather is a ring of n - 1; in an all-to-all all sends are under way at once. Workers
are equally fast: what waiting for the slowest of thousands costs is not in it.

Where a rehearsal would take too long (a scheme that decodes n payloads), seconds go on from the last two rehearsed
numbers of workers in a straight line, and the point says so; bytes are what the exchange sends among so many workers
(`accounting`).

Errors: vNMSE of real gradients (the embedded images, a small perceptron, other images for every worker), by
`Simulation`, error feedback off, in the third step on the same gradients; up to as many workers as are affordable, not
measured beyond.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from thinwire.exchange.simulation import Simulation
from thinwire.lab.cost.accounting import Accounting
from thinwire.lab.cost.link import cores
from thinwire.lab.cost.model import FLOATS, Host, Link, LinkCost, Message, Prediction, Step
from thinwire.lab.cost.rehearsal import rehearse
from thinwire.lab.cost.replay import predict, predict_rounds
from thinwire.lab.cost.survey import Matrices
from thinwire.lab.defaults import SIMULATED_WORKERS
from thinwire.lab.runs import launch
from thinwire.lab.runs.launch import Place
from thinwire.lab.tasks import datasets, estimates, models
from thinwire.lab.tasks.estimates import Named

AFFORDABLE_SECONDS = 2.0  # of one rehearsed or simulated step; beyond, numbers are extrapolated or left out
AFFORDABLE_BYTES = 2**30  # of what one worker would receive in one rehearsed message
ERROR_STEPS = 3  # the last counts: low-rank bases are warm by then
ERROR_BATCH = 8


@dataclass(frozen=True)
class ScalePoint:
    """One scheme at one number of workers."""

    scheme: str
    workers: int
    prediction: Prediction
    extrapolated: bool  # seconds were not rehearsed at this number of workers
    vnmse: float | None  # None: not measured


@dataclass(frozen=True)
class Study:
    """All points, and what they rest on."""

    parameters: int
    compute_seconds: float
    bits_per_second: float
    latency_seconds: float  # of one hop
    points: list[ScalePoint]
    every: int = 1  # steps that share one exchange

    def of(self, scheme: str) -> list[ScalePoint]:
        return [point for point in self.points if point.scheme == scheme]

    @property
    def schemes(self) -> list[str]:
        return list(dict.fromkeys(point.scheme for point in self.points))

    @property
    def workers(self) -> list[int]:
        return sorted({point.workers for point in self.points})

    def as_json(self) -> dict[str, Any]:
        listed = [
            asdict(point) | {"seconds": point.prediction.seconds, "bound": point.prediction.bound}
            for point in self.points
        ]
        return {**vars(self), "points": listed}


def simulate(
    schemes: Sequence[str],
    *,
    parameters: int,
    workers: Sequence[int] = SIMULATED_WORKERS,
    compute_seconds: float = 0.0,
    bits_per_second: float = 1e10,
    latency_seconds: float = 2e-5,
    every: int = 1,
    on_scheme: Callable[[str], None] = lambda scheme: None,
) -> Study:
    """Every scheme at every number of workers. Raises ValueError for what cannot be.

    every: steps that share one exchange (local steps); seconds and bytes are then one step's share.
    """
    counts = sorted(set(workers))
    if not counts or counts[0] < 2:
        raise ValueError(f"workers must be at least 2, got {', '.join(map(str, workers)) or 'none'}")
    for name, value in (("compute", compute_seconds), ("latency", latency_seconds)):
        if value < 0:
            raise ValueError(f"the {name} must not be negative, got {value} s")
    if every < 1:
        raise ValueError(f"every must be at least 1 step, got {every}")
    play = predict if every == 1 else partial(predict_rounds, every=every)
    host = Host(cores())
    gradients = _gradients(counts)
    points = []
    for scheme in schemes:
        on_scheme(scheme)
        (rehearsed,) = launch.on_ranks(_in_a_group, 1, parameters, scheme, counts)
        errors = _errors(scheme, gradients, counts)
        for count in counts:
            steps, extrapolated = rehearsed[count]
            link = paper_link(count, bits_per_second, latency_seconds)
            steps = [step.computing(compute_seconds) for step in steps]
            points.append(ScalePoint(scheme, count, play(steps, link, host), extrapolated, errors.get(count)))
    return Study(parameters, compute_seconds, bits_per_second, latency_seconds, points, every)


def paper_link(workers: int, bits_per_second: float, latency_seconds: float) -> Link:
    """A link whose messages take gloo's way, `latency_seconds` a hop."""
    hops = {FLOATS: 2 * (workers - 1), "AllGathered": workers - 1, "AllToAll": 1}
    costs = {kind: LinkCost(count * latency_seconds, 8 / bits_per_second) for kind, count in hops.items()}
    return Link(workers, costs)


def _in_a_group(
    place: Place, parameters: int, scheme: str, counts: Sequence[int]
) -> dict[int, tuple[list[Step], bool]]:
    with place.joined():
        return _rehearsed(parameters, scheme, counts)


def _rehearsed(parameters: int, scheme: str, counts: Sequence[int]) -> dict[int, tuple[list[Step], bool]]:
    """{workers: (steps, extrapolated)}"""
    torch.manual_seed(0)
    model = DistributedDataParallel(Matrices(parameters))

    def train() -> None:
        model.zero_grad()
        model(torch.ones(())).backward()

    found: dict[int, tuple[list[Step], bool]] = {}
    for count in counts:
        done = [(n, steps) for n, (steps, extrapolated) in found.items() if not extrapolated]
        if len(done) >= 2 and _too_long(done[-1], count):
            sent = rehearse(
                model, train, scheme, workers=count, steps=len(done[-1][1]),
                exchange=Accounting(count, lambda: None),
            )  # fmt: skip
            steps = [extended(a, b, done[-2][0], done[-1][0], count) for a, b in _pairs(done)]
            found[count] = ([sending(*each) for each in zip(steps, sent, strict=True)], True)
        else:
            found[count] = (rehearse(model, train, scheme, workers=count, steps=1), False)
    return found


def _pairs(done: Sequence[tuple[int, list[Step]]]) -> zip[tuple[Step, Step]]:
    return zip(done[-2][1], done[-1][1], strict=True)


def _too_long(last: tuple[int, list[Step]], count: int) -> bool:
    """Whether a rehearsal with `count` workers might be, if all grows as their number does."""
    before, steps = last
    growth = count / before
    seconds = max(step.encode_seconds for step in steps) * growth
    received = max((m.bytes_sent for step in steps for m in step.messages if m.kind == "AllGathered"), default=0)
    return seconds > AFFORDABLE_SECONDS or received * growth > AFFORDABLE_BYTES


def extended(a: Step, b: Step, at_a: int, at_b: int, count: int) -> Step:
    """The step with `count` workers, on the straight line through those with `at_a` and `at_b` workers."""

    def line(x: float, y: float) -> float:
        return max(0.0, y + (y - x) * (count - at_b) / (at_b - at_a))

    buckets = []
    for one, other in zip(a.buckets, b.buckets, strict=True):
        turns = []
        for x, y in zip(one.turns, other.turns, strict=True):
            messages = tuple(
                Message(n.kind, line(m.bytes_sent, n.bytes_sent)) for m, n in zip(x.messages, y.messages, strict=True)
            )
            turns.append(replace(y, encode_seconds=line(x.encode_seconds, y.encode_seconds), messages=messages))
        buckets.append(replace(other, turns=tuple(turns)))
    return replace(b, buckets=tuple(buckets))


def sending(step: Step, other: Step) -> Step:
    """The step with the messages of another, whose buckets are the same."""
    buckets = []
    for one, says in zip(step.buckets, other.buckets, strict=True):
        encoding = [turn.encode_seconds for turn in one.turns]
        if len(encoding) != len(says.turns):  # it takes another route
            encoding = [sum(encoding)] + [0.0] * (len(says.turns) - 1)
        turns = (replace(turn, encode_seconds=each) for turn, each in zip(says.turns, encoding, strict=True))
        buckets.append(replace(one, turns=tuple(turns)))
    return replace(step, buckets=tuple(buckets))


def _gradients(counts: Sequence[int]) -> list[Named]:
    """One gradient for each of as many workers as the errors may be simulated with."""
    torch.manual_seed(0)
    model = models.mlp(32)
    train = datasets.embedded_images().train
    shapes = {name: p for name, p in model.named_parameters() if estimates.compressed(p)}
    most = AFFORDABLE_BYTES // 4 // (4 * sum(p.numel() for p in shapes.values()))
    found = []
    for _ in range(max((count for count in counts if count <= most), default=0)):
        batch = train[torch.randint(len(train), (ERROR_BATCH,))]
        model.zero_grad()
        functional.cross_entropy(model(batch.inputs), batch.targets).backward()
        found.append({name: p.grad.clone() for name, p in shapes.items() if p.grad is not None})
    return found


def _errors(scheme: str, gradients: Sequence[Named], counts: Sequence[int]) -> dict[int, float]:
    """{workers: vNMSE}, as far as is affordable."""
    found: dict[int, float] = {}
    seconds = 0.0
    for before, count in pairwise((counts[0], *counts)):
        # A two-shot encodes n parts for each of n workers.
        if count > len(gradients) or seconds * (count / before) ** 2 > AFFORDABLE_SECONDS * ERROR_STEPS:
            break
        began = time.perf_counter()
        found[count] = settled_vnmse(scheme, gradients[:count])
        seconds = time.perf_counter() - began
    return found


def settled_vnmse(scheme: str, gradients: Sequence[Named]) -> float:
    """|X - Xhat|^2 / |X|^2 of the workers' mean gradient X and what the scheme makes of it."""
    simulation = Simulation(scheme, workers=len(gradients), feedback=False)
    *_, estimate = (simulation.reduce(gradients) for _ in range(ERROR_STEPS))
    return estimates.vnmse(estimate, estimates.mean_of(gradients))
