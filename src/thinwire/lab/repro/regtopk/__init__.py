"""RegTop-k against Top-k: the authors' regression, their toy, and images, with and without error feedback."""

from __future__ import annotations

from pathlib import Path

from thinwire.lab.repro.claims import Findings, Part
from thinwire.lab.repro.regtopk import finetuning, images, regression, toy
from thinwire.lab.tasks import datasets


def parts(quick: bool, data: Path | None) -> dict[str, Part]:
    """`quick`: fewer densities and rounds, and no fine-tuning. `data`: where CIFAR-10 lies; without it, the embedded
    images."""
    dataset = datasets.embedded_images() if data is None else datasets.cifar10(data)
    source = "the embedded images" if data is None else "CIFAR-10"

    def solve(found: Findings) -> None:
        with found.stop:
            found.tables.append(regression.regression_table(quick, found.seeds, found.claims, found.progress))
            found.tables += regression.option_tables(quick, found.seeds, found.claims, found.progress)

    def play(found: Findings) -> None:
        found.tables.append(toy.toy_table(found.claims))

    def classify(found: Findings) -> None:
        training = images.ImageRun(rounds=240) if data or not quick else images.ImageRun(rounds=12, width=4)
        images.add_table(training, source, dataset, found, quick)

    def fine_tune(found: Findings) -> None:
        finetuning.add_table(source, dataset, found)

    every: dict[str, Part] = {"regression": solve, "toy": play, "images": classify}
    return every if quick else every | {"finetuning": fine_tune}
