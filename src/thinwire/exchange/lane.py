"""Lane: one thread that drives conversations over one process group, in an order that all ranks share.

Collectives must start in the same order on every rank, whatever each rank's timing. The lane's order depends only on
the order in which jobs are submitted and on which is the last of its step:

    slot t: start job t; then, newest first, each older job waits for its answer and starts its next collectives.

So a bucket is encoded while the one before it is on the wire, and two-round schemes keep both rounds in flight behind
other buckets' work. At most `DEPTH` jobs are under way; before one more, the oldest runs to its end.
"""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias

import torch.distributed as dist
from torch import Tensor

from thinwire.bucket import Scratch
from thinwire.exchange.collectives import Collective, Started
from thinwire.ledger import Ledger

Talk: TypeAlias = Generator[Sequence[Collective], None, Tensor]
DEPTH = 2


class Job:
    """One conversation on a lane. `done` is called once, on the lane, with the job, when it has ended or failed."""

    def __init__(self, begin: Callable[[Scratch], Talk], last: bool, done: Callable[[Job], None]):
        self.begin = begin
        self.last = last
        self.result: Tensor | None = None
        self.error: BaseException | None = None
        self.ended = threading.Event()
        self.scratch: Scratch | None = None
        self.talk: Talk | None = None
        self.works: list[Started] = []
        self._done = done

    def end(self, result: Tensor | None, error: BaseException | None) -> None:
        self.result, self.error = result, error
        self.talk, self.works = None, []
        self._done(self)
        self.ended.set()


class Lane:
    """A thread, a first-in-first-out queue, and a process group of its own.

    After a failure the lane is dead: the ranks' orders may differ from then on, so every later job fails with the
    first error. Closing joins the thread; a thread still alive at interpreter exit would abort the process.
    """

    def __init__(self, group: dist.ProcessGroup, workers: int, ledger: Ledger, name: str):
        self.ledger = ledger
        self.error: BaseException | None = None
        self._group = group
        self._workers = workers
        self._inbox: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._active: deque[Job] = deque()  # oldest first
        self._scratches = [Scratch() for _ in range(DEPTH)]
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        # Daemon threads outlive atexit callbacks, so the join must be one; the weak reference lets lanes be freed.
        self._at_exit = _close_at_exit(weakref.ref(self))
        atexit.register(self._at_exit)

    def submit(self, begin: Callable[[Scratch], Talk], *, last: bool, done: Callable[[Job], None]) -> Job:
        """Queue a conversation; `begin` makes it on the lane, given memory to keep things in."""
        job = Job(begin, last, done)
        if not self._thread.is_alive():
            job.end(None, self.error or RuntimeError("this lane is closed"))
        else:
            self._inbox.put(job)
        return job

    @property
    def scratch_bytes(self) -> int:
        return sum(scratch.nbytes for scratch in self._scratches)

    def close(self) -> None:
        """Stop after what is under way, abandon what waits, and join the thread. Safe to call twice."""
        atexit.unregister(self._at_exit)
        if self._thread.is_alive():
            self._inbox.put(None)
            if threading.current_thread() is not self._thread:
                self._thread.join()

    def _run(self) -> None:
        while (job := self._inbox.get()) is not None:
            self._take(job)
        self._fail(RuntimeError("the lane was closed in the middle of a step"), None)

    def _take(self, job: Job) -> None:
        """One slot; after the last of a step, all that is left of the step."""
        if self.error is not None:
            job.end(None, self.error)
            return
        try:
            self._slot(job)
            while job.last and self._active:
                for each in reversed(self._active.copy()):
                    self._advance(each)
        except BaseException as error:
            self._fail(error, job)

    def _slot(self, job: Job) -> None:
        while len(self._active) >= DEPTH:
            self._advance(self._active[0])
        older = list(self._active)
        self._active.append(job)
        job.scratch = self._scratches.pop()
        job.talk = job.begin(job.scratch)
        self._advance(job)
        for each in reversed(older):
            self._advance(each)

    def _advance(self, job: Job) -> None:
        """Wait for the job's answers, let it think, start what it asks for next."""
        assert job.talk is not None and job.scratch is not None
        if job.works:
            with self.ledger.timed("wire_seconds"):
                for work in job.works:
                    work.wait()
            job.works = []
        try:
            with self.ledger.timed("encode_seconds"):
                wanted = next(job.talk)
        except StopIteration as stop:
            self._active.remove(job)
            self._scratches.append(job.scratch)
            job.end(stop.value, None)
            return
        for collective in wanted:
            self.ledger.add(
                messages=1,
                bytes_given=collective.bytes_given,
                bytes_sent=collective.bytes_sent(self._workers),
            )
            job.works.append(collective.start(self._group))

    def _fail(self, error: BaseException, job: Job | None) -> None:
        self.error = self.error or error
        pending = list(self._active)
        self._active.clear()
        if job is not None and job not in pending and not job.ended.is_set():
            pending.append(job)
        for each in pending:
            each.end(None, error)


def _close_at_exit(reference: weakref.ref[Lane]) -> Callable[[], None]:
    def close() -> None:
        lane = reference()
        if lane is not None:
            lane.close()

    return close
