"""Asynchronous training, the servers' side: weights and optimizer live here; workers push gradients, pull weights.

With n workers, the optimizer takes a step when n gradients are in, whoever sent them, with their mean, so learning rate
and momentum mean what they mean in synchronous training. `staleness` s bounds how far workers run ahead:

1. a worker that has more than s gradients waiting for the next step gets no weights until that step is taken;
2. the step from version v to v + 1 waits while some worker still computes on weights older than v + 1 - s.

So no gradient is applied more than s steps after the weights it was computed on, a slow worker holds the others up
only when it falls s steps behind, and s = 0 is synchronous training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from thinwire import kernels
from thinwire.core.layout import Layout
from thinwire.core.scheme import Codec
from thinwire.exchange import arithmetic
from thinwire.exchange.server import operations
from thinwire.exchange.server.frames import Kind
from thinwire.exchange.server.operations import Operation

if TYPE_CHECKING:
    from thinwire.exchange.server.peers import Incoming

FIRST = 0  # the worker whose weights are the ones to begin with
MakeOptimizer: TypeAlias = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
MakeSchedule: TypeAlias = Callable[[torch.optim.Optimizer], LRScheduler]


@dataclass(frozen=True, eq=False)
class Gradient(Operation):
    """A gradient in sections, each by its own codec; the weights come back in the dtype `down`."""

    sections: tuple[tuple[Codec, Layout], ...]
    down: str

    def literal(self) -> dict[str, Any]:
        return {"sections": [(codec.spec, layout.segments) for codec, layout in self.sections], "down": self.down}

    @classmethod
    def of(cls, literal: dict[str, Any]) -> Gradient:
        sections = [(operations.codec_of(codec), operations.layout_of(layout)) for codec, layout in literal["sections"]]
        return cls(tuple(sections), literal["down"])

    def __post_init__(self) -> None:
        if self.down not in operations.DTYPES:
            raise ValueError(f"weights cannot come back as {self.down!r}")

    def dense_bytes(self) -> int:
        return 4 * self.numel

    @property
    def numel(self) -> int:
        return sum(layout.numel for _, layout in self.sections)

    def up_bytes(self, level: float) -> int:
        return sum(self.section_bytes(level))

    def section_bytes(self, level: float) -> list[int]:
        return [arithmetic.aligned(codec.nbytes(layout, level)) for codec, layout in self.sections]

    def down_bytes(self, level: float) -> int:
        return self.numel * operations.DTYPES[self.down].itemsize

    def decode(self, data: Tensor, level: float, out: Tensor) -> None:
        """out = the gradient, sections end to end."""
        out.zero_()
        sizes, at = self.section_bytes(level), 0
        for (codec, layout), part in zip(self.sections, data.split(sizes), strict=True):
            size = codec.nbytes(layout, level)
            codec.decode_add(part[:size], layout, level, out[at : at + layout.numel], 1.0)
            at += layout.numel


class SharedWeights:
    """One server's segment of the weights, its optimizer, and who may have them when."""

    def __init__(self, optimizer: MakeOptimizer, staleness: int, schedule: MakeSchedule | None = None):
        if not isinstance(staleness, int) or staleness < 0:
            raise ValueError(f"staleness must be 0 or more steps, got {staleness!r}")
        self.staleness = staleness
        self.version: int = 0
        self.stalest: int = 0  # the oldest weights that any gradient was computed on, in steps
        self.skipped: int = 0  # gradients that were not finite
        self.held: dict[int, Incoming] = {}  # who waits for weights
        self._make, self._make_schedule = optimizer, schedule
        self._weights: nn.Parameter | None = None
        self._optimizer: torch.optim.Optimizer | None = None
        self._schedule: LRScheduler | None = None
        self._busy: dict[int, int] = {}  # worker -> the version it computes on
        self._arrived: Counter[int] = Counter()  # gradients since the last step, by worker
        self._added = 0

    def take(self, worker: int, arrival: Incoming, operation: Operation) -> None:
        """A gradient, or the first weights. ValueError where it cannot be used."""
        push = arrival.push
        assert push is not None
        if not isinstance(operation, Gradient) or push.answer_bytes != operation.down_bytes(push.level):
            raise ValueError("asynchronous servers take gradients and give weights, nothing else")
        if push.kind is Kind.WEIGHTS:
            if self._weights is None and (push.nbytes or worker == FIRST):
                self._start(worker, arrival.payload, operation)
        else:
            self._add(worker, arrival.payload, operation, push.level)
        self.held[worker] = arrival

    def released(self, present: Sequence[int]) -> list[Incoming]:
        """Take the step if it is due; those who may go on, each to compute on the weights as they are now."""
        self.held = {worker: arrival for worker, arrival in self.held.items() if worker in present}
        self._busy = {worker: version for worker, version in self._busy.items() if worker in present}
        if self._weights is None:
            if FIRST not in present:
                raise ValueError(f"worker {FIRST} was lost before it had given the first weights; start again")
            return []
        fresh = all(self.version + 1 - version <= self.staleness for version in self._busy.values())
        if sum(self._arrived.values()) >= len(present) and fresh and self._arrived:
            self._step()
        ready = [worker for worker in self.held if self._arrived[worker] <= self.staleness]
        for worker in ready:
            self._busy[worker] = self.version
        return [self.held.pop(worker) for worker in ready]

    def write_weights(self, operation: Operation, out: Tensor) -> None:
        assert isinstance(operation, Gradient) and self._weights is not None
        if operation.numel != self._weights.numel():
            raise ValueError(f"{operation.numel} weights were asked for where there are {self._weights.numel()}")
        out.view(operations.DTYPES[operation.down]).copy_(self._weights.detach())

    def _start(self, worker: int, payload: Tensor | None, operation: Gradient) -> None:
        if worker != FIRST or payload is None or payload.numel() != 4 * operation.numel:
            raise ValueError(f"worker {FIRST} gives the first weights, {operation.numel} of them in float32")
        self._own(payload.view(torch.float32).clone())

    def _own(self, weights: Tensor) -> None:
        self._weights = nn.Parameter(weights)
        self._weights.grad = torch.zeros_like(weights)
        self._decoded = torch.empty_like(weights)
        self._optimizer = self._make([self._weights])
        self._schedule = self._make_schedule(self._optimizer) if self._make_schedule else None

    def _add(self, worker: int, payload: Tensor | None, operation: Gradient, level: float) -> None:
        if self._weights is None or worker not in self._busy or payload is None:
            raise ValueError("a gradient came before its worker had pulled weights")
        if operation.numel != self._weights.numel() or payload.numel() != operation.up_bytes(level):
            raise ValueError(f"a gradient of {operation.numel} elements does not fit {self._weights.numel()} weights")
        operation.decode(payload, level, self._decoded)
        self.stalest = max(self.stalest, self.version - self._busy.pop(worker))
        self._arrived[worker] += 1
        if kernels.all_finite(self._decoded):
            assert self._weights.grad is not None
            self._weights.grad.add_(self._decoded)
            self._added += 1
        else:
            self.skipped += 1

    def _step(self) -> None:
        assert self._weights is not None and self._weights.grad is not None and self._optimizer is not None
        if self._added:
            self._weights.grad.div_(self._added)
            self._optimizer.step()
            if self._schedule is not None:
                self._schedule.step()
        self._weights.grad.zero_()
        self._arrived.clear()
        self._added = 0
        self.version += 1

    def totals(self) -> dict[str, float]:
        return {
            "steps": float(self.version),
            "stalest": float(self.stalest),
            "skipped": float(self.skipped),
        }

    def state_dict(self) -> dict[str, Any]:
        """Weights, optimizer and version. Gradients that wait for the next step are not saved."""
        if self._weights is None or self._optimizer is None:
            return {"version": self.version}
        return {
            "version": self.version,
            "weights": self._weights.detach(),
            "optimizer": self._optimizer.state_dict(),
            "schedule": self._schedule.state_dict() if self._schedule else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.version = int(state["version"])
        if "weights" in state:
            self._own(state["weights"].clone())
            assert self._optimizer is not None
            self._optimizer.load_state_dict(state["optimizer"])
            if self._schedule is not None and state.get("schedule"):
                self._schedule.load_state_dict(state["schedule"])
        self._arrived.clear()
        self._added = 0
        self._busy = dict.fromkeys(self._busy, self.version)
