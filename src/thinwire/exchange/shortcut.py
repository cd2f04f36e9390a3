"""The shortcut: means of whole buckets by nothing but all-reduce. No conversation, no lane."""

from __future__ import annotations

import time
from collections import deque

import torch.distributed as dist
from torch import Tensor

from thinwire.exchange.collectives import AllReduced, all_reduce
from thinwire.exchange.lane import Done
from thinwire.ledger import Ledger, Started


class Shortcut:
    """Whoever brings a bucket starts its sum, and the step's last bucket waits for all of them, in order.

    The wire has all buckets at once meanwhile, as under plain DDP, and with the last bucket backward is over. There is
    so little to do that a thread's wake-ups would cost more than the work. And between two kernels of backward no cache
    holds any of this code, so that a line costs several times what it costs elsewhere: what can be done later, while
    the last sum is on the wire, is done then.

    After a failure, every later bucket fails with the first error, as on a lane.
    """

    def __init__(self, group: dist.ProcessGroup, workers: int, ledger: Ledger):
        self.error: BaseException | None = None
        self._group = group
        self._workers = workers
        self._ledger = ledger
        self._amounts: dict[int, dict[str, float]] = {}  # what the ledger books for a bucket of so many bytes
        self._encode_seconds = 0.0
        # Of the buckets under way, oldest first:
        self._dones: deque[Done] = deque()
        self._works: list[Started] = []
        self._nbytes: list[int] = []
        # Held until others have been answered since, or for good if nobody waited for them: see Lane.
        self._answered: list[Started] = []

    def mean(self, tensor: Tensor, *, last: bool, done: Done) -> None:
        """Turn a bucket into the group's mean, in place. `done` is called once: with None, or with what went wrong."""
        if self.error is not None:
            done(self.error)
            return
        self._dones.append(done)
        try:
            began = time.perf_counter()
            tensor.mul_(1.0 / self._workers)
            self._encode_seconds += time.perf_counter() - began
            amounts = self._amounts.get(tensor.nbytes) or self._amounts_of(tensor)
            work = all_reduce(tensor, dist.ReduceOp.SUM, self._group)
            self._works.append(self._ledger.due(work, **amounts))
            self._nbytes.append(tensor.nbytes)
            if last:
                self._finish()
        except BaseException as error:
            self._fail(error)

    def close(self) -> None:
        """Fail what is under way. Safe to call twice."""
        self._fail(RuntimeError("this wire is closed"))

    def _amounts_of(self, tensor: Tensor) -> dict[str, float]:
        booked = {"messages": 1, "bytes_dense": tensor.nbytes, **AllReduced(tensor).amounts(self._workers)}
        return self._amounts.setdefault(tensor.nbytes, booked)

    def _finish(self) -> None:
        for nbytes in self._nbytes:
            self._ledger.add(**self._amounts[nbytes])
        self._nbytes.clear()
        began = time.perf_counter()
        for work in self._works:
            work.wait()
            self._dones.popleft()(None)
            self._answered.clear()
        self._answered, self._works = self._works, self._answered
        waited = time.perf_counter() - began
        self._ledger.add(encode_seconds=self._encode_seconds, wire_seconds=waited, exposed_seconds=waited)
        self._encode_seconds = 0.0

    def _fail(self, error: BaseException) -> None:
        self.error = self.error or error
        self._answered += self._works
        self._works = []
        while self._dones:
            self._dones.popleft()(error)
