"""Memory that the workers of one machine see: what stays inside a machine need not go through a socket.

Every worker writes to its own memory alone, and says so by a count there, for which the others wait before they read.
Whoever waits looks, now and then, whether those he waits for are still there, and waits no longer than his process
group would.
"""

from __future__ import annotations

import mmap
import os
import secrets
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.core.bucket import Bucket
from thinwire.exchange import objects
from thinwire.exchange.collectives import amounts
from thinwire.exchange.lane import Rounds
from thinwire.kernels import native

STRIDE = 1 << 36  # bytes from one region of a worker's memory to the next; what nobody touches takes no room
SECRET_BYTES = 16
WORDS, WORD_BYTES = -1, 64  # the region of the secret and of what is said; every line has a part of a cache to itself
LINES = 2  # on each, everybody's words come in one order
LOOK_SECONDS = 0.1  # between two looks at whether the others are still there


class Shared:
    """A group's memory: every worker has as many regions as were asked for, each as long as it needs to be.

    It has no name, so nothing is left of it when the last process that maps it has ended, however that ended.
    """

    def __init__(self, worker: int, files: list[int], theirs: list[str], seconds: float):
        """files: everybody's memory, opened here. theirs: where it is as long as its owner has it open. seconds: the
        longest wait."""
        self.worker = worker
        self.workers: int = len(files)
        self._files = files
        self._theirs = theirs
        self._seconds = seconds
        self._mapped: dict[tuple[int, int], Tensor] = {}
        self._said = [0] * LINES

    @classmethod
    def join(cls, group: dist.ProcessGroup, regions: int, *, wanted: bool = True) -> Shared | None:
        """All workers of the group call it. None, on all of them, if one cannot see another's memory, or will not."""
        worker, file, secret = group.rank(), None, secrets.token_bytes(SECRET_BYTES)
        with suppress(OSError, AttributeError):  # systems other than Linux have none
            if wanted and hasattr(native.module(), "hear"):
                file = os.memfd_create("thinwire")
                os.write(file, secret)
                os.ftruncate(file, (1 + regions) * STRIDE)
        told = objects.all_gather_objects([f"/proc/{os.getpid()}/fd/{file}", secret.hex()], group)
        files = [_opened(*each) if number != worker else file for number, each in enumerate(told)]
        everyone = objects.all_gather_objects(None not in files, group)
        if all(everyone):
            seconds = objects.timeout_of(group).total_seconds()
            return cls(worker, [each for each in files if each is not None], [path for path, _ in told], seconds)
        for each in files:
            if each is not None:
                os.close(each)
        return None

    def memory(self, worker: int, region: int, nbytes: int) -> Tensor:
        """uint8[nbytes]: the beginning of a worker's region."""
        mapped = self._mapped.get((worker, region))
        if mapped is None or mapped.numel() < nbytes:
            view = mmap.mmap(self._files[worker], max(nbytes, 1), offset=(1 + region) * STRIDE)
            mapped = self._mapped[worker, region] = torch.frombuffer(view, dtype=torch.uint8)
        return mapped[:nbytes]

    def say(self, line: int) -> int:
        """Tell the others that what was to be written is; the number of that word on its line."""
        self._said[line] = (self._said[line] + 1) % 2**32
        native.module().say(self._word(self.worker, line), self._said[line])
        return self._said[line]

    def hear(self, line: int, number: int) -> None:
        """Wait until all have said so many words on the line."""
        end = time.monotonic() + self._seconds
        for worker in range(self.workers):
            while not native.module().hear(self._word(worker, line), number, LOOK_SECONDS):
                if not os.path.exists(self._theirs[worker]):
                    raise RuntimeError(f"worker {worker} of this machine is gone, or has closed its wire")
                if time.monotonic() > end:
                    raise RuntimeError(f"worker {worker} of this machine said nothing for {self._seconds:g} seconds")

    def close(self) -> None:
        """Safe to call twice. Memory that somebody still looks at stays mapped until he has ended."""
        self._mapped = {}
        while self._files:
            os.close(self._files.pop())

    def _word(self, worker: int, line: int) -> int:
        """Where it lies."""
        return self.memory(worker, WORDS, (1 + LINES) * WORD_BYTES).data_ptr() + (1 + line) * WORD_BYTES


@dataclass(frozen=True)
class Told:
    """A word from everybody to everybody: what this worker had to write where the others read it is written.

    `given`, `sent`: the bytes they read there, as if they had been sent.
    """

    shared: Shared
    line: int
    given: int
    sent: int
    group: dist.ProcessGroup

    def amounts(self) -> dict[str, float]:
        return amounts(self.given, self.sent, self.group.size() - 1)

    def start(self) -> _Word:
        return _Word(self.shared, self.line, self.shared.say(self.line))


@dataclass(frozen=True)
class _Word:
    shared: Shared
    line: int
    number: int

    def wait(self) -> None:
        self.shared.hear(self.line, self.number)


@dataclass(frozen=True)
class Through:
    """The way of messages through a region of everybody's memory, among the workers of a group. Regions with an even
    number are told of on one line, those with an odd one on the other.

    A region is written to again only after a later word from everybody who reads it: see `Hierarchical.hold`.
    """

    shared: Shared
    region: int
    group: dist.ProcessGroup

    @property
    def worker(self) -> int:
        return self.shared.worker

    def outgoing(self, bucket: Bucket, name: str, nbytes: int) -> Tensor:
        return self.shared.memory(self.worker, self.region, nbytes)

    def swap(self, bucket: Bucket, outgoing: Tensor, sizes: Sequence[int]) -> Rounds:
        yield [self._told(outgoing.numel(), outgoing.numel())]
        return [self._message(writer, sizes) for writer in self._all]

    def _message(self, writer: int, sizes: Sequence[int]) -> Tensor:
        begin = sum(size for reader, size in enumerate(sizes[: self.worker]) if reader != writer)
        size = 0 if writer == self.worker else sizes[self.worker]
        return self.shared.memory(writer, self.region, begin + size)[begin:]

    def share(self, bucket: Bucket, message: Tensor) -> Rounds:
        nbytes = message.numel()
        yield [self._told(nbytes, nbytes * (self.shared.workers - 1))]
        return [self.shared.memory(writer, self.region, nbytes) for writer in self._all]

    @property
    def _all(self) -> range:
        return range(self.shared.workers)

    def _told(self, given: int, sent: int) -> Told:
        return Told(self.shared, self.region % LINES, given, sent, self.group)


def _opened(path: str, secret: str) -> int | None:
    """Another worker's memory, if it is in reach here: processes of another machine may have the same numbers."""
    with suppress(OSError):
        opened = os.open(path, os.O_RDWR)
        if os.pread(opened, SECRET_BYTES, 0).hex() == secret:
            return opened
        os.close(opened)
    return None
