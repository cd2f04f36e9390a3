"""`thinwire compare`: the same task under several schemes, and which of them is at the target first."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from thinwire import control
from thinwire.lab.network import links, shaped
from thinwire.lab.network.network import DEFAULT_NETWORK, Network
from thinwire.lab.report import table
from thinwire.lab.report.progress import LiveTable
from thinwire.lab.report.report import write_report
from thinwire.lab.runs.record import Record, RunPlan
from thinwire.lab.runs.run import execute
from thinwire.lab.runs.topology import misfit, parse_topology
from thinwire.lab.tasks.tasks import load_task
from thinwire.local.outer import parse_outer
from thinwire.schemes import codec, parse
from thinwire.steering import Steering

DEFAULT_TASKS = ("mlp(width=1024)",)
DEFAULT_EXCHANGES = ("allreduce",)
DEFAULT_OUTER = "nesterov(lr=1.0, momentum=0.3)"  # of local steps: chosen on other seeds than those compared on
LOCAL = ("allreduce", "qsgd(bits=4)", None, 8)  # the row of local steps where nothing is asked for


def compare(
    tasks: Sequence[str] = DEFAULT_TASKS,
    schemes: Sequence[str] = (),
    *,
    exchanges: Sequence[str] = DEFAULT_EXCHANGES,
    controllers: Sequence[str] = (),
    every: Sequence[int] = (),
    outer: str = DEFAULT_OUTER,
    network: str = DEFAULT_NETWORK,
    parallel: str = "ddp",
    seeds: int = 1,
    workers: int | str = 4,
    steps: int | None = None,
    data: Path | None = None,
    json: Path | None = None,
    report: Path | None = None,
    console: Console | None = None,
) -> Record:
    """Run every task under every scheme, exchange and seed; show progress, then the table and the verdicts.

    schemes: compared over every exchange of their kind: schemes over allreduce and server, mixers over gossip. None:
        the exchanges' defaults.
    controllers: each of them also turns the knob of every scheme that has one, in runs of their own.
    every: steps between two exchanges, each in runs of their own; above 1, `LocalSteps` with the outer optimizer
        `outer`. Where neither this nor schemes are given: 1, and one row of local steps.
    parallel: "ddp", or "fsdp": the model is sharded, and the scheme is between machines, or between shards where
        every worker has a machine of its own.
    workers: how many, each with a link of its own; or "2x4", two machines of four workers, which share its link.

    Seeds are 0..seeds-1, the same for all schemes. Runs are interleaved: every scheme once, then the next
    seed, so that what disturbs the machine for a while disturbs all alike. The baseline, fp16 over allreduce, is added
    if it is not among them. The record is written to `json` after every run, the page to `report` at the
    end. Ctrl-C ends it early with what is finished. Mistakes in the arguments raise ValueError before
    anything is started.
    """
    console = console or Console()
    workers, local = parse_workers(workers)
    net = _check(tasks, network, seeds, workers, local, steps, data)
    if parallel == "fsdp":
        schemes = _fit_for_shards(schemes, exchanges, controllers, every, local)
    elif parallel != "ddp":
        raise ValueError(f"parallel must be ddp or fsdp, got {parallel!r}")
    candidates = _candidates(schemes, exchanges, controllers, workers, every)
    parse_outer(outer)
    where = str(data) if data else None
    plans = [
        RunPlan(
            task, scheme, seed, exchange, str(net), workers, steps, where, controller, apart, outer, local, parallel
        )
        for seed in range(seeds)
        for task in tasks
        for exchange, scheme, controller, apart in candidates
    ]
    record = Record(
        {
            "tasks": list(tasks), "exchanges": list(dict.fromkeys(plan.exchange for plan in plans)),
            "schemes": list(dict.fromkeys(plan.scheme for plan in plans)), "controllers": list(controllers),
            "network": str(net), "why_paced": net.why_paced, "seeds": seeds, "workers": workers, "local": local,
            "parallel": parallel, "steps": steps, "data": where, "every": sorted({plan.every for plan in plans}),
            "outer": outer, "tbf_burst_bytes": shaped.BURST_BYTES if net.mode == "shaped" else None,
        }
    )  # fmt: skip
    _carry_out(plans, net, record, json, console)
    if json:
        record.save(json)
    if report and record.runs:
        write_report([record], report)
    show(record, console)
    return record


def _carry_out(plans: Sequence[RunPlan], net: Network, record: Record, json: Path | None, console: Console) -> None:
    """One run after the other, each into the record; Ctrl-C leaves it with what is finished."""
    first = plans[0]
    servers = max(parse_topology(plan.exchange).server_count for plan in plans)
    try:
        with links.opened(net, first.workers, servers, local=first.local) as opened, LiveTable(plans, console) as live:
            for plan in plans:
                task = load_task(plan.task, Path(plan.data) if plan.data else None)
                live.started(plan.steps or task.steps, task.metric.name)
                record.runs.append(execute(plan, opened, live.advanced))
                if json:
                    record.save(json)
                live.finished(record.runs[-1])
    except KeyboardInterrupt:
        record.interrupted = True


def show(record: Record, console: Console) -> None:
    """The table and the verdicts."""
    rows = table.summarise(record)
    if not rows:
        console.print("interrupted before the first run was finished")
        return
    console.print(table.comparison_table(record, rows))
    console.print()
    for row in rows:
        task = f"{row.task}, " if len(record.config["tasks"]) > 1 else ""
        console.print(f"{task}{row.label}: {row.verdict}", highlight=False, markup=False)


def parse_workers(given: int | str) -> tuple[int, int]:
    """How many workers, and how many of them share a machine: of 4, "4" or "2x2"."""
    if isinstance(given, int):
        return given, 1
    machines, _, local = given.partition("x")
    if not machines.isdigit() or not (local or "1").isdigit() or int(local or 1) < 1:
        raise ValueError(f"workers are a number, such as 4, or machines of several, such as 2x2; got {given!r}")
    return int(machines) * int(local or 1), int(local or 1)


def _fit_for_shards(
    schemes: Sequence[str], exchanges: Sequence[str], controllers: Sequence[str], every: Sequence[int], local: int
) -> list[str]:
    """The schemes, or a choice of them, for a sharded model; ValueError for what it cannot have."""
    if tuple(exchanges) != ("allreduce",) or controllers or any(apart > 1 for apart in every):
        raise ValueError("--parallel fsdp is for --exchange allreduce, without controllers, in every step")
    biased = [scheme for scheme in schemes if local == 1 and not codec(scheme).unbiased]
    if biased:
        raise ValueError(
            f"between shards a scheme must be right on average; {biased[0]} is not: try it between machines, "
            "--workers 2x2"
        )
    return [*schemes] or ["fp32", table.BASELINE, "qsgd(bits=4)"]


def _check(
    tasks: Sequence[str], network: str, seeds: int, workers: int, local: int, steps: int | None, data: Path | None
) -> Network:
    """Raise ValueError for whatever cannot be run; the network as it will be."""
    for name, count, least in (("seeds", seeds, 1), ("workers", workers, 2), ("steps", steps, 1)):
        if count is not None and count < least:
            raise ValueError(f"{name} must be at least {least}, got {count}")
    _each_once("task", tasks)
    if not tasks:
        raise ValueError("name at least one task")
    for task in tasks:
        loaded = load_task(task, data)
        smallest = len(loaded.dataset.train) // workers
        if loaded.batch > smallest:
            raise ValueError(
                f"task {task}: a batch of {loaded.batch} does not fit {workers} shards of {smallest} examples"
            )
    return links.resolved(network, workers, local)


def _candidates(
    schemes: Sequence[str], exchanges: Sequence[str], controllers: Sequence[str], workers: int, every: Sequence[int]
) -> list[tuple[str, str, str | None, int]]:
    """(exchange, scheme, controller, every) of every run of a seed, the baseline among them."""
    for name, given in (("scheme", schemes), ("exchange", exchanges), ("controller", controllers), ("every", every)):
        _each_once(name, given)
    if any(apart < 1 for apart in every):
        raise ValueError(f"every must be at least 1 step, got {min(every)}")
    if not exchanges:
        raise ValueError("name at least one exchange")
    found: list[tuple[str, str, str | None, int]] = []
    unmatched = list(schemes)
    for exchange in exchanges:
        topology = parse_topology(exchange)
        fitting = [scheme for scheme in schemes or topology.defaults if topology.takes(scheme)]
        if not fitting:
            raise ValueError(misfit(schemes[0], exchange))
        unmatched = [scheme for scheme in unmatched if scheme not in fitting]
        for scheme in fitting:
            topology.check(scheme, workers)
            steered = [c for c in controllers if topology.steered and parse(scheme).knob is not None]
            found += [(exchange, scheme, by, apart) for by in (None, *steered) for apart in every or (1,)]
        if any(apart > 1 for apart in every) and not topology.local_steps:
            raise ValueError(f"{exchange} exchanges in every step; --every above 1 needs allreduce or server")
    if unmatched:
        raise ValueError(misfit(unmatched[0], ", ".join(exchanges)))
    for controller in controllers:
        turned = [scheme for _, scheme, by, _ in found if by == controller]
        if not turned:
            raise ValueError(f"controller {control.parse(controller).name} has nothing to turn: no scheme has a knob")
        for scheme in turned:
            Steering(controller, parse(scheme))
    if not schemes and not every and "allreduce" in exchanges:
        found.append(LOCAL)
    baseline = ("allreduce", table.BASELINE, None, 1)
    return found if baseline in found else [baseline, *found]


def _each_once(name: str, given: Sequence[object]) -> None:
    if len(set(given)) < len(given):
        raise ValueError(f"the same {name} is named twice: {', '.join(map(str, given))}")
