"""How long a step takes under each level, from few steps that vary."""

from __future__ import annotations

import math
from collections.abc import Sequence


class LevelSeconds:
    """Seconds of a step by level: a line that never falls, and off it as far as a level's own steps say so.

    Steps of milliseconds vary by a third of themselves, and a level that was unlucky in its ten would never be
    visited again. So all levels' steps make one line, for what a level adds is bytes. Before anything is known, from
    the lowest level to the highest a step is taken to become longer by itself: who is to go up must gain by it. Then
    steps decide, once there are enough of them for how they vary. A level's own mean counts by the same measure. Old
    steps fade, so that what is no longer visited becomes unknown again.

    1. of every level l the steps w_l, fading, and their mean seconds s_l; of all a step's deviation v, in its seconds;
    2. slope = (sum w_l (l - mean l)(s_l - mean s) + d mean s / R) / (sum w_l (l - mean l)^2 + d), at least 0,
       where R is the range of the levels and d = 2 (v R)^2 how much there is to doubt;
    3. of(l) = line + w_l / (w_l + 2 (v / OFF)^2) (s_l - line).

    Both 2s: a median of steps that follow each other varies by about twice a mean's variance.
    """

    def __init__(self, levels: Sequence[float]) -> None:
        self._range = max(levels) - min(levels)
        self._known: dict[float, tuple[float, float]] = {}  # by level: steps, fading, and their mean seconds
        self._varies = 0.0  # a step's deviation, as a share of its seconds; smoothed

    def note(self, level: float, steps: int, seconds: float, deviation: float) -> None:
        """`steps` under `level` took `seconds` each, with this deviation; NaN: unknown."""
        self._known = {each: (_FADE * weight, mean) for each, (weight, mean) in self._known.items()}
        weight, mean = self._known.get(level, (0.0, seconds))
        weight += max(steps, 1)
        self._known[level] = weight, mean + max(steps, 1) / weight * (seconds - mean)
        if math.isfinite(deviation) and seconds > 0:
            news = deviation / seconds
            self._varies += (_NEWS if self._varies else 1.0) * (news - self._varies)

    def of(self, level: float) -> float:
        """What a step under this level will take; levels that were never in use are on the line."""
        total = sum(weight for weight, _ in self._known.values())
        middle = sum(weight * each for each, (weight, _) in self._known.items()) / total
        seconds = sum(weight * mean for weight, mean in self._known.values()) / total
        rise = sum(weight * (each - middle) * (mean - seconds) for each, (weight, mean) in self._known.items())
        width = sum(weight * (each - middle) ** 2 for each, (weight, _) in self._known.items())
        doubt = 2 * (self._varies * self._range) ** 2 or (0.0 if width else 1.0)
        believed = seconds / (self._range or 1.0)
        slope = max(0.0, (rise + doubt * believed) / (width + doubt))
        line = max(seconds + slope * (level - middle), _LEAST * seconds)
        weight, mean = self._known.get(level, (0.0, 0.0))
        return line if not weight else line + weight / (weight + 2 * (self._varies / _OFF) ** 2) * (mean - line)

    def state(self) -> list[list[float]]:
        return [[self._varies], *([level, *known] for level, known in self._known.items())]

    def load(self, state: Sequence[Sequence[float]]) -> None:
        """Of a state from before there were weights, too. ValueError for what is none."""
        entries = [[float(each) for each in entry] for entry in state]
        varies = entries.pop(0)[0] if entries and len(entries[0]) == 1 else 0.0
        known = {entry[0]: (entry[1] if len(entry) == 3 else 1.0, entry[-1]) for entry in entries}
        if not all(0 <= each < math.inf for each in (varies, *(mean for _, mean in known.values()))) or not all(
            0 < weight < math.inf for weight, _ in known.values()
        ):
            raise ValueError(f"these are no seconds by level: {state!r}")
        self._varies, self._known = varies, known


_FADE = 0.9  # of steps, per decision
_NEWS = 0.3  # of an interval in how steps vary
_OFF = 0.1  # of its seconds by which a level may well lie off the line; higher => a level's own steps count sooner
_LEAST = 0.25  # of the mean: a line through noise does not lead to nothing
