"""What a job is, and what all lanes do with one."""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, ClassVar, TypeAlias

from thinwire.core.bucket import Scratch
from thinwire.exchange import left
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
        self.ended: bool = False
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

    keeps_time: ClassVar[bool] = False  # of training that waits for means; else those who wait do

    def __init__(self, transport: Transport):
        self.transport = transport
        self.depth = DEPTH
        self.error: BaseException | None = None
        self._active: deque[Job] = deque()  # oldest first
        self._scratches: list[Scratch] = []
        self._place = 0  # of the next job in its step
        # Works are held until some of a later step are answered, or for good if nobody waited for them: see `left`.
        self._answered: list[Started] = []
        self._abandoned: list[Started] = []
        self._begins = True  # no work of this step has been answered

    @abstractmethod
    def submit(self, begin: Callable[[Scratch], Rounds], *, last: bool, done: Done, here: bool = False) -> Job:
        """Queue the conversation that `begin` makes, given memory to keep things in.

        here: the caller would do nothing but wait for it, so it may be held on the caller's own thread.
        """

    @abstractmethod
    def close(self) -> None:
        """Fail what is under way. Safe to call twice."""

    def _leave(self) -> None:
        """Let go of all works; the end of `close`."""
        left.add(self._answered, self._abandoned)
        self._answered, self._abandoned = [], []

    def catch_up(self) -> None:  # noqa: B027 - a CPU's are known at once
        """Have the ledger know all seconds that are known by now. Nobody is waited for."""

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
        self._begins = self._begins or place == 0
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
        began = self._moment()
        for work in job.works:
            work.wait()
        if job.works:
            self._answered = job.works if self._begins else self._answered + job.works
            self._begins, job.works = False, []
        answered = self._moment()
        wanted, result = None, None
        try:
            wanted = next(job.rounds)
        except StopIteration as stop:
            result = stop.value
        self._account(began, answered, self._moment())
        if wanted is None:
            self._active.remove(job)
            job.end(result, None)
            return
        for collective in wanted:
            job.works.append(self.transport.start(collective))

    def _moment(self) -> Any:
        """Now, for `_account`."""
        return time.perf_counter()

    def _account(self, began: Any, answered: Any, computed: Any) -> None:
        # One element, not two timers: this runs twice and more for every bucket.
        self.transport.ledger.add(wire_seconds=answered - began, encode_seconds=computed - answered)

    def _fail(self, error: BaseException, job: Job | None) -> None:
        self.error = self.error or error
        pending = list(self._active)
        self._active.clear()
        if job is not None and job not in pending and not job.ended:
            pending.append(job)
        for each in pending:
            self._abandoned += each.works
            each.end(None, error)
