"""Controller and Observation: who turns the knob, and all it gets to see. Numbers only, never tensors."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from thinwire.core.spec import Specced

WINDOW = 8  # how many smoothed losses an observation remembers


@dataclass(frozen=True)
class Observation:
    """How training went since the last decision, as the mean over all workers."""

    step: int
    level: float  # in use since the last decision
    seconds_per_step: float  # in the middle of the interval's steps: an evaluation between two is not a step
    bytes_per_step: float  # that left a worker
    gradient_norm: float  # of the group's mean, in the last step
    # |what a worker's message lost|^2 / |what it was to hold|^2 in the last step; NaN: unknown. Where it is `owed`, and
    # for controllers that need the noise: |the mean of what all owe|^2 / |the mean of their gradients|^2.
    compression_error: float
    losses: tuple[float, ...]  # the mean loss of each of the last WINDOW intervals, newest last; NaN where unknown
    # For controllers that need the noise: |a worker's gradient|^2 and |the group's mean|^2, mean over the steps that
    # were listened to; and what another level's message would have lost.
    given_square: float = math.nan
    mean_square: float = math.nan
    wondered_level: float = math.nan
    wondered_error: float = math.nan
    workers: int = 1
    relayed: float = 0.0  # 1: the mean comes back encoded once more, at the same level
    owed: float = 0.0  # 1: what messages lose is sent later, by error feedback; the error is then what is owed by now
    product: float = math.nan  # of a worker's gradient and the group's mean, in those steps
    seconds_deviation: float = math.nan  # of one step, by the middle of the distances from seconds_per_step

    def numbers(self) -> list[float]:
        return [
            float(self.step), self.level, self.seconds_per_step, self.bytes_per_step, self.gradient_norm,
            self.compression_error, self.given_square, self.mean_square, self.wondered_level, self.wondered_error,
            float(self.workers), self.relayed, self.owed, self.product,
            self.seconds_deviation, *self.losses,
        ]  # fmt: skip

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Observation:
        step, *five = numbers[:6]
        *noise, workers, relayed, owed, product, deviation = numbers[6:15]
        known = (tuple(numbers[15:]), *noise, round(workers), relayed, owed, product, deviation)
        return cls(round(step), *five, *known)  # type: ignore[call-arg]

    @property
    def loss(self) -> float:
        return self.losses[-1] if self.losses else math.nan


class Controller(Specced, ABC):
    """Decides, every `interval` steps or when `next_decision` says, which level of a scheme's knob to use next.

    Subclasses are dataclasses whose fields are the options of the spec text. Every worker has one, and all
    see and decide alike (see `steering`). `start` makes what it learns; that is its state.
    """

    knob = "bits"  # the name of what is turned; who starts it says so
    interval: int
    needs_loss: ClassVar[bool] = False
    needs_noise: ClassVar[bool] = False  # norms of the `interval` steps before a decision, not only of the last
    summary: ClassVar[str]

    def menu(self, menu: Sequence[float]) -> tuple[float, ...]:
        """Which of the knob's levels this controller chooses from, fewest bytes first; ValueError for others."""
        return tuple(menu)

    def first(self, default: float, menu: Sequence[float]) -> float:
        """The level before the first decision; `default` is the scheme's own."""
        return default if default in menu else menu[-1]

    def start(self, menu: Sequence[float]) -> None:
        """Begin, where the decisions are made, with the levels to choose from."""
        self.levels: tuple[float, ...] = tuple(menu)

    def next_decision(self, step: int) -> int:
        """The first step, counted from 1 and from this one on, that a decision comes after; of the step alone, so that
        all workers agree."""
        return -(-step // self.interval) * self.interval

    def wonders(self, level: float) -> float | None:
        """Another level, while `level` is in use, whose error to measure before the next decision; None: none."""
        return None

    @abstractmethod
    def decide(self, seen: Observation) -> float:
        """The level to use from the next step on."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state:
            raise ValueError(f"{self.name} keeps no state, got {', '.join(state)}")


def chosen(wanted: tuple[float, ...] | None, menu: Sequence[float], who: str) -> tuple[float, ...]:
    """`wanted` in the knob's order; everything where nothing is wanted."""
    if wanted is None:
        return tuple(menu)
    unknown = [level for level in wanted if level not in menu]
    if unknown or not wanted:
        raise ValueError(f"{who}: levels must be among {tuple(menu)}, got {wanted!r}")
    return tuple(level for level in menu if level in wanted)


def check_interval(interval: object, who: str) -> None:
    if not isinstance(interval, int) or interval < 1:
        raise ValueError(f"{who}: interval must be a number of steps, 1 or more, got {interval!r}")
