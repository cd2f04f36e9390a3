"""Streamed: the lane on an accelerator, where the device itself overlaps computing, sending and training.

NCCL wants everything that one device sends started in one order, over all its communicators. So there is no thread
and no group of our own: the training thread starts all of it, on the model's own group.

    a bucket arrives: its first round is computed and started, on a stream beside training's.
    the last one has: round after round of all buckets, in the order of buckets.

Nothing here waits. To "wait" for a collective makes the stream wait for it; and with the end of a step training's
stream waits for ours, so that whoever comes after, there, finds means, and may use again what memory we had.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

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


class Streamed(Lane):
    """A stream of its own, and nobody but the training thread to feed it.

    All buckets of a step are under way at once, each in memory of its own: their messages are many times smaller than
    they are, and a device that waited for one before it began the next would stand idle.
    """

    def __init__(self, transport: Transport, side: Side):
        super().__init__(transport)
        self._side = side
        self._closed = False

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
            self._fail(error, job)
        if last:
            self._side.join()
        return job

    def close(self) -> None:
        self._closed = True
        if self._active:
            self._fail(RuntimeError("the lane was closed in the middle of a step"), None)


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
