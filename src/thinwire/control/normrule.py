"""normrule: bits follow the gradient's norm under a budget (the DQSGD rule: Yan et al., 2021)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from thinwire.control.controller import Controller, Observation, check_interval, chosen


@dataclass
class NormRule(Controller):
    """bits_t = log2(T |g_t| + 1) + 1, rounded to the nearest level; T is set by the budget.

    Norms fall while training, so the rule spends its bits early. Only for knobs that count bits.

    Ours: the rule's authors give T by the total budget of a run of known length. Here T is set so that the mean of the
    bits over the norms seen so far is `budget`, which needs no known length.
    """

    budget: float = 4.0  # mean bits per entry; lower => fewer bytes, more error
    levels_from: tuple[float, ...] | None = None
    interval: int = 10

    summary: ClassVar[str] = "bits follow the gradient norm under a budget"

    _norms: list[float] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        check_interval(self.interval, "normrule")
        if not self.budget > 1:
            raise ValueError(f"normrule: the budget must be above 1 bit, got {self.budget!r}")

    def menu(self, menu: Sequence[float]) -> tuple[float, ...]:
        levels = chosen(self.levels_from, menu, "normrule")
        if any(level != round(level) or not 1 <= level <= 32 for level in levels):
            raise ValueError(f"normrule chooses bits, 1 to 32; this knob's levels are {levels}")
        return levels

    def decide(self, seen: Observation) -> float:
        if not math.isfinite(seen.gradient_norm):
            return seen.level
        self._norms.append(seen.gradient_norm)
        bits = _bits(self._scale() * seen.gradient_norm)
        return min(self.levels, key=lambda level: (abs(level - bits), level))

    def _scale(self) -> float:
        """T such that the mean bits over all norms so far is the budget; found by halving."""
        low, high = -60.0, 60.0
        for _ in range(60):
            middle = (low + high) / 2
            mean = sum(_bits(2.0**middle * norm) for norm in self._norms) / len(self._norms)
            low, high = (middle, high) if mean < self.budget else (low, middle)
        return 2.0**high

    def state_dict(self) -> dict[str, Any]:
        return {"norms": list(self._norms)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._norms = [float(norm) for norm in state["norms"]]


def _bits(scaled_norm: float) -> float:
    return math.log2(scaled_norm + 1) + 1
