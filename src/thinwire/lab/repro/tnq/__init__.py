"""Two-stage quantisation against what it is built from: errors, and training where noise limits it."""

from __future__ import annotations

from pathlib import Path

from thinwire.lab.repro.claims import Claim, Listing, Progress, Reproduction, Stoppable
from thinwire.lab.repro.tnq import errors, training


def reproduce(quick: bool, data: Path | None, seeds: int, progress: Progress) -> Reproduction:
    """What was measured, and the tables. Ctrl-C ends it with what is finished.

    `quick`: 2 bits, fewer rates and steps. `data` is not needed.
    """
    claims: list[Claim] = []
    tables: list[Listing] = []
    stop = Stoppable()
    with stop:
        tables.append(errors.laplace_table(claims, progress))
        tables.append(errors.gradient_table(claims, progress))
    tables += training.tables(quick, seeds, claims, progress, stop)
    return Reproduction(claims, tables, stopped=stop.stopped)
