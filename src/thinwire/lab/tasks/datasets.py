"""The examples tasks learn from: an embedded image subset, standard files, text, and made-up regressions."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from importlib import resources
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

HELD_OUT = 10  # one in so many training examples watches, where a dataset has no validation part
MOST_HELD_OUT = 2048  # so many at most: they are looked at again and again, and of a large text took most of a run
CIFAR_RECORD = 1 + 3 * 32 * 32  # a label, then the red, green and blue planes


@dataclass(frozen=True)
class Examples:
    """Inputs and what is expected for each, one row per example."""

    inputs: Tensor
    targets: Tensor

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, rows: Tensor | slice) -> Examples:
        return Examples(self.inputs[rows], self.targets[rows])

    def part(self, worker: int, workers: int) -> Examples:
        """Every `workers`-th example, beginning with `worker`: together the parts are the whole."""
        return self[slice(worker, None, workers)]

    def shard(self, worker: int, workers: int, *, seed: int, skew: float = 0.0) -> Examples:
        """This worker's examples: disjoint from the others', equally many, the same for the same seed.

        `skew` of each shard comes from one stretch of the examples sorted by target, so that with skew 1
        every worker sees its own few labels; the rest is drawn alike from all of them.  # higher => workers
        disagree more
        """
        order = torch.randperm(len(self), generator=torch.Generator().manual_seed(seed))
        size = len(self) // workers
        own = int(size * skew)
        order = order[: size * workers]
        skewed, mixed = order[: own * workers], order[own * workers :]
        if own:
            if self.targets.ndim > 1 and self.targets[0].numel() > 1:
                raise ValueError(
                    f"skew={skew}: shards can be skewed only where every example has one label; use skew=0"
                )
            skewed = skewed[torch.argsort(self.targets[skewed].reshape(-1), stable=True)]
        return self[torch.cat([skewed[worker * own : (worker + 1) * own], mixed[worker::workers]])]

    def batches(self, size: int, *, seed: int) -> Iterator[Examples]:
        """Batches for ever: each epoch in a new order, the rest that fills no batch left out of it."""
        if not 1 <= size <= len(self):
            raise ValueError(f"a batch of {size} cannot be taken from {len(self)} examples")
        generator = torch.Generator().manual_seed(seed)
        while True:
            order = torch.randperm(len(self), generator=generator)
            for start in range(0, len(self) - size + 1, size):
                yield self[order[start : start + size]]


@dataclass(frozen=True)
class Dataset:
    """What to learn from, what to watch training by, and what to evaluate it by once, at its end."""

    train: Examples
    test: Examples
    validation: Examples | None = None  # None: some of train, see `split`

    @cached_property
    def split(self) -> tuple[Examples, Examples]:
        """(to train on, to watch training by). Without a validation part every tenth of train is kept from training."""
        if self.validation is not None:
            return self.train, self.validation
        apart = max(HELD_OUT, -(-len(self.train) // MOST_HELD_OUT))
        kept = torch.arange(len(self.train)) % apart == apart - 1
        return self.train[~kept], self.train[kept]


@cache
def embedded_images() -> Dataset:
    """6,000 images of Fashion-MNIST, 2,000 for validation, 5,000 to test: uint8 [1, 28, 28], ten balanced classes."""
    with resources.files("thinwire.lab.tasks").joinpath("data/fashion_mnist_subset.npz").open("rb") as file:
        arrays = np.load(file)
        parts = (
            _images(arrays[f"{part}_images"][:, None], arrays[f"{part}_labels"])
            for part in ("train", "test", "validation")
        )
        return Dataset(*parts)


def fashion_mnist(folder: Path) -> Dataset:
    """Fashion-MNIST (or MNIST) from its four idx .gz files: uint8 [1, 28, 28]."""
    folder = _folder_with(folder, "fashion-mnist", "train-images-idx3-ubyte.gz")
    parts = []
    for prefix in ("train", "t10k"):
        images = read_idx(folder / f"{prefix}-images-idx3-ubyte.gz")
        labels = read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz")
        if images.ndim != 3 or len(images) != len(labels):
            raise ValueError(f"{folder}: {prefix} has images of shape {images.shape} and {len(labels)} labels")
        parts.append(_images(images[:, None], labels))
    return Dataset(*parts)


def cifar10(folder: Path) -> Dataset:
    """CIFAR-10, binary version: as many of the five training batches as are there, and the test batch."""
    folder = _folder_with(folder, "cifar-10-batches-bin", "test_batch.bin")
    batches = sorted(folder.glob("data_batch_*.bin"))
    if not batches:
        raise ValueError(f"missing file: {folder / 'data_batch_1.bin'}")
    train = np.concatenate([_cifar_records(file) for file in batches])
    test = _cifar_records(folder / "test_batch.bin")
    return Dataset(*(_images(r[:, 1:].reshape(-1, 3, 32, 32), r[:, 0]) for r in (train, test)))


def text_bytes(source: Path, *, context: int, test_windows: int = 1024) -> Dataset:
    """Next-byte prediction on a text file (or a folder's train.txt)."""
    if source.is_dir():
        source = _folder_with(source, "wikitext-2", "train.txt") / "train.txt"
    if not source.is_file():
        raise ValueError(f"missing file: {source}")
    text = np.fromfile(source, dtype=np.uint8)
    if (len(text) - 1) // context < 20:
        raise ValueError(f"{source} holds {len(text)} bytes; a text of at least {20 * context + 1} is needed")
    return _next_bytes(text, context, test_windows)


def python_reference(*, context: int, test_windows: int = 1024) -> Dataset:
    """The same on a text that every Python brings along: its language reference, as `help()` shows it."""
    from pydoc_data.topics import topics

    text = "".join(topics[name] for name in sorted(topics)).encode()
    return _next_bytes(np.frombuffer(text, dtype=np.uint8).copy(), context, test_windows)


def _next_bytes(raw: np.ndarray, context: int, test_windows: int) -> Dataset:
    """The text cut into windows of `context` bytes; targets are the inputs moved on by one byte.

    The last tenth is kept for testing, by `test_windows` windows spread evenly over it.
    """
    text = torch.from_numpy(raw)
    windows = (len(text) - 1) // context
    inputs = text[: windows * context].view(windows, context)
    targets = text[1 : windows * context + 1].view(windows, context)
    held_out = windows // 10
    rows = torch.linspace(windows - held_out, windows - 1, min(test_windows, held_out)).long()
    return Dataset(
        Examples(inputs[: windows - held_out], targets[: windows - held_out]),
        Examples(inputs[rows], targets[rows]),
    )


def regression(*, features: int, outputs: int, noise: float, train: int = 8000, test: int = 1000) -> Dataset:
    """y = A x + noise, with |y|^2 = 1 on average before the noise; the same numbers every time."""
    generator = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    x = normal(train + test, features)
    truth = normal(features, outputs) / (features * outputs) ** 0.5
    y = x @ truth + noise * normal(train + test, outputs) / outputs**0.5
    return Dataset(Examples(x[:train], y[:train]), Examples(x[train:], y[train:]))


def read_idx(file: Path) -> np.ndarray:
    """The uint8 array in a gzipped idx file."""
    if not file.is_file():
        raise ValueError(f"missing file: {file}")
    try:
        with gzip.open(file) as stream:
            raw = stream.read()
    except (OSError, EOFError, zlib.error) as error:
        raise ValueError(f"{file} is not a whole gzip file: {error}") from None
    dims = raw[3] if raw[:3] == b"\0\0\x08" and len(raw) >= 4 else 0
    shape = [int.from_bytes(raw[4 + 4 * at : 8 + 4 * at], "big") for at in range(dims)]
    if not dims or len(raw) != 4 + 4 * dims + math.prod(shape):
        raise ValueError(f"{file} is not an idx file of bytes")
    return np.frombuffer(raw, np.uint8, offset=4 + 4 * dims).reshape(shape)


def _cifar_records(file: Path) -> np.ndarray:
    raw = np.fromfile(file, np.uint8)
    if not raw.size or raw.size % CIFAR_RECORD:
        raise ValueError(f"{file} is not a CIFAR-10 batch (binary version): {raw.size} bytes")
    return raw.reshape(-1, CIFAR_RECORD)


def _folder_with(folder: Path, usual_name: str, file: str) -> Path:
    """`folder` if it holds the file, else its subfolder of the usual name."""
    for place in (folder, folder / usual_name):
        if (place / file).is_file():
            return place
    raise ValueError(f"missing file: {folder / file}")


def _images(images: np.ndarray, labels: np.ndarray) -> Examples:
    return Examples(torch.tensor(images), torch.tensor(labels, dtype=torch.int64))
