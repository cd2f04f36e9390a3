"""Point-to-point messages over torch.distributed, with the news of who is lost."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.core.bucket import Scratch
from thinwire.exchange.collectives import Started, amounts
from thinwire.exchange.transport import Transport


class DeadRank(RuntimeError):
    """A rank's connection broke, and the run cannot or shall not go on without it."""


class PointToPoint:
    """Messages between this process and single others; what breaks one connection leaves the others whole.

    Every message ends with one bit per rank: those the sender knows to be lost. So news of a death travels
    with the gossip, at no message of its own, and all hear of it within the graph's diameter in rounds.

    A time-out is no death: gloo closes all of a group's connections when one receive times out, so it raises.
    """

    def __init__(self, group: dist.ProcessGroup, *, timeout_seconds: float, transport: Transport):
        self.rank, self.ranks = dist.get_rank(group), dist.get_world_size(group)
        self.dead: set[int] = set()
        self._group = group
        self._timeout_seconds = timeout_seconds
        self._transport = transport
        self._scratch = Scratch()
        self._news_bytes = -(-self.ranks // 8)
        self._round = 0

    @property
    def survivors(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank not in self.dead]

    def exchange(self, messages: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Send every message (uint8) and hear an equally long one from the same rank.

        A rank that is lost is missing from the answer. The answers are good until the next call.
        """
        sizes = {rank: message.numel() for rank, message in messages.items()}
        return self._transfer(self._next_round(), messages, sizes)

    def _next_round(self) -> int:
        """The tag of the next round: who mixes once too often times out and mixes no wrong step."""
        self._round = (self._round + 1) % 2**31
        return self._round

    def _transfer(self, tag: int, messages: Mapping[int, Tensor], sizes: Mapping[int, int]) -> dict[int, Tensor]:
        """Send every message, and hear `sizes[rank]` bytes from each of those ranks, all at once."""
        inbox = {rank: self._buffer(f"from {rank}", size) for rank, size in sizes.items()}
        outbox = {rank: self._with_news(rank, message) for rank, message in messages.items()}
        # Receives first, so that no message has to wait for a place to land.
        started = [(rank, self._receive(buffer, rank, tag)) for rank, buffer in inbox.items()]
        started += [(rank, self._send(buffer, rank, tag)) for rank, buffer in outbox.items()]
        with self._transport.ledger.timed("wire_seconds"):
            broken = {rank for rank, work in started if not self._finished(rank, work)}
        self.dead |= broken
        heard = {rank: buffer for rank, buffer in inbox.items() if rank not in broken}
        for rank, buffer in heard.items():
            self._read_news(rank, buffer[sizes[rank] :])
        return {rank: buffer[: sizes[rank]] for rank, buffer in heard.items()}

    def mean(self, values: Tensor) -> Tensor:
        """The mean of all survivors' values, the same bits on each.

        1. Speak to everybody not known to be dead: all learn alike who is.
        2. Up a binary tree of the survivors, adding; divide; down again.
        3. Vote: if a rank was lost on the way, some have no mean, so all begin again without it.
        """
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        while True:
            self.exchange(dict.fromkeys(self._others(), nothing))
            result, whole = self._tree_mean(values.clone(), self.survivors)
            vote = torch.tensor([whole], dtype=torch.uint8, device="cpu")
            votes = self.exchange(dict.fromkeys(self._others(), vote))
            if whole and all(bool(other) for other in votes.values()):
                return result

    def _tree_mean(self, values: Tensor, survivors: list[int]) -> tuple[Tensor, bool]:
        place = survivors.index(self.rank)
        children = [survivors[child] for child in (2 * place + 1, 2 * place + 2) if child < len(survivors)]
        parent = [survivors[(place - 1) // 2]] if place else []
        wire = values.view(torch.uint8)
        up, down = self._next_round(), self._next_round()
        below = self._transfer(up, {}, dict.fromkeys(children, wire.numel()))
        for child in children:
            if child in below:
                values.add_(below[child].view(values.dtype))
        if not parent:
            values.div_(len(survivors))
        self._transfer(up, dict.fromkeys(parent, wire), {})
        above = self._transfer(down, {}, dict.fromkeys(parent, wire.numel()))
        for answer in above.values():
            values.copy_(answer.view(values.dtype))
        self._transfer(down, dict.fromkeys(children, wire), {})
        return values, len(below) == len(children) and len(above) == len(parent)

    def close(self) -> None:
        with suppress(ValueError, AssertionError):  # destroyed already, with all other groups
            dist.destroy_process_group(self._group)

    def _others(self) -> list[int]:
        return [rank for rank in self.survivors if rank != self.rank]

    def _buffer(self, name: str, size: int) -> Tensor:
        return self._scratch.take(name, size + self._news_bytes, torch.uint8)

    def _with_news(self, rank: int, message: Tensor) -> Tensor:
        buffer = self._buffer(f"to {rank}", message.numel())
        buffer[: message.numel()].copy_(message)
        bits = sum(1 << rank for rank in self.dead)
        news = bytearray(bits.to_bytes(self._news_bytes, "little"))
        buffer[message.numel() :].copy_(torch.frombuffer(news, dtype=torch.uint8))
        return buffer

    def _read_news(self, rank: int, news: Tensor) -> None:
        bits = int.from_bytes(bytes(news.tolist()), "little")
        if bits >> self.ranks:
            raise ValueError(f"rank {rank} tells of ranks past {self.ranks - 1}: its message is not gossip's")
        told = {lost for lost in range(self.ranks) if bits >> lost & 1}
        if self.rank in told:
            raise DeadRank(f"rank {self.rank} was given up: its connection to another rank broke")
        self.dead |= told

    def _receive(self, buffer: Tensor, rank: int, tag: int) -> Started | None:
        with suppress(RuntimeError):  # the connection was found broken before anything was started on it
            return dist.irecv(buffer, dist.get_global_rank(self._group, rank), group=self._group, tag=tag)

    def _send(self, buffer: Tensor, rank: int, tag: int) -> Started | None:
        with suppress(RuntimeError):
            return self._transport.start(_Message(buffer, dist.get_global_rank(self._group, rank), tag, self._group))

    def _finished(self, rank: int, work: Started | None) -> bool:
        if work is None:
            return False
        began = time.monotonic()
        try:
            work.wait()
        except RuntimeError as error:
            if time.monotonic() - began >= self._timeout_seconds:
                waited = f"rank {rank} said nothing for {self._timeout_seconds:g} seconds"
                raise TimeoutError(f"{waited}; does every rank mix equally often?") from error
            return False
        return True


@dataclass(frozen=True)
class _Message:
    """A message to one rank, shaped like a collective: point to point, what is given is sent once."""

    tensor: Tensor
    rank: int  # in the whole job
    tag: int
    group: dist.ProcessGroup

    def amounts(self) -> dict[str, float]:
        return amounts(self.tensor.numel(), self.tensor.numel(), 1)

    def start(self) -> Started:
        work = dist.isend(self.tensor, self.rank, group=self.group, tag=self.tag)
        assert work is not None
        return work
