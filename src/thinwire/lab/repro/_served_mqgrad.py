"""A run of `thinwire repro mqgrad` on a real parameter server: a process per rank, thin links, the wall clock."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from thinwire.exchange.server.client import ParameterServer
from thinwire.front import attach
from thinwire.lab.network import links
from thinwire.lab.network.network import parse_network
from thinwire.lab.repro import _mqgrad_task as task
from thinwire.lab.repro._mqgrad_task import ServedRun
from thinwire.lab.runs import launch
from thinwire.lab.runs.launch import Place
from thinwire.schemes import register
from thinwire.server import join

SERVER_TIMEOUT_SECONDS = 300.0


@dataclass(frozen=True)
class Order:
    """The run to make, the same for every rank."""

    controller: str  # its spec
    seed: int
    steps: int
    network: str
    learnt: str | None = None  # where to write what the controller has learnt


def run_served(order: Order, namespaces: Sequence[str] | None) -> ServedRun:
    """One run under one controller. `namespaces`: of the server and the workers, where links are shaped."""
    _, trained, *_ = launch.on_ranks(_rank, 1 + task.WORKERS, order, namespaces=namespaces)
    return trained


def _rank(place: Place, order: Order) -> Any:
    register(task.Ladder)  # on every rank, the server's too; nowhere else it is a scheme among the others
    with place.joined():
        # Rank 0 serves: it sends by no transport.
        transport = links.transport(parse_network(order.network), max(0, place.rank - 1), task.WORKERS, servers=1)
        role = join(servers=1, on_failure="stop", timeout_seconds=SERVER_TIMEOUT_SECONDS, transport=transport)
        if role.serves:
            return role.serve()
        assert role.exchange is not None
        return _train(order, role.exchange, role.workers)


def _train(order: Order, exchange: ParameterServer, group: dist.ProcessGroup | None) -> ServedRun | None:
    """What became of the run, on the first worker. Weights are evaluated after the run, off its clock."""
    model = DistributedDataParallel(task.network(order.seed), process_group=group)
    optimizer = task.optimizer(model)
    batches = task.batches(order.seed, exchange.worker)
    levels: list[float] = []
    seconds: list[float] = []
    snapshots: list[torch.Tensor] = []
    with attach(
        model, task.Ladder(), exchange=exchange, controller=order.controller, exempt=(), seed=order.seed
    ) as wire:
        dist.barrier(group)
        began = time.perf_counter()
        for step in range(1, order.steps + 1):
            images, labels = next(batches)
            optimizer.zero_grad()
            loss = functional.cross_entropy(model(images), labels)
            levels.append(wire.level)
            loss.backward()
            optimizer.step()
            wire.observe(loss)
            if step % task.EVALUATE_EVERY == 0:
                seconds.append(time.perf_counter() - began)
                snapshots.append(nn.utils.parameters_to_vector(model.parameters()).detach())
        controller_seconds = wire.stats().get("controller_seconds", 0.0)
        if order.learnt is not None:
            wire.save_controller(order.learnt)
    if exchange.worker != 0:
        return None
    losses, accuracy = task.evaluate(order.seed, snapshots)
    return ServedRun(tuple(zip(seconds, losses, strict=True)), tuple(levels), accuracy, controller_seconds)
