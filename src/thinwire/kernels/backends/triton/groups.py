"""Where rotated blocks lie, of which some are longer than a program can hold: those come in groups."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.backends.reference.rotated import SMALLEST
from thinwire.kernels.backends.triton.places import KEPT

TILE = 4096  # elements of a block that a program holds
SHARE = 40  # a group is this part of a buffer, which is less than a bit of an element; or a block, where that is more


class Part(NamedTuple):
    """Blocks of one padded size, of one stretch."""

    owner: int  # the stretch
    begin: int
    length: int
    size: int  # of a block, padded
    number: int  # of the first block
    place: int  # of the first element, among padded ones
    counter: int

    @property
    def blocks(self) -> int:
        return -(-self.length // self.size)

    def follows(self, other: Part) -> bool:
        """Whether it lies right behind, and neither has any padding."""
        whole = all(part.length == part.blocks * part.size for part in (self, other))
        return whole and other.begin + other.length == self.begin

    def some(self, first: int, count: int) -> Part:
        """So many of its blocks."""
        at = first * self.size
        moved = {name: getattr(self, name) + at for name in ("begin", "place", "counter")}
        return self._replace(**moved, length=min(count * self.size, self.length - at), number=self.number + first)


class Group(NamedTuple):
    """Parts as stretches of their own: of blocks within a tile, or laid end to end, padded, in memory of their own."""

    table: Tensor  # as of `Places`; but the sixth field is a block's size, the third, of longer ones, a place there
    stretch: Tensor  # int32[tiles]
    tiles: int
    owner: Tensor  # int64: the stretch of the buffer, on the device
    counters: Tensor
    counters_there: Tensor
    starts: Tensor  # in memory of their own
    numel: int
    begin: int | None  # where they lie in a buffer just as in memory of their own; None where padding keeps them apart

    def of(self, keys: Tensor) -> Tensor:
        """Out of a key for each stretch of the buffer those of the stretches here."""
        return keys.index_select(-1, self.owner)


def longer_than_a_tile(starts: Tensor, block: int, counters: Tensor, device: torch.device) -> tuple[Group, list[Group]]:
    """The padded blocks that are no longer than a tile, and groups of those that are."""
    return _longer(starts.numpy().tobytes(), starts.dim(), block, counters.numpy().tobytes(), device)


@lru_cache(maxsize=KEPT)
def _longer(content: bytes, dim: int, block: int, counters: bytes, device: torch.device) -> tuple[Group, list[Group]]:
    numbers, first = (np.frombuffer(each, dtype=np.int64).tolist() for each in (content, counters))
    spans = list(pairwise(numbers)) if dim == 1 else list(zip(numbers[0::2], numbers[1::2], strict=True))
    parts = _parts(spans, block, first)
    short, longer = ([part for part in parts if (part.size > TILE) is so] for so in (False, True))
    every = sum(part.blocks * part.size for part in parts)
    room = max([every // SHARE, *(part.size for part in longer)])
    return _group(short, device, longer=False), [_group(each, device, longer=True) for each in _packed(longer, room)]


def _parts(spans: list[tuple[int, int]], block: int, counters: list[int]) -> list[Part]:
    parts, number, at = [], 0, 0
    for owner, (begin, end) in enumerate(spans):
        whole, rest = (end - begin) // block * block, (end - begin) % block
        for inside, length, size in ((0, whole, block), (whole, rest, check.padded(rest, block, SMALLEST))):
            if length:
                parts.append(Part(owner, begin + inside, length, size, number, at, counters[owner] + inside))
                number, at = number + parts[-1].blocks, at + parts[-1].blocks * size
    return parts


def _packed(parts: list[Part], room: int) -> list[list[Part]]:
    """In groups of at most so many padded elements, which lie in the buffer as they would end to end."""
    groups, left = [], 0
    for part in parts:
        most = room // part.size
        for first in range(0, part.blocks, most):
            some = part.some(first, most)
            if some.blocks * some.size > left or not some.follows(groups[-1][-1]):
                groups.append([])
                left = room
            groups[-1].append(some)
            left -= some.blocks * some.size
    return groups


def _group(parts: list[Part], device: torch.device, *, longer: bool) -> Group:
    sizes = np.array([part.blocks * part.size if longer else TILE for part in parts], dtype=np.int64)
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    table = np.array(
        [
            (part.begin, part.length, at if longer else at // TILE, part.number, part.place, part.size)
            for part, at in zip(parts, starts.tolist(), strict=False)
        ],
        dtype=np.int64,
    )
    stretch = np.repeat(np.arange(len(parts), dtype=np.int32), sizes // TILE)
    owner, counters = (np.array([part[field] for part in parts], dtype=np.int64) for field in (0, 6))
    there = [torch.from_numpy(each).to(device) for each in (table.reshape(-1), stretch, owner, counters)]
    begin = parts[0].begin if parts and starts[-1] == sum(part.length for part in parts) else None
    return Group(
        *there[:2], len(stretch), there[2], torch.from_numpy(counters), there[3], torch.from_numpy(starts),
        int(starts[-1]), begin,
    )  # fmt: skip
