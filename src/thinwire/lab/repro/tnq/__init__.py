"""Two-stage quantisation against what it is built from: errors, and training where noise limits it."""

from __future__ import annotations

from pathlib import Path

from thinwire.lab.repro.claims import Claim, Progress, Reproduction
from thinwire.lab.repro.tnq import errors, training


def reproduce(quick: bool, data: Path | None, seeds: int, progress: Progress) -> Reproduction:
    """What was measured, and the tables. `quick`: 2 bits, fewer rates and steps. `data` is not needed."""
    claims: list[Claim] = []
    tables = [
        errors.laplace_table(claims, progress),
        errors.gradient_table(claims, progress),
        *training.tables(quick, seeds, claims, progress),
    ]
    return Reproduction(claims, tables)
