"""Steering: a controller's place in a training loop. Gathers what it may see, asks it when due, keeps its level.

The question goes through the lane right after the last bucket of a step, so it travels while the next forward pass
runs; the lane answers it before it starts the next step's first bucket. So all workers change level at the same step,
and training waits for the controller only if the controller is slower than a forward pass.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from thinwire import control
from thinwire.control import Controller, Observation
from thinwire.control.controller import WINDOW
from thinwire.core.bucket import Bucket, Scratch
from thinwire.core.memory import Memory
from thinwire.core.scheme import Conversation, Scheme
from thinwire.exchange.exchange import Exchange
from thinwire.exchange.lane import Job, Rounds


class Steering:
    """One worker's side of the controller. `level` changes on the lane only, between two steps."""

    def __init__(self, controller: str | Controller, scheme: Scheme) -> None:
        self.controller = control.parse(controller)
        if scheme.knob is None:
            raise ValueError(f"{scheme.name} has no knob for a controller to turn")
        self._menu = self.controller.menu(scheme.knob.menu)
        self.controller.start(self._menu)
        self.level = self.controller.first(scheme.level, self._menu)
        self._observed: list[float | Tensor] = []
        self._history: deque[float] = deque([math.nan] * WINDOW, WINDOW)
        self._began = time.perf_counter()
        self._bytes = 0.0
        self._due = False  # the step under way is the last before a decision: measure it
        self._squares = {"mean": 0.0, "given": 0.0, "lost": 0.0}
        self._job: Job | None = None

    def observe(self, loss: float | Tensor) -> None:
        self._observed.append(loss.detach() if isinstance(loss, Tensor) else float(loss))

    def end_step(self, step: int, exchange: Exchange) -> None:
        """After a step: when due, send what was seen to the controller. Raises what the last question met."""
        if self._job is not None and self._job.ended:
            failed, self._job = self._job.error, None
            if failed is not None:
                raise RuntimeError(f"the controller could not decide: {failed}") from failed
        if step % self.controller.interval == 0:
            self._ask(step, exchange)
        self._due = (step + 1) % self.controller.interval == 0

    def converse(self, scheme: Scheme, bucket: Bucket, memory: Memory) -> Conversation:
        """The scheme's conversation at the level in use; in the last step before a decision, with its norms taken."""
        if not self._due:
            return scheme.converse(bucket, memory, self.level)
        return self._measure(scheme, bucket, memory)

    def _measure(self, scheme: Scheme, bucket: Bucket, memory: Memory) -> Conversation:
        flat = bucket.flat
        lost = bucket.lost
        if lost is None:
            lost = bucket.scratch.take("measured-lost", flat.numel(), flat.dtype, flat.device)
        given = _square(flat)
        mean = yield from scheme.converse(replace(bucket, lost=lost), memory, self.level)
        self._squares["given"] += given
        self._squares["mean"] += _square(mean)
        self._squares["lost"] += _square(lost)
        return mean

    def _ask(self, step: int, exchange: Exchange) -> None:
        if self.controller.needs_loss and not self._observed:
            raise ValueError(f"{self.controller.name} decides by the loss: call wire.observe(loss) after every step")
        observed, self._observed = self._observed, []
        now, interval = time.perf_counter(), self.controller.interval
        seconds, self._began = (now - self._began) / interval, now
        sent = exchange.ledger.totals().get("bytes_sent", 0.0)
        nbytes, self._bytes = (sent - self._bytes) / interval, sent
        squares, self._squares = self._squares, dict.fromkeys(self._squares, 0.0)
        lane = exchange.lane
        assert lane is not None

        def talk(scratch: Scratch) -> Rounds:
            losses = [float(loss) for loss in observed]
            self._history.append(sum(losses) / len(losses) if losses else math.nan)
            seen = Observation(
                step, self.level, seconds, nbytes, math.sqrt(squares["mean"]),
                squares["lost"] / squares["given"] if squares["given"] else math.nan, tuple(self._history),
            )  # fmt: skip
            numbers = torch.tensor(seen.numbers(), dtype=torch.float64)
            answer = yield from exchange.consult(self.controller, self._menu, numbers, scratch)
            self.level = float(answer)
            return answer

        self._job = lane.submit(talk, last=True, done=lambda error: None)

    def settle(self) -> None:
        """Wait for the decision under way, so that what is saved next is the state between two steps."""
        if self._job is not None:
            self._job.wait()

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        return {
            "controller": self.controller.spec,
            "learnt": self.controller.state_dict(),
            "level": self.level,
            "history": list(self._history),
            "observed": [float(loss) for loss in self._observed],
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["controller"] != self.controller.spec:
            raise ValueError(
                f"the state was saved under {state['controller']!r}, this wire's controller is {self.controller.spec!r}"
            )
        self.controller.load_state_dict(state["learnt"])
        self.level = float(state["level"])
        self._history = deque(state["history"], WINDOW)
        self._observed = list(state["observed"])


def _square(tensor: Tensor) -> float:
    return float(torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32))) ** 2
