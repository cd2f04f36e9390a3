"""Steering: a controller's place in a training loop. Gathers what it may see, asks it when due, keeps its level.

A decision is a conversation: the sum of what all workers saw, the same `decide` on every worker, and the largest of
their levels, so that processors which compute unlike cannot part. It goes through the lane right after the last bucket
of a step, so it travels while the next forward pass runs; the lane ends it before it starts the next step's first
bucket. So all workers change level at the same step, and training waits only for what is slower than a forward pass.
"""

from __future__ import annotations

import copy
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire import control
from thinwire.control import Controller, Observation
from thinwire.control.controller import WINDOW
from thinwire.core.bucket import Bucket
from thinwire.core.memory import Memory
from thinwire.core.request import Max, Sum
from thinwire.core.scheme import Codec, Conversation, Knob, Scheme, Wrapper, innermost
from thinwire.core.sketch import sketch
from thinwire.exchange.exchange import Exchange, drive
from thinwire.exchange.lane import Job

FORMAT = 2  # 1: only rank 0, or the first server, knew what the controller had learnt
# Squares of norms: in the last step before a decision; in all steps that are listened to, and the product of what was
# given and the mean; of a message that is not sent.
_SQUARES = ("mean", "given", "lost", "all given", "all means", "all products", "wondered")
_SKETCH = 256  # numbers for what all owe, and as many for what all were given: errors within a tenth
_UNSAID = 1 << 20  # scratch of its own, beside that of a request's parts


class Turned(Protocol):
    """What a controller turns: a scheme is one."""

    @property
    def name(self) -> str: ...
    @property
    def knob(self) -> Knob | None: ...
    @property
    def level(self) -> float: ...


class Steering:
    """One worker's controller. `level` changes on the lane only, between two steps."""

    def __init__(self, controller: str | Controller, turned: Turned) -> None:
        self.controller: Controller = control.parse(controller)
        if turned.knob is None:
            raise ValueError(f"{turned.name} has no knob for a controller to turn")
        menu = self.controller.menu(turned.knob.menu)
        self.controller.knob = turned.knob.name
        self.controller.start(menu)
        self._turned = turned
        self.level: float = self.controller.first(turned.level, menu)
        self.due: bool = False  # the step under way is the last before a decision: measure it
        self.listens: bool = False  # it is near one: norms are wanted
        self._heard = 0  # steps that were listened to since the last decision
        self.wonders: float | None = None  # a level whose error to measure in it, too
        self.squares: dict[str, float | Tensor] = _nothing()
        self._owed: bool = isinstance(turned, Scheme) and turned.remembers
        # Where errors are owed, and matter: of what is owed after the last step before a decision, and of its gradient.
        self.sketched: bool = self.controller.needs_noise and self._owed
        self.sketches: dict[str, Tensor] = {}
        self._observed: list[float | Tensor] = []
        self._history: deque[float] = deque([math.nan] * WINDOW, WINDOW)
        self._began = time.perf_counter()
        self._taken: list[float] = []  # seconds of the interval's steps
        self._bytes = 0.0
        self._job: Job | None = None
        self.scale: float = 1.0  # gradients are so many times too large
        self._steps = 0  # since the start or a resume
        self._told = False
        self._look_ahead(1)

    def observe(self, loss: float | Tensor) -> None:
        self._told = True
        self._observed.append(loss.detach() if isinstance(loss, Tensor) else float(loss))

    def end_step(self, step: int, exchange: Exchange, *, silent: bool = False) -> None:
        """After a step: when due, decide. Raises what the last decision met.

        silent: this worker had no data of its own, so it may have seen no loss.
        """
        self._steps += 1
        now = time.perf_counter()
        self._taken.append(now - self._began)
        self._began = now
        if self.controller.needs_loss and not self._told and not silent and self._steps > 1:
            raise ValueError(f"{self.controller.name} decides by the loss: call wire.observe(loss) after every step")
        if self._job is not None and self._job.ended:
            failed, self._job = self._job.error, None
            if failed is not None:
                raise RuntimeError(f"the controller could not decide: {failed}") from failed
        self._heard += self.listens
        if self.controller.next_decision(step) == step:
            self._begin_decision(step, exchange)
        self._look_ahead(step + 1)

    def _look_ahead(self, step: int) -> None:
        """What the step that comes will be measured for."""
        left = self.controller.next_decision(step) - step
        self.due = left == 0
        self.listens = self.controller.needs_noise and left < self.controller.interval
        if self.due:
            self.wonders = self.controller.wonders(self.level)

    def _begin_decision(self, step: int, exchange: Exchange) -> None:
        observed, self._observed = self._observed, []
        made = len(self._taken)  # steps since the last decision, or since a resume
        seconds, deviation = _middle(self._taken)
        self._taken = []
        sent = exchange.transport.ledger.totals().get("bytes_sent", 0.0)
        nbytes, self._bytes = (sent - self._bytes) / made, sent
        taken, wondered = self.squares, self.wonders
        sketches, self.squares, self.sketches = self.sketches, _nothing(), {}
        heard, self._heard = self._heard, 0

        def see() -> Observation:
            squares = {key: float(square) for key, square in taken.items()}
            losses = [float(loss) for loss in observed]
            self._history.append(sum(losses) / len(losses) if losses else math.nan)
            per_step = math.nan if not heard else 1 / heard / self.scale**2
            return Observation(
                step, self.level, seconds, nbytes, math.sqrt(squares["mean"]) / self.scale,
                _ratio(squares["lost"], squares["given"]), tuple(self._history),
                squares["all given"] * per_step, squares["all means"] * per_step,
                math.nan if wondered is None else wondered, _ratio(squares["wondered"], squares["given"]),
                exchange.workers, float(isinstance(self._turned, Scheme) and exchange.relays(self._turned)),
                float(self._owed), squares["all products"] * per_step, deviation,
            )  # fmt: skip

        lane = exchange.lane
        assert lane is not None
        self._job = lane.submit(
            lambda scratch: drive(self._decide(see, sketches, exchange), exchange, scratch), last=True,
            done=lambda error: None,
        )  # fmt: skip

    def _decide(
        self, see: Callable[[], Observation], sketches: Mapping[str, Tensor], exchange: Exchange
    ) -> Conversation:
        numbers = torch.tensor(see().numbers(), dtype=torch.float64, device=exchange.device)
        known = ~numbers.isnan()
        sums = [numbers.where(known, 0.0), known.to(numbers.dtype)]
        if self.sketched:
            sums += [sketches.get(name, numbers.new_zeros(_SKETCH)).to(numbers.device) for name in ("lost", "given")]
        total, count, *vectors = (yield Sum(torch.cat(sums))).split(list(map(len, sums)))
        seen = Observation.of((total / count).tolist())
        if self.sketched:
            seen = replace(seen, compression_error=_ratio(*(float(_square(vector)) for vector in vectors)))
        with exchange.transport.ledger.timed("controller_seconds"):
            level = self.controller.decide(seen)
        agreed = yield Max(torch.tensor([level], dtype=torch.float64, device=exchange.device))
        self.level = float(agreed)
        return agreed

    def settle(self) -> None:
        """Wait for the decision under way, so that what is saved next is the state between two steps."""
        if self._job is not None:
            self._job.wait()

    def state_dict(self) -> dict[str, Any]:
        self.settle()
        return {
            "format": FORMAT,
            "controller": self.controller.spec,
            "learnt": self.controller.state_dict(),
            "level": self.level,
            "history": list(self._history),
            "observed": [float(loss) for loss in self._observed],
        }

    def loaded(self, state: Mapping[str, Any]) -> Callable[[], None]:
        """Check a saved state; what to call to take it, which cannot fail."""
        if not isinstance(state, Mapping):
            raise ValueError(f"the controller's state is a dict, got {type(state).__name__}")
        missing = [key for key in ("controller", "learnt", "level", "history", "observed") if key not in state]
        if missing:
            raise ValueError(f"the controller's state lacks {', '.join(missing)}")
        if str(state["controller"]) != self.controller.spec:
            raise ValueError(
                f"the state was saved under {state['controller']!r}, this wire's controller is {self.controller.spec!r}"
            )
        if str(state.get("format")) != str(FORMAT) and self.controller.state_dict():
            raise ValueError(
                f"the state is of a version in which one rank alone held the controller, so what "
                f"{self.controller.name} had learnt is not in it; leave it out: state['steering'] = {{}}"
            )
        controller = copy.deepcopy(self.controller)
        try:
            controller.load_state_dict(state["learnt"])
            level, history = float(state["level"]), deque(map(float, state["history"]), WINDOW)
            observed: list[float | Tensor] = [float(loss) for loss in state["observed"]]
        except ValueError:
            raise
        except Exception as error:  # whatever a state that is none raises
            raise ValueError(f"what {controller.name} learnt cannot be read: {error!r}") from error

        def take() -> None:
            self.controller, self.level, self._history, self._observed = controller, level, history, observed

        return take


@dataclass(frozen=True)
class Measured(Wrapper):
    """A scheme whose norms are taken, for the controller: in the last step before a decision, or in several."""

    steering: Steering

    def converse(self, bucket: Bucket, memory: Memory, level: float) -> Conversation:
        if self.steering.due:
            return self._measure(bucket, memory, level)
        if self.steering.listens:
            return self._listen(bucket, memory, level)
        return self.scheme.converse(bucket, memory, level)

    def _listen(self, bucket: Bucket, memory: Memory, level: float) -> Conversation:
        given = self._given(bucket)
        mean = yield from self.scheme.converse(bucket, memory, level)
        self._hear(given, mean)
        return mean

    def _given(self, bucket: Bucket) -> Tensor:
        """What a mean will be held against, which may be written over it."""
        return bucket.room("listened").copy_(bucket.flat)

    def _hear(self, given: Tensor, mean: Tensor) -> None:
        self._add(("all given", _square(given)), ("all means", _square(mean)), ("all products", _product(given, mean)))

    def _measure(self, bucket: Bucket, memory: Memory, level: float) -> Conversation:
        flat = bucket.flat
        lost = bucket.room("measured-lost") if bucket.spare is None else bucket.layout.clear_gaps(bucket.spare)
        given, heard = _square(flat), self._given(bucket) if self.steering.listens else None
        self._sketch("given", flat, bucket)
        inner = innermost(self.scheme)
        if self.steering.wonders is not None and isinstance(inner, Codec):
            self._add(("wondered", _square(_unsaid(inner, bucket, self.steering.wonders))))
        mean = yield from self.scheme.converse(replace(bucket, lost=lost), memory, level)
        self._add(("given", given), ("mean", _square(mean)), ("lost", _square(lost)))
        self._sketch("lost", lost, bucket)
        if heard is not None:
            self._hear(heard, mean)
        return mean

    def _add(self, *squares: tuple[str, Tensor]) -> None:
        for key, square in squares:
            self.steering.squares[key] += square

    def _sketch(self, name: str, vector: Tensor, bucket: Bucket) -> None:
        """For the mean of all workers': what they owe each other comes to nothing in it, and may be most of what each
        of them keeps.
        """
        if self.steering.sketched:
            before = self.steering.sketches.get(name, 0.0)
            self.steering.sketches[name] = before + sketch(vector, _SKETCH, bucket.segments[0].name)


def _unsaid(codec: Codec, bucket: Bucket, level: float) -> Tensor:
    """What a message about the bucket would lose at a level; it is not sent."""
    part = replace(bucket, scratch=bucket.scratch.part(_UNSAID), spare=None, out=None, owed=None)
    lost = part.room("lost")
    codec.payload(replace(part, flat=part.room("copy").copy_(bucket.flat), lost=lost), level)
    return lost


def _nothing() -> dict[str, float | Tensor]:
    return dict.fromkeys(_SQUARES, 0.0)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole and part else math.nan


def _middle(seconds: Sequence[float]) -> tuple[float, float]:
    """The median, and the deviation as it would be of a normal distribution with this median distance from it."""
    middle = median(seconds)
    return middle, 1.4826 * median(abs(each - middle) for each in seconds)


def _square(tensor: Tensor) -> Tensor:
    """On the tensor's device: only a decision waits for it."""
    return torch.linalg.vector_norm(tensor, dtype=torch.promote_types(tensor.dtype, torch.float32)).double() ** 2


def _product(one: Tensor, other: Tensor) -> Tensor:
    kind = torch.promote_types(torch.promote_types(one.dtype, other.dtype), torch.float32)
    return torch.dot(one.to(kind), other.to(kind)).double()
