"""A run: one process per worker and server, watched from start to end. Nothing of it outlives `execute`."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from thinwire.lab.network.shaped import Shaped
from thinwire.lab.runs import launch, worker
from thinwire.lab.runs.record import CurvePoint, Run, RunPlan
from thinwire.lab.runs.topology import parse_topology
from thinwire.lab.runs.worker import PointShare
from thinwire.lab.tasks.tasks import load_task


def execute(plan: RunPlan, links: Shaped | None, on_point: Callable[[CurvePoint], None] = lambda point: None) -> Run:
    """Carry out a plan. A worker that fails or is killed makes a run with a reason, not an exception.

    links: the namespaces to run in, for shaped networks.
    """
    task = load_task(plan.task, Path(plan.data) if plan.data else None)
    run = Run(plan, task.metric.name, task.metric.rising, task.target, plan.steps_of(task))
    servers = parse_topology(plan.exchange).server_count
    shares: dict[int, list[PointShare]] = defaultdict(list)

    def on_share(share: PointShare) -> None:
        shares[share.step].append(share)
        if len(shares[share.step]) == plan.workers:
            run.curve.append(_point(shares.pop(share.step)))
            on_point(run.curve[-1])

    barrier = launch.CONTEXT.Barrier(plan.workers)
    namespaces = links.by_rank(servers) if links else None
    with launch.started(worker.run_process, servers + plan.workers, plan, barrier, namespaces=namespaces) as members:
        failure = launch.listen(members, on_message=on_share)
    if failure is None:
        totals = [member.result for member in members]
        run.final = _final(totals[servers:])
        run.totals = _totals(totals[servers:], totals[:servers])
    else:
        serves = failure.rank < servers
        number = failure.rank if serves else failure.rank - servers
        run.reason = f"{'server' if serves else 'worker'} {number} {failure.reason}"
    return run


def _final(workers: Sequence[dict[str, float]]) -> float | None:
    """The score on all test examples, of which every worker has looked at its part."""
    score_sum, count = (sum(totals.pop(name, 0.0) for totals in workers) for name in ("test_sum", "test_count"))
    return score_sum / count if count else None


def _totals(workers: Sequence[dict[str, float]], servers: Sequence[dict[str, float]]) -> dict[str, float]:
    """Per worker: the workers' mean. What was metered counts whoever sent it, so the servers' share is in it."""
    mean = {name: sum(t[name] for t in (*workers, *servers) if name in t) / len(workers) for name in workers[0]}
    return mean | {"vnmse": workers[0]["vnmse"]}  # worker 0 measures for all


def _point(shares: list[PointShare]) -> CurvePoint:
    workers = len(shares)
    return CurvePoint(
        step=shares[0].step,
        seconds=max(share.seconds for share in shares),
        bytes_sent=sum(share.bytes_sent for share in shares) / workers,
        loss=sum(share.loss for share in shares) / workers,
        score=sum(share.score_sum for share in shares) / sum(share.score_count for share in shares),
        level=shares[0].level,
    )
