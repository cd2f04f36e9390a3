"""Which server owns what.

A tensor of a Mean goes whole to one server, so that spreading a bucket over servers changes no bit of its answer,
whatever a codec computes per tensor. Owners are chosen by size: in the order in which buckets are first seen, largest
tensor first, each to the server with the fewest entries so far. They are chosen by name and for good: they stay when
DDP regroups its buckets, and are the same again in a resumed run. A payload that cannot be cut goes whole to the owner
of its first tensor. Plain numbers have no names and are cut into equal stretches.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from torch import Tensor

from thinwire.core.bucket import Layout, Segment

SMALL_BYTES = 16384  # plain numbers below this go to one server: a message costs more than its bytes


@dataclass(frozen=True)
class Shard:
    """One server's tensors of a bucket: their layout end to end, and where they lie in the bucket."""

    server: int
    layout: Layout
    runs: tuple[tuple[int, int], ...]

    def gather(self, whole: Tensor, out: Tensor) -> Tensor:
        at = 0
        for start, stop in self.runs:
            out[at : at + stop - start].copy_(whole[start:stop])
            at += stop - start
        return out

    def scatter(self, values: Tensor, whole: Tensor) -> None:
        at = 0
        for start, stop in self.runs:
            whole[start:stop].copy_(values[at : at + stop - start])
            at += stop - start


class Owners:
    """Remembers which server owns which tensor."""

    def __init__(self, servers: int):
        self.servers = servers
        self.entries = [0] * servers
        self._owner: dict[str, int] = {}
        self._known: dict[tuple[tuple[Segment, ...], bool], list[Shard]] = {}

    def shards(self, layout: Layout, grain: int | None) -> list[Shard]:
        """What of `layout` each server owns; servers that own nothing of it are left out."""
        key = (layout.segments, grain is None)
        if key not in self._known:
            self._assign(layout)
            self._known[key] = self._divide(layout, whole=grain is None)
        return self._known[key]

    def _assign(self, layout: Layout) -> None:
        for segment in sorted(layout.segments, key=lambda segment: (-segment.numel, segment.name)):
            if segment.name not in self._owner:
                least = min(range(self.servers), key=lambda server: self.entries[server])
                self._owner[segment.name] = least
                self.entries[least] += segment.numel

    def _divide(self, layout: Layout, *, whole: bool) -> list[Shard]:
        if not layout.numel:
            return []
        if whole or self.servers == 1:
            return [Shard(self._owner[layout.names[0]], layout, ((0, layout.numel),))]
        found = []
        for server in range(self.servers):
            mine = [segment for segment in layout.segments if self._owner[segment.name] == server]
            segments, at = [], 0
            for segment in mine:
                segments.append(segment._replace(start=at, stop=at + segment.numel))
                at += segment.numel
            if at:
                found.append(Shard(server, Layout(segments), _joined(mine)))
        return found


def ranges(numel: int, itemsize: int, servers: int, turn: int) -> list[tuple[int, int, int]]:
    """(server, start, stop) of plain numbers: equal stretches, or all to one server, by turns, where there are few."""
    if servers == 1 or numel * itemsize < SMALL_BYTES:
        return [(turn % servers, 0, numel)]
    cuts = [server * numel // servers // 64 * 64 for server in range(servers)] + [numel]
    return [(server, start, stop) for server, (start, stop) in enumerate(pairwise(cuts))]


def _joined(segments: list[Segment]) -> tuple[tuple[int, int], ...]:
    joined: list[tuple[int, int]] = []
    for segment in segments:
        if joined and joined[-1][1] == segment.start:
            joined[-1] = (joined[-1][0], segment.stop)
        else:
            joined.append((segment.start, segment.stop))
    return tuple(joined)
