"""Paired differences over seeds, with 95% intervals by Student's t: what so few runs can tell apart, and what not."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

# The 97.5% quantile of Student's t, by degrees of freedom.
QUANTILES = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262, 10: 2.228, 11: 2.201,
    12: 2.179, 13: 2.160, 14: 2.145, 15: 2.131, 16: 2.120, 17: 2.110, 18: 2.101, 19: 2.093, 20: 2.086, 25: 2.060,
    30: 2.042,
}  # fmt: skip


@dataclass(frozen=True)
class Interval:
    """A mean and how far to either side the truth may lie; infinitely far where one run is all there is."""

    mean: float
    half: float

    @property
    def low(self) -> float:
        return self.mean - self.half

    @property
    def high(self) -> float:
        return self.mean + self.half

    def text(self, form: str = "+.1f", scale: float = 1.0) -> str:
        """Such as "+0.3 ±0.2"; of one run there is nothing after ±."""
        spread = f" ±{self.half * abs(scale):{form.lstrip('+')}}" if math.isfinite(self.half) else ""
        return f"{self.mean * scale + 0.0:{form}}{spread}"


def quantile(freedom: int) -> float:
    """Of Student's t, 97.5%; between the table's rows the next smaller number of degrees, which is the wider."""
    return QUANTILES[max(known for known in QUANTILES if known <= freedom)]


def interval(values: Sequence[float]) -> Interval:
    """The mean of equally good values, and its 95% interval."""
    if len(values) < 2 or any(math.isnan(value) for value in values):
        return Interval(mean(values), math.inf)
    return Interval(mean(values), quantile(len(values) - 1) * stdev(values) / math.sqrt(len(values)))


def paired(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """Ours minus theirs, pair by pair."""
    return interval([a - b for a, b in zip(ours, theirs, strict=True)])


def ratio(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """log(ours / theirs), pair by pair: exp of its ends are those of the ratio."""
    return paired([math.log(each) for each in ours], [math.log(each) for each in theirs])


def verdict(difference: Interval, margin: float = 0.0) -> str:
    """Whether a difference is there, seen from above: "holds", "level" or "fails".

    holds: the whole interval lies above -margin. fails: all of it lies below. level: the runs cannot tell, and one run
    alone never can; unless one of the two sides failed, which is infinitely worse.
    """
    if not math.isfinite(difference.half):
        return _without_interval(difference)
    if difference.low >= -margin:
        return "holds"
    return "fails" if difference.high < -margin else "level"


def on_par(difference: Interval, margin: float) -> str:
    """Whether ours is as good as theirs: "fails" where the interval says that it is worse, by however little, unless it
    is certainly less than `margin`; "level" where the runs cannot tell.
    """
    if not math.isfinite(difference.half):
        return _without_interval(difference)
    if difference.low >= -margin:
        return "holds"
    return "fails" if difference.high < 0 else "level"


def _without_interval(difference: Interval) -> str:
    if math.isfinite(difference.mean):
        return "level"
    return "holds" if difference.mean > 0 else "fails"
