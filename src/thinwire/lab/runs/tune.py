"""`compare --tune`: every row's own learning rate, from one grid, by validation examples; none of the test.

A row begins with the middle of the grid and climbs: as long as the best of what was tried is at its end, the next rate
beyond it is tried. So six runs a row are enough where the task's own rate is about right, and none is wasted far off.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

from thinwire.lab.runs import curves
from thinwire.lab.runs.record import Run, RunPlan
from thinwire.lab.runs.timing import training

GRID = (0.125, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # times the task's own rate
MIDDLE = (0.5, 1.0, 2.0)  # which everybody tries
SEEDS = (1000, 1001)  # none that anything is evaluated on

Row = tuple[str, str, str]  # task, exchange, name of the plan


def row_of(plan: RunPlan) -> Row:
    return plan.task, plan.exchange, plan.name


@dataclass(frozen=True)
class Tuned:
    """A row's scores over the grid: the rolling mean that a run ends with, the mean over SEEDS. NaN: diverged."""

    row: Row
    rising: bool
    metric: str
    scores: dict[float, float]

    @property
    def rate(self) -> float:
        """The best of the grid; of equals the one nearest to the task's own."""
        sign = 1 if self.rising else -1

        def worth(rate: float) -> tuple[float, float]:
            score = self.scores[rate]
            return (-math.inf if math.isnan(score) else sign * score, -abs(math.log(rate)))

        return max(self.scores, key=worth)

    @property
    def at_the_edge(self) -> bool:
        """A still better rate may lie beyond what was tried."""
        return self.rate in (min(self.scores), max(self.scores))

    @property
    def beyond(self) -> float | None:
        """The rate to try next; None: the best one is known."""
        at = GRID.index(self.rate)
        further = GRID[max(0, at - 1) : at + 2]
        return next((rate for rate in further if rate not in self.scores), None)


def tuning(plans: Sequence[RunPlan], found: Sequence[Tuned] = ()) -> list[RunPlan]:
    """The next runs towards the best rates of the rows of `plans`, the baseline's first; none: they are found.

    found: what is known by now.
    """
    known = {each.row: each for each in found}
    rows = {row_of(plan): plan for plan in plans}
    first = sorted(rows.values(), key=lambda plan: not curves.baseline_plan(plan))

    def rates(plan: RunPlan) -> tuple[float, ...]:
        so_far = known.get(row_of(plan))
        return MIDDLE if so_far is None else () if so_far.beyond is None else (so_far.beyond,)

    return [
        replace(training(plan), seed=seed, rate=rate, tested=False)
        for plan in first
        for rate in rates(plan)
        for seed in SEEDS
    ]


def tuned(runs: Sequence[Run]) -> list[Tuned]:
    """What became of them, row by row. A run that failed or diverged counts as diverged."""
    rows: dict[Row, dict[float, list[float]]] = {}
    about: dict[Row, Run] = {}
    for run in runs:
        ends = curves.rolling([point.score for point in run.curve]) if run.reason is None else []
        rows.setdefault(row_of(run.plan), {}).setdefault(run.plan.rate, []).append(ends[-1] if ends else math.nan)
        about[row_of(run.plan)] = run
    return [
        Tuned(row, about[row].rising, about[row].metric, {rate: mean(found) for rate, found in scores.items()})
        for row, scores in rows.items()
    ]
