"""From runs to rows: one per task, scheme and exchange; seconds to the target against fp16 over allreduce."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import mean, stdev

from rich import box
from rich.table import Table
from rich.text import Text

from thinwire.lab.report.intervals import Interval, paired
from thinwire.lab.report.verdicts import WORTH, verdict
from thinwire.lab.runs.curves import BASELINE, WINDOW
from thinwire.lab.runs.record import Record, Run
from thinwire.lab.runs.tune import SEEDS, Tuned
from thinwire.lab.tasks import rates


@dataclass(frozen=True)
class SchemeRow:
    """What all seeds of a scheme on a task came to. Per-step figures are means over runs; None: not known."""

    task: str
    scheme: str  # with its controller, if one turned its knob
    exchange: str
    label: str  # the scheme, with the exchange where the record has several
    metric: str
    rising: bool
    target: float | None  # the mean over seeds, where each has its own
    runs: int  # that came to their end
    failures: tuple[str, ...]
    seconds_to_target: tuple[float | None, ...]  # of each run; None: not reached
    run_seconds: dict[int, float]  # of each run, by its seed: from start to end
    encodes: dict[int, float]  # seconds in all that training waited for encoding, by seed
    scores: dict[int, float]  # at the end, by seed
    score: float | None  # their mean
    steps_per_second: float | None
    bytes_per_step: float | None
    rounds: float | None
    vnmse: float | None
    compute_seconds: float | None  # per step, like the next two
    encode_seconds: float | None
    wire_seconds: float | None
    speedup_fp16: float | None = None  # on mean seconds to target, where both always reach it
    speedup_fp32: float | None = None
    difference: Interval | None = None  # of the final score to the baseline's, seed by seed; more is better
    verdict: str = ""

    @property
    def baseline(self) -> bool:
        return self.scheme == BASELINE and self.exchange == "allreduce"

    @property
    def against(self) -> str:
        return f"{BASELINE} over allreduce"

    @property
    def target_text(self) -> str:
        return "no target" if self.target is None else f"the target of {score_text(self.metric, self.target)}"

    @property
    def mean_seconds(self) -> float | None:
        """Mean seconds to the target; None unless every run reached it."""
        reached = [seconds for seconds in self.seconds_to_target if seconds is not None]
        return mean(reached) if reached and len(reached) == len(self.seconds_to_target) else None

    @property
    def utilisation(self) -> float | None:
        """The share of a step that is training itself."""
        seconds = [each for each in self.phases.values() if each is not None]
        return (self.compute_seconds or 0.0) / sum(seconds) if sum(seconds) else None

    @property
    def phases(self) -> dict[str, float | None]:
        """Seconds per step by what they went into; they add up to the step."""
        return {"compute": self.compute_seconds, "encode": self.encode_seconds, "wire": self.wire_seconds}


def summarise(record: Record) -> list[SchemeRow]:
    """A row per task, exchange and scheme, in the order of the comparison."""
    groups: dict[tuple[str, str, str], list[Run]] = {}
    for run in record.runs:
        groups.setdefault((run.plan.task, run.plan.exchange, run.plan.name), []).append(run)
    plain = {key: _row(runs, label(record, runs[0])) for key, runs in groups.items()}
    rows = []
    for (task, *_), row in plain.items():
        fp16, fp32 = (plain.get((task, "allreduce", scheme)) for scheme in (BASELINE, "fp32"))
        against = replace(
            row, speedup_fp16=_speedup(row, fp16), speedup_fp32=_speedup(row, fp32), difference=_difference(row, fp16)
        )
        rows.append(replace(against, verdict=verdict(against, fp16)))
    return rows


def label(record: Record, run: Run) -> str:
    """What to call a run beside the others of its record."""
    return f"{run.plan.name} over {run.plan.exchange}" if len(record.config["exchanges"]) > 1 else run.plan.name


def _row(runs: list[Run], label: str) -> SchemeRow:
    done = [run for run in runs if run.reason is None]

    def per_step(name: str) -> float | None:
        return mean(run.totals[name] / run.totals["steps"] for run in done) if done else None

    step_seconds = per_step("seconds")
    vnmse = mean(run.totals["vnmse"] for run in done) if done else None
    first = runs[0]
    targets = [run.target for run in runs if run.target is not None]
    return SchemeRow(
        task=first.plan.task,
        scheme=first.plan.name,
        exchange=first.plan.exchange,
        label=label,
        metric=first.metric,
        rising=first.rising,
        target=mean(targets) if targets else None,
        runs=len(done),
        failures=tuple(run.reason for run in runs if run.reason is not None),
        seconds_to_target=tuple(run.seconds_to_target for run in done),
        run_seconds={run.plan.seed: run.totals["seconds"] for run in done},
        encodes={run.plan.seed: run.totals["encode_seconds"] for run in done},
        scores={run.plan.seed: run.score for run in done},
        score=mean(run.score for run in done) if done else None,
        steps_per_second=1 / step_seconds if step_seconds else None,
        bytes_per_step=per_step("bytes_sent"),
        rounds=mean(run.totals.get("rounds", run.totals["steps"]) for run in done) if done else None,
        vnmse=vnmse if vnmse is not None and math.isfinite(vnmse) else None,
        compute_seconds=per_step("compute_seconds"),
        encode_seconds=per_step("encode_seconds"),
        wire_seconds=per_step("wire_seconds"),
    )


def _speedup(row: SchemeRow, other: SchemeRow | None) -> float | None:
    if other is None or row.mean_seconds is None or other.mean_seconds is None:
        return None
    return other.mean_seconds / row.mean_seconds


def _difference(row: SchemeRow, baseline: SchemeRow | None) -> Interval | None:
    """How much better the row ends than the baseline, by the seeds that both have."""
    seeds = [seed for seed in row.scores if baseline is not None and seed in baseline.scores]
    if baseline is None or not seeds:
        return None
    sign = 1 if row.rising else -1
    return paired([sign * row.scores[seed] for seed in seeds], [sign * baseline.scores[seed] for seed in seeds])


def comparison_table(record: Record, rows: Sequence[SchemeRow]) -> Table:
    """The final table, for a terminal of 80 columns."""
    several = len({row.task for row in rows}) > 1
    over = len(record.config["exchanges"]) > 1
    table = Table(
        title=f"{', '.join(record.config['tasks'])}: {setting(record)}",
        title_justify="left", title_style="bold", caption=caption(record), caption_justify="left",
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0,
    )  # fmt: skip
    for name in ["task"] * several + ["scheme"]:
        table.add_column(name, vertical="bottom", overflow="fold")
    # Where there are local steps, two columns give way to what is said of these.
    local = any(run.plan.every > 1 for run in record.runs)
    for name in (
        "seconds\nto target", "final\nscore", "rounds" if local else "steps\n/s", "MB\n/step", "vNMSE",
        "compute\n+encode\n+wire ms", "vs\nfp16", "compute\nshare" if local else "vs\nfp32",
    ):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    exchange = None
    for row in rows:
        if over and row.exchange != exchange:
            exchange = row.exchange
            table.add_row(*[""] * several, Text(f"over {_broken(exchange)}", style="bold"))
        head = [row.task] * several + [_broken(row.scheme)]
        if not row.runs:
            table.add_row(*head, Text("failed", style="red"), *[""] * 7)
            continue
        paying = row.speedup_fp16 is not None and row.speedup_fp16 >= WORTH
        table.add_row(
            *head,
            target_text(row),
            score_text(row.metric, row.score, short=True),
            number_text(row.rounds, ".0f") if local else number_text(row.steps_per_second, ".2f"),
            number_text(row.bytes_per_step, ".3g", 1e-6),
            number_text(row.vnmse, ".0e"),
            "+".join(number_text(seconds, ".0f", 1e3) for seconds in row.phases.values()),
            Text(times(row.speedup_fp16), style="bold green" if paying else ""),
            number_text(row.utilisation, ".0%") if local else times(row.speedup_fp32),
        )
    return table


def tuning_table(found: Sequence[Tuned]) -> Table:
    """Every row's score over the grid of learning rates, the chosen one bold; in brackets those of one seed."""
    grid = rates_of(found)
    table = Table(
        title="learning rates, times the task's own: validation score at the end; (one seed)", title_justify="left",
        title_style="bold", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False,
    )  # fmt: skip
    table.add_column("row", overflow="fold")
    for rate in grid:
        table.add_column(f"{rate:g}x", justify="right", no_wrap=True)
    table.add_column("chosen", justify="right")
    for each in found:
        cells = [Text(trial_text(each, rate), style="bold" if rate == each.rate else "") for rate in grid]
        table.add_row(_broken(each.row[2]), *cells, chosen_text(each))
    return table


def rates_of(found: Sequence[Tuned]) -> list[float]:
    """All that anybody tried."""
    return sorted({rate for each in found for rate in each.trials})


def chosen_text(found: Tuned) -> str:
    return f"{found.rate:g}x" + (", the edge" if found.at_the_edge else "")


def trial_text(found: Tuned, rate: float) -> str:
    """How a row ended at a rate; in brackets where it had one seed, nothing where it was not tried."""
    if rate not in found.trials:
        return ""
    score = found.scores[rate]
    text = "diverged" if math.isnan(score) else score_text(found.metric, score, short=True)
    return text if len(found.trials[rate]) == len(SEEDS) else f"({text})"


def _broken(spec: str) -> str:
    """Long spec text breaks before its options and its controller, not in the middle of a word."""
    spec, _, every = spec.partition(" every ")
    lines = spec.split(" by ")
    text = "\n by ".join(line if len(line) <= 20 else line.replace("(", "\n (", 1) for line in lines)
    return f"{text}\n every {every}" if every else text


def setting(record: Record) -> str:
    """Workers, exchange, network and seeds, in words."""
    config = record.config
    seeds = f"{config['seeds']} seed{'s' * (config['seeds'] > 1)}"
    workers, local = config["workers"], config.get("local", 1)
    who = f"{workers // local} machines of {local} workers" if local > 1 else f"{workers} workers"
    sharded = ["fsdp"] if config.get("parallel") == "fsdp" else []
    return ", ".join([who, *sharded, *config["exchanges"], config["network"], seeds])


def caption(record: Record) -> str:
    """What one must know to read the table: the machine, and how well ledger and interfaces agree."""
    machine, lines = record.machine, []
    lines.append(f"{machine['cores']} cores of {machine['cpu']}; torch {record.versions['torch']}")
    lines.extend(_target_lines(record))
    lines.extend(_rate_lines(record))
    if record.config.get("why_paced"):
        lines.append(f"paced, not shaped: {record.config['why_paced']}")
    if not any(run.plan.scheme == BASELINE and run.plan.exchange == "allreduce" for run in record.runs):
        lines.append(f"no baseline: {BASELINE} over allreduce was not run")
    lines.extend(_ledger_check(record))
    if any("interface_bytes" in run.totals and "ledger_bytes" not in run.totals for run in record.runs):
        lines.append("MB/step: what crosses a machine's link, by the interface's count, divided by its workers")
    if record.interrupted:
        lines.append("interrupted: only what was finished is shown")
    return "\n".join(lines)


def _target_lines(record: Record) -> list[str]:
    found = sorted({score_text(run.metric, run.target) for run in record.runs if run.target is not None})
    if not found:
        return []
    span = found[0] if len(found) == 1 else f"{found[0]} to {found[-1]}"
    return [f"target: {span}, by the mean of {WINDOW} evaluations (validation); final score: test examples, seen once"]


def _rate_lines(record: Record) -> list[str]:
    """Who trains longer; whose learning rate is another than the task's own, and whose was not looked for."""
    plans = {run.plan.name: run.plan for run in record.runs}
    other = [f"{name} {plan.rate:g}x" for name, plan in plans.items() if plan.rate != 1]
    lines = [f"learning rates, times the task's own: {', '.join(other)}; all others 1x"] if other else []
    longer = [f"{name} {plan.longer:g}x" for name, plan in plans.items() if plan.longer != 1]
    if longer:
        lines.append(f"trained for more steps than the others: {', '.join(longer)}")
    if not record.config.get("tuned"):
        known = {name for name, plan in plans.items() if rates.known(plan.task.partition("(")[0], name)}
        if set(plans) - known - {BASELINE}:
            lines.append(f"not tuned, at {BASELINE}'s rate: {', '.join(sorted(set(plans) - known - {BASELINE}))}")
    return lines


def surplus(run: Run) -> float:
    """How many more bytes the interfaces counted than the ledger and gloo's headers come to, as a share of these."""
    totals = run.totals
    return totals["interface_payload_bytes"] / (totals["ledger_bytes"] + totals["ledger_overhead_bytes"]) - 1


def _ledger_check(record: Record) -> list[str]:
    """Whether the counted bytes are the sent bytes: over all runs, and at most."""
    metered = [run for run in record.runs if run.totals.get("ledger_bytes")]
    if not metered:
        return []
    names = ("ledger_bytes", "ledger_overhead_bytes", "interface_payload_bytes")
    counted, headers, seen = (sum(run.totals[name] for run in metered) for name in names)
    worst = max(metered, key=lambda run: abs(surplus(run)))
    return [
        f"the interfaces sent {seen / (counted + headers) - 1:+.1%} against the ledger's bytes and gloo's headers "
        f"({headers / counted:.1%} of them); at most {surplus(worst):+.1%}, under {label(record, worst)}"
    ]


def target_text(row: SchemeRow) -> str:
    """Mean and standard deviation of the seconds to the target, if every run reached it."""
    if row.mean_seconds is None:
        return "not reached"
    reached = [seconds for seconds in row.seconds_to_target if seconds is not None]
    return f"{row.mean_seconds:.1f}" + (f" ±{stdev(reached):.1f}" if len(reached) > 1 else "")


def score_text(metric: str, score: float | None, *, short: bool = False) -> str:
    if score is None:
        return ""
    if metric == "accuracy":
        return f"{score:.1%}"
    return f"{score:.3g}" if short else f"{score:.3g} {metric}"


def difference_text(row: SchemeRow) -> str:
    """Better than the baseline by so much, with its 95% interval."""
    assert row.difference is not None
    return row.difference.text("+.1f", 100) if row.metric == "accuracy" else row.difference.text("+.3f")


def number_text(value: float | None, form: str, scale: float = 1.0) -> str:
    return "" if value is None else format(value * scale, form)


def times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"
