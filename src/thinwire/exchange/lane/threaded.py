"""Threaded: the lane on a CPU, where computing and waiting need a thread of their own."""

from __future__ import annotations

import atexit
import queue
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch

from thinwire.core.bucket import Scratch
from thinwire.exchange.lane.lane import Done, Job, Lane, Rounds
from thinwire.exchange.transport import Transport


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
