"""The tables of a workload on one link."""

from __future__ import annotations

import math
from collections.abc import Sequence

from thinwire.lab.report import table
from thinwire.lab.report.table import difference_text, number_text, score_text, times
from thinwire.lab.repro.claims import Listing
from thinwire.lab.repro.utility.evaluated import RungResult, compressed_of, plateau, seconds_text
from thinwire.lab.repro.utility.ladders import FP16
from thinwire.lab.runs.record import Record


def result_table(results: Sequence[RungResult], record: Record) -> Listing:
    """Rung by rung: bytes, error, time, where a step's time goes, and the end."""
    rows = []
    for each in results:
        row = each.row
        error = "" if each.vnmse is None else f"{each.vnmse[0]:.2g}, {each.vnmse[1]:.2g}"
        difference = "" if row.difference is None or each.rung == FP16 else difference_text(row)
        rows.append([
            each.rung.title, each.rung.name, number_text(row.bytes_per_step, ".3f", 1e-6), error,
            "+".join(number_text(seconds, ".0f", 1e3) for seconds in row.phases.values()),
            seconds_text(each) if row.runs else f"failed: {row.failures[0]}",
            score_text(row.metric, row.score, short=True), difference, times(row.speedup_fp16), times(row.speedup_fp32),
        ])  # fmt: skip
    columns = [
        "rung", "scheme", "MB/step", "vNMSE early, late", "compute + encode + wire ms", "seconds to target", "final",
        "against fp16", "vs fp16", "vs fp32",
    ]  # fmt: skip
    first = results[0].row
    still = plateau([run for each in results if each.rung == FP16 for run in each.runs if run.reason is None])
    target = score_text(first.metric, first.target)
    return Listing(
        f"{first.task}, {table.setting(record)}; target {target}, by a rolling mean; "
        f"in fp16's last tenth it moves by {still:.1%}",
        columns,
        rows,
    )


def order_table(results: Sequence[RungResult], record: Record) -> Listing:
    """Places by each proxy, in the order of seconds to the target."""
    compressed = sorted(compressed_of(results), key=lambda each: each.seconds)
    by_speed = sorted(compressed, key=lambda each: -each.steps_per_second)
    known = all(each.vnmse is not None for each in compressed)
    by_error = sorted(compressed, key=lambda each: each.late_error) if known else []
    rows = []
    for place, each in enumerate(compressed, 1):
        reached = str(place) if math.isfinite(each.seconds) else "-"
        error = str(by_error.index(each) + 1) if known else ""
        rows.append([each.rung.title, reached, str(by_speed.index(each) + 1), error])
    columns = ["rung", "by seconds to target", "by steps/s", "by late vNMSE"]
    network = record.runs[0].plan.network
    return Listing(f"The order that proxies predict, {network} (- : not always reached)", columns, rows)
