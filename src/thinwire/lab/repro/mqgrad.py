"""thinwire repro mqgrad: does a learner that sets the bits reach the target no later than the best fixed width?

Real runs: a parameter server, two workers, thin links (shaped where the machine allows it, else paced), seconds of the
wall clock. MQGrad's own reward, learner and results are not public: this checks the claims on our design.

Target, for each seed: the lowest loss that 16 bit has reached by 80% of its steps. No other run is looked at for it.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterable
from pathlib import Path
from statistics import fmean, pstdev

from thinwire.lab.network import links
from thinwire.lab.network.network import Network
from thinwire.lab.report import intervals
from thinwire.lab.repro import _mqgrad_runs as task
from thinwire.lab.repro._mqgrad_runs import Order, ServedRun
from thinwire.lab.repro.claims import PAPER, Claim, Listing, Progress, Reproduction, told

LINK = "auto:60mbit"
STEPS, QUICK_STEPS = 400, 200
EARLIER, QUICK_EARLIER = 12, 4  # runs, on seeds of their own, that the carried-over policy was learnt in
EARLIER_SEEDS = 1_000_000
EXACT = "16 bit"
TARGET_AT = 0.8  # of 16 bit's steps
WITHIN = 0.01  # of 16 bit's accuracy counts as the same

LEARNER, LEARNER_CARRIED = "mqgrad(seed={seed})", "mqgrad(seed={seed}, policy={policy!r})"
CARRIED = "mqgrad, carried over"
FIXED = {f"{bits} bit": f"fixed(level={bits})" for bits in task.MENU}
RunsByPolicy = dict[str, list[ServedRun]]


def policies(steps: int) -> dict[str, str]:
    """Spec by name: every fixed width, the rivals, the learner from its prior and from a policy of earlier runs."""
    return FIXED | {
        "random": "uniform(seed={seed})",
        "schedule: 2, at half-time 4": f"schedule(levels_at=((0, 2), ({steps // 2}, 4)))",
        "norm rule, 4 bits to spend": "normrule(budget=4)",
        "mqgrad": LEARNER,
        CARRIED: LEARNER_CARRIED,
    }


def reproduce(quick: bool, data: Path | None, seeds: int, progress: Progress) -> Reproduction:
    """Every policy on the same seeds. Needs no `data`: the images are embedded. `quick` trains for half as long."""
    net = links.resolved(LINK, task.WORKERS)
    steps, earlier = (QUICK_STEPS, QUICK_EARLIER) if quick else (STEPS, EARLIER)
    with tempfile.TemporaryDirectory(prefix="thinwire-") as folder:
        policy = f"{folder}/policy.pt"
        learn_policy(policy, earlier, steps, net, progress)
        return summary(run_policies(range(seeds), policy, steps, net, progress), net)


def learn_policy(policy: str, runs: int, steps: int, net: Network, progress: Progress) -> None:
    """Run after run, each from what the last has learnt."""
    with links.opened(net, task.WORKERS, servers=1) as opened:
        namespaces = opened.by_rank(servers=1) if opened else None
        for seed in range(EARLIER_SEEDS, EARLIER_SEEDS + runs):
            progress(f"mqgrad: earlier runs, seed {seed}")
            spec = LEARNER if seed == EARLIER_SEEDS else LEARNER_CARRIED
            order = Order(spec.format(seed=seed, policy=policy), seed, steps, str(net), learnt=policy)
            task.run_served(order, namespaces)


def run_policies(seeds: Iterable[int], policy: str, steps: int, net: Network, progress: Progress) -> RunsByPolicy:
    """policy: where the carried-over one lies."""
    outcomes: RunsByPolicy = {name: [] for name in policies(steps)}
    with links.opened(net, task.WORKERS, servers=1) as opened:
        namespaces = opened.by_rank(servers=1) if opened else None
        for seed in seeds:  # one seed after the other, so that a busy machine is busy for all policies
            for name, spec in policies(steps).items():
                progress(f"mqgrad: {name}, seed {seed}")
                order = Order(spec.format(seed=seed, policy=policy), seed, steps, str(net))
                outcomes[name].append(task.run_served(order, namespaces))
    return outcomes


def targets(outcomes: RunsByPolicy) -> list[float]:
    """One per seed, by the rule above."""
    return [min(loss for _, loss in run.curve[: int(TARGET_AT * len(run.curve))]) for run in outcomes[EXACT]]


def summary(outcomes: RunsByPolicy, net: Network) -> Reproduction:
    goals = targets(outcomes)
    seconds = {
        name: [run.seconds_to(goal) for run, goal in zip(runs, goals, strict=True)] for name, runs in outcomes.items()
    }
    rows = [_row(name, runs, seconds[name]) for name, runs in outcomes.items()]
    steps = len(outcomes[EXACT][0].levels)
    title = f"{task.WORKERS} workers, one server, {net}, {steps} steps, {len(goals)} seeds"
    columns = (
        "controller", "seconds to target", "reached", "final accuracy", "seconds in all", "bits first/last quarter",
        "controller's own seconds",
    )  # fmt: skip
    table = Listing(f"{title}, target loss {fmean(goals):.3f}", columns, rows)
    return Reproduction(_claims(outcomes, seconds), [table])


def _row(name: str, runs: list[ServedRun], seconds: list[float]) -> tuple[str, ...]:
    reached = [each for each in seconds if math.isfinite(each)]
    accuracies = [run.accuracy for run in runs]
    return (
        name,
        f"{fmean(reached):.2f} ± {pstdev(reached):.2f}" if reached else "never",
        f"{len(reached)}/{len(runs)}",
        f"{fmean(accuracies):.3f} ± {pstdev(accuracies):.3f}",
        f"{fmean(run.seconds for run in runs):.1f}",
        f"{_bits(runs, first=True):.1f} / {_bits(runs, first=False):.1f}",
        f"{fmean(run.controller_seconds for run in runs):.3f}",
    )


def _bits(runs: list[ServedRun], *, first: bool) -> float:
    quarter = len(runs[0].levels) // 4
    return fmean(level for run in runs for level in (run.levels[:quarter] if first else run.levels[-quarter:]))


def _claims(outcomes: RunsByPolicy, seconds: dict[str, list[float]]) -> list[Claim]:
    to_target = {name: fmean(each) for name, each in seconds.items()}  # infinite if a seed never reached it
    accuracy = {name: fmean(run.accuracy for run in runs) for name, runs in outcomes.items()}
    best = min(FIXED, key=lambda name: to_target[name])
    early, late = (_bits(outcomes["mqgrad"], first=first) for first in (True, False))
    claims = []
    for name in ("mqgrad", CARRIED):
        claims += [
            Claim(
                claim=f"{name}: reaches the target no later than the best fixed width",
                measured=_seconds_text(seconds[name]),
                expected=f"at most {to_target[best]:.2f} s ({best})",
                verdict=_no_later(seconds[name], seconds[best]),
                source=PAPER,
            ),
            Claim(
                claim=f"{name}: same final accuracy as 16 bit",
                measured=f"{accuracy[name]:.3f}",
                expected=f"at least {accuracy[EXACT]:.3f} less {WITHIN}",
                verdict=intervals.verdict(
                    intervals.paired(*([run.accuracy for run in outcomes[each]] for each in (name, EXACT))), WITHIN
                ),
                source=PAPER,
            ),
        ]
    few_early = Claim(
        claim="mqgrad: few bits early, more bits later",
        measured=f"{early:.1f} bits in the first quarter, {late:.1f} in the last",
        expected="more in the last",
        verdict=told(late > early),
        source=PAPER,
    )
    return [*claims, few_early]


def _no_later(ours: list[float], theirs: list[float]) -> str:
    """Seed by seed; who missed the target is later than who did not."""
    if not all(map(math.isfinite, ours)):
        return "fails"
    return intervals.verdict(intervals.ratio(theirs, ours)) if all(map(math.isfinite, theirs)) else "holds"


def _seconds_text(seconds: list[float]) -> str:
    missed = sum(math.isinf(each) for each in seconds)
    return f"not reached in {missed} of {len(seconds)}" if missed else f"{fmean(seconds):.2f} s"
