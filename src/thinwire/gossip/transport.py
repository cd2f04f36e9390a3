"""Point-to-point messages over torch.distributed, with the news of what broke."""

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
from thinwire.gossip.news import News, parents


class DeadRank(RuntimeError):
    """A rank's connection broke, and the run cannot or shall not go on without it."""


class PointToPoint:
    """Messages between this process and single others; what breaks one connection leaves the others whole.

    Every message ends with the sender's `News`: so it travels with the gossip, at no message of its own.

    A time-out is no death: gloo closes all of a group's connections when one receive times out, so it raises.
    """

    def __init__(self, group: dist.ProcessGroup, *, timeout_seconds: float, transport: Transport):
        self.rank: int = dist.get_rank(group)
        self.ranks: int = dist.get_world_size(group)
        self.news: News = News(self.rank, self.ranks)
        self._group = group
        self._timeout_seconds = timeout_seconds
        self._transport = transport
        self._scratch = Scratch()
        self._round = 0
        self._abandoned: list[Started | None] = []

    def exchange(self, messages: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Send every message (uint8) and hear an equally long one from the same rank.

        A rank that cannot be reached is missing from the answer. The answers are good until the next call.
        """
        sizes = {rank: message.numel() for rank, message in messages.items()}
        return self._transfer(self._next_round(), messages, sizes)[0]

    def _next_round(self) -> int:
        """The tag of the next round: who mixes once too often times out and mixes no wrong step."""
        self._round = (self._round + 1) % 2**31
        self.news.next_round()
        return self._round

    def _transfer(
        self, tag: int, messages: Mapping[int, Tensor], sizes: Mapping[int, int]
    ) -> tuple[dict[int, Tensor], dict[int, bytes]]:
        """Send every message, and hear `sizes[rank]` bytes and the news from each of those ranks, all at once."""
        known, avoided = self.news.message(), self.news.broken
        inbox = {rank: self._buffer(f"from {rank}", size) for rank, size in sizes.items() if rank not in avoided}
        outbox = {rank: self._with(known, rank, message) for rank, message in messages.items() if rank not in avoided}
        # Receives first, so that no message has to wait for a place to land.
        receiving = {rank: self._receive(buffer, rank, tag) for rank, buffer in inbox.items()}
        sending = {rank: self._send(buffer, rank, tag) for rank, buffer in outbox.items()}
        with self._transport.ledger.timed("wire_seconds"):
            broken = {rank for rank, work in receiving.items() if not self._finished(rank, work)}
            # On a connection that just broke gloo may forget to fail a send: nobody waits for it, but it is held.
            self._abandoned += [work for rank, work in sending.items() if rank in broken]
            left = [(rank, work) for rank, work in sending.items() if rank not in broken]
            broken |= {rank for rank, work in left if not self._finished(rank, work)}
        for rank in broken:
            self.news.add(rank)
        heard = {rank: buffer for rank, buffer in inbox.items() if rank not in broken}
        told = {rank: bytes(buffer[sizes[rank] :].tolist()) for rank, buffer in heard.items()}
        for rank, news in told.items():
            self.news.read(rank, news)
        return {rank: buffer[: sizes[rank]] for rank, buffer in heard.items()}, told

    def mean(self, values: Tensor) -> Tensor:
        """The mean of all survivors' values, the same bits on each.

        1. Agree on who takes part, and on a tree of them.
        2. Up the tree, adding; divide; down again.
        3. Vote: if a rank was lost on the way, some have no mean, so all begin again without it.
        """
        while True:
            tree = self._agreed_tree()
            result, whole = self._tree_mean(values.clone(), tree)
            if self._all_say(whole):
                self.news.believe()
                return result

    def _agreed_tree(self) -> dict[int, int | None]:
        """Everybody's parent, after all have found that they knew the same before they spoke.

        What is noticed first while speaking does not count, for others may not have noticed it. So a rank may be
        counted in that died just now: the tree breaks there, and the vote says so.
        """
        nothing = torch.empty(0, dtype=torch.uint8, device="cpu")
        while True:
            known, members, links = self.news.message(), self.news.living(), self.news.links
            others = dict.fromkeys(self._others(), nothing)
            _, told = self._transfer(self._next_round(), others, dict.fromkeys(others, 0))
            if self._all_say(all(news == known for news in told.values())):
                break
        tree = parents(members, lambda i, j: (min(i, j), max(i, j)) not in links)
        if len(tree) < len(members):
            lost = sorted(set(members) - set(tree))
            raise DeadRank(f"ranks {lost} live, but no connection leads to them any more")
        return tree

    def _all_say(self, word: bool) -> bool:
        """Whether everybody says yes.

        The second round is for those who could not hear a "no": their connection is broken, or who said it died
        over it. So all get one answer, unless two ranks die in the same vote.
        """
        for _ in range(2):
            vote = torch.tensor([word], dtype=torch.uint8, device="cpu")
            answers = self.exchange(dict.fromkeys(self._others(), vote))
            word = word and all(bool(answer) for answer in answers.values())
        return word

    def _tree_mean(self, values: Tensor, tree: Mapping[int, int | None]) -> tuple[Tensor, bool]:
        children = [child for child, parent in tree.items() if parent == self.rank]
        parent = [rank for rank in (tree[self.rank],) if rank is not None]
        wire = values.view(torch.uint8)
        up, down = self._next_round(), self._next_round()
        below, _ = self._transfer(up, {}, dict.fromkeys(children, wire.numel()))
        for child in children:
            if child in below:
                values.add_(below[child].view(values.dtype))
        if not parent:
            values.div_(len(tree))
        self._transfer(up, dict.fromkeys(parent, wire), {})
        above, _ = self._transfer(down, {}, dict.fromkeys(parent, wire.numel()))
        for answer in above.values():
            values.copy_(answer.view(values.dtype))
        self._transfer(down, dict.fromkeys(children, wire), {})
        return values, len(below) == len(children) and len(above) == len(parent)

    def close(self) -> None:
        with suppress(ValueError, AssertionError):  # destroyed already, with all other groups
            dist.destroy_process_group(self._group)

    def _others(self) -> list[int]:
        return [rank for rank in range(self.ranks) if rank != self.rank and rank not in self.news.broken]

    def _buffer(self, name: str, size: int) -> Tensor:
        return self._scratch.take(name, size + self.news.nbytes, torch.uint8)

    def _with(self, news: bytes, rank: int, message: Tensor) -> Tensor:
        buffer = self._buffer(f"to {rank}", message.numel())
        buffer[: message.numel()].copy_(message)
        buffer[message.numel() :].copy_(torch.frombuffer(bytearray(news), dtype=torch.uint8))
        return buffer

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
