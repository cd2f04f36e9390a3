"""Streamed: the lane on an accelerator, where the device itself overlaps computing, sending and training.

NCCL wants everything that one device sends started in one order, over all its communicators. So there is no thread
and no group of our own: the training thread starts all of it, on the model's own group.

    a bucket arrives: its first round is computed and started, on a stream beside training's.
    the last one has: round after round of all buckets, in the order of buckets.

Nothing here waits. To "wait" for a collective makes the stream wait for it; and with the end of a step training's
stream waits for ours, so that whoever comes after, there, finds means, and may use again what memory we had.

Seconds are the device's: marks are left in the streams, and read when the device has long passed them.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, ClassVar, Protocol

import torch

from thinwire.core.bucket import Scratch
from thinwire.exchange.lane.lane import Done, Job, Lane, Rounds
from thinwire.exchange.transport import Transport


class Side(Protocol):
    """A stream beside training's, on one device."""

    def turn(self) -> AbstractContextManager[None]:
        """Work on the side, after all that training's stream has to do so far."""
        ...

    def join(self) -> None:
        """Have training's stream go on after all that the side has to do so far."""
        ...

    def mark(self) -> Any:
        """A moment in the stream that work is given to now."""
        ...

    def seconds(self, begin: Any, end: Any) -> float | None:
        """Between two marks of one stream; None as long as the device has not come to the second. Nobody waits."""
        ...


class Streamed(Lane):
    """A stream of its own, and nobody but the training thread to feed it.

    All buckets of a step are under way at once, each in memory of its own: their messages are many times smaller than
    they are, and a device that waited for one before it began the next would stand idle.
    """

    keeps_time: ClassVar[bool] = True  # the device's own: what the host takes to start all of it exposes nothing

    def __init__(self, transport: Transport, side: Side):
        super().__init__(transport)
        self._side = side
        self._closed = False
        self._spans: deque[tuple[str, Any, Any]] = deque()  # whose seconds are to be read, oldest first
        self._reading = threading.Lock()  # whoever asks for statistics reads them, too

    def submit(self, begin: Callable[[Scratch], Rounds], *, last: bool, done: Done, here: bool = False) -> Job:
        """As on every lane. On return the job's first round is on its way; with the last of a step, all are."""
        job = Job(begin, last, done)
        if self.error is not None or self._closed:
            job.end(None, self.error or RuntimeError("this lane is closed"))
            return job
        try:
            # Not the hook's mode: under backward(create_graph=True) buckets require gradients.
            with self._side.turn(), torch.no_grad():
                self._begin(job)
                while last and self._active:
                    for each in list(self._active):
                        self._advance(each)
        except BaseException as error:
            self._break_off(error, job)
        if last:
            ready = self._side.mark()
            self._side.join()
            self._spans.append(("exposed_seconds", ready, self._side.mark()))
        return job

    def _break_off(self, error: BaseException, job: Job | None) -> None:
        """Training goes on, with memory that the side may still be at: so its stream waits for the side here, too."""
        try:
            self._side.join()
        finally:
            self._fail(error, job)  # also where the device itself is what failed: nobody may wait for ever

    def _moment(self) -> Any:
        return self._side.mark()

    def _account(self, began: Any, answered: Any, computed: Any) -> None:
        self._spans += ("wire_seconds", began, answered), ("encode_seconds", answered, computed)
        self.catch_up()

    def catch_up(self) -> None:
        with self._reading:
            while self._spans:
                name, begin, end = self._spans[0]
                seconds = self._side.seconds(begin, end)
                if seconds is None:
                    return
                self._spans.popleft()
                self.transport.ledger.add(**{name: seconds})

    def close(self) -> None:
        self._closed = True
        if self._active:
            self._break_off(RuntimeError("the lane was closed in the middle of a step"), None)
        self._leave()


class CudaSide:
    """A side stream of a CUDA device."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def turn(self) -> Iterator[None]:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            yield

    def join(self) -> None:
        torch.cuda.current_stream(self._device).wait_stream(self._stream)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, begin: torch.cuda.Event, end: torch.cuda.Event) -> float | None:
        return begin.elapsed_time(end) / 1000 if end.query() else None
