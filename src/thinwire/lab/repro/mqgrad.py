"""thinwire repro mqgrad: does a learner that sets the bits reach the target no later than the best fixed width?

Real runs: a parameter server, two workers, links on which the wire rules and on which computing does (shaped where the
machine allows it, else paced), seconds of the wall clock. MQGrad's own reward, learner and results are not public: this
checks the claims on our design.

Every run gets the seconds that 16 bit takes for its steps, on the same link and seed. Target: the lowest loss that 16
bit has reached by 80% of its steps. No other run is looked at for either.
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
from thinwire.lab.repro.claims import OURS, PAPER, Claim, Listing, Progress, Reproduction, told

LINKS = ("auto:60mbit", "auto:1gbit")
STEPS, QUICK_STEPS = 400, 60  # of 16 bit
MOST = 12  # times as many steps, where the seconds last
EARLIER, QUICK_EARLIER = 12, 2  # runs, on seeds of their own, that the carried-over policy was learnt in
EARLIER_SEEDS = 1_000_000
EXACT = "16 bit"
TARGET_AT = 0.8  # of 16 bit's steps
WITHIN = 0.01  # of 16 bit's accuracy counts as the same

LEARNER, LEARNER_CARRIED = "mqgrad(seed={seed})", "mqgrad(seed={seed}, policy={policy!r})"
CARRIED, STILL = "mqgrad, carried over", "mqgrad(rate=0)"
FIXED = {f"{bits} bit": f"fixed(level={bits})" for bits in task.MENU}
RunsByPolicy = dict[str, list[ServedRun]]


def policies(steps: int) -> dict[str, str]:
    """Spec by name: every fixed width, the rivals, the learner from its prior and from a policy of earlier runs."""
    return FIXED | {
        "random": "uniform(seed={seed})",
        "schedule: 2, at half-time 4": f"schedule(levels_at=((0, 2), ({steps // 2}, 4)))",
        "norm rule, 4 bits to spend": "normrule(budget=4)",
        "a level per halving of the RMS": "halvings of rms",
        "a level per halving of mean/std": "halvings of ratio",
        STILL: "mqgrad(seed={seed}, rate=0)",
        "mqgrad": LEARNER,
        CARRIED: LEARNER_CARRIED,
    }


def reproduce(quick: bool, data: Path | None, seeds: int, progress: Progress) -> Reproduction:
    """Every policy on the same seeds. The images are embedded; with `data`, the folder of Fashion-MNIST, all of its
    test images are evaluated. `quick`: one link, and short."""
    steps, earlier = (QUICK_STEPS, QUICK_EARLIER) if quick else (STEPS, EARLIER)
    claims, tables = [], []
    for link in LINKS[:1] if quick else LINKS:
        net = links.resolved(link, task.WORKERS)
        with tempfile.TemporaryDirectory(prefix="thinwire-") as folder:
            policy = f"{folder}/policy.pt"
            learn_policy(policy, earlier, steps, net, progress)
            found = summary(run_policies(range(seeds), policy, steps, net, progress, data), net, link)
        claims += found.claims
        tables += found.tables
    return Reproduction(claims, tables)


def learn_policy(policy: str, runs: int, steps: int, net: Network, progress: Progress) -> None:
    """Run after run, each from what the last has learnt."""
    with links.opened(net, task.WORKERS, servers=1) as opened:
        namespaces = opened.by_rank(servers=1) if opened else None
        for seed in range(EARLIER_SEEDS, EARLIER_SEEDS + runs):
            progress(f"mqgrad: earlier runs, seed {seed}")
            spec = LEARNER if seed == EARLIER_SEEDS else LEARNER_CARRIED
            order = Order(spec.format(seed=seed, policy=policy), seed, steps, str(net), learnt=policy)
            task.run_served(order, namespaces)


def run_policies(
    seeds: Iterable[int], policy: str, steps: int, net: Network, progress: Progress, data: Path | None = None
) -> RunsByPolicy:
    """policy: where the carried-over one lies."""
    folder = None if data is None else str(data)
    outcomes: RunsByPolicy = {name: [] for name in policies(steps)}
    with links.opened(net, task.WORKERS, servers=1) as opened:
        namespaces = opened.by_rank(servers=1) if opened else None
        for seed in seeds:  # one seed after the other, so that a busy machine is busy for all policies
            exact = Order(FIXED[EXACT], seed, steps, str(net), data=folder)
            progress(f"mqgrad: {EXACT}, seed {seed}, {net}")
            outcomes[EXACT].append(task.run_served(exact, namespaces))
            seconds = outcomes[EXACT][-1].seconds
            for name, spec in policies(steps).items():
                if name != EXACT:
                    progress(f"mqgrad: {name}, seed {seed}, {net}")
                    spec = spec.format(seed=seed, policy=policy)
                    order = Order(spec, seed, MOST * steps, str(net), seconds=seconds, data=folder)
                    outcomes[name].append(task.run_served(order, namespaces))
    return outcomes


def targets(outcomes: RunsByPolicy) -> list[float]:
    """One per seed, by the rule above."""
    return [min(loss for _, loss in run.curve[: int(TARGET_AT * len(run.curve))]) for run in outcomes[EXACT]]


def summary(outcomes: RunsByPolicy, net: Network, link: str = LINKS[0]) -> Reproduction:
    goals = targets(outcomes)
    seconds = {
        name: [run.seconds_to(goal) for run, goal in zip(runs, goals, strict=True)] for name, runs in outcomes.items()
    }
    rows = [_row(name, runs, seconds[name]) for name, runs in outcomes.items()]
    steps = len(outcomes[EXACT][0].levels)
    title = f"{task.WORKERS} workers, one server, {net}, the seconds of {steps} steps of 16 bit, {len(goals)} seeds"
    columns = (
        "controller", "seconds to target", "reached", "final accuracy", "steps", "bits first/last quarter",
        "controller's own seconds",
    )  # fmt: skip
    table = Listing(f"{title}, target loss {fmean(goals):.3f}", columns, rows)
    return Reproduction(_claims(outcomes, seconds, link), [table])


def _row(name: str, runs: list[ServedRun], seconds: list[float]) -> tuple[str, ...]:
    reached = [each for each in seconds if math.isfinite(each)]
    accuracies = [run.accuracy for run in runs]
    return (
        name,
        f"{fmean(reached):.2f} ± {pstdev(reached):.2f}" if reached else "never",
        f"{len(reached)}/{len(runs)}",
        f"{fmean(accuracies):.3f} ± {pstdev(accuracies):.3f}",
        f"{fmean(len(run.levels) for run in runs):.0f}",
        f"{_bits(runs, first=True):.1f} / {_bits(runs, first=False):.1f}",
        f"{fmean(run.controller_seconds for run in runs):.3f}",
    )


def _bits(runs: list[ServedRun], *, first: bool) -> float:
    quarters = [max(1, len(run.levels) // 4) for run in runs]
    return fmean(
        fmean(run.levels[:quarter] if first else run.levels[-quarter:])
        for run, quarter in zip(runs, quarters, strict=True)
    )


def _claims(outcomes: RunsByPolicy, seconds: dict[str, list[float]], link: str) -> list[Claim]:
    on = f", {link.removeprefix('auto:')}"
    to_target = {name: fmean(each) for name, each in seconds.items()}  # infinite if a seed never reached it
    accuracy = {name: fmean(run.accuracy for run in runs) for name, runs in outcomes.items()}
    best = min(FIXED, key=lambda name: to_target[name])
    early, late = (_bits(outcomes["mqgrad"], first=first) for first in (True, False))
    claims = []
    for name in ("mqgrad", CARRIED):
        claims += [
            Claim(
                claim=f"{name}: reaches the target no later than the best fixed width{on}",
                measured=_seconds_text(seconds[name]),
                expected=f"at most {to_target[best]:.2f} s ({best})",
                verdict=_no_later(seconds[name], seconds[best]),
                source=PAPER,
            ),
            Claim(
                claim=f"{name}: same final accuracy as 16 bit{on}",
                measured=f"{accuracy[name]:.3f}",
                expected=f"at least {accuracy[EXACT]:.3f} less {WITHIN}",
                verdict=intervals.verdict(
                    intervals.paired(*([run.accuracy for run in outcomes[each]] for each in (name, EXACT))), WITHIN
                ),
                source=PAPER,
            ),
        ]
    both = _reached(seconds, STILL, "mqgrad")
    claims.append(
        Claim(
            claim=f"learning helps: mqgrad is at the target before the same rule without learning{on}",
            measured=_seconds_text(seconds["mqgrad"]),
            expected=f"less than {_seconds_text(seconds[STILL])}",
            verdict=_helps(intervals.ratio(*both)) if both[0] else "level",
            source=OURS,
        )
    )
    if link == LINKS[0]:  # where the wire rules
        claims.append(
            Claim(
                claim=f"mqgrad: few bits early, more bits later{on}",
                measured=f"{early:.1f} bits in the first quarter, {late:.1f} in the last",
                expected="more in the last",
                verdict=told(late > early),
                source=PAPER,
            )
        )
    return claims


def _reached(seconds: dict[str, list[float]], *names: str) -> tuple[list[float], ...]:
    """Of these, on the seeds on which all reached the target."""
    pairs = [pair for pair in zip(*(seconds[name] for name in names), strict=True) if all(map(math.isfinite, pair))]
    return tuple([pair[at] for pair in pairs] for at in range(len(names)))


def _helps(gain: intervals.Interval) -> str:
    """Whether log(seconds without / seconds with) is above nothing."""
    if not math.isfinite(gain.half):
        return told(gain.mean > 0)
    return "holds" if gain.low > 0 else "fails" if gain.high < 0 else "level"


def _no_later(ours: list[float], theirs: list[float]) -> str:
    """Seed by seed; who missed the target is later than who did not."""
    if not all(map(math.isfinite, ours)):
        return "fails"
    return intervals.verdict(intervals.ratio(theirs, ours)) if all(map(math.isfinite, theirs)) else "holds"


def _seconds_text(seconds: list[float]) -> str:
    missed = sum(math.isinf(each) for each in seconds)
    return f"not reached in {missed} of {len(seconds)}" if missed else f"{fmean(seconds):.2f} s"
