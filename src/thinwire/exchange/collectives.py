"""The collectives of torch.distributed as values: what is given, what leaves this worker, how to start it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor


class Started(Protocol):
    """What can be waited for."""

    def wait(self) -> object: ...


class Collective(Protocol):
    """One started-and-awaited exchange of tensors. Every worker starts the same ones in the same order."""

    def amounts(self) -> dict[str, float]:
        """What the ledger counts for it."""
        ...

    def start(self) -> Started: ...


# Renamed in PyTorch 2.13; the old name warns there and the new one is missing before.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def amounts(given: int, sent: int, sends: int) -> dict[str, float]:
    return {"bytes_given": given, "bytes_sent": sent, "sends": sends}


def nbytes_of(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


@dataclass(frozen=True)
class AllReduced:
    """Element-wise sum or maximum, in place. A ring sends each of its n slices n - 1 times, twice; gloo in halves."""

    tensor: Tensor
    group: dist.ProcessGroup
    op: dist.ReduceOp.RedOpType = field(default=dist.ReduceOp.SUM)

    def amounts(self) -> dict[str, float]:
        given, workers = nbytes_of(self.tensor), self.group.size()
        return amounts(given, 2 * (workers - 1) * given // workers, 4 * (workers - 1))

    def start(self) -> dist.Work:
        """As dist.all_reduce, which first asks what is known here (is this rank in the group, is the tensor complex).

        In the middle of backward no cache holds that code, so asking is not free.
        """
        return self.group.allreduce([self.tensor], self.op)


@dataclass(frozen=True)
class AllGathered:
    """Everybody's tensor, end to end in rank order, in `out`. A ring passes on n - 1 tensors; gloo in halves."""

    out: Tensor
    tensor: Tensor
    group: dist.ProcessGroup

    def amounts(self) -> dict[str, float]:
        given, workers = nbytes_of(self.tensor), self.group.size()
        return amounts(given, (workers - 1) * given, 2 * (workers - 1))

    def start(self) -> dist.Work:
        return all_gather(self.out, self.tensor, group=self.group, async_op=True)  # type: ignore[return-value]


@dataclass(frozen=True)
class AllToAll:
    """Slice j of mine goes to worker j, and slice j of `out` comes from it; my own slice stays."""

    out: Tensor
    tensor: Tensor
    out_sizes: Sequence[int]
    sizes: Sequence[int]
    worker: int
    group: dist.ProcessGroup

    def amounts(self) -> dict[str, float]:
        given = nbytes_of(self.tensor)
        sent = given - self.sizes[self.worker] * self.tensor.element_size()
        return amounts(given, sent, self.group.size() - 1)

    def start(self) -> dist.Work:
        return dist.all_to_all_single(
            self.out, self.tensor, list(self.out_sizes), list(self.sizes), group=self.group, async_op=True
        )  # type: ignore[return-value]
