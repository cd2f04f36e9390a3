"""The collectives of torch.distributed as values: what is given, what leaves this worker, how to start it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch.distributed as dist
from torch import Tensor


class Started(Protocol):
    """What can be waited for."""

    def wait(self) -> object: ...


class Collective(Protocol):
    """One started-and-awaited exchange of tensors. Every worker starts the same ones in the same order."""

    @property
    def bytes_given(self) -> int: ...

    def bytes_sent(self, workers: int) -> int: ...

    def start(self, group: dist.ProcessGroup) -> Started: ...


# Renamed in PyTorch 2.13; the old name warns there and the new one is missing before.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True)
class AllReduced:
    """Element-wise sum or maximum, in place. A ring sends each of its n slices n - 1 times, twice."""

    tensor: Tensor
    op: dist.ReduceOp.RedOpType = field(default=dist.ReduceOp.SUM)

    @property
    def bytes_given(self) -> int:
        return _nbytes(self.tensor)

    def bytes_sent(self, workers: int) -> int:
        return 2 * (workers - 1) * self.bytes_given // workers

    def start(self, group: dist.ProcessGroup) -> dist.Work:
        return dist.all_reduce(self.tensor, self.op, group=group, async_op=True)  # type: ignore[return-value]


@dataclass(frozen=True)
class AllGathered:
    """Everybody's tensor, end to end in rank order, in `out`. A ring passes on n - 1 tensors."""

    out: Tensor
    tensor: Tensor

    @property
    def bytes_given(self) -> int:
        return _nbytes(self.tensor)

    def bytes_sent(self, workers: int) -> int:
        return (workers - 1) * self.bytes_given

    def start(self, group: dist.ProcessGroup) -> dist.Work:
        return _all_gather(self.out, self.tensor, group=group, async_op=True)  # type: ignore[return-value]


@dataclass(frozen=True)
class AllToAll:
    """Slice j of mine goes to worker j, and slice j of `out` comes from it; my own slice stays."""

    out: Tensor
    tensor: Tensor
    out_sizes: Sequence[int]
    sizes: Sequence[int]
    worker: int

    @property
    def bytes_given(self) -> int:
        return _nbytes(self.tensor)

    def bytes_sent(self, workers: int) -> int:
        return self.bytes_given - self.sizes[self.worker] * self.tensor.element_size()

    def start(self, group: dist.ProcessGroup) -> dist.Work:
        return dist.all_to_all_single(
            self.out, self.tensor, list(self.out_sizes), list(self.sizes), group=group, async_op=True
        )  # type: ignore[return-value]
