"""A worker's side of an exchange: what surrounds forward and backward in a step of a run.

    side.begin(); loss = ... side.model(inputs) ...; loss.backward(); side.end(loss)

`judging` makes the model ready to be judged.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire import gossip, schemes
from thinwire.ddp import attach
from thinwire.exchange.allreduce import AllReduce
from thinwire.exchange.server.client import ParameterServer
from thinwire.exchange.transport import Transport
from thinwire.lab.network import links, network
from thinwire.lab.runs import topology
from thinwire.lab.runs.launch import PATIENCE_SECONDS
from thinwire.lab.runs.probe import Probe, Replicas
from thinwire.lab.runs.record import Plan
from thinwire.lab.tasks.tasks import Task
from thinwire.server import Role, ServerOptimizer


class Side(ABC):
    """`probe` is None where no common mean gradient is applied, so that there is nothing to measure vNMSE on.

    `in_step`: workers that were judged go on together, so that nobody's judging is somebody else's waiting.
    """

    model: nn.Module  # to train
    bare: nn.Module  # to judge
    probe: Probe | None = None
    in_step: ClassVar[bool] = True

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def end(self, loss: Tensor) -> None: ...

    def judging(self) -> AbstractContextManager[None]:
        return nullcontext()

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Totals: bytes_sent, bytes_dense, messages, sends, encode_seconds, wire_seconds, exposed_seconds, level."""

    @abstractmethod
    def close(self) -> None: ...


@dataclass(frozen=True)
class Desk:
    """What a worker has, whatever the exchange: its place in the run and a folder that all workers share."""

    plan: Plan
    task: Task
    worker: int
    folder: Path
    meet: Callable[[], object]  # waits for all workers, off the network

    @property
    def steps(self) -> int:
        return self.plan.steps or self.task.steps

    def transport(self, servers: int = 0) -> Transport:
        return links.transport(network.parse(self.plan.network), self.worker, self.plan.workers, servers)

    def falling(self, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """Call it after every step: the learning rate falls linearly to zero."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / self.steps)).step


def sit_down(desk: Desk, role: Role | None) -> Side:
    """The side of the plan's exchange. `role`: what `thinwire.join` gave a worker of servers."""
    exchange = topology.parse(desk.plan.exchange)
    torch.manual_seed(desk.plan.seed)
    if isinstance(exchange, topology.Gossip):
        return Gossiping(desk, exchange)
    if isinstance(exchange, topology.Server):
        assert role is not None and role.exchange is not None
        role.exchange.transport = desk.transport(exchange.servers)
        if exchange.staleness is not None:
            assert exchange.down is not None
            return Trading(desk, role, exchange.down)
        return Attached(desk, role.exchange, role.workers)
    return Attached(desk, AllReduce(transport=desk.transport()), None)


def serve(desk: Desk, role: Role) -> dict[str, float]:
    """A server's whole work; its totals."""
    exchange = topology.parse(desk.plan.exchange)
    assert isinstance(exchange, topology.Server)
    if exchange.staleness is None:
        return role.serve()

    def make(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = desk.task.optimizer(weights)
        fall = desk.falling(optimizer)
        optimizer.register_step_post_hook(lambda *_: fall())
        return optimizer

    return role.serve(optimizer=make, staleness=exchange.staleness)


class Attached(Side):
    """DistributedDataParallel with a wire: over all-reduce, or a parameter server with all workers in step."""

    def __init__(self, desk: Desk, exchange: AllReduce | ParameterServer, group: dist.ProcessGroup | None):
        plan = desk.plan
        self.bare = desk.task.model()
        self.model = model = DistributedDataParallel(self.bare, process_group=group)
        self.wire = attach(model, plan.scheme, exchange=exchange, controller=plan.controller, seed=plan.seed)
        self._optimizer = desk.task.optimizer(self.model.parameters())
        self._fall = desk.falling(self._optimizer)
        self.probe = Probe(self.bare, desk.folder / "gradients", desk.worker, plan.workers)

    def begin(self) -> None:
        self._optimizer.zero_grad()

    def end(self, loss: Tensor) -> None:
        self.wire.observe(loss)
        self._optimizer.step()
        self._fall()

    def stats(self) -> dict[str, float]:
        return self.wire.stats()

    def close(self) -> None:
        self.wire.close()


class Trading(Side):
    """An asynchronous server: a gradient up, weights down, and no waiting but what staleness asks for."""

    in_step = False  # workers that wait for each other would not be asynchronous, and could wait for ever

    def __init__(self, desk: Desk, role: Role, down: str):
        self.model = self.bare = desk.task.model()
        self._optimizer = ServerOptimizer(self.model, desk.plan.scheme, role=role, down=down, seed=desk.plan.seed)
        self._level = schemes.parse(desk.plan.scheme).level
        self._seconds = 0.0
        self._dense = sum(4 * p.numel() for p in self.model.parameters() if p.requires_grad)

    def begin(self) -> None:
        self._optimizer.zero_grad()

    def end(self, loss: Tensor) -> None:
        began = time.perf_counter()
        self._optimizer.step()
        self._seconds += time.perf_counter() - began

    def stats(self) -> dict[str, float]:
        stats = self._optimizer.stats()
        encode = self._seconds - stats["wire_seconds"]
        dense = self._dense * stats["steps"]
        return stats | {
            "exposed_seconds": self._seconds, "encode_seconds": encode, "bytes_dense": dense,
            "level": self._level,
        }  # fmt: skip

    def close(self) -> None:
        self._optimizer.close()


class Gossiping(Side):
    """Neighbours mix their weights while the gradient is computed; the mean of all replicas is judged."""

    def __init__(self, desk: Desk, exchange: topology.Gossip):
        plan = desk.plan
        self.model = self.bare = desk.task.model()
        self._gossip = gossip.Gossip(
            self.model, exchange.among(plan.workers), plan.scheme, on_failure="stop", timeout_seconds=PATIENCE_SECONDS,
            seed=plan.seed, transport=desk.transport(),
        )  # fmt: skip
        self._optimizer = desk.task.optimizer(self.model.parameters())
        self._fall = desk.falling(self._optimizer)
        self._replicas = Replicas(self.model, desk.folder / "replicas", desk.worker, plan.workers, desk.meet)

    def begin(self) -> None:
        self._optimizer.zero_grad()
        self._gossip.mix_begin()

    def end(self, loss: Tensor) -> None:
        self._gossip.mix_end()
        self._optimizer.step()
        self._fall()

    def judging(self) -> AbstractContextManager[None]:
        return self._replicas.averaged()

    def stats(self) -> dict[str, float]:
        stats = self._gossip.stats()
        return stats | {"encode_seconds": stats["mix_seconds"], "level": 0.0}

    def close(self) -> None:
        self._gossip.close()
