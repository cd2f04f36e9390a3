"""The exchanges that laws run over, one row each: a new exchange is a new row."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import thinwire as tw
from helpers.gradients import gradient
from helpers.world import run_world
from thinwire.core import parts
from thinwire.exchange import collectives, shared
from thinwire.reducer import Reducer
from thinwire.schemes import parse

SHAPES = {"w": (37, 53), "b": (11,), "v": (8, 200), "exact": (40, 30)}
EXEMPT = ("exact",)
STEPS, SAVED = 4, 2


@dataclass(frozen=True)
class Row:
    """One way for workers to talk. Without `servers` they are all there is.

    With `local`, every worker is a machine of so many ranks, which divide what they say between machines.
    """

    name: str
    workers: int
    route: str = "auto"
    servers: int = 0
    goes_on: bool = False  # when a worker dies
    local: int = 0
    whole: int = 1 << 20  # tensors of more elements are cut
    memory: bool = True  # inside machines; else by sockets
    only: tuple[str, ...] = ()  # specs; none: all

    @property
    def ranks(self) -> int:
        return self.servers + self.workers * max(1, self.local)

    @property
    def senders(self) -> int:
        """The ranks that bring gradients."""
        return self.ranks - self.servers

    def takes(self, spec: str) -> bool:
        if self.only and spec not in self.only:
            return False
        return self.route != "two-shot" or bool(getattr(parse(spec), "grain", None))

    def run(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        """[function(row, *arguments) on every rank]"""
        return run_world(function, self.ranks, self, *arguments)

    def session(self, train: Callable[..., Any], *arguments: Any) -> Any:
        """On every rank: `train(exchange, group, *arguments)` of a worker, or a server's totals in the end."""
        if self.local:
            inner, outer = grid(self.local)
            options = {"route": self.route, "whole": self.whole, "memory": self.memory}
            exchange = tw.Hierarchical(inner=inner, outer=outer, **options)
            return train(exchange, dist.group.WORLD, *arguments)
        if not self.servers:
            return train(tw.AllReduce(route=self.route), dist.group.WORLD, *arguments)
        role = tw.join(servers=self.servers, down="fp32", timeout_seconds=30)
        return role.serve() if role.serves else train(role.exchange, role.workers, *arguments)


FEW = ("fp32", "powersgd", "qsgd", "thc", "topk")
ROWS = [
    Row("gather", workers=2, route="gather"),
    Row("two-shot", workers=4, route="two-shot"),
    Row("auto", workers=3),
    Row("server", workers=2, servers=1, goes_on=True),
    Row("2x2", workers=2, local=2, whole=1000),
    Row("2x1", workers=2, local=1, only=FEW),
    Row("2x2 by sockets", workers=2, local=2, whole=1000, memory=False, only=FEW),
    Row("1x2", workers=1, local=2, only=FEW),
    Row("3x2", workers=3, local=2, only=FEW),
]


@cache
def grid(local: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """Of this rank: the group of its machine, and the group of those with its place on every machine."""
    ranks = dist.get_world_size()
    levels = (
        [list(range(first, first + local)) for first in range(0, ranks, local)],
        [list(range(place, ranks, local)) for place in range(local)],
    )
    made = [[dist.new_group(each) for each in level] for level in levels]
    inner, outer = (next(group for group in level if isinstance(group, dist.ProcessGroup)) for level in made)
    return inner, outer


@dataclass
class Outcome:
    """What one worker got: the mean of every step, what it remembers and counted; from SAVED on, once more, resumed."""

    means: list[dict[str, Tensor]] = field(default_factory=list)
    memory: dict[tuple[str, str], Tensor] = field(default_factory=dict)
    totals: dict[str, float] = field(default_factory=dict)
    resumed: list[dict[str, Tensor]] = field(default_factory=list)
    given: int = 0  # bytes that torch.distributed was given
    state: dict[str, Any] = field(default_factory=dict)  # at SAVED


def inputs(step: int, worker: int) -> dict[str, Tensor]:
    return {
        name: gradient(*shape, seed=1000 * step + 10 * worker + number)
        for number, (name, shape) in enumerate(SHAPES.items())
    }


def exact_mean(step: int, workers: int) -> dict[str, Tensor]:
    given = [inputs(step, worker) for worker in range(workers)]
    return {name: sum(each[name].double() for each in given) / workers for name in SHAPES}


def exercise(row: Row, cases: list[tuple[str, str | bool]]) -> dict[tuple[str, str | bool], Any]:
    """On every rank, for every (spec, feedback): STEPS steps, then from the state at SAVED once more."""
    given = count_what_torch_is_given()
    found = {}
    for case in cases:
        outcome = row.session(_train, given, *case)
        if isinstance(outcome, Outcome):
            outcome.resumed = row.session(_resume, outcome.state, *case)
        else:
            row.session(_resume, {}, *case)  # a server has no say in it
        found[case] = outcome
    return found


def _reducer(exchange, group, spec, feedback) -> Reducer:
    tensors = {name: torch.empty(shape) for name, shape in SHAPES.items()}
    return Reducer(tensors, spec, group, exchange=exchange, feedback=feedback, exempt=EXEMPT)


def _train(exchange, group, given, spec, feedback) -> Outcome:
    outcome = Outcome()
    with _reducer(exchange, group, spec, feedback) as reducer:
        given.clear()  # workers agreed on something by then
        for step in range(STEPS):
            if step == SAVED:
                outcome.state = copy.deepcopy(reducer.state_dict())
            outcome.means.append(reducer.reduce(inputs(step, exchange.worker)))
        outcome.memory = {key: tensor.clone() for key, tensor in reducer.memory.items()}
        outcome.totals, outcome.given = reducer.stats(), sum(given)
    return outcome


def _resume(exchange, group, state, spec, feedback) -> list[dict[str, Tensor]]:
    with _reducer(exchange, group, spec, feedback) as reducer:
        reducer.load_state_dict(state)
        return [reducer.reduce(inputs(step, exchange.worker)) for step in range(SAVED, STEPS)]


@dataclass
class Virtual:
    """What virtual workers get, and what every rank is to remember; bytes that one rank would send."""

    means: list[dict[str, Tensor]]
    memories: list[dict[tuple[str, str], Tensor]]
    bytes_sent: float


def virtually(row: Row, spec: str, feedback: str | bool) -> Virtual:
    """The same on virtual workers; over two levels, on as many as there are machines, once for every place there."""
    if row.local:
        return _two_levels(row, spec, feedback)
    route = "gather" if row.servers else row.route
    simulation = tw.Simulation(spec, workers=row.workers, feedback=feedback, route=route, exempt=EXEMPT)
    steps = [[inputs(step, worker) for worker in range(row.workers)] for step in range(STEPS)]
    means = [simulation.reduce(named) for named in steps]
    return Virtual(means, [dict(memory.items()) for memory in simulation.memories], simulation.bytes_sent)


def _two_levels(row: Row, spec: str, feedback: str | bool) -> Virtual:
    """Every place's own pieces, as tensors of their own; the workers are given the means of their machines."""
    tensors = {name: torch.empty(shape) for name, shape in SHAPES.items()}
    found = Virtual([{name: torch.empty(SHAPES[name]) for name in SHAPES} for _ in range(STEPS)], [], 0.0)
    memories = {}
    for place in range(row.local):
        own = [piece for piece in parts.deal(tensors, row.local, row.whole, EXEMPT) if piece.owner == place]
        exempt = [piece.name for piece in own if piece.whole in EXEMPT]
        simulation = tw.Simulation(
            spec, workers=row.workers, feedback=feedback, route=row.route, exempt=lambda name, _, e=exempt: name in e
        )
        for step in range(STEPS):
            given = [_machine_mean(step, machine, row.local) for machine in range(row.workers)]
            named = [{piece.name: _rows(each[piece.whole], piece).clone() for piece in own} for each in given]
            mean = simulation.reduce(named) if own else {}
            for piece in own:
                _rows(found.means[step][piece.whole], piece).copy_(mean[piece.name])
        memories |= {(machine, place): dict(each.items()) for machine, each in enumerate(simulation.memories)}
        found.bytes_sent += simulation.bytes_sent / row.local
    found.memories = [memories[rank // row.local, rank % row.local] for rank in range(row.senders)]
    return found


def _machine_mean(step: int, machine: int, local: int) -> dict[str, Tensor]:
    given = [inputs(step, machine * local + place) for place in range(local)]
    return {name: sum(each[name] for each in given) / local for name in SHAPES}


def _rows(tensor: Tensor, piece: parts.Piece) -> Tensor:
    return tensor.view(-1)[piece.start : piece.start + piece.numel].view(piece.shape)


def count_what_torch_is_given() -> list[int]:
    """Counted where torch.distributed itself hands tensors to a group: {its method: which argument is given}.

    An all-to-all is messages to all others, which are counted one by one; what a worker has for itself is given to
    nobody, and is what the rest leaves of the whole. What goes through memory is counted where it is said to be there.
    """
    given: list[int] = []
    count_messages(given)
    count_written(given)
    for method, which in {"allreduce": 0, "all_gather_single": 1, "all_to_all_single": 1}.items():
        plain = getattr(dist.ProcessGroup, method)

        def counted(group, *args, plain=plain, which=which):
            tensor = args[which][0] if which == 0 else args[which]
            given.append(tensor.numel() * tensor.element_size())
            return plain(group, *args)

        setattr(dist.ProcessGroup, method, counted)
    return given


def count_messages(given: list[int]) -> None:
    send, exchange = dist.ProcessGroup.send, collectives._exchange
    sent: list[int] = []

    def sending(group, tensors, *to):
        sent.append(sum(each.nbytes for each in tensors))
        return send(group, tensors, *to)

    def exchanging(outgoing, incoming, worker, group):
        sent.clear()
        works = exchange(outgoing, incoming, worker, group)
        given.append(sum(sent) + outgoing[worker].nbytes)
        return works

    dist.ProcessGroup.send, collectives._exchange = sending, exchanging


def count_written(given: list[int]) -> None:
    """Bytes that the others of a machine read."""
    for name in ("swap", "share"):
        plain = getattr(shared.Through, name)

        def counting(way, bucket, message, *sizes, plain=plain):
            given.append(message.nbytes)
            return plain(way, bucket, message, *sizes)

        setattr(shared.Through, name, counting)
