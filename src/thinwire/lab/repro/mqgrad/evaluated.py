"""What the runs of `thinwire repro mqgrad` say: seconds to the target, accuracy, levels early and late."""

from __future__ import annotations

import math
from collections.abc import Iterable
from statistics import fmean, pstdev

from thinwire.lab.report import intervals
from thinwire.lab.report.verdicts import WORTH
from thinwire.lab.repro.claims import OURS, PAPER, Claim, Listing
from thinwire.lab.repro.mqgrad.runs import WORKERS, ServedRun

EXACT = "16 bit"  # gives target and seconds
LEARNER, CARRIED, STILL = "mqgrad", "mqgrad, carried over", "mqgrad(rate=0)"
TARGET_AT = 0.8  # of 16 bit's steps
WITHIN = 0.01  # of 16 bit's accuracy counts as the same

RunsByPolicy = dict[str, list[ServedRun]]
Seconds = dict[str, list[float]]  # to the target, by policy; infinite where it was missed


def targets(outcomes: RunsByPolicy) -> list[float]:
    """One per seed, by the rule above."""
    return [min(loss for _, loss in run.curve[: int(TARGET_AT * len(run.curve))]) for run in outcomes[EXACT]]


def seconds_of(outcomes: RunsByPolicy) -> Seconds:
    goals = targets(outcomes)
    return {
        name: [run.seconds_to(goal) for run, goal in zip(runs, goals, strict=True)] for name, runs in outcomes.items()
    }


def table(outcomes: RunsByPolicy, where: str) -> Listing:
    seconds, goals = seconds_of(outcomes), targets(outcomes)
    steps = len(outcomes[EXACT][0].levels)
    title = f"{WORKERS} workers, one server, {where}, the seconds of {steps} steps of 16 bit, {len(goals)} seeds"
    columns = (
        "controller", "seconds to target", "reached", "final accuracy", "steps", "level first/last quarter",
        "controller's own seconds",
    )  # fmt: skip
    rows = [_row(name, runs, seconds[name]) for name, runs in outcomes.items()]
    return Listing(f"{title}, target loss {fmean(goals):.3f}", columns, rows)


def by_seed(outcomes: RunsByPolicy, where: str, first_seed: int) -> Listing:
    """Run by run: a mean hides one that is late."""

    def text(seconds: float) -> str:
        return f"{seconds:.2f}" if math.isfinite(seconds) else "never"

    seconds = seconds_of(outcomes)
    seeds = f"seeds {first_seed} to {first_seed + len(outcomes[EXACT]) - 1}"
    rows = [(name, "  ".join(map(text, each))) for name, each in seconds.items()]
    return Listing(f"Seconds to target, {where}, {seeds}", ("controller", "seed by seed"), rows)


def _row(name: str, runs: list[ServedRun], seconds: list[float]) -> tuple[str, ...]:
    reached = [each for each in seconds if math.isfinite(each)]
    accuracies = [run.accuracy for run in runs]
    return (
        name,
        f"{fmean(reached):.2f} ± {pstdev(reached):.2f}" if reached else "never",
        f"{len(reached)}/{len(runs)}",
        f"{fmean(accuracies):.3f} ± {pstdev(accuracies):.3f}",
        f"{fmean(len(run.levels) for run in runs):.0f}",
        f"{_level(runs, first=True):.3g} / {_level(runs, first=False):.3g}",
        f"{fmean(run.controller_seconds for run in runs):.3f}",
    )


def _level(runs: list[ServedRun], *, first: bool) -> float:
    quarters = [max(1, len(run.levels) // 4) for run in runs]
    return fmean(
        fmean(run.levels[:quarter] if first else run.levels[-quarter:])
        for run, quarter in zip(runs, quarters, strict=True)
    )


def claims_of(outcomes: RunsByPolicy, fixed: Iterable[str], title: str, source: str = PAPER) -> list[Claim]:
    """`fixed`: the rows whose level never changes; `title`: of the study; `source`: who says that the learner is no
    later and no less accurate."""
    on, seconds = f", {title}", seconds_of(outcomes)
    to_target = {name: fmean(each) for name, each in seconds.items()}  # infinite if a seed never reached it
    accuracy = {name: fmean(run.accuracy for run in runs) for name, runs in outcomes.items()}
    best = min(fixed, key=lambda name: to_target[name])
    claims = []
    for name in (LEARNER, CARRIED):
        if name not in outcomes:
            continue
        closeness = intervals.paired(*([run.accuracy for run in outcomes[each]] for each in (name, EXACT)))
        claims += [
            Claim(
                claim=f"{name}: reaches the target no later than the best fixed level{on}",
                measured=_seconds_text(seconds[name]),
                expected=f"{_seconds_text(seconds[best])} ({best}), certainly less than {WORTH:g} times that",
                verdict=_no_later(seconds[name], seconds[best]),
                source=source,
                reason=_times_text(seconds[name], seconds[best]),
            ),
            Claim(
                claim=f"{name}: same final accuracy as 16 bit{on}",
                measured=f"{accuracy[name]:.3f}",
                expected=f"at least {accuracy[EXACT]:.3f} less {WITHIN}",
                verdict=intervals.verdict(closeness, WITHIN),
                source=source,
                reason=f"the difference is {closeness.text('+.3f')}",
            ),
        ]
    claims.append(_learning_claim(outcomes, seconds, on))
    if source == PAPER and "60mbit" in title:  # where the wire rules
        early, late = ([_level([run], first=first) for run in outcomes[LEARNER]] for first in (True, False))
        claims.append(
            Claim(
                claim=f"mqgrad: few bits early, more bits later{on}",
                measured=f"{fmean(early):.1f} bits in the first quarter, {fmean(late):.1f} in the last",
                expected="more in the last",
                verdict=_above(intervals.paired(late, early)),
                source=PAPER,
            )
        )
    return claims


def _learning_claim(outcomes: RunsByPolicy, seconds: Seconds, on: str) -> Claim:
    without, learnt = _reached(seconds, STILL, LEARNER)
    first, last = (
        " and ".join(f"{_level(outcomes[name], first=first):.2g}" for name in (LEARNER, STILL))
        for first in (True, False)
    )
    return Claim(
        claim=f"learning helps: mqgrad is at the target before the same rule without learning{on}",
        measured=_seconds_text(seconds[LEARNER]),
        expected=f"less than {_seconds_text(seconds[STILL])}",
        verdict=_above(intervals.ratio(without, learnt)) if learnt else "level",
        source=OURS,
        reason=f"with learning and without the level is {first} in the first quarter, {last} in the last",
    )


def _reached(seconds: dict[str, list[float]], *names: str) -> tuple[list[float], ...]:
    """Of these, on the seeds on which all reached the target."""
    pairs = [pair for pair in zip(*(seconds[name] for name in names), strict=True) if all(map(math.isfinite, pair))]
    return tuple([pair[at] for pair in pairs] for at in range(len(names)))


def _above(gain: intervals.Interval) -> str:
    """Whether a difference is above nothing; none at all is not."""
    if not math.isfinite(gain.half):
        return intervals.verdict(gain)
    return "holds" if gain.low > 0 else "fails" if gain.high < 0 else "level"


def _no_later(ours: list[float], theirs: list[float]) -> str:
    """Seed by seed; who missed the target is later than who did not. Where one level is the best from start to end,
    nobody can be sooner, so less than WORTH later counts as no later, if it is certain."""
    if not all(map(math.isfinite, ours)):
        return "fails"
    if not all(map(math.isfinite, theirs)):
        return "holds"
    return intervals.on_par(intervals.ratio(theirs, ours), math.log(WORTH))


def _times_text(ours: list[float], theirs: list[float]) -> str:
    ratios = (f"{a / b:.2g}" if math.isfinite(a) else "never there" for a, b in zip(ours, theirs, strict=True))
    return f"its seconds over those of the best, seed by seed: {', '.join(ratios)}"


def _seconds_text(seconds: list[float]) -> str:
    missed = sum(math.isinf(each) for each in seconds)
    return f"not reached in {missed} of {len(seconds)}" if missed else f"{fmean(seconds):.2f} s"
