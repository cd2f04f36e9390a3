"""Memory that the workers of one machine see: what stays inside a machine need not go through a socket.

Every worker writes to its own memory alone, and says so by a byte to each of the others, over their process group: they
read it from there. So waiting, its limits, and what a lost worker looks like are the group's, as everywhere.
"""

from __future__ import annotations

import mmap
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.core.bucket import Bucket
from thinwire.exchange import objects
from thinwire.exchange.collectives import Told
from thinwire.exchange.lane import Rounds

STRIDE = 1 << 36  # bytes from one region of a worker's memory to the next; what nobody touches takes no room
SECRET_BYTES = 16


class Shared:
    """A group's memory: every worker has as many regions as were asked for, each as long as it needs to be.

    It has no name, so nothing is left of it when the last process that maps it has ended, however that ended.
    """

    def __init__(self, worker: int, files: list[int]):
        self.worker = worker
        self.workers: int = len(files)
        self._files = files
        self._mapped: dict[tuple[int, int], Tensor] = {}

    @classmethod
    def join(cls, group: dist.ProcessGroup, regions: int, *, wanted: bool = True) -> Shared | None:
        """All workers of the group call it. None, on all of them, if one cannot see another's memory, or will not."""
        worker, file, secret = group.rank(), None, secrets.token_bytes(SECRET_BYTES)
        with suppress(OSError, AttributeError):  # systems other than Linux have none
            if wanted:
                file = os.memfd_create("thinwire")
                os.write(file, secret)
                os.ftruncate(file, regions * STRIDE)
        told = objects.all_gather_objects([os.getpid(), file, secret.hex()], group)
        files = [_opened(*each) if number != worker else file for number, each in enumerate(told)]
        everyone = objects.all_gather_objects(None not in files, group)
        if all(everyone):
            return cls(worker, [each for each in files if each is not None])
        for each in files:
            if each is not None:
                os.close(each)
        return None

    def memory(self, worker: int, region: int, nbytes: int) -> Tensor:
        """uint8[nbytes]: the beginning of a worker's region."""
        mapped = self._mapped.get((worker, region))
        if mapped is None or mapped.numel() < nbytes:
            view = mmap.mmap(self._files[worker], max(nbytes, 1), offset=region * STRIDE)
            mapped = self._mapped[worker, region] = torch.frombuffer(view, dtype=torch.uint8)
        return mapped[:nbytes]

    def close(self) -> None:
        """Safe to call twice. Memory that somebody still looks at stays mapped until he has ended."""
        self._mapped = {}
        while self._files:
            os.close(self._files.pop())


@dataclass(frozen=True)
class Through:
    """The way of messages through a region of everybody's memory. The group is the one by which workers say that they
    have written.

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
        yield [self._told(bucket, outgoing.numel(), outgoing.numel())]
        return [self._message(writer, sizes) for writer in self._all]

    def _message(self, writer: int, sizes: Sequence[int]) -> Tensor:
        begin = sum(size for reader, size in enumerate(sizes[: self.worker]) if reader != writer)
        size = 0 if writer == self.worker else sizes[self.worker]
        return self.shared.memory(writer, self.region, begin + size)[begin:]

    def share(self, bucket: Bucket, message: Tensor) -> Rounds:
        nbytes = message.numel()
        yield [self._told(bucket, nbytes, nbytes * (self.shared.workers - 1))]
        return [self.shared.memory(writer, self.region, nbytes) for writer in self._all]

    @property
    def _all(self) -> range:
        return range(self.shared.workers)

    def _told(self, bucket: Bucket, given: int, sent: int) -> Told:
        words = bucket.scratch.take("words", 2 * self.shared.workers, torch.uint8)
        return Told(words.zero_(), given, sent, self.worker, self.group)


def _opened(process: int, file: int | None, secret: str) -> int | None:
    """Another worker's memory, if it is in reach here: processes of another machine may have the same numbers."""
    if file is None:
        return None
    with suppress(OSError):
        opened = os.open(f"/proc/{process}/fd/{file}", os.O_RDWR)
        if os.pread(opened, SECRET_BYTES, 0).hex() == secret:
            return opened
        os.close(opened)
    return None
