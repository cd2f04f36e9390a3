"""What curves of scores say: rolling means, when one meets a target, and the target that the baseline sets.

A single evaluation can be lucky; the mean of WINDOW that follow each other has to be there. Between two of them the
curve is taken to be straight. The baseline's own can be lucky, too: the target lies as far below it as counts as the
same, or who ends level with it would be at it by the toss of a coin.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from thinwire.lab.runs.record import CurvePoint, Run, RunPlan

WINDOW = 3  # evaluated steps
HELD_AT = 0.9  # of its steps: what the baseline holds then, less what does not count, is everybody's target
KEPT_POINTS = 0.5  # an accuracy within this much (in percent) of the baseline's counts as the same
KEPT_SHARE = 0.01  # the same for other metrics, as a share of the baseline's
BASELINE = "fp16"  # over allreduce, in every step


def rolling(scores: Sequence[float]) -> list[float]:
    """The mean of the last WINDOW scores, from the first score on that has so many; of a shorter curve, of all."""
    window = min(WINDOW, len(scores))
    return [mean(scores[end - window : end]) for end in range(window, len(scores) + 1)] if window else []


def crossing(curve: Sequence[CurvePoint], target: float, *, rising: bool) -> float | None:
    """Training seconds until the rolling mean meets the target; None: never."""
    sign = 1 if rising else -1
    means = [sign * each for each in rolling([point.score for point in curve])]
    seconds = [point.seconds for point in curve[len(curve) - len(means) :]]
    for at, score in enumerate(means):
        if score >= sign * target:
            if at == 0 or means[at - 1] != means[at - 1]:  # nothing, or a NaN, to come from
                return seconds[at]
            share = (sign * target - means[at - 1]) / (score - means[at - 1])
            return seconds[at - 1] + share * (seconds[at] - seconds[at - 1])
    return None


def held(run: Run) -> float | None:
    """The rolling mean that a run has after HELD_AT of its steps; None: it was not evaluated until then."""
    early = [point.score for point in run.curve if point.step <= HELD_AT * run.steps]
    return rolling(early)[-1] if early else run.curve[-1].score if run.curve else None


def kept(metric: str, score: float) -> float:
    """How far from a baseline's score another may be and count as the same."""
    return KEPT_POINTS / 100 if metric == "accuracy" else KEPT_SHARE * abs(score)


def baseline_plan(plan: RunPlan) -> bool:
    """Whether it is what all others are held against."""
    found = (plan.scheme, plan.exchange, plan.every, plan.controller, plan.compute)
    return found == (BASELINE, "allreduce", 1, None, "fp32")


def set_targets(runs: Sequence[Run]) -> None:
    """Give every run that has no target what the baseline of its own task, network and seed holds, less `kept`."""
    found: dict[tuple[str, str, int], float] = {}
    for run in runs:
        holds = held(run) if baseline_plan(run.plan) and run.reason is None else None
        if holds is not None:
            less = kept(run.metric, holds)
            found[run.plan.task, run.plan.network, run.plan.seed] = holds - less if run.rising else holds + less
    for run in runs:
        if run.target is None:
            run.target = found.get((run.plan.task, run.plan.network, run.plan.seed))
