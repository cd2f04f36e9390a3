"""uniform: a level drawn at random. What a learner must beat to have learnt anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from thinwire.control.controller import Controller, Observation, check_interval, chosen
from thinwire.core import randomness


@dataclass
class Uniform(Controller):
    """Each of the levels with the same probability, drawn anew every `interval` steps.

    The draw is a function of seed and step, so a resumed run continues with the same levels.
    """

    levels_from: tuple[float, ...] | None = None  # None: the knob's whole menu
    seed: int = 0  # of the draws
    interval: int = 10  # steps between two draws

    summary: ClassVar[str] = "a level drawn at random"

    def __post_init__(self) -> None:
        check_interval(self.interval, "uniform")

    def menu(self, menu: Sequence[float]) -> tuple[float, ...]:
        return chosen(self.levels_from, menu, "uniform")

    def decide(self, seen: Observation) -> float:
        return self.levels[randomness.key(self.seed, seen.step, "control.random") % len(self.levels)]
