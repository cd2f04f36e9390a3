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
    A slot is the thread's, or, where the thread has nothing to do and the caller neither, the caller's: waking a thread
    and handing the interpreter over and back costs more than a short round does. The order is the same.
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

    def submit(self, begin: Callable[[Scratch], Rounds], *, last: bool, done: Done, here: bool = False) -> Job:
        job = Job(begin, last, done)
        if here and self._inbox.enter():
            try:
                with torch.no_grad():
                    self._take(job)
            finally:
                self._inbox.leave()
            if job.error is not None and not isinstance(job.error, Exception):
                raise job.error  # an interrupt or an exit, of the caller's own thread
        elif not self._inbox.put(job):
            job.end(None, self.error or RuntimeError("this lane is closed"))
        return job

    def close(self) -> None:
        """Stop after what was queued before, fail what is queued later, join the thread. Safe to call twice."""
        atexit.unregister(self._at_exit)
        self._inbox.close()
        if threading.get_ident() not in (self._thread.ident, self._inbox.doing):  # by a signal, in the middle of a job
            self._thread.join()
            self._leave()

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
    """A lane's queue. Once it has ended nothing gets in, so nobody waits for a job that nobody will do.

    Jobs are done one after the other: those of the queue by the lane's thread, between `get` and `leave`; one that
    finds nothing before it by its caller, between `enter` and `leave`.
    """

    def __init__(self) -> None:
        self._queue: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._turn = threading.Lock()  # whose holder does a job
        self._before = 0  # jobs that got in and are not done
        self.doing: int | None = None  # the caller's thread, while it does its own job
        self._ended = False

    def put(self, job: Job) -> bool:
        """Whether it got in."""
        with self._lock:
            if not self._ended:
                self._before += 1
                self._queue.put(job)
            return not self._ended

    def enter(self) -> bool:
        """Whether the caller may do a job itself, now: nothing is before it."""
        with self._lock:
            free = not self._ended and self._before == 0
            if free:
                self._before += 1
                self._turn.acquire()  # nobody has it: whoever did has left, and what is queued from now on comes later
                self.doing = threading.get_ident()
            return free

    def leave(self) -> None:
        """After a job."""
        with self._lock:
            self._before -= 1
            self.doing = None
            self._turn.release()

    def get(self) -> Job | None:
        """The next job, once its turn has come; None where the lane is to end."""
        job = self._queue.get()
        if job is not None:
            self._turn.acquire()
        return job

    def close(self) -> None:
        """Let the lane end after what is queued. No lock: this may be called while memory is being collected."""
        self._queue.put(None)

    def end(self, fail: Callable[[], None], error: BaseException) -> None:
        """Let nothing in any more, and, once nobody is at it, fail what is under way and what is queued."""
        with self._lock:
            self._ended = True
        with self._turn:
            fail()
        while not self._queue.empty():
            job = self._queue.get()
            if job is not None:
                job.end(None, error)


def _run(lane: weakref.ref[Threaded], inbox: _Inbox) -> None:
    torch.set_grad_enabled(False)  # of this thread: under backward(create_graph=True) buckets require gradients
    while _take_next(lane, inbox):
        pass
    closed, alive = RuntimeError("the lane was closed in the middle of a step"), lane()
    inbox.end(lambda: alive._fail(closed, None) if alive is not None else None, closed)


def _take_next(lane: weakref.ref[Threaded], inbox: _Inbox) -> bool:
    """A call of its own: while the thread waits, it holds neither the lane nor its last job, and DDP's old buffer."""
    job, alive = inbox.get(), lane()
    if job is None:
        return False
    try:
        if alive is None:
            return False
        alive._take(job)
        return True
    finally:
        inbox.leave()


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
