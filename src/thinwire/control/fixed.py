"""fixed: always the same level. The controller every other must beat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from thinwire.control.controller import Controller, Observation, check_interval, chosen


@dataclass
class Fixed(Controller):
    """One level of the knob, for good."""

    level: float  # of the knob's menu; lower => fewer bytes, more error
    interval: int = 1000  # steps between two decisions, of which none changes anything

    summary: ClassVar[str] = "always the same level"

    def __post_init__(self) -> None:
        check_interval(self.interval, "fixed")

    def menu(self, menu: Sequence[float]) -> tuple[float, ...]:
        return chosen((self.level,), menu, "fixed")

    def first(self, default: float, menu: Sequence[float]) -> float:
        return self.level

    def decide(self, seen: Observation) -> float:
        return self.level
