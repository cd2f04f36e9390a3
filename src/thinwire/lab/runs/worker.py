"""One process of a run: a worker that trains, keeps the time and tells its parent how it goes, or a server.

The parent gets, through a pipe, a `Progress` of a worker at every judged step, then the totals (a dict) at the end, or
a `Failure`.
"""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.lab.network import shaped
from thinwire.lab.runs import process, topology
from thinwire.lab.runs.probe import Probe
from thinwire.lab.runs.record import Plan
from thinwire.lab.runs.trainers import Desk, serve, sit_down
from thinwire.lab.tasks import tasks
from thinwire.lab.tasks.datasets import Examples
from thinwire.server import Role, join

# gloo's own headers of one message: "I will send", "I am ready" and what goes before the bytes, 48 each. Measured on
# interface counters: exactly so, for pairs and for what collectives are made of.
GLOO_BYTES = 144


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


def main(plan: Plan, rank: int, namespace: str | None, folder: Path, barrier: Barrier, report: Connection) -> None:
    """The whole life of one process of a run. The first ranks are the servers, if the exchange has any.

    What the lab itself needs passes by folder, barrier and pipe: the links carry training alone.
    """
    process.prepare()
    try:
        exchange = topology.parse(plan.exchange)
        process.join(rank, exchange.server_count + plan.workers, namespace, folder)
        task = tasks.load(plan.task, Path(plan.data) if plan.data else None)
        desk = Desk(plan, task, rank - exchange.server_count, folder, barrier.wait)
        role = None
        if isinstance(exchange, topology.Server):
            down = "same" if exchange.staleness is not None else exchange.down
            role = join(servers=exchange.servers, down=down or "same", lost="stop", timeout=process.PATIENCE_SECONDS)
        counted = namespace is not None
        totals = _serve(desk, role, counted) if role and role.serves else _train(desk, role, report, counted)
        dist.destroy_process_group()
        report.send(totals)
    except Exception as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        report.send(Failure(time.monotonic(), f"failed: {reason}"))
        raise SystemExit(1) from None


def _serve(desk: Desk, role: Role, counted: bool) -> dict[str, float]:
    meter = Meter(counted)
    return meter.read(serve(desk, role))


def _train(desk: Desk, role: Role | None, report: Connection, counted: bool) -> dict[str, float]:
    plan, task, worker = desk.plan, desk.task, desk.worker
    shard = task.dataset.train.shard(worker, plan.workers, seed=plan.seed, skew=task.skew)
    batches = shard.batches(task.batch, seed=plan.seed * 1000 + worker)
    exam = task.dataset.test.part(worker, plan.workers)
    side = sit_down(desk, role)

    if side.in_step:
        desk.meet()
    meter = Meter(counted)
    before = side.stats()
    seconds = 0.0
    for step in range(1, desk.steps + 1):
        judged = task.judged(step, desk.steps)
        with side.probe.watching() if judged and side.probe else nullcontext():
            began = time.perf_counter()
            batch = next(batches)
            side.begin()
            loss = task.loss(side.model(batch.inputs), batch.targets)
            loss.backward()
            side.end(loss)
            seconds += time.perf_counter() - began
        if judged:
            seconds -= side.probe.measure() if side.probe else 0.0
            with side.judging():
                scores = _scores(task, side.bare, exam)
            stats = _since(before, side.stats())
            sent, level = _on_wire(stats), stats["level"]
            report.send(Progress(step, seconds, sent, loss.item(), scores.sum().item(), len(scores), level))
            if side.in_step:
                desk.meet()

    stats = _since(before, side.stats())
    totals = _totals(stats, desk.steps, seconds, side.probe) | meter.read(stats)
    side.close()
    return totals


def _on_wire(stats: dict[str, float]) -> float:
    """What a server sends to a worker is on the wire for it, too."""
    return stats["bytes_sent"] + stats.get("bytes_received", 0.0)


class Meter:
    """What this process's interface has sent since it was made, as the kernel counts; nothing where not `counted`.

    `stats`: the ledger's totals of the same time, to hold against it.
    """

    def __init__(self, counted: bool):
        self._before = shaped.sent() if counted else None

    def read(self, stats: dict[str, float]) -> dict[str, float]:
        if self._before is None:
            return {}
        nbytes, packets = (after - before for after, before in zip(shaped.sent(), self._before, strict=True))
        return {
            "interface_bytes": nbytes,
            "interface_payload_bytes": nbytes - packets * shaped.HEADER_BYTES,
            "ledger_bytes": stats["bytes_sent"],
            "ledger_overhead_bytes": stats["sends"] * GLOO_BYTES,
        }


def _since(before: dict[str, float], now: dict[str, float]) -> dict[str, float]:
    """Totals of training alone; the level is none."""
    return {name: value if name == "level" else value - before.get(name, 0.0) for name, value in now.items()}


def _scores(task: tasks.Task, model: nn.Module, exam: Examples) -> Tensor:
    """The metric of every example of this worker's part of the test."""
    model.eval()
    with torch.no_grad():
        parts = [exam[slice(at, at + 256)] for at in range(0, len(exam), 256)]
        values = torch.cat([task.metric.values(model(part.inputs), part.targets) for part in parts])
    model.train()
    return values


def _totals(stats: dict[str, float], steps: int, seconds: float, probe: Probe | None) -> dict[str, float]:
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
        "bytes_sent": _on_wire(stats),
        "bytes_dense": stats["bytes_dense"],
        "messages": stats["messages"],
        "vnmse": probe.vnmse if probe else float("nan"),
    }
