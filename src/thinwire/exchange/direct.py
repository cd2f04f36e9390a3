"""The direct way: means of whole buckets by nothing but all-reduce. No conversation, no lane."""

from __future__ import annotations

import time
from collections import deque
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import kernels
from thinwire.core.scheme import Scheme
from thinwire.exchange.collectives import AllReduced, Started
from thinwire.exchange.lane import Done
from thinwire.exchange.transport import Transport


class _Kind(NamedTuple):
    """What all buckets of one dtype and size have in common."""

    dtype: torch.dtype  # that they are summed in
    amounts: dict[str, float]  # that the ledger counts for each


class _Travelling(NamedTuple):
    """A bucket under way."""

    tensor: Tensor
    summand: Tensor  # the tensor itself, or the front of its memory
    kind: _Kind
    work: Started
    done: Done


class Direct:
    """Whoever brings a bucket starts its sum, and the step's last bucket waits for all of them, in order.

    The wire has all buckets at once meanwhile, as under plain DDP, and with the last bucket backward is over. There is
    so little to do that a thread's wake-ups would cost more than the work. And between two kernels of backward no cache
    holds any of this code, so that a line costs several times what it costs elsewhere: what can be done later, while
    the last sum is on the wire, is done then. A bucket that is cast keeps to its own memory.

    After a failure, every later bucket fails with the first error, as on a lane.
    """

    def __init__(self, group: dist.ProcessGroup, scheme: Scheme, transport: Transport):
        self.error: BaseException | None = None
        self._group = group
        self._share = 1.0 / group.size()
        self._scheme = scheme
        self._transport = transport
        self._kinds: dict[tuple[torch.dtype, int], _Kind] = {}
        self._encode_seconds = 0.0
        self._travelling: deque[_Travelling] = deque()  # oldest first
        # The group's thread lets go of a work a moment after the answer. Were nobody else left to hold its tensors but
        # Python, it would need the interpreter for that, and at exit that aborts. Buckets are held by DDP. For what was
        # made of them here, works are held until the next step's are answered, or for good if nobody waited for them.
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
            work = self._transport.launch(AllReduced(summand, self._group))
            self._travelling.append(_Travelling(tensor, summand, kind, work, done))
        except BaseException as error:
            self._fail(error)
            done(error)
            return
        if last:
            self.finish()

    def close(self) -> None:
        """Fail what is under way. Safe to call twice."""
        self._fail(RuntimeError("this wire is closed"))

    def _kind(self, tensor: Tensor) -> _Kind:
        dtype = self._scheme.summed_as(tensor.dtype, self._group.size())
        assert dtype is not None, f"{self._scheme.spec} has more to say of {tensor.dtype} than a sum"
        sent = AllReduced(torch.empty(tensor.numel(), dtype=dtype, device="meta"), self._group).amounts()
        kind = _Kind(dtype, {"messages": 1, "bytes_dense": tensor.nbytes, **sent})
        return self._kinds.setdefault((tensor.dtype, tensor.numel()), kind)

    def finish(self) -> None:
        """Wait for all that is under way."""
        entered, waited, answered = time.perf_counter(), 0.0, []
        while self._travelling:
            each = self._oldest()
            try:
                began = time.perf_counter()
                each.work.wait()
                waited += time.perf_counter() - began
                if each.summand is not each.tensor:
                    kernels.widen(each.summand, each.tensor)
                    answered.append(each.work)
                    # Emptied: DDP makes new buckets after its first step, and these must go then.
                    each.summand.data = each.summand.new_empty(0)
            except BaseException as error:
                self._abandoned += [*answered, each.work]
                each.done(error)
                self._fail(error)
                return
            each.done(None)
        self._answered = answered
        # All of it is the training thread's, so all of it is exposed.
        exposed, self._encode_seconds = self._encode_seconds + time.perf_counter() - entered, 0.0
        self._transport.ledger.add(encode_seconds=exposed - waited, wire_seconds=waited, exposed_seconds=exposed)

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error
        while self._travelling:
            each = self._oldest()
            self._abandoned.append(each.work)
            each.done(error)

    def _oldest(self) -> _Travelling:
        """Under way no longer, and counted."""
        each = self._travelling.popleft()
        self._transport.ledger.add(**each.kind.amounts)
        return each
