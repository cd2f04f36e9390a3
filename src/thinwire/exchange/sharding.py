"""Which server owns what.

Every tensor is cut by itself into one stretch per server, so ownership follows from its name and size alone: it stays
when DDP regroups its buckets, and a server's error memory and checkpoint stay with it. A cut lies a multiple of the
codec's grain from the tensor's beginning, so cutting changes no bit of the answer. Payloads that cannot be cut go
whole to one server, chosen by the bucket's first name.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from thinwire import randomness
from thinwire.bucket import Layout, Segment

SMALL_BYTES = 16384  # plain numbers below this go to one server: a message costs more than its bytes


@dataclass(frozen=True)
class Shard:
    """One server's stretches of a bucket: their layout end to end, and where they lie in the bucket."""

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


def shards(layout: Layout, servers: int, grain: int | None) -> list[Shard]:
    """The stretches of `layout` that each server owns; servers that own nothing of it are left out."""
    if not layout.numel:
        return []
    if servers == 1 or grain is None:
        server = randomness.name_hash(layout.names[0]) % servers
        return [Shard(server, layout, ((0, layout.numel),))]
    found = []
    for server in range(servers):
        segments, runs, at = [], [], 0
        for segment in layout.segments:
            begin, end = _stretch(segment, server, servers, grain)
            if begin < end:
                whole = (begin, end) == (0, segment.numel)
                shape = segment.shape if whole else (end - begin,)
                segments.append(Segment(segment.name, at, at + end - begin, shape, segment.offset + begin))
                runs.append((segment.start + begin, segment.start + end))
                at += end - begin
        if segments:
            found.append(Shard(server, Layout(segments), _joined(runs)))
    return found


def ranges(numel: int, itemsize: int, servers: int, turn: int) -> list[tuple[int, int, int]]:
    """(server, start, stop) of plain numbers: equal stretches, or all to one server, by turns, where there are few."""
    if servers == 1 or numel * itemsize < SMALL_BYTES:
        return [(turn % servers, 0, numel)]
    cuts = [server * numel // servers // 64 * 64 for server in range(servers)] + [numel]
    return [(server, a, b) for server, (a, b) in enumerate(zip(cuts, cuts[1:], strict=False))]


def _stretch(segment: Segment, server: int, servers: int, grain: int) -> tuple[int, int]:
    """Where in its tensor a server's stretch begins and ends. The turn by name evens out what rounding leaves over."""
    place = (server + randomness.name_hash(segment.name)) % servers

    def cut(number: int) -> int:
        if number == servers:
            return segment.numel
        return min(round(number * segment.numel / servers / grain) * grain, segment.numel)

    return cut(place), cut(place + 1)


def _joined(runs: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    joined: list[tuple[int, int]] = []
    for start, stop in runs:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return tuple(joined)
