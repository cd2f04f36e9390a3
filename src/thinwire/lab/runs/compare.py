"""`thinwire compare`: the same task under several schemes, and which of them is at the target first."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Protocol

from rich.console import Console

from thinwire import control
from thinwire.lab.defaults import DEFAULT_EXCHANGES, DEFAULT_NETWORK, DEFAULT_OUTER, DEFAULT_TASKS, LONGER
from thinwire.lab.network import links, shaped
from thinwire.lab.network.network import Network
from thinwire.lab.report import table
from thinwire.lab.report.progress import LiveTable
from thinwire.lab.runs import curves, timing
from thinwire.lab.runs import tune as tuning
from thinwire.lab.runs.record import CurvePoint, Record, Run, RunPlan
from thinwire.lab.runs.run import execute
from thinwire.lab.runs.topology import misfit, parse_topology
from thinwire.lab.tasks import rates
from thinwire.lab.tasks.tasks import load_task
from thinwire.local.outer import parse_outer
from thinwire.schemes import codec, parse
from thinwire.steering import Steering


class Watcher(Protocol):
    """Who is told how far runs have come."""

    def started(self, steps: int, metric: str) -> None: ...
    def advanced(self, point: CurvePoint) -> None: ...
    def finished(self, run: Run) -> None: ...


LOCAL = ("allreduce", "qsgd(bits=4)", None, 8)  # the row of local steps where nothing is asked for


def compare(
    tasks: Sequence[str] = DEFAULT_TASKS,
    schemes: Sequence[str] = (),
    *,
    exchanges: Sequence[str] = DEFAULT_EXCHANGES,
    controllers: Sequence[str] = (),
    every: Sequence[int] = (),
    outer: str = DEFAULT_OUTER,
    longer: float = LONGER,
    network: str | Sequence[str] = DEFAULT_NETWORK,
    tune: bool = False,
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
        the exchanges' defaults. "qsgd(bits=4) every 8" is that row alone, whatever `every` says of the others.
    controllers: each of them also turns the knob of every scheme that has one, in runs of their own.
    every: steps between two exchanges, each in runs of their own; above 1, `LocalSteps` with the outer optimizer
        `outer`, for `longer` times as many steps. Where neither this nor schemes are given: 1, and one row of local
        steps.
    parallel: "ddp", or "fsdp": the model is sharded, and the scheme is between machines, or between shards where
        every worker has a machine of its own.
    network: one or several. Each scheme and seed is trained once, and timed on every one of them (see `timing`).
    tune: find every row's learning rate first (see `tune`); without it rates are those of `tasks.rates`.
    workers: how many, each with a link of its own; or "2x4", two machines of four workers, which share its link.

    Seeds are 0..seeds-1, the same for all schemes. Runs are interleaved: every scheme once, then the next
    seed, so that what disturbs the machine for a while disturbs all alike. The baseline, fp16 over allreduce, is added
    if it is not among them. The record is written to `json` after every run and trial, the page to `report` at the
    end. Ctrl-C ends it early with what is finished. Mistakes in the arguments raise ValueError before
    anything is started.
    """
    console = console or Console()
    workers, local = parse_workers(workers)
    given = [network] if isinstance(network, str) else list(network)
    nets = _check(tasks, given, seeds, workers, local, steps, data)
    if parallel == "fsdp":
        schemes = _fit_for_shards(schemes, exchanges, controllers, every, local)
    elif parallel != "ddp":
        raise ValueError(f"parallel must be ddp or fsdp, got {parallel!r}")
    candidates = _candidates(schemes, exchanges, controllers, workers, every)
    parse_outer(outer)
    where = str(data) if data else None
    plans = [
        RunPlan(task, scheme, seed, exchange, "none", workers, steps, where, controller, apart, outer, local, parallel)
        for seed in range(seeds)
        for task in tasks
        for exchange, scheme, controller, apart in candidates
    ]
    plans = [_as_tuned(plan, longer) for plan in plans]
    record = _record(plans, nets, controllers, seeds, tune)
    try:
        if tune:
            plans = _tune(plans, record, json, console)
        carry_out(plans, nets, record, json, lambda runs: LiveTable(runs, console))
    except KeyboardInterrupt:
        record.interrupted = True
    _finish(record, plans, nets, json, report, console)
    return record


def _as_tuned(plan: RunPlan, longer: float) -> RunPlan:
    """At the rate found for it; of local steps, so many times as long."""
    if not 0 < longer < math.inf:
        raise ValueError(f"longer must be above 0, got {longer}")
    task = load_task(plan.task, Path(plan.data) if plan.data else None)
    return replace(plan, rate=rates.of(task.name, plan.name), longer=longer if plan.every > 1 else 1.0)


def _record(
    plans: Sequence[RunPlan], nets: Sequence[Network], controllers: Sequence[str], seeds: int, tune: bool
) -> Record:
    """Without runs yet: what is compared, and how."""
    first = plans[0]
    return Record(
        {
            "tasks": list(dict.fromkeys(plan.task for plan in plans)),
            "exchanges": list(dict.fromkeys(plan.exchange for plan in plans)),
            "schemes": list(dict.fromkeys(plan.scheme for plan in plans)), "controllers": list(controllers),
            "network": ", ".join(map(str, nets)), "why_paced": nets[0].why_paced, "seeds": seeds,
            "workers": first.workers, "local": first.local, "parallel": first.parallel, "steps": first.steps,
            "data": first.data, "every": sorted({plan.every for plan in plans}), "outer": first.outer, "tuned": tune,
            "longer": max(plan.longer for plan in plans),
            "tbf_burst_bytes": shaped.BURST_BYTES if any(net.mode == "shaped" for net in nets) else None,
        }
    )  # fmt: skip


def _finish(
    record: Record, plans: Sequence[RunPlan], nets: Sequence[Network], json: Path | None, report: Path | None,
    console: Console,
) -> None:  # fmt: skip
    """Runs in the order of the comparison, with their targets, kept and shown."""
    rows, names = [tuning.row_of(plan) for plan in plans], [str(net) for net in nets]
    record.runs.sort(
        key=lambda run: (names.index(run.plan.network), run.plan.seed, rows.index(tuning.row_of(run.plan)))
    )
    curves.set_targets(record.runs)
    if json:
        record.save(json)
    if report and record.runs:
        from thinwire.lab.report.report import write_report  # with plotly, which not every command should wait for

        write_report([record], report)
    show(record, console)


def _tune(plans: Sequence[RunPlan], record: Record, json: Path | None, console: Console) -> list[RunPlan]:
    """The plans, each at the best rate of its row."""
    found: list[tuning.Tuned] = []
    try:
        while trials := tuning.tuning(plans, found):
            with LiveTable(trials, console) as live:
                for trial in trials:
                    record.trials.append(_execute(trial, None, live))
                    if json:
                        record.save(json)
                    live.finished(record.trials[-1])
            found = tuning.tuned(record.trials)
    finally:  # an hour of trials is worth being shown when the next is interrupted
        if record.trials:
            console.print(table.tuning_table(tuning.tuned(record.trials)))
            console.print()
    best = {each.row: each.rate for each in found}
    return [replace(plan, rate=best[tuning.row_of(plan)]) for plan in plans]


def carry_out(
    plans: Sequence[RunPlan],
    nets: Sequence[Network],
    record: Record,
    json: Path | None,
    watched: Callable[[Sequence[RunPlan]], AbstractContextManager[Watcher]],
) -> None:
    """Time a few steps of every run on every link, then train; each goes into the record as soon as it is whole.

    A run's seconds are its own, so that intervals over seeds hold what the clock varies by, too. Of several links the
    loopback is timed like the others, in turns: training may go on beside whatever else the machine has to do, and
    links differ by nothing but themselves. Where it is the only one, training is its timing.

    watched: is given all that will be run, and makes who is told of it.
    """
    once = [plan for plan in plans if timing.timeless(plan)]
    turns = -(-timing.TURNS // max(1, len({plan.seed for plan in once})))
    always = [replace(plan, network=str(net)) for net in nets for plan in plans if not timing.timeless(plan)]
    timings = [
        timing.timing(replace(plan, network=str(net)))
        for net in nets
        if net.mode != "none" or len(nets) > 1
        for _ in range(turns)
        for plan in once
    ]
    of_net = {str(net): net for net in nets}
    steps: dict[tuple[str, tuning.Row, int], list[Run]] = {}
    with watched([*timings, *once, *always]) as live:
        for run in _on_links(timings, of_net, live):
            steps.setdefault((run.plan.network, tuning.row_of(run.plan), run.plan.seed), []).append(run)
            live.finished(run)
        for plan in once:
            trained = _execute(plan, None, live)
            for name in of_net:
                timed = steps.get((name, tuning.row_of(plan), plan.seed))
                record.runs.append(timing.composed(trained, timed) if timed else trained)
            if json:
                record.save(json)
            live.finished(trained)  # what is said to be finished is kept already
        for run in _on_links(always, of_net, live):
            record.runs.append(run)
            if json:
                record.save(json)
            live.finished(run)


def _on_links(plans: Sequence[RunPlan], nets: dict[str, Network], live: Watcher) -> Iterator[Run]:
    """Runs on the links that they name; links that follow each other are opened once."""
    servers = max((parse_topology(plan.exchange).server_count for plan in plans), default=0)
    for name, group in groupby(plans, key=lambda plan: plan.network):
        several = list(group)
        with links.opened(nets[name], several[0].workers, servers, local=several[0].local) as opened:
            for plan in several:
                yield _execute(plan, opened, live)


def _execute(plan: RunPlan, opened: shaped.Shaped | None, live: Watcher) -> Run:
    task = load_task(plan.task, Path(plan.data) if plan.data else None)
    live.started(plan.timed or plan.steps_of(task), task.metric.name)
    return execute(plan, opened, live.advanced)


def show(record: Record, console: Console) -> None:
    """The table and the verdicts of every network."""
    if not record.runs:
        console.print("interrupted before the first run was finished")
        return
    for each in record.by_network():
        rows = table.summarise(each)
        console.print(table.comparison_table(each, rows))
        console.print()
        for row in rows:
            task = f"{row.task}, " if len(record.config["tasks"]) > 1 else ""
            console.print(f"{task}{row.label}: {row.verdict}", highlight=False, markup=False)
        console.print()


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
    if any(rounds != (1,) for _, rounds in (_with_rounds(scheme, ()) for scheme in schemes)):
        raise ValueError("--parallel fsdp exchanges in every step")
    biased = [scheme for scheme in schemes if local == 1 and not codec(scheme).unbiased]
    if biased:
        raise ValueError(
            f"between shards a scheme must be right on average; {biased[0]} is not: try it between machines, "
            "--workers 2x2"
        )
    return [*schemes] or ["fp32", curves.BASELINE, "qsgd(bits=4)"]


def _check(
    tasks: Sequence[str], networks: Sequence[str], seeds: int, workers: int, local: int, steps: int | None,
    data: Path | None,
) -> list[Network]:  # fmt: skip
    """Raise ValueError for whatever cannot be run; the networks as they will be."""
    for name, count, least in (("seeds", seeds, 1), ("workers", workers, 2), ("steps", steps, 1)):
        if count is not None and count < least:
            raise ValueError(f"{name} must be at least {least}, got {count}")
    _each_once("task", tasks)
    if not tasks:
        raise ValueError("name at least one task")
    for task in tasks:
        loaded = load_task(task, data)
        smallest = len(loaded.dataset.split[0]) // workers
        if loaded.batch > smallest:
            raise ValueError(
                f"task {task}: a batch of {loaded.batch} does not fit {workers} shards of {smallest} examples"
            )
    if not networks:
        raise ValueError("name at least one network")
    found = [links.resolved(network, workers, local) for network in networks]
    _each_once("network", [str(net) for net in found])
    return found


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
    asked = [_with_rounds(scheme, every) for scheme in schemes]
    unmatched = [scheme for scheme, _ in asked]
    for exchange in exchanges:
        topology = parse_topology(exchange)
        rows = asked or [(scheme, tuple(every) or (1,)) for scheme in topology.defaults]
        fitting = [(scheme, rounds) for scheme, rounds in rows if topology.takes(scheme)]
        if not fitting:
            raise ValueError(misfit(unmatched[0], exchange))
        for scheme, rounds in fitting:
            topology.check(scheme, workers)
            steered = [c for c in controllers if topology.steered and parse(scheme).knob is not None]
            found += [(exchange, scheme, by, apart) for by in (None, *steered) for apart in rounds]
        if any(apart > 1 for _, rounds in fitting for apart in rounds) and not topology.local_steps:
            raise ValueError(f"{exchange} exchanges in every step; --every above 1 needs allreduce or server")
        known = [scheme for scheme, _ in fitting]
        unmatched = [scheme for scheme in unmatched if scheme not in known]
    if unmatched:
        raise ValueError(misfit(unmatched[0], ", ".join(exchanges)))
    _each_once("row", found)
    for controller in controllers:
        turned = [scheme for _, scheme, by, _ in found if by == controller]
        if not turned:
            raise ValueError(f"controller {control.parse(controller).name} has nothing to turn: no scheme has a knob")
        for scheme in turned:
            Steering(controller, parse(scheme))
    if not schemes and not every and "allreduce" in exchanges:
        found.append(LOCAL)
    baseline = ("allreduce", curves.BASELINE, None, 1)
    return found if baseline in found else [baseline, *found]


def _with_rounds(text: str, every: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """A scheme and the steps between its exchanges: its own, "qsgd(bits=4) every 8", or everybody's."""
    own = re.fullmatch(r"(.*\S)\s+every\s+(\d+)", text.strip())
    if own is None:
        return text, tuple(every) or (1,)
    if int(own[2]) < 1:
        raise ValueError(f"every must be at least 1 step, got {text!r}")
    return own[1], (int(own[2]),)


def _each_once(name: str, given: Sequence[object]) -> None:
    if len(set(given)) < len(given):
        raise ValueError(f"the same {name} is named twice: {', '.join(map(str, given))}")
