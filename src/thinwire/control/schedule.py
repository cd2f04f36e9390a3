"""schedule: levels by step, set beforehand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from thinwire.control.controller import Controller, Observation, check_interval, chosen


@dataclass
class Schedule(Controller):
    """`levels_at` maps steps to levels: ((0, 2), (200, 4)) is level 2 from the start and 4 from step 200 on.

    A change takes effect at the first multiple of `interval` that is not before its step.
    """

    levels_at: tuple[tuple[int, float], ...]  # (step, level from there on), the first at step 0
    interval: int = 10  # steps between two decisions; lower => nearer to the steps named

    summary: ClassVar[str] = "levels by step, set beforehand"

    def __post_init__(self) -> None:
        check_interval(self.interval, "schedule")
        steps = [step for step, _ in self.levels_at]
        if not steps or steps[0] != 0 or steps != sorted(set(steps)):
            raise ValueError(f"schedule: steps must begin with 0 and rise, got {self.levels_at!r}")

    def menu(self, menu: Sequence[float]) -> tuple[float, ...]:
        return chosen(tuple(level for _, level in self.levels_at), menu, "schedule")

    def first(self, default: float, menu: Sequence[float]) -> float:
        return self.levels_at[0][1]

    def decide(self, seen: Observation) -> float:
        return [level for step, level in self.levels_at if step <= seen.step][-1]
