"""A run of `thinwire repro mqgrad` on a real parameter server: a process per rank, thin links, the wall clock."""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

from thinwire.ddp import attach
from thinwire.exchange.server.client import ParameterServer
from thinwire.lab.network import network
from thinwire.lab.network.paced import Pace, Paced
from thinwire.lab.repro import _mqgrad_task as task
from thinwire.lab.repro._mqgrad_task import Outcome
from thinwire.lab.runs import process
from thinwire.server import join

RANKS = task.WORKERS + 1
PATIENCE_SECONDS = 300.0


@dataclass(frozen=True)
class Order:
    """What every rank of a run is told."""

    controller: str  # its spec
    seed: int
    steps: int
    network: str
    learnt: str | None = None  # where to write what the controller has learnt


def train(order: Order, namespaces: Sequence[str | None]) -> Outcome:
    """One run under one controller. `namespaces`: of the server and the workers, where links are shaped."""
    # Ranks are forked from a process that has imported torch once, with the part that DDP imports on first use.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "torch._dynamo"])
    with tempfile.TemporaryDirectory(prefix="thinwire-") as folder:
        members = []
        for rank, namespace in enumerate(namespaces):
            ours, theirs = context.Pipe(duplex=False)
            member = context.Process(target=_rank, args=(order, rank, Path(folder), namespace, theirs), daemon=True)
            member.start()
            theirs.close()
            members.append((member, ours))
        try:
            told = [ours.recv() for _, ours in members]
        except EOFError:
            raise RuntimeError(f"a rank failed under {order.controller}; its traceback is above") from None
        finally:
            for member, _ in members:
                member.join(10)
                member.kill()
                member.join()
    curve, levels, accuracy = told[1]
    return Outcome(curve, levels, accuracy, told[0].get("controller_seconds", 0.0))


def _rank(order: Order, rank: int, folder: Path, namespace: str | None, report: Connection) -> None:
    process.prepare()
    process.join(rank, RANKS, namespace, folder)
    role = join(servers=1, lost="stop", timeout=PATIENCE_SECONDS)
    if role.serves:
        told = role.serve()
    else:
        assert role.exchange is not None
        link = network.parse(order.network)
        if link.mode == "paced":
            # What workers pull comes over the server's one link: each has its share.
            rate = link.rate_of(rank)
            down = Pace((rate.down or rate.up) / task.WORKERS, link.latency_seconds)
            role.exchange.transport = Paced(Pace(rate.up, link.latency_seconds), down=down)
        told = _train(order, role.exchange, role.workers)
    dist.destroy_process_group()
    report.send(told)


def _train(
    order: Order, exchange: ParameterServer, group: dist.ProcessGroup | None
) -> tuple[tuple[tuple[float, float], ...], tuple[float, ...], float] | None:
    """Curve, levels and accuracy, on the first worker. Weights are judged after the run, off its clock."""
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
            if step % task.JUDGED_EVERY == 0:
                seconds.append(time.perf_counter() - began)
                snapshots.append(nn.utils.parameters_to_vector(model.parameters()).detach())
        if order.learnt is not None:
            wire.save_controller(order.learnt)
    if exchange.worker != 0:
        return None
    losses, accuracy = task.judge(order.seed, snapshots)
    return tuple(zip(seconds, losses, strict=True)), tuple(levels), accuracy
