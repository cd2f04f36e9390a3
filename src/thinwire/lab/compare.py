"""`thinwire compare`: the same task under several schemes, and which of them is at the target first."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from thinwire import schemes as registry
from thinwire.lab import network as networks
from thinwire.lab import report as reports
from thinwire.lab import shaped, table
from thinwire.lab import tasks as task_specs
from thinwire.lab.live import LiveTable
from thinwire.lab.record import Plan, Record
from thinwire.lab.run import execute

EXCHANGES = ("allreduce",)
DEFAULT_TASKS = ("mlp(width=1024)",)
DEFAULT_SCHEMES = ("fp32", "fp16", "qsgd(bits=4)")
DEFAULT_NETWORK = "auto:100mbit"


def compare(
    tasks: Sequence[str] = DEFAULT_TASKS,
    schemes: Sequence[str] = DEFAULT_SCHEMES,
    *,
    exchange: str = "allreduce",
    network: str = DEFAULT_NETWORK,
    seeds: int = 2,
    workers: int = 4,
    steps: int | None = None,
    data: Path | None = None,
    json: Path | None = None,
    report: Path | None = None,
    console: Console | None = None,
) -> Record:
    """Run every task under every scheme and seed; show progress, then the table and the verdicts.

    Seeds are 0..seeds-1, the same for all schemes. Runs are interleaved: every scheme once, then the next
    seed, so that what disturbs the machine for a while disturbs all alike. fp16, the baseline, is added if it
    is not among the schemes. The record is written to `json` after every run, the page to `report` at the
    end. Ctrl-C ends it early with what is finished. Mistakes in the arguments raise ValueError before
    anything is started.
    """
    console = console or Console()
    net = _check(tasks, schemes, exchange, network, seeds, workers, steps, data)
    if table.BASELINE not in schemes:
        schemes = (table.BASELINE, *schemes)
    plans = [
        Plan(task, scheme, seed, exchange, str(net), workers, steps, str(data) if data else None)
        for seed in range(seeds)
        for task in tasks
        for scheme in schemes
    ]
    record = Record(
        {
            "tasks": list(tasks), "schemes": list(schemes), "exchange": exchange, "network": str(net),
            "why_paced": net.why_paced, "seeds": seeds, "workers": workers, "steps": steps,
            "data": str(data) if data else None,
            "tbf_burst_bytes": shaped.BURST_BYTES if net.mode == "shaped" else None,
        }
    )  # fmt: skip
    try:
        with (
            shaped.Shaped(net, workers) if net.mode == "shaped" else contextlib.nullcontext() as links,
            LiveTable(plans, console) as live,
        ):
            for plan in plans:
                task = task_specs.load(plan.task, data)
                live.started(plan.steps or task.steps, task.metric.name)
                record.runs.append(execute(plan, links, live.advanced))
                if json:
                    record.save(json)
                live.finished(record.runs[-1])
    except KeyboardInterrupt:
        record.interrupted = True
    if json:
        record.save(json)
    if report and record.runs:
        reports.write([record], report)
    show(record, console)
    return record


def show(record: Record, console: Console) -> None:
    """The table and the verdicts."""
    rows = table.summarise(record)
    if not rows:
        console.print("interrupted before the first run was finished")
        return
    console.print(table.render(record, rows))
    for row in rows:
        task = f"{row.task}, " if len(record.config["tasks"]) > 1 else ""
        console.print(f"{task}{row.scheme}: {row.verdict}", highlight=False, markup=False)


def _check(
    tasks: Sequence[str], schemes: Sequence[str], exchange: str, network: str,
    seeds: int, workers: int, steps: int | None, data: Path | None,
) -> networks.Network:  # fmt: skip
    """Raise ValueError for whatever cannot be run; the network as it will be."""
    for name, count, least in (("seeds", seeds, 1), ("workers", workers, 2), ("steps", steps, 1)):
        if count is not None and count < least:
            raise ValueError(f"{name} must be at least {least}, got {count}")
    if exchange not in EXCHANGES:
        raise ValueError(f"unknown exchange {exchange!r}; known: {', '.join(EXCHANGES)}")
    for name, given in (("task", tasks), ("scheme", schemes)):
        if not given:
            raise ValueError(f"name at least one {name}")
        if len(set(given)) < len(given):
            raise ValueError(f"the same {name} is named twice: {', '.join(given)}")
    for scheme in schemes:
        registry.parse(scheme)
    for task in tasks:
        loaded = task_specs.load(task, data)
        smallest = len(loaded.dataset.train) // workers
        if loaded.batch > smallest:
            raise ValueError(
                f"task {task}: a batch of {loaded.batch} does not fit {workers} shards of {smallest} examples"
            )
    net = networks.parse(network)
    net.check(workers)
    return networks.resolve(net, shaped.why_not() if net.mode in ("shaped", "auto") else None)
