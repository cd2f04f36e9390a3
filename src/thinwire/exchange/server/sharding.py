"""Which server owns what.

A tensor of a Mean goes whole to one server, so that spreading a bucket over servers changes no bit of its answer,
whatever a codec computes per tensor. Owners are chosen by size: in the order in which buckets are first seen, largest
tensor first, each to the server with the fewest elements so far. They are chosen by name and for good: they stay when
DDP regroups its buckets, and are the same again in a resumed run. A payload that cannot be cut goes whole to the owner
of its first tensor. Plain numbers have no names and are cut into equal segments.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any, NamedTuple

from thinwire.core.layout import Layout, Selection

SMALL_BYTES = 16384  # plain numbers below this go to one server: a message costs more than its bytes


class Shard(NamedTuple):
    """One server's tensors of a bucket."""

    server: int
    tensors: Selection


class Owners:
    """Remembers which server owns which tensor."""

    def __init__(self, servers: int):
        self.servers = servers
        self.entries: list[int] = [0] * servers
        self._owner: dict[str, int] = {}

    def shards(self, layout: Layout, grain: int | None) -> list[Shard]:
        """What of `layout` each server owns; servers that own nothing of it are left out."""
        return layout.once((self, grain is None), lambda: self._shards(layout, whole=grain is None))

    def state_dict(self) -> dict[str, Any]:
        """For a worker that comes late: it did not see the first buckets."""
        return {"entries": list(self.entries), "owners": dict(self._owner)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.entries, self._owner = list(state["entries"]), dict(state["owners"])

    def _shards(self, layout: Layout, *, whole: bool) -> list[Shard]:
        self._assign(layout)
        return self._divide(layout, whole=whole)

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
            return [Shard(self._owner[layout.names[0]], layout.select(layout.names))]
        owned = [{name for name in layout.names if self._owner[name] == server} for server in range(self.servers)]
        return [Shard(server, layout.select(names)) for server, names in enumerate(owned) if names]


def ranges(numel: int, itemsize: int, servers: int, turn: int) -> list[tuple[int, int, int]]:
    """(server, start, stop) of plain numbers: equal segments, or all to one server, by turns, where there are few."""
    if servers == 1 or numel * itemsize < SMALL_BYTES:
        return [(turn % servers, 0, numel)]
    cuts = [server * numel // servers // 64 * 64 for server in range(servers)] + [numel]
    return [(server, start, stop) for server, (start, stop) in enumerate(pairwise(cuts))]
