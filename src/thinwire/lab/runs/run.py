"""A run: one process per worker and server, watched from start to end. Nothing of it outlives `execute`."""

from __future__ import annotations

import multiprocessing
import signal
import tempfile
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing import connection
from multiprocessing.process import BaseProcess
from pathlib import Path

from thinwire.lab.network.shaped import Shaped
from thinwire.lab.runs import topology, worker
from thinwire.lab.runs.record import Plan, Point, Run
from thinwire.lab.runs.worker import Failure, Progress
from thinwire.lab.tasks import tasks

GRACE_SECONDS = 2.0  # one worker's death makes the others fail; this long we listen for who was first


def execute(plan: Plan, links: Shaped | None, on_point: Callable[[Point], None] = lambda point: None) -> Run:
    """Carry out a plan. A worker that fails or is killed makes a run with a reason, not an exception.

    links: the namespaces to run in, for shaped networks.
    """
    task = tasks.load(plan.task, Path(plan.data) if plan.data else None)
    run = Run(plan, task.metric.name, task.metric.rising, task.target, plan.steps or task.steps)
    servers = topology.parse(plan.exchange).server_count
    # Workers are forked from a server that has imported torch once, with the part that DDP imports on first
    # use (torch._dynamo, over a second of processor time in each worker otherwise).
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["thinwire.lab.runs.worker", "torch._dynamo"])
    with tempfile.TemporaryDirectory(prefix="thinwire-") as folder:
        members = []
        barrier = context.Barrier(plan.workers)
        try:
            for rank in range(servers + plan.workers):
                ours, theirs = context.Pipe(duplex=False)
                serves, number = rank < servers, rank if rank < servers else rank - servers
                namespace = links.namespace(number, serves=serves) if links else None
                process = context.Process(
                    target=worker.main, args=(plan, rank, namespace, Path(folder), barrier, theirs), daemon=True
                )
                process.start()
                theirs.close()
                members.append(_Member(number, serves, process, ours))
            _listen(members, run, on_point)
        finally:
            for member in members:
                member.process.kill()
                member.process.join()
                member.pipe.close()
    return run


@dataclass
class _Member:
    """A worker, or a server, as its parent sees it."""

    number: int
    serves: bool
    process: BaseProcess
    pipe: connection.Connection
    totals: dict[str, float] | None = None
    failure: Failure | None = None
    progress: list[Progress] = field(default_factory=list)

    def hear(self) -> None:
        """Take the next message; the end of the pipe is the end of the process."""
        try:
            message = self.pipe.recv()
        except (EOFError, ConnectionError):
            self.process.join()
            if not self.ended:
                self.failure = Failure(0.0, _how_it_ended(self.process.exitcode))  # before any that it caused
            return
        if isinstance(message, Progress):
            self.progress.append(message)
        elif isinstance(message, Failure):
            self.failure = message
        else:
            self.totals = message

    @property
    def name(self) -> str:
        return f"{'server' if self.serves else 'worker'} {self.number}"

    @property
    def ended(self) -> bool:
        return self.totals is not None or self.failure is not None


def _listen(members: list[_Member], run: Run, on_point: Callable[[Point], None]) -> None:
    heard: dict[int, list[Progress]] = defaultdict(list)
    workers = sum(not member.serves for member in members)
    while not all(member.ended for member in members):
        failing = any(member.failure for member in members)
        ready = connection.wait([m.pipe for m in members if not m.ended], GRACE_SECONDS if failing else None)
        if not ready:
            break
        for member in members:
            if member.pipe in ready:
                member.hear()
                for progress in member.progress:
                    heard[progress.step].append(progress)
                    if len(heard[progress.step]) == workers:
                        run.curve.append(_point(heard.pop(progress.step)))
                        on_point(run.curve[-1])
                member.progress.clear()

    run.reason = _reason(members)
    if run.reason is None:
        run.totals = _totals(members)


def _totals(members: list[_Member]) -> dict[str, float]:
    """Per worker: the workers' mean. What was metered counts whoever sent it, so the servers' share is in it."""
    workers = [m.totals for m in members if not m.serves and m.totals is not None]
    servers = [m.totals for m in members if m.serves and m.totals is not None]
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


def _reason(members: list[_Member]) -> str | None:
    """Why the run failed, told by the first that did."""
    failures = [(member.failure.at, member.name, member.failure.reason) for member in members if member.failure]
    if not failures:
        return None
    _, name, reason = min(failures)
    return f"{name} {reason}"


def _how_it_ended(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"was killed by {signal.Signals(-exitcode).name}"
    return f"ended with exit code {exitcode} and no result"
