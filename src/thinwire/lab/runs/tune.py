"""`compare --tune`: every row's own learning rate, from one grid, by validation examples; none of the test.

A row begins with the middle of the grid and one seed, and climbs: as long as the best of what was tried is at its end,
the next rate beyond it is tried. The other seed decides among those that are NEAR the best with the first one, where
there are several. So three to six runs a row are enough where the task's own rate is about right.

Two seeds are few: the best of several equally good rates is the luckiest. A row leaves the baseline's rate, and the
baseline the task's own, only for one that is better by more than what counts as the same.
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
# Times what counts as the same score: a point of accuracy, 2% of others. Who is further behind the best with the first
# seed is not tried with the others.  # higher => more trials, none given up too soon
NEAR = 2.0

Row = tuple[str, str, str]  # task, exchange, name of the plan


def row_of(plan: RunPlan) -> Row:
    return plan.task, plan.exchange, plan.name


@dataclass(frozen=True)
class Tuned:
    """A row's trials: by rate, the rolling mean that a run ends with, in the order of SEEDS. NaN: diverged."""

    row: Row
    rising: bool
    metric: str
    trials: dict[float, tuple[float, ...]]
    home: float = 1.0  # the rate to stay near: the baseline's, and for the baseline the task's own

    @property
    def scores(self) -> dict[float, float]:
        """By rate, the mean over the seeds that it was tried with."""
        return {rate: mean(found) for rate, found in self.trials.items()}

    @property
    def rate(self) -> float:
        """Of those tried with most seeds whose score counts as the same as the best's, the one nearest to `home`."""
        seeds = max(map(len, self.trials.values()))
        scores = {rate: self.scores[rate] for rate, found in self.trials.items() if len(found) == seeds}
        best = self._best(scores)
        same = self._near(scores, best, 1.0) or [best]
        least = min(map(self._away, same))
        return self._best({rate: scores[rate] for rate in same if self._away(rate) == least})

    @property
    def at_the_edge(self) -> bool:
        """A still better rate may lie beyond what was tried."""
        return self.rate in (min(self.trials), max(self.trials))

    @property
    def ahead(self) -> list[tuple[float, int]]:
        """The rates and seeds to try next; none: the best rate is known."""
        first = {rate: found[0] for rate, found in self.trials.items()}
        best = self._best(first)
        if beyond := self._beyond(best):
            return [(rate, SEEDS[0]) for rate in beyond]
        contenders = self._near(first, best, NEAR)
        rivals = {*contenders, *(rate for rate, found in self.trials.items() if len(found) > 1)}
        seconds = [(rate, seed) for rate in contenders for seed in SEEDS[len(self.trials[rate]) :] if len(rivals) > 1]
        return seconds or [(rate, SEEDS[0]) for rate in self._beyond(self.rate)]

    def _best(self, scores: dict[float, float]) -> float:
        """Where all diverge the lowest: still lower ones may not."""
        sign = 1 if self.rising else -1

        def worth(rate: float) -> tuple[float, float]:
            score = scores[rate]
            return (-math.inf, -rate) if math.isnan(score) else (sign * score, -self._away(rate))

        return max(scores, key=worth)

    def _near(self, scores: dict[float, float], best: float, times: float) -> list[float]:
        """Whose score is the best one within so many times what counts as the same; none where all diverge."""
        margin = times * curves.kept(self.metric, scores[best])
        return [rate for rate, score in scores.items() if abs(score - scores[best]) <= margin]

    def _away(self, rate: float) -> float:
        return abs(math.log(rate / self.home))

    def _beyond(self, rate: float) -> list[float]:
        """The neighbour that was not tried yet, if any."""
        at = GRID.index(rate)
        return [other for other in GRID[max(0, at - 1) : at + 2] if other not in self.trials]


def tuning(plans: Sequence[RunPlan], found: Sequence[Tuned] = ()) -> list[RunPlan]:
    """The next runs towards the best rates of the rows of `plans`, the baseline's first; none: they are found.

    found: what is known by now.
    """
    known = {each.row: each.ahead for each in found}
    rows = {row_of(plan): plan for plan in plans}
    first = sorted(rows.values(), key=lambda plan: not curves.baseline_plan(plan))
    return [
        replace(training(plan), seed=seed, rate=rate, tested=False)
        for plan in first
        for rate, seed in known.get(row_of(plan), [(rate, SEEDS[0]) for rate in MIDDLE])
    ]


def tuned(runs: Sequence[Run]) -> list[Tuned]:
    """What became of them, row by row. A run that failed or diverged counts as diverged."""
    rows: dict[Row, dict[float, tuple[float, ...]]] = {}
    about: dict[Row, Run] = {}
    for run in runs:
        ends = curves.rolling([point.score for point in run.curve]) if run.reason is None else []
        trials = rows.setdefault(row_of(run.plan), {})
        trials[run.plan.rate] = (*trials.get(run.plan.rate, ()), ends[-1] if ends else math.nan)
        about[row_of(run.plan)] = run
    found = [Tuned(row, about[row].rising, about[row].metric, trials) for row, trials in rows.items()]
    homes = {each.row[0]: each.rate for each in found if curves.baseline_plan(about[each.row].plan)}
    return [
        each if curves.baseline_plan(about[each.row].plan) else replace(each, home=homes.get(each.row[0], 1.0))
        for each in found
    ]
