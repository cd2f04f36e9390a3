"""Two-stage quantisation against what it is built from: errors, and training where noise limits it."""

from __future__ import annotations

from pathlib import Path

from thinwire.lab.repro.claims import Findings, Part
from thinwire.lab.repro.tnq import errors, training


def parts(quick: bool, data: Path | None) -> dict[str, Part]:
    """`quick`: 2 bits, fewer rates and steps. `data` is not needed."""

    def measure_errors(found: Findings) -> None:
        with found.stop:
            found.tables.append(errors.laplace_table(found.claims, found.progress))
            found.tables.append(errors.gradient_table(found.claims, found.progress))

    def train(found: Findings) -> None:
        found.tables += training.tables(quick, found.seeds, found.claims, found.progress, found.stop)

    return {"errors": measure_errors, "training": train}
