"""A run: one process per worker and server, watched from start to end. Nothing of it outlives `execute`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from thinwire.lab.network.shaped import Shaped
from thinwire.lab.runs import launch, topology, worker
from thinwire.lab.runs.record import Plan, Point, Run
from thinwire.lab.runs.worker import Progress
from thinwire.lab.tasks import tasks


def execute(plan: Plan, links: Shaped | None, on_point: Callable[[Point], None] = lambda point: None) -> Run:
    """Carry out a plan. A worker that fails or is killed makes a run with a reason, not an exception.

    links: the namespaces to run in, for shaped networks.
    """
    task = tasks.load(plan.task, Path(plan.data) if plan.data else None)
    run = Run(plan, task.metric.name, task.metric.rising, task.target, plan.steps or task.steps)
    servers = topology.parse(plan.exchange).server_count
    heard: dict[int, list[Progress]] = defaultdict(list)

    def on_progress(progress: Progress) -> None:
        heard[progress.step].append(progress)
        if len(heard[progress.step]) == plan.workers:
            run.curve.append(_point(heard.pop(progress.step)))
            on_point(run.curve[-1])

    barrier = launch.CONTEXT.Barrier(plan.workers)
    namespaces = links.by_rank(servers) if links else None
    with launch.started(worker.main, servers + plan.workers, plan, barrier, namespaces=namespaces) as members:
        failure = launch.listen(members, on_message=on_progress)
    if failure is None:
        totals = [member.result for member in members]
        run.totals = _totals(totals[servers:], totals[:servers])
    else:
        serves = failure.rank < servers
        number = failure.rank if serves else failure.rank - servers
        run.reason = f"{'server' if serves else 'worker'} {number} {failure.reason}"
    return run


def _totals(workers: Sequence[dict[str, float]], servers: Sequence[dict[str, float]]) -> dict[str, float]:
    """Per worker: the workers' mean. What was metered counts whoever sent it, so the servers' share is in it."""
    mean = {name: sum(t[name] for t in (*workers, *servers) if name in t) / len(workers) for name in workers[0]}
    return mean | {"vnmse": workers[0]["vnmse"]}  # worker 0 measures for all


def _point(shares: list[Progress]) -> Point:
    workers = len(shares)
    return Point(
        step=shares[0].step,
        seconds=max(share.seconds for share in shares),
        bytes_sent=sum(share.bytes_sent for share in shares) / workers,
        loss=sum(share.loss for share in shares) / workers,
        score=sum(share.score_sum for share in shares) / sum(share.score_count for share in shares),
        level=shares[0].level,
    )
