"""The learning rates that `compare --tune` found for the tasks that come with the lab, by row: times the task's own.

A task's own rate is the one found for fp16 in every step, so a row that is not here was not tuned and has fp16's.
"""

from __future__ import annotations

RATES: dict[str, dict[str, float]] = {}


def of(task: str, row: str) -> float:
    """How many times the task's own rate a row is trained at."""
    return RATES.get(task, {}).get(row, 1.0)


def known(task: str, row: str) -> bool:
    """Whether a rate was looked for."""
    return row in RATES.get(task, {})
