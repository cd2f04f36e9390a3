"""Lanes hold conversations over one process group, in an order that all ranks share.

Collectives must start in the same order on every rank, whatever each rank's timing, so a lane's order depends only on
the order in which jobs are submitted and on which is the last of its step.
"""

from __future__ import annotations

import atexit
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeAlias

import torch

from thinwire.core.bucket import Scratch
from thinwire.exchange.collectives import Collective, Started
from thinwire.exchange.transport import Transport

Rounds: TypeAlias = Generator[Sequence[Collective], None, Any]  # what goes out together, round by round
Done: TypeAlias = Callable[[BaseException | None], None]
DEPTH = 2


class Job:
    """One conversation on a lane. `done` is called once: with None, or with what went wrong."""

    def __init__(self, begin: Callable[[Scratch], Rounds], last: bool, done: Done):
        self.begin = begin
        self.last = last
        self.result: Any = None
        self.error: BaseException | None = None
        self.ended = False
        self.scratch: Scratch | None = None
        self.rounds: Rounds | None = None
        self.works: list[Started] = []
        self._done = done
        self._under_way = threading.Lock()  # cheaper than an Event, and every bucket is a job
        self._under_way.acquire()

    def end(self, result: Any, error: BaseException | None) -> None:
        self.result, self.error = result, error
        self.rounds, self.works = None, []
        self._done(error)
        self.ended = True
        self._under_way.release()

    def wait(self, timeout: float = -1) -> bool:
        """Until it has ended, or so many seconds; whether it has."""
        if self._under_way.acquire(timeout=timeout):
            self._under_way.release()
        return self.ended


class Lane(ABC):
    """What drives jobs. After a failure it is dead: the ranks' orders may differ from then on, so every later job
    fails with the first error."""

    def __init__(self, transport: Transport):
        self.transport = transport
        self.depth = DEPTH
        self.error: BaseException | None = None
        self._active: deque[Job] = deque()  # oldest first
        self._scratches: list[Scratch] = []
        self._place = 0  # of the next job in its step
        # Works are held until others have been answered since, or for good if nobody waited for them: were the group's
        # thread the last to hold one, it would need the interpreter to free its tensors, and at exit that aborts.
        self._answered: list[Started] = []
        self._abandoned: list[Started] = []

    @abstractmethod
    def submit(self, begin: Callable[[Scratch], Rounds], *, last: bool, done: Done) -> Job:
        """Queue the conversation that `begin` makes, given memory to keep things in."""

    @abstractmethod
    def close(self) -> None:
        """Fail what is under way. Safe to call twice."""

    @property
    def scratch_bytes(self) -> int:
        return sum(scratch.nbytes for scratch in self._scratches)

    def _begin(self, job: Job) -> None:
        job.scratch = self._memory_for(job)
        self._active.append(job)
        job.rounds = job.begin(job.scratch)
        self._advance(job)

    def _memory_for(self, job: Job) -> Scratch:
        """Best what the job at this place of the step had in the step before: it has the right sizes already."""
        place, self._place = self._place, 0 if job.last else self._place + 1
        taken = [each.scratch for each in self._active]
        free = [scratch for scratch in self._scratches if scratch not in taken]
        if not free:
            self._scratches.append(Scratch())
            return self._scratches[-1]
        usual = self._scratches[place % len(self._scratches)]
        return usual if usual in free else free[0]

    def _advance(self, job: Job) -> None:
        """Wait for the job's answers, let it compute, start what it asks for next."""
        assert job.rounds is not None
        began = time.perf_counter()
        for work in job.works:
            work.wait()
        if job.works:
            self._answered, job.works = job.works, []
        answered = time.perf_counter()
        wanted, result = None, None
        try:
            wanted = next(job.rounds)
        except StopIteration as stop:
            result = stop.value
        # One entry, not two timers: this runs twice and more for every bucket.
        self.transport.ledger.add(wire_seconds=answered - began, encode_seconds=time.perf_counter() - answered)
        if wanted is None:
            self._active.remove(job)
            job.end(result, None)
            return
        for collective in wanted:
            job.works.append(self.transport.start(collective))

    def _fail(self, error: BaseException, job: Job | None) -> None:
        self.error = self.error or error
        pending = list(self._active)
        self._active.clear()
        if job is not None and job not in pending and not job.ended:
            pending.append(job)
        for each in pending:
            self._abandoned += each.works
            each.end(None, error)


class Threaded(Lane):
    """A thread and a first-in-first-out queue, so that backward goes on while buckets are encoded and sent.

        slot t: start job t; then, newest first, each older job waits for its answer and starts its next collectives.

    So a bucket is encoded while the one before it is on the wire, and two-round schemes keep both rounds in flight
    behind other buckets' work. At most `depth` jobs are under way; before one more, the oldest runs to its end.
    Closing joins the thread; a thread still alive at interpreter exit would abort the process.
    """

    def __init__(self, transport: Transport, name: str):
        super().__init__(transport)
        self._inbox = _Inbox()
        # The thread knows the lane weakly: a lane that nobody else holds is freed, and its thread ends.
        self._thread = threading.Thread(target=_run, args=(weakref.ref(self), self._inbox), name=name, daemon=True)
        self._thread.start()
        # Daemon threads outlive atexit callbacks, so the join must be one.
        self._at_exit = close_at_exit(self)
        weakref.finalize(self, _let_go, self._inbox, self._at_exit).atexit = False

    def submit(self, begin: Callable[[Scratch], Rounds], *, last: bool, done: Done) -> Job:
        job = Job(begin, last, done)
        if not self._inbox.put(job):
            job.end(None, self.error or RuntimeError("this lane is closed"))
        return job

    def close(self) -> None:
        """Stop after what was queued before, fail what is queued later, join the thread. Safe to call twice."""
        atexit.unregister(self._at_exit)
        self._inbox.close()
        if threading.current_thread() is not self._thread:
            self._thread.join()

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
        while len(self._active) >= self.depth:
            self._advance(self._active[0])
        older = list(self._active)
        self._begin(job)
        for each in reversed(older):
            self._advance(each)


class _Inbox:
    """A lane's queue. Once it has ended nothing gets in, so nobody waits for a job that nobody will do."""

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended = False

    def put(self, job: Job) -> bool:
        """Whether it got in."""
        with self._lock:
            if not self._ended:
                self._queue.put(job)
            return not self._ended

    def get(self) -> Job | None:
        """The next job; None where the lane is to end."""
        return self._queue.get()

    def close(self) -> None:
        """Let the lane end after what is queued. No lock: this may be called while memory is being collected."""
        self._queue.put(None)

    def end(self, error: BaseException) -> None:
        """Let nothing in any more, and fail what is here."""
        with self._lock:
            self._ended = True
        while not self._queue.empty():
            job = self._queue.get()
            if job is not None:
                job.end(None, error)


def _run(lane: weakref.ref[Threaded], inbox: _Inbox) -> None:
    torch.set_grad_enabled(False)  # of this thread: under backward(create_graph=True) buckets require gradients
    while _take_next(lane, inbox):
        pass
    closed = RuntimeError("the lane was closed in the middle of a step")
    alive = lane()
    if alive is not None:
        alive._fail(closed, None)
    inbox.end(closed)


def _take_next(lane: weakref.ref[Threaded], inbox: _Inbox) -> bool:
    """A call of its own: while the thread waits, it holds neither the lane nor its last job, and DDP's old buffer."""
    job, alive = inbox.get(), lane()
    if job is None or alive is None:
        return False
    alive._take(job)
    return True


def _let_go(inbox: _Inbox, at_exit: Callable[[], None]) -> None:
    atexit.unregister(at_exit)
    inbox.close()


def close_at_exit(what: Any) -> Callable[[], None]:
    """Have `what.close()` called at exit, if it is still there; what to unregister once it was closed."""
    reference = weakref.ref(what)

    def close() -> None:
        alive = reference()
        if alive is not None:
            alive.close()

    return atexit.register(close)
