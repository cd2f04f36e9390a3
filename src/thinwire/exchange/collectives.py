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

_TAG = 0x7477  # of our messages, on a group where users may send their own


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

    def start(self) -> Started:
        """Between two a ring is a message each way, for which gloo's own takes twice the processor time."""
        if self.group.size() == 2 and _is_gloo(self.group, self.tensor):
            worker, incoming = self.group.rank(), self.out.chunk(2)
            outgoing = [self.tensor if each != worker else self.tensor[:0] for each in range(2)]
            incoming[worker].copy_(self.tensor)
            return _exchange(outgoing, incoming, worker, self.group)
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

    def start(self) -> Started:
        """gloo's own begins to send to one before it tells the next that it may send: that word then waits behind all
        that goes out, and a thin link idles for it. So here everybody is told first.
        """
        if not _is_gloo(self.group, self.tensor):
            return dist.all_to_all_single(
                self.out, self.tensor, list(self.out_sizes), list(self.sizes), group=self.group, async_op=True
            )  # type: ignore[return-value]
        outgoing, incoming = self.tensor.split(list(self.sizes)), self.out.split(list(self.out_sizes))
        incoming[self.worker].copy_(outgoing[self.worker])
        return _exchange(outgoing, incoming, self.worker, self.group)


class Messages:
    """Between two workers each, under way together."""

    def __init__(self, works: list[dist.Work]):
        self._works = works

    def wait(self) -> None:
        while self._works:
            self._works[0].wait()
            del self._works[0]  # a second wait would be for one more message, and for ever


def _exchange(
    outgoing: Sequence[Tensor], incoming: Sequence[Tensor], worker: int, group: dist.ProcessGroup
) -> Messages:
    """One message to every other worker, and one from each. Those without bytes are not sent."""
    workers = group.size()
    sources = [(worker - turn) % workers for turn in range(1, workers)]
    targets = [(worker + turn) % workers for turn in range(1, workers)]
    works = [group.recv([incoming[each]], each, _TAG) for each in sources if incoming[each].numel()]
    works += [group.send([outgoing[each]], each, _TAG) for each in targets if outgoing[each].numel()]
    return Messages(works)


def _is_gloo(group: dist.ProcessGroup, tensor: Tensor) -> bool:
    return isinstance(group._get_backend(tensor.device), dist.ProcessGroupGloo)
