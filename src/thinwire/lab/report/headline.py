"""The one sentence of a comparison, for those who read nothing else: what pays, or that nothing does."""

from __future__ import annotations

from collections.abc import Sequence

from thinwire.lab.report.table import SchemeRow
from thinwire.lab.report.verdicts import speed, standing


def headline(rows: Sequence[SchemeRow]) -> str:
    """Of the rows of one task on one network. Who surely pays goes before a faster one that may not."""
    baseline = next((row for row in rows if row.baseline and row.runs), None)
    others = [row for row in rows if row is not baseline and row.runs and row.difference is not None]
    if baseline is None or not others:
        return f"No verdict: there is nothing to hold against {rows[0].against}."
    pays, open_, worse = (_best(others, baseline, word) for word in ("pays", "open", "worse"))
    than = f"than {baseline.label}"
    if pays is not None:
        says = f"{pays.label} pays: {_sooner(pays, baseline)} {than}"
        if open_ is not None and speed(open_, baseline) > speed(pays, baseline):
            says += f"; {open_.label} is {_sooner(open_, baseline)}, but whether it ends as good is open"
        return f"{says}."
    if open_ is not None:
        return f"{open_.label} may pay: it is {_sooner(open_, baseline)} {than}; whether it ends as good is open."
    if worse is not None:
        return f"Nothing pays without a price: {worse.label} is {_sooner(worse, baseline)} {than}, and ends worse."
    return f"Nothing pays here: stay with {baseline.label}."


def _best(rows: Sequence[SchemeRow], baseline: SchemeRow, word: str) -> SchemeRow | None:
    """The fastest of those whose verdict is this word; of those that always hold the target, if there are any."""
    found = [row for row in rows if standing(row, baseline) == word]
    holding = [row for row in found if row.mean_seconds is not None]
    return max(holding or found, key=lambda row: speed(row, baseline), default=None)


def _sooner(row: SchemeRow, baseline: SchemeRow) -> str:
    """At the target, or, where that is not always held, at the end of all steps."""
    held = row.mean_seconds is not None and baseline.mean_seconds is not None
    return f"{speed(row, baseline):.1f}x sooner" + ("" if held else " through all steps")
