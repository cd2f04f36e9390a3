"""One worker of a run: a process that trains, keeps the time and tells its parent how it goes.

The parent gets, through a pipe, a `Progress` at every judged step, then the totals (a dict) at the end, or a
`Failure`.
"""

from __future__ import annotations

import ctypes
import datetime
import os
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.ddp import attach
from thinwire.exchange.allreduce import AllReduce
from thinwire.lab import network, shaped, tasks
from thinwire.lab.datasets import Examples
from thinwire.lab.paced import Pace, PacedLedger
from thinwire.lab.record import Plan

# A worker that dies is noticed at once, by its closed connections; a slow link is no reason to give up.
PATIENCE = datetime.timedelta(hours=2)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Progress:
    """One worker's share of a Point."""

    step: int
    seconds: float
    bytes_sent: float
    loss: float
    score_sum: float
    score_count: int
    level: float


@dataclass(frozen=True)
class Failure:
    """Why a worker gave up, and when: its end makes the others fail too, so the first one tells why."""

    at: float  # seconds, on the clock that all processes of a machine share
    reason: str


def main(plan: Plan, worker: int, namespace: str | None, folder: Path, report: Connection) -> None:
    """The whole life of a worker process."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)  # no worker outlives its parent
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides what Ctrl-C means
    torch.set_num_threads(1)
    try:
        if namespace is not None:
            shaped.enter(namespace)
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ["GLOO_SOCKET_IFNAME"] = shaped.INTERFACE if namespace else loopback
        # A file tells the workers of each other: no port to find free, and no traffic on the links.
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=worker,
            world_size=plan.workers,
            timeout=PATIENCE,
        )
        totals = _train(plan, worker, folder, report, counted=namespace is not None)
        dist.destroy_process_group()
        report.send(totals)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        report.send(Failure(time.monotonic(), f"failed: {reason}"))
        raise SystemExit(1) from None


def _train(plan: Plan, worker: int, folder: Path, report: Connection, *, counted: bool) -> dict[str, float]:
    task = tasks.load(plan.task, Path(plan.data) if plan.data else None)
    steps = plan.steps or task.steps
    torch.manual_seed(plan.seed)
    model = DistributedDataParallel(task.model())
    wire = attach(model, plan.scheme, exchange=_exchange(plan, worker), seed=plan.seed)
    optimizer = task.optimizer(model.parameters())
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    shard = task.dataset.train.shard(worker, plan.workers, seed=plan.seed, skew=task.skew)
    batches = shard.batches(task.batch, seed=plan.seed * 1000 + worker)
    exam = task.dataset.test.part(worker, plan.workers)
    probe = Probe(model.module, folder / "gradients", worker, plan.workers)

    dist.barrier()
    before = shaped.sent() if counted else (0, 0)
    seconds = 0.0
    for step in range(1, steps + 1):
        judged = task.judged(step, steps)
        with probe.watching() if judged else _nothing():
            began = time.perf_counter()
            batch = next(batches)
            optimizer.zero_grad()
            loss = task.loss(model(batch.inputs), batch.targets)
            loss.backward()
            wire.observe(loss)
            optimizer.step()
            schedule.step()
            seconds += time.perf_counter() - began
        if judged:
            seconds -= probe.measure()
            scores = _scores(task, model.module, exam)
            sent, level = wire.stats()["bytes_sent"], wire.stats()["level"]
            report.send(Progress(step, seconds, sent, loss.item(), scores.sum().item(), len(scores), level))
            dist.barrier()

    stats = wire.stats()
    totals = _totals(stats, steps, seconds, probe)
    if counted:
        nbytes, packets = (after - began for after, began in zip(shaped.sent(), before, strict=True))
        totals |= {
            "interface_bytes": nbytes,
            "interface_payload_bytes": nbytes - packets * shaped.HEADER_BYTES,
        }
    wire.close()
    return totals


def _exchange(plan: Plan, worker: int) -> AllReduce:
    assert plan.exchange == "allreduce"
    exchange = AllReduce()
    net = network.parse(plan.network)
    if net.mode == "paced":
        exchange.ledger = PacedLedger(Pace(net.rate_of(worker).up, net.latency_seconds))
    return exchange


def _scores(task: tasks.Task, model: nn.Module, exam: Examples) -> Tensor:
    """The metric of every example of this worker's part of the test."""
    model.eval()
    with torch.no_grad():
        parts = [exam[slice(at, at + 256)] for at in range(0, len(exam), 256)]
        values = torch.cat([task.metric.values(model(part.inputs), part.targets) for part in parts])
    model.train()
    return values


def _totals(stats: dict[str, float], steps: int, seconds: float, probe: Probe) -> dict[str, float]:
    """Where the seconds went. Encoding and waiting, on the lane, count as far as training waited for them."""
    exposed = min(stats["exposed_seconds"], seconds)
    lane = stats["encode_seconds"] + stats["wire_seconds"]
    share = exposed / lane if lane else 0.0
    return {
        "steps": steps,
        "seconds": seconds,
        "compute_seconds": seconds - exposed,
        "encode_seconds": stats["encode_seconds"] * share,
        "wire_seconds": stats["wire_seconds"] * share,
        "bytes_sent": stats["bytes_sent"],
        "bytes_dense": stats["bytes_dense"],
        "vnmse": probe.vnmse,
    }


class Probe:
    """Measures vNMSE on real steps, off the network.

    Every worker copies its own gradient, as backward makes it, into a file that all of them map.
    """

    def __init__(self, model: nn.Module, file: Path, worker: int, workers: int):
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._worker = worker
        numel = sum(p.numel() for p in self._parameters)
        self._all = torch.from_file(str(file), shared=True, size=numel * workers).view(workers, numel)
        self._copying_seconds = 0.0
        self._values: list[float] = []

    @property
    def vnmse(self) -> float:
        return sum(self._values) / len(self._values) if self._values else float("nan")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Copy the gradients of the backward pass inside."""
        self._copying_seconds = 0.0
        own = self._all[self._worker].split([p.numel() for p in self._parameters])
        hooks = [
            p.register_hook(lambda gradient, place=place: self._copy(gradient, place))
            for p, place in zip(self._parameters, own, strict=True)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _copy(self, gradient: Tensor, place: Tensor) -> None:
        began = time.perf_counter()
        place.copy_(gradient.reshape(-1))
        self._copying_seconds += time.perf_counter() - began

    def measure(self) -> float:
        """Compare what was applied with the exact mean; the seconds that copying took out of training.

        Worker 0 does it for all. Every copy is there: none of the means it has got could be had without them.
        """
        if self._worker == 0:
            exact = self._all.mean(0)
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
            applied = torch.cat([grad.reshape(-1) for grad in grads])
            self._values.append(((applied - exact).square().sum() / exact.square().sum()).item())
        return self._copying_seconds


@contextmanager
def _nothing() -> Iterator[None]:
    yield
