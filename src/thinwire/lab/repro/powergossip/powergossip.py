"""PowerGossip: consensus at equal steps and at equal bytes, why rank 1 is enough, and training against tuned peers."""

from __future__ import annotations

from pathlib import Path

from thinwire.gossip import graphs
from thinwire.lab.repro.claims import Findings, Part
from thinwire.lab.repro.powergossip import equal_bytes, evaluated, reruns, spectrum
from thinwire.lab.repro.powergossip.resnet import ResNetTraining
from thinwire.lab.repro.powergossip.training import Training
from thinwire.lab.tasks import datasets

STEPS, QUICK_STEPS = 900, 450
FASHION = ("fashion-mnist", "train-images-idx3-ubyte.gz")
CIFAR = ("cifar-10-batches-bin", "test_batch.bin")
RESNET_SEEDS = 3  # at most: a run takes minutes


def parts(quick: bool, data: Path | None) -> dict[str, Part]:
    """quick: half of the consensus and of the steps, embedded images, i.i.d. shards, nobody's training tuned. data:
    where Fashion-MNIST lies, and CIFAR-10 for a ResNet; the embedded images serve without it.
    """
    if data is not None and not _has(data, *FASHION) and not _has(data, *CIFAR):
        raise ValueError(f"{data} holds neither Fashion-MNIST ({FASHION[1]}) nor CIFAR-10 ({CIFAR[1]})")
    steps, peers = (QUICK_STEPS, evaluated.untuned()) if quick else (STEPS, evaluated.tuned())

    def agree(found: Findings) -> None:
        with found.stop:
            marks = reruns.MARKS[:2] if quick else reruns.MARKS
            found.tables.append(reruns.consensus_table(marks, found.claims, found.progress))
            found.tables.append(reruns.bytes_table(found.claims))
            found.tables.append(reruns.graph_table(found.claims, found.progress))
            found.tables += equal_bytes.tables(quick, found.seeds, found.claims, found.progress)

    def look_at_differences(found: Findings) -> None:
        with found.stop:
            found.tables.append(spectrum.table(_cnn(None), steps, found.claims, found.progress))

    def train(found: Findings, training: evaluated.Trained, peers: evaluated.Peers, seeds: int) -> None:
        if not found.stop.stopped:
            found.tables += evaluated.tables(training, peers, seeds, found.claims, found.progress, found.stop)

    def train_cnn(found: Findings) -> None:
        for skew in (0.0,) if quick else (0.0, 0.5):
            train(found, _cnn(None if quick else data, skew, steps), peers, found.seeds)

    def train_resnet(found: Findings) -> None:
        assert data is not None
        resnet = ResNetTraining(datasets.cifar10(data), graphs.ring(8), steps=STEPS)
        train(found, resnet, evaluated.of_the_authors(), min(found.seeds, RESNET_SEEDS))

    every: dict[str, Part] = {"consensus": agree, "spectrum": look_at_differences, "fashion": train_cnn}
    return every | {"resnet": train_resnet} if data is not None and not quick and _has(data, *CIFAR) else every


def _cnn(data: Path | None, skew: float = 0.0, steps: int = STEPS) -> Training:
    """The small network; its rate is the one of 0.05, 0.02, 0.01 and 0.005 that suits all-reduce best on CIFAR-10."""
    dataset = datasets.fashion_mnist(data) if data is not None and _has(data, *FASHION) else datasets.embedded_images()
    return Training(dataset, graphs.ring(8), steps, skew=skew, rate=0.05)


def _has(folder: Path, usual_name: str, file: str) -> bool:
    return (folder / file).is_file() or (folder / usual_name / file).is_file()
