"""The blocks in which a bucket is rotated, each with a scale of its own. Shared by THC and EDEN."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.core.layout import Layout, bounds, integers
from thinwire.kernels.backends.reference.rotated import SMALLEST


class Tables(NamedTuple):
    owners: Tensor  # of every stretch: the number of its tensor
    lengths: Tensor  # of every block
    block_owners: Tensor  # the number of its tensor


class Rotation:
    """Where the blocks of a layout lie: each tensor is cut into blocks of 2^stages elements, what is left into smaller
    powers of two, and the last elements are padded with zeros up to SMALLEST. Blocks do not cross tensors.
    """

    def __init__(self, layout: Layout, stages: int) -> None:
        self.block = 1 << stages
        spans, owners, counters, lengths, block_owners, stretches = [], [], [], [], [], []
        for number, segment in enumerate(layout.segments):
            begin, padded = segment.start, -(-segment.numel // SMALLEST) * SMALLEST
            sizes = [padded // self.block * self.block]  # one stretch of many blocks, then stretches of one
            left = padded % self.block
            sizes += [1 << power for power in reversed(range(left.bit_length())) if left >> power & 1]
            for size in filter(None, sizes):
                owners.append(number)
                counters.append(segment.offset + begin - segment.start)
                stretches.append(size)
                count = -(-size // self.block)
                lengths += [min(size, self.block)] * count
                block_owners += [number] * count
                spans.append((begin, min(begin + size, segment.stop)))
                begin += size
        self.numel = sum(lengths)  # padded
        self.starts = bounds(spans)
        self.counters = integers(counters)
        self.stretches = tuple(stretches)  # their padded lengths
        self._tables = Tables(integers(owners), integers(lengths), integers(block_owners))
        self._there: dict[torch.device, Tables] = {}

    @property
    def blocks(self) -> int:
        return len(self._tables.lengths)

    def signs(self, keys: Tensor) -> Tensor:
        """The rotation's key for every stretch, from one for each tensor."""
        return keys[self.on(keys.device).owners]

    def on(self, device: torch.device) -> Tables:
        """What is indexed by, on a device; moved there once."""
        if device not in self._there:
            self._there[device] = Tables(*(each.to(device) for each in self._tables))
        return self._there[device]


def rotation(layout: Layout, stages: int) -> Rotation:
    """The rotation of a layout, made once."""
    return layout.once(("rotation", stages), lambda: Rotation(layout, stages))
