"""normrule: bits follow the gradient's norm under a budget (the DQSGD rule: Yan et al., 2021)."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np

from thinwire.control.controller import Controller, Observation, check_interval, chosen

BINS = 256  # for every doubling of the norm: a norm is remembered to 0.14 percent, its bits to 0.002
ORDERS = 128  # what is beyond 2^128 counts as that, and what is below 2^-128 as nothing: float32's own range


@dataclass
class NormRule(Controller):
    """bits_t = log2(T |g_t| + 1) + 1, rounded to the nearest level; T is set by the budget.

    Norms fall while training, so the rule spends its bits early. Only for knobs that count bits.

    Ours: the rule's authors give T by the total budget of a run of known length. Here T is set so that the mean of the
    bits over the norms seen so far is `budget`, which needs no known length. Norms are remembered by how many fell into
    each of many narrow bins, so a long run costs no more than a short one.
    """

    budget: float = 4.0  # mean bits per element; lower => fewer bytes, more error
    levels_from: tuple[float, ...] | None = None  # None: the knob's whole menu
    interval: int = 10  # steps between two decisions; lower => follows the norm more closely

    summary: ClassVar[str] = "bits follow the gradient norm under a budget"

    _seen: Counter[int] = field(default_factory=Counter, init=False, repr=False)  # norms, by bin

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
        place = _bin(seen.gradient_norm)
        self._seen[place] += 1
        bits = math.log2(self._scale() * 2.0 ** (place / BINS) + 1) + 1
        return min(self.levels, key=lambda level: (abs(level - bits), level))

    def _scale(self) -> float:
        """T such that the mean bits over all norms so far is the budget; found by halving."""
        norms = np.exp2(np.array(list(self._seen), dtype=np.float64) / BINS)
        counts = np.array(list(self._seen.values()), dtype=np.float64)
        total = float(counts.sum())
        low, high = -60.0, 60.0
        for _ in range(60):
            middle = (low + high) / 2
            mean = float((np.log2(2.0**middle * norms + 1) * counts).sum()) / total + 1
            low, high = (middle, high) if mean < self.budget else (low, middle)
        return 2.0**high

    def state_dict(self) -> dict[str, Any]:
        return {"bins": list(self._seen), "counts": list(self._seen.values())}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._seen = Counter()
        if "norms" in state:  # of a version that kept every norm
            self._seen.update(_bin(float(norm)) for norm in state["norms"])
        else:
            self._seen.update(dict(zip(map(int, state["bins"]), map(int, state["counts"]), strict=True)))


def _bin(norm: float) -> int:
    order = math.log2(norm) if norm > 0 else -ORDERS
    return round(BINS * max(-ORDERS, min(ORDERS, order)))
