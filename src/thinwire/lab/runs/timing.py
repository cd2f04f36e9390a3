"""Train once, time on many links: what is learnt in a step does not depend on how long its messages travel.

A run is trained on the loopback, its curve over steps; on every link a few steps are made and timed; the two together
are the run as it would have been on that link (`composed`). Runs whose steps follow from the clock itself cannot be
taken apart and are trained on every link: controllers see seconds, and with staleness whoever comes first is first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import mean

from thinwire.lab.runs.record import Run, RunPlan
from thinwire.lab.runs.topology import ServerTopology, parse_topology

STEPS = 8  # on the clock, or as many more as make whole rounds of local steps
WARM_STEPS = 2  # before them: DDP makes its buckets anew after the first, memory is touched for the first time
WHOLE = ("steps", "rounds", "vnmse")  # totals that are those of training
COUNTED = ("bytes_sent", "bytes_dense", "messages")  # where all is counted: a few steps may end with a part under way
TURNS = 2  # each link is timed so often at least under every scheme, in turn: what disturbs for a while disturbs all


def timeless(plan: RunPlan) -> bool:
    """Whether the same is learnt on every link."""
    topology = parse_topology(plan.exchange)
    return plan.controller is None and not (isinstance(topology, ServerTopology) and topology.staleness is not None)


def training(plan: RunPlan) -> RunPlan:
    """The plan's training, on the loopback."""
    return replace(plan, network="none")


def timing(plan: RunPlan) -> RunPlan:
    """The plan's steps on its own link, on the clock."""
    return replace(plan, timed=-(-STEPS // plan.every) * plan.every, tested=False)


def warm_steps(plan: RunPlan) -> int:
    """Off the clock: a whole round, where there are rounds."""
    return max(WARM_STEPS, plan.every)


def composed(trained: Run, timed: Sequence[Run]) -> Run:
    """The run on the link of `timed`: what `trained` learnt in each step, in the seconds that steps take there."""
    plan = replace(trained.plan, network=timed[0].plan.network)
    failed = next((run.reason for run in (trained, *timed) if run.reason is not None), None)
    if failed is not None:
        return replace(trained, plan=plan, reason=failed, totals={}, curve=trained.curve if trained.reason else [])

    def per_step(name: str) -> float:
        return mean(run.totals[name] / run.totals["steps"] for run in timed)

    known = _in_ledger(timed[0])
    curve = [
        replace(
            point,
            seconds=point.step * per_step("seconds"),
            bytes_sent=point.bytes_sent if known else point.step * per_step("bytes_sent"),
        )
        for point in trained.curve
    ]
    totals = {name: trained.steps * per_step(name) for name in timed[0].totals}
    whole = {name: trained.totals[name] for name in (*WHOLE, *(COUNTED if known else ())) if name in trained.totals}
    return replace(trained, plan=plan, curve=curve, totals=totals | whole)


def _in_ledger(run: Run) -> bool:
    """Whether workers count what they send, all of it, on every link alike; else only a link's interface does."""
    return "interface_bytes" not in run.totals or "ledger_bytes" in run.totals
