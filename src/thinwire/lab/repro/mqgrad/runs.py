"""The runs of `thinwire repro mqgrad`: model, examples, the ladder of widths and the evaluation; and a real parameter
server, a process per rank, thin links, the wall clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from thinwire.control import Controller, Observation
from thinwire.core.bucket import Bucket
from thinwire.core.layout import Layout
from thinwire.core.scheme import Codec, Knob
from thinwire.exchange.server.client import ParameterServer
from thinwire.front import attach
from thinwire.lab.network import links
from thinwire.lab.network.network import parse_network
from thinwire.lab.runs import launch
from thinwire.lab.runs.launch import Place
from thinwire.lab.tasks import datasets, models
from thinwire.schemes import register
from thinwire.schemes.cast import FP16
from thinwire.schemes.qsgd import QSGD
from thinwire.server import join

WORKERS, BATCH = 2, 32
MOMENTUM = 0.9
MENU = (2, 4, 8, 16)
EVALUATE_EVERY = 5  # steps
SMOOTHED_OVER = 4  # evaluated losses: a lucky one is not a target reached
SERVER_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class Ladder(Codec):
    """QSGD at 2, 4 and 8 bits, half precision at 16: one knob over the whole range."""

    unbiased: ClassVar[bool] = True
    grain: ClassVar[int | None] = 128
    summary: ClassVar[str] = "qsgd and fp16 on one knob"

    @property
    def knob(self) -> Knob:
        return Knob("bits", MENU, 4)

    def nbytes(self, layout: Layout, level: float) -> int:
        return _rung(level).nbytes(layout, level)

    def encode(self, bucket: Bucket, level: float, out: Tensor) -> None:
        _rung(level).encode(bucket, level, out)

    def decode_add(self, data: Tensor, layout: Layout, level: float, out: Tensor, weight: float) -> None:
        _rung(level).decode_add(data, layout, level, out, weight)


def _rung(level: float) -> Codec:
    return FP16() if level == 16 else QSGD(bits=int(level), block=128)


@dataclass(frozen=True)
class ServedRun:
    """What became of a run."""

    curve: tuple[tuple[float, float], ...]  # at every evaluated step: seconds of training so far, smoothed loss
    levels: tuple[float, ...]  # one per step
    accuracy: float  # at the end, on the test images
    controller_seconds: float  # what the controller itself took

    def seconds_to(self, target: float) -> float:
        """Infinite where the loss never came down to the target."""
        return next((seconds for seconds, loss in self.curve if loss <= target), math.inf)

    @property
    def seconds(self) -> float:
        return self.curve[-1][0]


@dataclass
class Halvings(Controller):
    """A rule without learning: one level more for every halving, since the first decision, of a number seen."""

    seen: str = "rms"  # of the mean gradient's elements; or "ratio", of its mean to its spread over the workers
    interval: int = 10

    needs_noise: ClassVar[bool] = True
    summary: ClassVar[str] = "a level per halving of what is seen"

    def start(self, menu: Sequence[float]) -> None:
        super().start(menu)
        self._first = math.nan

    def first(self, default: float, menu: Sequence[float]) -> float:
        return menu[0]

    def decide(self, seen: Observation) -> float:
        number = seen.gradient_norm
        if self.seen == "ratio":  # |mean| over the deviation of one worker's gradient from it
            spread = max(seen.given_square - seen.mean_square, 1e-12)
            number = math.sqrt(seen.mean_square / spread)
        if not math.isfinite(number) or number <= 0:
            return seen.level
        self._first = number if math.isnan(self._first) else self._first
        return self.levels[min(max(0, int(math.log2(self._first / number))), len(self.levels) - 1)]

    def state_dict(self) -> dict[str, Any]:
        return {"first": self._first}


@dataclass(frozen=True)
class Problem:
    """A model, and the rate it learns at."""

    make: Callable[[], nn.Module]
    rate: float

    def network(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return self.make()

    def optimizer(self, net: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(net.parameters(), lr=self.rate, momentum=MOMENTUM)


def perceptron() -> nn.Module:
    """784-128-10, without biases: 101,632 weights, little to compute and much to send."""
    return nn.Sequential(nn.Linear(784, 128, bias=False), nn.ReLU(), nn.Linear(128, 10, bias=False))


def convolutional() -> nn.Module:
    """Two convolutions and two linear layers, 106,000 weights: messages as long as the perceptron's."""
    return nn.Sequential(nn.Unflatten(1, (1, 28, 28)), models.small_cnn(1, 28))


# The perceptron's rate was chosen with its link and the learner's numbers. The other's is the best of .02, .05, .1 and
# .2 by the loss after 400 uncompressed steps, seeds 1000 and 1001: no learner was looked at.
PROBLEMS = {"mlp": Problem(perceptron, 0.1), "cnn": Problem(convolutional, 0.1)}


def batches(seed: int, worker: int, data: str | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """A worker's examples, without end: everybody shuffles alike and takes its own part of each batch of the group."""
    images, labels, _, _ = examples(data)
    generator = torch.Generator().manual_seed(seed)
    while True:
        order = torch.randperm(len(images), generator=generator)
        for group in order.split(WORKERS * BATCH):
            if len(group) == WORKERS * BATCH:
                rows = group[worker * BATCH : (worker + 1) * BATCH]
                yield images[rows], labels[rows]


@torch.no_grad()
def evaluate(order: Order, snapshots: Sequence[Tensor]) -> tuple[list[float], float]:
    """For every snapshot of the weights the loss on the first 1,000 training images, smoothed; the last one's accuracy
    on the test images."""
    images, labels, tests, answers = examples(order.data)
    net, losses = PROBLEMS[order.problem].network(order.seed), []
    for snapshot in snapshots:
        nn.utils.vector_to_parameters(snapshot, net.parameters())
        losses.append(functional.cross_entropy(net(images[:1000]), labels[:1000]).item())
    smoothed = [fmean(losses[max(0, at - SMOOTHED_OVER) : at]) for at in range(1, len(losses) + 1)]
    return smoothed, float((net(tests).argmax(1) == answers).float().mean())


@cache
def examples(data: str | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images and labels, test images and labels, flat and centred: the embedded ones; tested, where there are
    the files in `data`, on all 10,000 of Fashion-MNIST."""
    dataset = datasets.embedded_images()
    test = dataset.test if data is None else datasets.fashion_mnist(Path(data)).test

    def flat(images: Tensor) -> Tensor:
        return images.float().flatten(1) / 255 - 0.29

    return (
        flat(dataset.train.inputs), dataset.train.targets.long(),
        flat(test.inputs), test.targets.long(),
    )  # fmt: skip


# -- on a real server --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Order:
    """The run to make, the same for every rank."""

    controller: str  # its spec
    seed: int
    steps: int  # at most
    network: str
    learnt: str | None = None  # where to write what the controller has learnt
    seconds: float = math.inf  # of training, at most
    data: str | None = None  # the folder of Fashion-MNIST, on whose test images runs are then evaluated
    problem: str = "mlp"
    scheme: str = "ladder"


def run_served(order: Order, namespaces: Sequence[str] | None) -> ServedRun:
    """One run under one controller. `namespaces`: of the server and the workers, where links are shaped."""
    _, trained, *_ = launch.on_ranks(_rank, 1 + WORKERS, order, namespaces=namespaces)
    return trained


def _rank(place: Place, order: Order) -> Any:
    register(Ladder)  # on every rank, the server's too; nowhere else it is a scheme among the others
    with place.joined():
        # Rank 0 serves: it sends by no transport.
        transport = links.transport(parse_network(order.network), max(0, place.rank - 1), WORKERS, servers=1)
        role = join(servers=1, on_failure="stop", timeout_seconds=SERVER_TIMEOUT_SECONDS, transport=transport)
        if role.serves:
            return role.serve()
        assert role.exchange is not None
        return _train(order, role.exchange, role.workers)


def _train(order: Order, exchange: ParameterServer, group: dist.ProcessGroup | None) -> ServedRun | None:
    """What became of the run, on the first worker. Weights are evaluated after the run, off its clock."""
    problem = PROBLEMS[order.problem]
    model = DistributedDataParallel(problem.network(order.seed), process_group=group)
    inner = problem.optimizer(model)
    examples_of = batches(order.seed, exchange.worker, order.data)
    levels: list[float] = []
    seconds: list[float] = []
    snapshots: list[torch.Tensor] = []
    rule = order.controller.removeprefix("halvings of ")
    controller = order.controller if rule == order.controller else Halvings(rule)
    with attach(model, order.scheme, exchange=exchange, controller=controller, exempt=(), seed=order.seed) as wire:
        dist.barrier(group)
        began = time.perf_counter()
        spent = torch.zeros(1, dtype=torch.float64)
        for step in range(1, order.steps + 1):
            images, labels = next(examples_of)
            inner.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            levels.append(wire.level)
            loss.backward()
            inner.step()
            wire.observe(loss)
            if step % EVALUATE_EVERY == 0:
                seconds.append(time.perf_counter() - began)
                snapshots.append(nn.utils.parameters_to_vector(model.parameters()).detach())
                dist.all_reduce(spent.fill_(seconds[-1]), dist.ReduceOp.MAX, group=group)
                if float(spent) >= order.seconds:
                    break  # on all workers at the same step
        controller_seconds = wire.stats().get("controller_seconds", 0.0)
        if order.learnt is not None:
            wire.save_controller(order.learnt)
    if exchange.worker != 0:
        return None
    losses, accuracy = evaluate(order, snapshots)
    return ServedRun(tuple(zip(seconds, losses, strict=True)), tuple(levels), accuracy, controller_seconds)
