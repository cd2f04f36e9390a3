"""Does it pay, here? One sentence for every row, from paired differences over seeds and their 95% intervals.

Two questions: is the row at the target sooner than the baseline, and does it end as well? A difference counts when its
interval leaves out zero. What lies within `kept` or WORTH of the baseline is level, and who surely ends no more
than `kept` below it is as good; the rest is left open, and the sentence says so, for more seeds may decide it.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from thinwire.lab.report.intervals import Interval, ratio
from thinwire.lab.runs.curves import kept

if TYPE_CHECKING:
    from thinwire.lab.report.table import SchemeRow

WORTH = 1.1  # a scheme pays from this speed-up on: less is within what one machine's runs vary by


def verdict(row: SchemeRow, baseline: SchemeRow | None) -> str:
    """The sentence."""
    if not row.runs:
        return f"Failed: {row.failures[0]}."
    if row.baseline:
        return _of_the_baseline(row)
    if baseline is None or not baseline.runs or row.difference is None:
        nothing = f"ithout a run of {row.against} there is no verdict."
        if row.mean_seconds is None:
            return f"W{nothing}"
        return f"Reached {row.target_text} after {row.mean_seconds:.1f} s; w{nothing}"
    end = ending(row, baseline)
    if row.mean_seconds is None or baseline.mean_seconds is None:
        return _by_the_end(row, baseline, end)
    found = _speed(row, baseline)
    pace = _pace(found)
    words = _ending_words(row, end, but=pace == "sooner")
    side = "sooner" if found.mean > 0 else "later"
    reaches = f"reaches {row.target_text} {_times(found)} {side} than {baseline.label}"
    if pace == "sooner":
        head = {"lower": "Sooner, but worse", "open": "Sooner; whether as good is open"}.get(end, "Pays here")
        return f"{head}: {reaches}, {words}."
    if pace == "later":
        bound = max(row.phases, key=lambda phase: row.phases[phase] or 0.0)
        return f"Does not pay here: {reaches}, {words}; most of a step goes into {bound}."
    if pace == "level":
        head = "Does not pay here" if end == "lower" else "Level here"
        return f"{head}: {reaches}, {words}."
    return f"Open: {reaches}, as far as so few seeds can tell, {words}."


def standing(row: SchemeRow, baseline: SchemeRow) -> str:
    """The verdict in a word, as far as a row is faster: "pays", "open", "worse"; else "not"."""
    end, pace = ending(row, baseline), _pace(_speed(row, baseline))
    if pace != "sooner":
        return "not"
    if end == "lower":
        # Of a row that does not hold the target the sentence says that it does not pay.
        return "not" if row.mean_seconds is None or baseline.mean_seconds is None else "worse"
    return "open" if end == "open" else "pays"


def speed(row: SchemeRow, baseline: SchemeRow) -> float:
    """How many times as fast: to the target, or, where one of the two does not always hold it, for all steps."""
    return math.exp(_speed(row, baseline).mean)


def _speed(row: SchemeRow, baseline: SchemeRow) -> Interval:
    """log(their seconds / ours)."""
    if row.mean_seconds is None or baseline.mean_seconds is None:
        return ratio(*([each.run_seconds[seed] for seed in _common(row, baseline)] for each in (baseline, row)))
    return ratio(*_pairs(row, baseline))


def _of_the_baseline(row: SchemeRow) -> str:
    reached = sum(seconds is not None for seconds in row.seconds_to_target)
    if reached < row.runs:
        return f"The baseline: reached {row.target_text} in {reached} of {row.runs} runs; give it more steps."
    return f"The baseline: {row.target_text} after {row.mean_seconds:.1f} s."


def _by_the_end(row: SchemeRow, baseline: SchemeRow, end: str) -> str:
    """Where a target was not always held, what counts is how good the row ends, and after how long."""
    reached = sum(seconds is not None for seconds in row.seconds_to_target)
    held = f"held {row.target_text} in {reached} of {row.runs} runs"
    words = _ending_words(row, end)
    if end == "lower":
        return f"Does not pay here: {held}, {words}."
    found = _speed(row, baseline)
    head = {"sooner": "Pays here", "later": "Does not pay here"}.get(_pace(found), "Level here")
    side = "fewer" if found.mean > 0 else "more"
    return (
        f"{'Open' if end == 'open' else head}: takes {_times(found)} {side} seconds than {baseline.label} for all "
        f"steps, {words}; {held}."
    )


def ending(row: SchemeRow, baseline: SchemeRow) -> str:
    """How the final scores compare: "higher" (which is better), "level", "no worse", "lower" or "open"."""
    assert row.difference is not None and baseline.score is not None
    margin = kept(row.metric, baseline.score)
    difference = row.difference
    if math.isnan(difference.mean):
        return "lower"
    if not math.isfinite(difference.half):  # one run, no interval
        return "lower" if difference.mean < -margin else "higher" if difference.mean > margin else "level"
    if -margin <= difference.low and difference.high <= margin:
        return "level"
    if difference.low >= -margin:
        return "higher" if difference.low > 0 else "no worse"
    return "lower" if difference.high < 0 else "open"


def _ending_words(row: SchemeRow, end: str, *, but: bool = False) -> str:
    """How the row ends; in points, or in the metric's own measure, in which a better end may be a lower one.

    but: what goes before it speaks for the row.
    """
    assert row.difference is not None
    found = row.difference
    if math.isnan(found.mean):
        return "and diverged"
    if row.metric == "accuracy":
        by = f"{found.text('+.1f', 100)} points"
    else:
        by = found.text("+.2g", 1.0 if row.rising else -1.0) + f" {row.metric}"
    one = "" if math.isfinite(found.half) else ", one seed"
    how = {
        "higher": "ends better", "level": "ends level", "no worse": "ends no worse", "lower": "ends worse",
    }.get(end, "how it ends is open")  # fmt: skip
    word = "but" if but and end in ("lower", "open") else "and"
    return f"{word} {how} ({by}{one})"


def _pace(speed: Interval) -> str:
    """ "sooner", "later", "level" or "open", of log(their seconds / ours)."""
    worth = math.log(WORTH)
    if abs(speed.mean) < worth:
        return "level"
    if math.isfinite(speed.half) and speed.low <= 0 <= speed.high:
        return "open"
    return "sooner" if speed.mean > 0 else "later"


def _times(speed: Interval) -> str:
    """A ratio above 1, whichever side of 1 the middle lies on, and its interval: "2.7x (2.4 to 3.0)"."""
    middle = abs(speed.mean)
    if not math.isfinite(speed.half):
        return f"{math.exp(middle):.1f}x"
    low, high = (math.exp(min(middle + side * speed.half, 50)) for side in (-1, 1))
    return f"{math.exp(middle):.1f}x ({low:.1f} to {high:.1f})"


def _common(row: SchemeRow, baseline: SchemeRow) -> list[int]:
    return [seed for seed in row.run_seconds if seed in baseline.run_seconds]


def _pairs(row: SchemeRow, baseline: SchemeRow) -> tuple[list[float], list[float]]:
    """The baseline's and the row's seconds to the target, by the seeds that both have."""
    ours, theirs = (dict(zip(each.run_seconds, each.seconds_to_target, strict=True)) for each in (row, baseline))
    both = [(theirs[seed], ours[seed]) for seed in _common(row, baseline)]
    return [a for a, b in both if a and b], [b for a, b in both if a and b]
