"""From runs to verdicts: a row per task, scheme and exchange; seconds to the target against fp16 over allreduce."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import mean, stdev

from rich import box
from rich.table import Table
from rich.text import Text

from thinwire.lab.runs.record import Record, Run

BASELINE = "fp16"  # over allreduce
WORTH = 1.1  # a scheme pays from this speed-up on: less is within what one machine's runs vary by
KEPT_POINTS = 0.5  # an accuracy this much (in percent) below the baseline's still counts as kept
KEPT_SHARE = 0.01  # the same for other metrics, as a share of the baseline's


@dataclass(frozen=True)
class SchemeRow:
    """What all seeds of a scheme on a task came to. Per-step figures are means over runs; None: not known."""

    task: str
    scheme: str  # with its controller, if one turned its knob
    exchange: str
    label: str  # the scheme, with the exchange where the record has several
    metric: str
    rising: bool
    target: float
    runs: int  # that came to their end
    failures: tuple[str, ...]
    seconds_to_target: tuple[float | None, ...]  # of each run; None: not reached
    score: float | None
    steps_per_second: float | None
    bytes_per_step: float | None
    rounds: float | None
    vnmse: float | None
    compute_seconds: float | None  # per step, like the next two
    encode_seconds: float | None
    wire_seconds: float | None
    speedup_fp16: float | None = None  # on mean seconds to target, where both always reach it
    speedup_fp32: float | None = None
    verdict: str = ""

    @property
    def baseline(self) -> bool:
        return self.scheme == BASELINE and self.exchange == "allreduce"

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
        fp16, fp32 = (plain.get((task, "allreduce", scheme)) for scheme in ("fp16", "fp32"))
        against = SchemeRow(**{**vars(row), "speedup_fp16": _speedup(row, fp16), "speedup_fp32": _speedup(row, fp32)})
        rows.append(SchemeRow(**{**vars(against), "verdict": _verdict(against, fp16)}))
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
    return SchemeRow(
        task=first.plan.task,
        scheme=first.plan.name,
        exchange=first.plan.exchange,
        label=label,
        metric=first.metric,
        rising=first.rising,
        target=first.target,
        runs=len(done),
        failures=tuple(run.reason for run in runs if run.reason is not None),
        seconds_to_target=tuple(run.seconds_to_target for run in done),
        score=mean(run.curve[-1].score for run in done) if done else None,
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


def _verdict(row: SchemeRow, baseline: SchemeRow | None) -> str:
    """One sentence: does it pay, here?"""
    target = f"the target of {score_text(row.metric, row.target)}"
    if not row.runs:
        return f"Failed: {row.failures[0]}."
    reached = sum(seconds is not None for seconds in row.seconds_to_target)
    if row.baseline and reached < row.runs:
        return f"The baseline: reached {target} in {reached} of {row.runs} runs; give it more steps."
    if not reached:
        return f"Does not pay here: never reached {target}."
    if reached < row.runs:
        return f"Does not pay here: reached {target} in only {reached} of {row.runs} runs."
    if row.baseline:
        return f"The baseline: {target} after {row.mean_seconds:.1f} s."
    if baseline is None or not baseline.runs:
        reached = f"Reached {target} after {row.mean_seconds:.1f} s"
        return f"{reached}; without a run of {BASELINE} over allreduce there is no verdict."
    if row.speedup_fp16 is None:
        return f"Pays here: reached {target} after {row.mean_seconds:.1f} s; {baseline.label} did not always."

    speedup, lost = row.speedup_fp16, _lost(row, baseline)
    if speedup >= WORTH and not lost:
        return f"Pays here: reaches {target} {speedup:.1f}x sooner than {baseline.label}, and ends no worse."
    if speedup >= WORTH:
        return f"Reaches {target} {speedup:.1f}x sooner than {baseline.label}, but ends {lost}."
    bound = max(row.phases, key=lambda phase: row.phases[phase] or 0.0)
    how = "as soon as" if speedup > 1 / WORTH else f"{1 / speedup:.1f}x later than"
    return f"Does not pay here: reaches {target} {how} {baseline.label}; most of a step goes into {bound}."


def _lost(row: SchemeRow, baseline: SchemeRow) -> str:
    """How much worse the row ends than the baseline, in words; empty: not worth mentioning."""
    assert row.score is not None and baseline.score is not None
    worse = baseline.score - row.score if row.rising else row.score - baseline.score
    if row.metric == "accuracy":
        return f"{worse * 100:.1f} points lower" if worse * 100 > KEPT_POINTS else ""
    return f"at {row.score:.3g} instead of {baseline.score:.3g}" if worse > KEPT_SHARE * abs(baseline.score) else ""


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


def number_text(value: float | None, form: str, scale: float = 1.0) -> str:
    return "" if value is None else format(value * scale, form)


def times(ratio: float | None) -> str:
    return "" if ratio is None else f"{ratio:.2f}x"
