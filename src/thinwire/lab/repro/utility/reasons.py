"""Why a claim does not hold, as far as the same runs tell: what a step takes, and how the runs end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from thinwire.lab.report.table import SchemeRow, difference_text, score_text, times

ROTATED_TOGETHER = (
    "a block's range is that of the worker with most of its norm there, and workers differ block by block"
)


def of_two(before: SchemeRow, after: SchemeRow) -> str:
    """Seconds to a target are those of a step, and how far it gets."""
    failure = next((row.failures[0] for row in (after, before) if not row.runs), None)
    if failure is not None:
        return f"failed: {failure}"
    steps, ends = (
        " against ".join(map(text, (after, before)))
        for text in (lambda row: _milliseconds(sum(_phases(row))), lambda row: score_text(row.metric, row.score))
    )
    return f"a step takes {steps} ms, and the end is {ends}"


def of_wires(rows: Mapping[str, SchemeRow]) -> str:
    """`rows`: by what to call them; what there is to save."""
    takes = (
        f"{name} {_milliseconds(row.wire_seconds or 0.0)} of {_milliseconds(sum(_phases(row)))}"
        for name, row in rows.items()
        if row.runs
    )
    return f"the milliseconds of a step that the wire takes: {', '.join(takes)}"


def of_paying(paying: Sequence[SchemeRow], fp16: SchemeRow) -> str:
    """Of those that pay against fp16."""
    if not paying:
        return of_wires({"under fp16": fp16})
    return f"all that pay do so by {times(min(row.speedup_fp16 or 0.0 for row in paying))} or more against fp16, too"


def of_leading(leading: Sequence[SchemeRow]) -> str:
    if not leading:
        return "nobody is ahead of fp16 so early"
    ends = (f"{row.label} {difference_text(row)}" for row in leading if row.difference is not None)
    return f"the ends of those that lead, against fp16: {', '.join(ends)}"


def _phases(row: SchemeRow) -> list[float]:
    return [seconds or 0.0 for seconds in row.phases.values()]


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:.0f}"
