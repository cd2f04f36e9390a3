"""The direct way: means of whole buckets by nothing but all-reduce. No conversation, no lane."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import kernels
from thinwire.core.scheme import Scheme
from thinwire.exchange import left
from thinwire.exchange.collectives import AllGathered, AllReduced, AllToAll, Started
from thinwire.exchange.lane import Done
from thinwire.exchange.transport import Transport

OURS = {
    torch.float16
}  # what gloo adds slowly: on 2 and 4 ranks ours takes 0.5 to 0.7 of its time. Its bfloat16 is fast
AHEAD = 2  # buckets whose parts are under way to their owners: one more, and the oldest is waited for and turned back
LEAST = 1 << 20  # elements of a bucket that is added up here: below, one collective is there as soon as two


class _Kind(NamedTuple):
    """What all buckets of one dtype and size have in common."""

    dtype: torch.dtype  # that they are summed in
    part: int  # elements that each worker adds up; 0: the group's all-reduce does
    amounts: dict[str, float]  # that the ledger counts for each


@dataclass
class _Travelling:
    """A bucket under way."""

    tensor: Tensor
    summand: Tensor  # the tensor itself, or the front of its memory
    incoming: Tensor | None  # everybody's summands of the part that is this worker's, until it is added up
    kind: _Kind
    work: Started
    done: Done
    works: list[Started] = field(default_factory=list)  # that were waited for, or come beside `work`
    views: list[Tensor] = field(default_factory=list)  # of the tensor's memory, that works hold


class Direct:
    """Whoever brings a bucket starts its sum, and the step's last bucket waits for all of them, in order.

    The wire has all buckets at once meanwhile, as under plain DDP, and with the last bucket backward is over. There is
    so little to do that a thread's wake-ups would cost more than the work. And between two kernels of backward no cache
    holds any of this code, so that a line costs several times what it costs elsewhere: what can be done later, while
    the last sum is on the wire, is done then. A bucket that is cast keeps to its own memory.

    Long buckets of halves are summed by a two-shot of our own (`OURS`, `LEAST`): gloo is slow at them. Each worker
    gets everybody's halves of its part, adds them up in float32, in rank order, and sends the sum to all. It takes as
    many bytes as an all-reduce, and rounds once. What comes in has room behind the halves, where the floats were; the
    last few elements, which do not divide by the workers, go by all-reduce. The way back is on a group of its own, so
    that it does not wait for the parts of later buckets; `AHEAD` buckets later its turn has come.

    After a failure, every later bucket fails with the first error, as on a lane.
    """

    def __init__(
        self, group: dist.ProcessGroup, scheme: Scheme, transport: Transport, back: dist.ProcessGroup | None = None
    ):
        """`back`: another group of the same workers; without one, all sums are the group's own."""
        self.error: BaseException | None = None
        self._group = group
        self._back = back
        self._share = 1.0 / group.size()
        self._scheme = scheme
        self._transport = transport
        self._kinds: dict[tuple[torch.dtype, int], _Kind] = {}
        self._encode_seconds = 0.0
        self._waited_seconds = 0.0  # in the middle of backward
        self._travelling: deque[_Travelling] = deque()  # oldest first
        # Buckets are held by DDP. For what was made of them here, works are held until the next step's are answered, or
        # for good if nobody waited for them: see `left`.
        self._answered: list[Started] = []
        self._abandoned: list[Started] = []

    def mean(self, tensor: Tensor, *, last: bool, done: Done) -> None:
        """Turn a bucket into the group's mean, in place. `done` is called once: with None, or with what went wrong."""
        if self.error is not None:
            done(self.error)
            return
        try:
            kind = self._kinds.get((tensor.dtype, tensor.numel())) or self._kind(tensor)
            began = time.perf_counter()
            if kind.dtype is tensor.dtype:
                summand = tensor.mul_(self._share)
            else:
                summand = kernels.narrow(tensor, self._share, kind.dtype).detach()  # a view holds its base
            self._encode_seconds += time.perf_counter() - began
            self._travelling.append(self._send(tensor, summand, kind, done))
        except BaseException as error:
            self._fail(error)
            done(error)
            return
        if last:
            self.finish()
        elif kind.part:
            self._turn_back_some()

    def close(self) -> None:
        """Fail what is under way. Safe to call twice."""
        self._fail(RuntimeError("this wire is closed"))
        left.add(self._answered, self._abandoned)
        self._answered, self._abandoned = [], []

    def _kind(self, tensor: Tensor) -> _Kind:
        workers = self._group.size()
        dtype = self._scheme.summed_as(tensor.dtype, workers)
        assert dtype is not None, f"{self._scheme.spec} has more to say of {tensor.dtype} than a sum"
        ours = self._back and workers > 1 and dtype in OURS and dtype.itemsize < tensor.itemsize
        part = tensor.numel() // workers if ours and tensor.numel() >= LEAST else 0
        summand = torch.empty(tensor.numel(), dtype=dtype, device="meta")
        collectives = self._there(summand, summand, part) + ([self._back_of(summand, summand, part)] if part else [])
        counted: dict[str, float] = {"messages": len(collectives), "bytes_dense": tensor.nbytes}
        for collective in collectives:
            for name, amount in collective.amounts().items():
                counted[name] = counted.get(name, 0) + amount
        return self._kinds.setdefault((tensor.dtype, tensor.numel()), _Kind(dtype, part, counted))

    def _there(self, summand: Tensor, incoming: Tensor, part: int) -> list[AllReduced | AllToAll]:
        """What brings everybody's halves of a part to its owner; or the group's own sum."""
        if not part:
            return [AllReduced(summand, self._group)]
        workers, size = self._group.size(), part * summand.itemsize
        end = workers * part
        sizes = [size] * workers
        rest = [AllReduced(summand[end:].detach(), self._group)] if end < summand.numel() else []
        return [AllToAll(incoming, _bytes(summand[:end]), sizes, sizes, self._group.rank(), self._group), *rest]

    def _back_of(self, summand: Tensor, mine: Tensor, part: int) -> AllGathered:
        """What brings every part's sum from its owner to all."""
        assert self._back is not None
        return AllGathered(_bytes(summand[: self._group.size() * part]), _bytes(mine[:part]), self._back)

    def _send(self, tensor: Tensor, summand: Tensor, kind: _Kind, done: Done) -> _Travelling:
        if not kind.part:
            (whole,) = self._there(summand, summand, 0)
            return _Travelling(tensor, summand, None, kind, self._transport.launch(whole), done)
        end = self._group.size() * kind.part
        incoming = _bytes(tensor.view(kind.dtype)[summand.numel() : summand.numel() + end])
        first, *beside = self._there(summand, incoming, kind.part)
        work, works = self._transport.launch(first), [self._transport.launch(each) for each in beside]
        return _Travelling(
            tensor, summand, incoming, kind, work, done, works, [incoming, *(c.tensor for c in (first, *beside))]
        )

    def _turn_back_some(self) -> None:
        """All but the newest: whether their parts are there nobody can tell without waiting for them."""
        began = time.perf_counter()
        try:
            waited = self._turn_back(keep=AHEAD)
        except BaseException as error:
            self._fail(error)
            return
        self._waited_seconds += waited
        self._encode_seconds += time.perf_counter() - began - waited

    def _turn_back(self, *, keep: int) -> float:
        """Add up the parts that have come, the oldest first, and send them to all; the seconds that were waited."""
        waited = 0.0
        there = [each for each in self._travelling if each.incoming is not None]
        for each in there[: max(0, len(there) - keep)]:
            assert each.incoming is not None
            began = time.perf_counter()
            each.work.wait()
            waited += time.perf_counter() - began
            halves = each.incoming.view(each.kind.dtype)
            kernels.sum_halves(halves, self._group.size(), halves[: each.kind.part])
            back = self._back_of(each.summand, halves, each.kind.part)
            each.works.append(each.work)
            each.work, each.incoming = self._transport.launch(back), None
            each.views += [back.out, back.tensor]
        return waited

    def finish(self) -> None:
        """Wait for all that is under way."""
        entered, answered = time.perf_counter(), []
        try:
            waited = self._waited_seconds + self._turn_back(keep=0)
        except BaseException as error:
            self._fail(error)
            return
        while self._travelling:
            each = self._oldest()
            try:
                began = time.perf_counter()
                for work in (*each.works, each.work):
                    work.wait()
                waited += time.perf_counter() - began
                if each.summand is not each.tensor:
                    kernels.widen(each.summand, each.tensor)
                    answered += [*each.works, each.work]
                    # Emptied: DDP makes new buckets after its first step, and these must go then.
                    for view in (each.summand, *each.views):
                        view.data = view.new_empty(0)
            except BaseException as error:
                self._abandoned += [*answered, *each.works, each.work]
                each.done(error)
                self._fail(error)
                return
            each.done(None)
        self._answered = answered
        # All of it is the training thread's, so all of it is exposed.
        exposed = self._encode_seconds + self._waited_seconds + time.perf_counter() - entered
        self._encode_seconds = self._waited_seconds = 0.0
        self._transport.ledger.add(encode_seconds=exposed - waited, wire_seconds=waited, exposed_seconds=exposed)

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error
        while self._travelling:
            each = self._oldest()
            self._abandoned += [*each.works, each.work]
            each.done(error)

    def _oldest(self) -> _Travelling:
        """Under way no longer, and counted."""
        each = self._travelling.popleft()
        self._transport.ledger.add(**each.kind.amounts)
        return each


def _bytes(halves: Tensor) -> Tensor:
    """For collectives that only carry; without a hold on its base."""
    return halves.view(torch.uint8).detach()
