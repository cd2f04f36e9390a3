"""PowerGossip: consensus at equal steps and at equal bytes, why rank 1 is enough, and training against tuned peers."""

from __future__ import annotations

from pathlib import Path

from thinwire.gossip import graphs
from thinwire.lab.repro.claims import Claim, Listing, Progress, Reproduction, Stoppable
from thinwire.lab.repro.powergossip import equal_bytes, judged, reruns, spectrum
from thinwire.lab.repro.powergossip.resnet import ResNetTraining
from thinwire.lab.repro.powergossip.training import Training
from thinwire.lab.tasks import datasets

STEPS, QUICK_STEPS = 900, 450
FASHION = ("fashion-mnist", "train-images-idx3-ubyte.gz")
CIFAR = ("cifar-10-batches-bin", "test_batch.bin")
RESNET_SEEDS = 2  # at most: a run takes minutes


def reproduce(quick: bool, data: Path | None, seeds: int, progress: Progress) -> Reproduction:
    """What was measured, and the tables. Ctrl-C ends it with what is finished.

    quick: half of the consensus and of the steps, embedded images, i.i.d. shards, nobody's training tuned. data: where
    Fashion-MNIST lies, and CIFAR-10 for a ResNet; the embedded images serve without it.
    """
    if data is not None and not _has(data, *FASHION) and not _has(data, *CIFAR):
        raise ValueError(f"{data} holds neither Fashion-MNIST ({FASHION[1]}) nor CIFAR-10 ({CIFAR[1]})")
    claims: list[Claim] = []
    tables: list[Listing] = []
    stop = Stoppable()
    with stop:
        tables.append(reruns.consensus_table(reruns.MARKS[:2] if quick else reruns.MARKS, claims, progress))
        tables.append(reruns.bytes_table(claims))
        tables.append(reruns.graph_table(claims, progress))
        tables += equal_bytes.tables(quick, seeds, claims, progress)
        tables.append(spectrum.table(_cnn(None), QUICK_STEPS if quick else STEPS, claims, progress))
    for training, peers, count in _trainings(None if quick else data, seeds, quick):
        if not stop.stopped:
            tables += judged.tables(training, peers, count, claims, progress, stop)
    return Reproduction(claims, tables, stopped=stop.stopped)


def _trainings(data: Path | None, seeds: int, quick: bool) -> list[tuple[judged.Trained, judged.Peers, int]]:
    """What is trained, the peers with their settings to choose from, and how many seeds count."""
    peers = judged.untuned() if quick else judged.tuned()
    found: list[tuple[judged.Trained, judged.Peers, int]] = [
        (_cnn(data, skew, QUICK_STEPS if quick else STEPS), peers, seeds) for skew in ((0.0,) if quick else (0.0, 0.5))
    ]
    if data is not None and _has(data, *CIFAR):
        resnet = ResNetTraining(datasets.cifar10(data), graphs.ring(8), steps=STEPS)
        found.append((resnet, judged.of_the_authors(), min(seeds, RESNET_SEEDS)))
    return found


def _cnn(data: Path | None, skew: float = 0.0, steps: int = STEPS) -> Training:
    """The small network; its rate is the one of 0.05, 0.02, 0.01 and 0.005 that suits all-reduce best on CIFAR-10."""
    dataset = datasets.fashion_mnist(data) if data is not None and _has(data, *FASHION) else datasets.embedded_images()
    return Training(dataset, graphs.ring(8), steps, skew=skew, rate=0.05)


def _has(folder: Path, usual_name: str, file: str) -> bool:
    return (folder / file).is_file() or (folder / usual_name / file).is_file()
