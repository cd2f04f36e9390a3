"""One process of a run: a worker that trains and keeps the time, or a server.

The parent gets a `PointShare` of a worker at every evaluated step, and everybody's totals (a dict) at the end.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing.synchronize import Barrier
from pathlib import Path

import torch
from torch import Tensor, nn

from thinwire.lab.network import shaped
from thinwire.lab.runs.curves import WINDOW
from thinwire.lab.runs.launch import PATIENCE_SECONDS, Place
from thinwire.lab.runs.probe import Probe
from thinwire.lab.runs.record import RunPlan
from thinwire.lab.runs.timing import warm_steps
from thinwire.lab.runs.topology import ServerTopology, parse_topology
from thinwire.lab.runs.trainers import RunContext, make_trainer, serve
from thinwire.lab.tasks.datasets import Examples
from thinwire.lab.tasks.tasks import Task, load_task
from thinwire.server import Role, join

# gloo's own headers of one message: "I will send", "I am ready" and what goes before the bytes, 48 each. Measured on
# interface counters: exactly so, for pairs and for what collectives are made of.
GLOO_BYTES = 144


@dataclass(frozen=True)
class PointShare:
    """One worker's share of a CurvePoint."""

    step: int
    seconds: float
    bytes_sent: float
    loss: float
    score_sum: float
    score_count: int
    level: float


def run_process(place: Place, plan: RunPlan, barrier: Barrier) -> dict[str, float]:
    """The whole life of one process of a run. The first ranks are the servers, if the exchange has any.

    What the lab itself needs passes by folder, barrier and pipe: the links carry training alone.
    """
    topology = parse_topology(plan.exchange)
    with place.joined():
        task = load_task(plan.task, Path(plan.data) if plan.data else None)
        context = RunContext(plan, task, place.rank - topology.server_count, place.folder, barrier.wait)
        role = None
        if isinstance(topology, ServerTopology):
            down = "same" if topology.staleness is not None else topology.down
            role = join(
                servers=topology.servers, down=down or "same", on_failure="stop", timeout_seconds=PATIENCE_SECONDS,
                transport=context.transport(topology.servers),
            )  # fmt: skip
        serves = role is not None and role.serves
        known = plan.local == 1 and plan.parallel == "ddp"
        meter = Meter(1 if serves else plan.local, known) if place.namespace is not None else NoMeter()
        return _serve(context, role, meter) if role and serves else _train(context, role, place.send, meter)


def _serve(context: RunContext, role: Role, meter: NoMeter) -> dict[str, float]:
    meter.start()
    return meter.read(serve(context, role))


def _train(
    context: RunContext, role: Role | None, send: Callable[[PointShare], None], meter: NoMeter
) -> dict[str, float]:
    plan, task, worker = context.plan, context.task, context.worker
    train, validation = task.dataset.split
    shard = train.shard(worker, plan.workers, seed=plan.seed, skew=task.skew)
    batches = shard.batches(task.batch, seed=plan.seed * 1000 + worker)
    watched = validation.part(worker, plan.workers)
    trainer = make_trainer(context, role)

    def make_step() -> tuple[float, Tensor]:
        began = time.perf_counter()
        batch = next(batches)
        trainer.begin()
        with torch.autocast("cpu", torch.bfloat16, enabled=plan.compute == "bf16"):
            outputs = trainer.model(batch.inputs)
        loss = task.loss(outputs.float() if plan.compute == "bf16" else outputs, batch.targets)
        loss.backward()
        trainer.end(loss)
        return time.perf_counter() - began, loss

    for _ in range(warm_steps(plan) if plan.timed else 0):
        make_step()
    if trainer.in_step:
        context.wait_for_all()
    meter.start()
    before = trainer.stats()
    seconds = 0.0
    steps = plan.timed or context.steps
    looks = [step for step in range(1, steps + 1) if plan.timed is None and task.evaluates(step, steps)]
    evaluated_steps = set(looks if plan.tested else looks[-WINDOW:])
    for step in range(1, steps + 1):
        evaluated = step in evaluated_steps
        with trainer.probe.watching() if evaluated and trainer.probe else nullcontext():
            took, loss = make_step()
            seconds += took
        if evaluated:
            seconds -= trainer.probe.measure() if trainer.probe else 0.0
            with trainer.evaluating():
                scores = _scores(task, trainer.bare, watched)
            stats = _since(before, trainer.stats())
            sent, level = meter.on_wire(stats), stats["level"]
            send(PointShare(step, seconds, sent, loss.item(), scores.sum().item(), len(scores), level))
            if trainer.in_step:
                context.wait_for_all()

    stats = _since(before, trainer.stats())
    totals = _totals(stats, steps, seconds, trainer.probe) | meter.read(stats)
    totals["bytes_sent"] = meter.on_wire(stats)
    totals["rounds"] = stats.get("rounds", steps)
    if plan.tested:
        with trainer.evaluating():
            scores = _scores(task, trainer.bare, task.dataset.test.part(worker, plan.workers))
        totals |= {"test_sum": scores.sum().item(), "test_count": len(scores)}
    trainer.close()
    return totals


class NoMeter:
    """What a worker has sent, by the ledger alone: its totals are `stats`."""

    def start(self) -> None:
        """Count from now on."""

    def on_wire(self, stats: dict[str, float]) -> float:
        """Bytes. What a server sends to a worker is on the wire for it, too."""
        return stats["bytes_sent"] + stats.get("bytes_received", 0.0)

    def read(self, stats: dict[str, float]) -> dict[str, float]:
        """What an interface counted, and what it should come to."""
        return {}


class Meter(NoMeter):
    """What this process's interface has sent, as the kernel counts: its share, where so many processes share it.

    known: what is sent is in the ledger, and nothing but that, so that one can be held against the other.
    """

    def __init__(self, processes: int, known: bool):
        self._processes, self._known = processes, known

    def start(self) -> None:
        self._before = shaped.sent()

    def on_wire(self, stats: dict[str, float]) -> float:
        return super().on_wire(stats) if self._known else self._sent()["interface_payload_bytes"]

    def read(self, stats: dict[str, float]) -> dict[str, float]:
        expected = {"ledger_bytes": stats["bytes_sent"], "ledger_overhead_bytes": stats["sends"] * GLOO_BYTES}
        return self._sent() | (expected if self._known else {})

    def _sent(self) -> dict[str, float]:
        now = shaped.sent()
        return {
            "interface_bytes": (now.nbytes - self._before.nbytes) / self._processes,
            "interface_payload_bytes": (now.payload - self._before.payload) / self._processes,
        }


def _since(before: dict[str, float], now: dict[str, float]) -> dict[str, float]:
    """Totals of training alone; the level is none."""
    return {name: value if name == "level" else value - before.get(name, 0.0) for name, value in now.items()}


def _scores(task: Task, model: nn.Module, part: Examples) -> Tensor:
    """The metric of every example of this worker's part."""
    model.eval()
    values = task.metric.of(model, part)
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
        "bytes_dense": stats["bytes_dense"],
        "messages": stats["messages"],
        "vnmse": probe.vnmse if probe else float("nan"),
    }
