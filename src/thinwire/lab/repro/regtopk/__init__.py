"""RegTop-k against Top-k: the authors' regression, their toy, and images, with and without error feedback."""

from __future__ import annotations

from pathlib import Path

from thinwire.lab.repro.claims import Claim, Listing, Progress, Reproduction, Stoppable
from thinwire.lab.repro.regtopk import images, regression, toy


def reproduce(quick: bool, data: Path | None, seeds: int, progress: Progress) -> Reproduction:
    """What was measured, and the tables. Ctrl-C ends it with what is finished.

    `quick`: fewer densities and rounds. `data`: where CIFAR-10 lies.
    """
    claims: list[Claim] = []
    tables: list[Listing] = []
    stop = Stoppable()
    with stop:
        tables.append(regression.regression_table(quick, seeds, claims, progress))
        tables += regression.option_tables(quick, seeds, claims, progress)
        tables.append(toy.toy_table(claims))
    tables += images.tables(quick, data, seeds, claims, progress, stop)
    return Reproduction(claims, tables, stopped=stop.stopped)
