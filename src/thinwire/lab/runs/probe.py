"""What workers of a run show each other off the network: rows of a file that all of them map."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn


class Rows:
    """A row per worker, each with one element per element of the tensors in `like`, kept in a file."""

    def __init__(self, file: Path, like: Sequence[Tensor], worker: int, workers: int):
        sizes = [tensor.numel() for tensor in like]
        self.all = torch.from_file(str(file), shared=True, size=sum(sizes) * workers).view(workers, sum(sizes))
        self.own = self.all[worker].split(sizes)
        self._sizes = sizes

    def mean(self) -> Sequence[Tensor]:
        """The mean of everybody's row, cut like the tensors."""
        return self.all.mean(0).split(self._sizes)


class Probe:
    """Measures vNMSE on real steps: |X - Xhat|^2 / |X|^2, X the exact mean gradient, Xhat what was applied.

    Every worker copies its own gradient, as backward makes it, into its row.
    """

    def __init__(self, model: nn.Module, file: Path, worker: int, workers: int):
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._worker = worker
        self._rows = Rows(file, self._parameters, worker, workers)
        self._copying_seconds = 0.0
        self._values: list[float] = []

    @property
    def vnmse(self) -> float:
        return sum(self._values) / len(self._values) if self._values else float("nan")

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Copy the gradients of the backward pass inside."""
        self._copying_seconds = 0.0
        hooks = [
            p.register_hook(lambda gradient, place=place: self._copy(gradient, place))
            for p, place in zip(self._parameters, self._rows.own, strict=True)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _copy(self, gradient: Tensor, place: Tensor) -> None:
        began = time.perf_counter()
        place.copy_(gradient.reshape(-1))
        self._copying_seconds += time.perf_counter() - began

    def measure(self) -> float:
        """Compare what was applied with the exact mean; the seconds that copying took out of training.

        Worker 0 does it for all. Every copy is there: none of the means it has got could be had without them.
        """
        if self._worker == 0:
            exact = torch.cat(list(self._rows.mean()))
            grads = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
            applied = torch.cat([grad.reshape(-1) for grad in grads])
            self._values.append(((applied - exact).square().sum() / exact.square().sum()).item())
        return self._copying_seconds


class Shards:
    """Puts the whole of a sharded model (FSDP2) into another for a while. `place`: this worker's, of `shards`."""

    def __init__(
        self, sharded: nn.Module, whole: nn.Module, file: Path, place: int, shards: int,
        wait_for_all: Callable[[], object],
    ):  # fmt: skip
        self._sharded, self._whole = list(sharded.parameters()), list(whole.parameters())
        self._row = Rows(file, self._whole, 0, 1).own  # that all shards write, each its part
        self._place, self._shards = place, shards
        self._wait_for_all = wait_for_all

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """All workers come here together."""
        with torch.no_grad():
            for shard, whole, row in zip(self._sharded, self._whole, self._row, strict=True):
                own: Tensor = shard.to_local()  # type: ignore[operator]
                first = self._place * -(-whole.shape[0] // self._shards)  # FSDP2 cuts as torch.chunk does
                row.view(whole.shape)[first : first + own.shape[0]] = own
            self._wait_for_all()
            for whole, row in zip(self._whole, self._row, strict=True):
                whole.copy_(row.view(whole.shape))
        yield


class Replicas:
    """Lets every worker hold, for a while, the mean of all workers' tensors."""

    def __init__(
        self, tensors: Sequence[Tensor], file: Path, worker: int, workers: int, wait_for_all: Callable[[], object]
    ):
        self._tensors = tensors
        self._rows = Rows(file, tensors, worker, workers)
        self._wait_for_all = wait_for_all

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The mean inside, everybody's own again after it. All workers come here together."""
        for tensor, place in zip(self._tensors, self._rows.own, strict=True):
            place.copy_(tensor.reshape(-1))
        self._wait_for_all()
        for tensor, mean in zip(self._tensors, self._rows.mean(), strict=True):
            tensor.copy_(mean.view(tensor.shape))
        try:
            yield
        finally:
            for tensor, place in zip(self._tensors, self._rows.own, strict=True):
                tensor.copy_(place.view(tensor.shape))


def statistics(model: nn.Module) -> list[Tensor]:
    """What a model keeps of its examples beside its weights, such as batch norm's running means."""
    return [buffer for buffer in model.buffers() if buffer.is_floating_point()]
