"""RegTop-k against Top-k: the authors' regression, their toy, and images, with and without error feedback."""

from __future__ import annotations

from pathlib import Path

from thinwire.lab.repro.claims import Claim, Progress, Reproduction
from thinwire.lab.repro.regtopk import images, regression, toy


def reproduce(quick: bool, data: Path | None, seeds: int, progress: Progress) -> Reproduction:
    """What was measured, and the tables. `quick`: fewer densities and rounds. `data`: where CIFAR-10 lies."""
    claims: list[Claim] = []
    tables = [
        regression.regression_table(quick, seeds, claims, progress),
        *regression.option_tables(quick, seeds, claims, progress),
        toy.toy_table(claims),
        *images.tables(quick, data, seeds, claims, progress),
    ]
    return Reproduction(claims, tables)
