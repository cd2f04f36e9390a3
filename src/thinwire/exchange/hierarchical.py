"""Hierarchical: two levels. Workers of one machine divide a bucket, and each speaks of its own part with the others.

1. Scatter inside: every worker gets the mean, over its machine, of its own part.
2. The scheme converses about that part with those of the other machines who have the same: all links are in use.
3. Gather inside: every part's mean to all.

So a machine sends between machines what one flat worker would, and each of its workers remembers its part's share.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import schemes
from thinwire.core import parts
from thinwire.core.bucket import Bucket, Scratch
from thinwire.core.layout import Layout
from thinwire.core.request import Max, Mean, Sum
from thinwire.core.scheme import Codec, Conversation, Scheme
from thinwire.exchange import arithmetic, objects, scatter
from thinwire.exchange.allreduce import AllReduce
from thinwire.exchange.arithmetic import Route
from thinwire.exchange.exchange import CPU, drive
from thinwire.exchange.lane import Lane, Rounds
from thinwire.exchange.scatter import Part, Sockets, Way
from thinwire.exchange.shared import Shared, Through
from thinwire.exchange.transport import Transport

WHOLE, WHOLE_MATRICES = 1 << 12, 1 << 20  # elements
DEPTH = 4  # buckets under way: one on each of the ways there, between machines, and back, and one more that begins


class Hierarchical:
    """Exact or nearly so inside a machine, where links are fast; the scheme between machines, where they are thin.

    `inner`: the process group of this machine's workers; all machines have equally many.
    `outer`: that of the workers who have this one's place on each machine.
    `inside`: how elements travel inside: a codec that is right on average, such as "fp32" (as they are), "bf16",
        "qsgd(bits=8)". Nobody remembers what it loses. Exempt tensors travel as they are.
    `route`, `link`: of Means between machines, as in `AllReduce`.
    `whole`: tensors of at most so many elements are one worker's; larger ones are cut between rows (`parts.deal`).
        Higher => low rank sees larger matrices; lower => workers of a machine have more equal shares of each bucket.
        Unless given, 2^20 for schemes that look at matrices, 2^12 for others.
    `memory`: inside, elements go through memory that a machine's workers all see, where they do (Linux, one container,
        compiled kernels); else, and where not, through the group.
    `transport`: starts and counts what is sent; the ledger has bytes_sent_inside and bytes_sent_outside apart.
    """

    def __init__(
        self,
        *,
        inner: dist.ProcessGroup,
        outer: dist.ProcessGroup,
        inside: str | Codec = "fp32",
        route: Route = "auto",
        link: tuple[float, float] | None = None,
        whole: int | None = None,
        memory: bool = True,
        transport: Transport | None = None,
    ) -> None:
        self.inside: Codec = schemes.codec(inside)
        if not self.inside.unbiased:
            known = "fp32, bf16, fp16, qsgd(bits=8)"
            raise ValueError(f"inside must be right on average, such as {known}; nobody remembers what {inside} loses")
        if whole is not None and (not isinstance(whole, int) or whole < 1):
            raise ValueError(f"whole must be a number of elements, 1 or more, got {whole!r}")
        for name, group in (("inner", inner), ("outer", outer)):
            if not hasattr(group, "rank"):  # what PyTorch gives those who are not in a group has none
                raise ValueError(f"{name} must be a process group that this rank is in, got {group!r}")
        self.transport: Transport = transport or Transport()
        self.transport.ledger.add(bytes_sent_inside=0.0, bytes_sent_outside=0.0)
        self.lane: Lane | None = None
        self._whole = whole
        self.whole: int = whole or WHOLE
        self._given = (inner, outer)
        self._everyone = AllReduce(transport=self.transport)
        self._outer = AllReduce(route=route, link=link, transport=self.transport)
        # A group for each way: scatters go out in the order of buckets, and so do gathers, but not one between the same
        # two others on all workers.
        self._there, self._back = AllReduce(transport=self.transport), AllReduce(transport=self.transport)
        self._local, self._place = inner.size(), inner.rank()
        self.workers: int = outer.size() * self._local
        self.worker: int = outer.rank() * self._local + self._place
        self._pieces: dict[str, list[parts.Piece]] = {}  # of every tensor, everybody's
        self._exact: Collection[str] = ()
        self._turns: deque[object] = deque()  # buckets that will be gathered, oldest first
        self._shared: Shared | None = None
        self._memory = memory
        self._asked = self._given_out = 0  # buckets that asked for regions, and that have got some
        self._taken: set[int] = set()

    @classmethod
    def of_nodes(
        cls, local: int | None = None, *, inside: str | Codec = "fp32", route: Route = "auto",
        link: tuple[float, float] | None = None, whole: int | None = None, memory: bool = True,
        transport: Transport | None = None,
    ) -> Hierarchical:  # fmt: skip
        """Groups of the ranks as torchrun places them, `local` of every machine one after the other.

        Every rank of the job calls it. local: LOCAL_WORLD_SIZE, which torchrun sets, unless given.
        """
        said = os.environ.get("LOCAL_WORLD_SIZE", "nothing") if local is None else local
        ranks, local = dist.get_world_size(), int(said) if str(said).isdigit() else 0
        if not local or ranks % local:
            raise ValueError(
                f"LOCAL_WORLD_SIZE, or local=, must divide the {ranks} ranks, got {said}; "
                "for ranks in another order there is Hierarchical(inner=, outer=)"
            )
        inner, outer = node_groups(local)
        options: dict[str, Any] = {"route": route, "link": link, "whole": whole, "memory": memory}
        return cls(inner=inner, outer=outer, inside=inside, transport=transport, **options)

    # -- what a pipeline needs -----------------------------------------------------------------------------------------

    @property
    def place(self) -> int:
        return self.worker

    @property
    def device(self) -> torch.device:
        return self._everyone.device

    @property
    def route(self) -> str:
        return f"{self._outer.route}, parts of {self.whole} for {self._local} inside by {self.inside.spec}"

    def open(self, group: dist.ProcessGroup | None, scheme: Scheme, device: torch.device = CPU) -> None:
        if self.lane is not None:
            raise ValueError("this Hierarchical is in use by another attach(); make one for each")
        arithmetic.check_route(self._outer.route, scheme)
        self._everyone.open(group, scheme, device)
        try:
            self._check_grid()
        except ValueError:
            self._everyone.close()
            raise
        self._turns.clear()
        self._taken.clear()
        self._asked = self._given_out = 0
        inner, outer = self._given
        self._there.join(inner, self.device)
        self._back.join(inner, self.device)
        self._outer.join(outer, self.device)
        if self.device.type == "cpu":
            self._shared = Shared.join(self._there.group, 2 * DEPTH, wanted=self._memory)
        self.lane = self._everyone.lane
        if self.lane is not None:
            self.lane.depth = DEPTH

    def _check_grid(self) -> None:
        """Raise on every worker alike unless the groups of all make a grid: machines by places."""
        ranks = [dist.get_process_group_ranks(each) for each in self._given]
        told = objects.all_gather_objects(ranks, self._everyone.group, self.device)
        inner, outer = ({tuple(each[level]) for each in told} for level in (0, 1))
        everyone = sorted(dist.get_process_group_ranks(self._everyone.group))
        grid = [[machine[place] for machine in inner] for place in range(min(map(len, inner)))]
        if (
            sorted(rank for machine in inner for rank in machine) != everyone
            or len({len(machine) for machine in inner}) != 1
            or sorted(map(sorted, grid)) != sorted(map(sorted, outer))
        ):
            raise ValueError(
                f"inner and outer must make a grid of the model's ranks {everyone}, every machine with equally many; "
                f"inner are {sorted(inner)}, outer are {sorted(outer)}"
            )

    def direct(self, scheme: Scheme) -> None:
        """Plain sums have two levels like all else."""

    def relays(self, scheme: Scheme) -> bool:
        return self._outer.relays(scheme)

    def agree(self, given: Mapping[str, str] | None) -> None:
        self._everyone.agree(given and {**given, "link between machines": str(self._outer.link)})

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._everyone.load_state_dict(state)

    def close(self) -> None:
        for each in (self._everyone, self._there, self._back, self._outer):
            each.close()
        if self._shared is not None:
            self._shared.close()
            self._shared = None
        self.lane = None

    # -- conversations -------------------------------------------------------------------------------------------------

    def deal(self, tensors: Mapping[str, Tensor], exact: Collection[str], scheme: Scheme) -> Sequence[parts.Piece]:
        self.whole = self._whole or (WHOLE_MATRICES if scheme.matrices else WHOLE)
        dealt = parts.deal(tensors, self._local, self.whole, exact)
        self._pieces, self._exact = {name: [] for name in tensors}, exact
        for piece in dealt:
            self._pieces[piece.whole].append(piece)
        return [piece for piece in dealt if piece.owner == self._place]

    def hold(self, bucket: Bucket, converse: Callable[[Bucket], Conversation]) -> Rounds:
        outer, codec = self._outer, self.inside
        mine = replace(bucket, workers=outer.workers, worker=outer.worker, seat=outer.worker)
        if self._local == 1:
            return (yield from self._between(mine, converse))
        all_exact = codec.lossless(bucket.flat.dtype)
        divided = bucket.layout.once(("parts", self, all_exact), lambda: self._parts(bucket.layout, all_exact))
        layout = divided[self._place].layout
        self._turns.append(bucket)
        there, back, pair = yield from self._ways()
        flat = scatter.own_memory(bucket, divided, codec, back)
        out = scatter.scatter(bucket, divided, codec, there, partial(_encode, codec), 1.0 / self._local, flat)
        yield from self._counted(out, "bytes_sent_inside")
        if layout.numel:
            yield from self._between(replace(mine, flat=flat, layout=layout), converse)
        # Schemes ask as often as their own part needs, so workers of one machine come here in different orders.
        while self._turns[0] is not bucket:
            yield []
        self._turns.popleft()
        yield from self._counted(scatter.gather(flat, bucket, divided, codec, back), "bytes_sent_inside")
        self._taken.discard(pair)
        return bucket.flat

    def _ways(self) -> Generator[list[Any], None, tuple[Way, Way, int]]:
        """There and back, and the number of their pair of regions, which is to be given back.

        Buckets take pairs in turn, the same on all workers, so nobody writes over what another still reads: who has the
        pair again has heard, on the way back, that all had read what went there; and who writes for the way back has
        heard, on the way there, that all are done with the bucket that had the pair before.
        """
        if self._shared is None:
            return Sockets(self._there.group), Sockets(self._back.group), 0
        number, self._asked = self._asked, self._asked + 1
        pair = number % DEPTH
        while self._given_out != number or pair in self._taken:
            yield []
        self._given_out += 1
        self._taken.add(pair)
        there = Through(self._shared, 2 * pair, self._there.group)
        return there, Through(self._shared, 2 * pair + 1, self._back.group), pair

    def _parts(self, layout: Layout, all_exact: bool) -> list[Part]:
        """Each owner's part of a bucket."""
        found = []
        for owner in range(self._local):
            own = [piece for name in layout.names for piece in self._pieces[name] if piece.owner == owner]
            exact = [piece for piece in own if all_exact or piece.whole in self._exact]
            coded = [piece for piece in own if piece not in exact]
            found.append(Part(parts.select(layout, exact), parts.select(layout, coded)))
        return found

    def _between(self, part: Bucket, converse: Callable[[Bucket], Conversation]) -> Rounds:
        return (yield from self._counted(drive(converse(part), self._outer, part.scratch), "bytes_sent_outside"))

    def answer(self, request: Sum | Max | Mean, workers: int, scratch: Scratch) -> Rounds:
        """What is not about a bucket is asked of everybody at once."""
        return (yield from self._counted(self._everyone.answer(request, workers, scratch), "bytes_sent_outside"))

    def _counted(self, rounds: Rounds, total: str) -> Rounds:
        """The same rounds, with their bytes in a total of their own."""
        while True:
            try:
                wanted = next(rounds)
            except StopIteration as stop:
                return stop.value
            self.transport.ledger.add(**{total: sum(each.amounts()["bytes_sent"] for each in wanted)})
            yield wanted


def node_groups(local: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    """This rank's machine, and those who have its place on each, where every `local` ranks are a machine. All call."""
    ranks, timeout = dist.get_world_size(), objects.timeout_of(dist.group.WORLD)  # type: ignore[arg-type]
    inner = [list(range(first, first + local)) for first in range(0, ranks, local)]
    outer = [list(range(place, ranks, local)) for place in range(local)]
    made = [[dist.new_group(each, timeout=timeout) for each in level] for level in (inner, outer)]
    mine = [next(group for group in level if isinstance(group, dist.ProcessGroup)) for level in made]
    return mine[0], mine[1]


def _encode(codec: Codec, part: Bucket, out: Tensor) -> None:
    codec.encode_padded(part, codec.level, out)
