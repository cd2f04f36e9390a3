"""`compare --tune`: every row's own learning rate, from one grid, by validation examples; none of the test."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean

from thinwire.lab.runs import curves
from thinwire.lab.runs.record import Run, RunPlan
from thinwire.lab.runs.timing import training

GRID = (0.25, 0.5, 1.0, 2.0, 4.0)  # times the task's own rate
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
        """A still better rate may lie beyond the grid."""
        return self.rate in (min(self.scores), max(self.scores))


def tuning(plans: Sequence[RunPlan]) -> list[RunPlan]:
    """The runs that find rates for the rows of `plans`: the baseline's first, then everybody else's."""
    rows = {row_of(plan): plan for plan in plans}
    first = sorted(rows.values(), key=lambda plan: not curves.baseline_plan(plan))
    return [
        replace(training(plan), seed=seed, rate=rate, tested=False) for plan in first for seed in SEEDS for rate in GRID
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
