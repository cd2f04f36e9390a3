"""The randomised Hadamard rotation of a bucket, in blocks with a scale of their own. Shared by THC and EDEN."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core.layout import Layout, integers

SMALLEST = 64  # the smallest block: fewer entries do not mix into anything like a Gaussian


class Rotation:
    """Where the blocks of a layout lie: each tensor is cut into blocks of 2^stages entries, what is left into smaller
    powers of two, and the last entries are padded with zeros up to SMALLEST. Blocks do not cross tensors.
    """

    def __init__(self, layout: Layout, stages: int) -> None:
        self.layout = layout
        self.block = 1 << stages
        starts, owners, counters, lengths, block_owners = [0], [], [], [], []
        # (first padded entry, one past the last real one, one past the padding)
        self._spans: list[tuple[int, int, int]] = []
        for number, segment in enumerate(layout.segments):
            begin, padded = starts[-1], -(-segment.numel // SMALLEST) * SMALLEST
            self._spans.append((begin, begin + segment.numel, begin + padded))
            sizes = [padded // self.block * self.block]  # one stretch of many blocks, then stretches of one
            left = padded % self.block
            sizes += [1 << power for power in reversed(range(left.bit_length())) if left >> power & 1]
            for size in filter(None, sizes):
                owners.append(number)
                counters.append(segment.offset + starts[-1] - begin)
                count = -(-size // self.block)
                lengths += [min(size, self.block)] * count
                block_owners += [number] * count
                starts.append(starts[-1] + size)
        self.numel = starts[-1]
        self.starts = integers(starts)
        self.owners = integers(owners)
        self.counters = integers(counters)
        self.lengths = integers(lengths)  # of every block
        self.block_owners = integers(block_owners)  # the number of its tensor
        self.tensor_starts = integers([span[0] for span in self._spans] + [self.numel])

    @property
    def blocks(self) -> int:
        return len(self.lengths)

    def spread(self, flat: Tensor, out: Tensor) -> None:
        """out = the bucket's entries at their padded places."""
        if self.numel == self.layout.numel:
            out.copy_(flat)
            return
        for segment, (a, b, c) in zip(self.layout.segments, self._spans, strict=True):
            out[a:b] = flat[segment.start : segment.stop]
            out[b:c] = 0.0

    def collect_add(self, padded: Tensor, out: Tensor, weight: float) -> None:
        """out += weight * the entries at their own places."""
        if self.numel == self.layout.numel:
            out.add_(padded, alpha=weight)
            return
        for segment, (a, b, _) in zip(self.layout.segments, self._spans, strict=True):
            out[segment.start : segment.stop].add_(padded[a:b], alpha=weight)

    def dots_(self, flat: Tensor, padded: Tensor) -> Tensor:
        """float64[S]: the inner product of every tensor in `flat`, which is used up, with its own in `padded`.

        Products, then their sum: the bits of `torch.dot` depend on where in memory, so in its bucket, a tensor lies.
        """
        pairs = zip(self.layout.segments, self._spans, strict=True)
        products = (flat[s.start : s.stop].mul_(padded[a:b]) for s, (a, b, _) in pairs)
        return torch.stack([product.sum(dtype=torch.float64) for product in products])

    def rotate_(self, padded: Tensor, keys: Tensor, *, inverse: bool = False) -> None:
        """Every block times a random orthonormal matrix, or back. `keys`: one for each tensor."""
        kernels.hadamard_(
            padded, self.starts, self.block, keys=keys[self.owners], counters=self.counters, inverse=inverse
        )

    def per_entry(self, per_block: Tensor) -> Tensor:
        """Each block's number, for every entry of it."""
        lengths = self.lengths.to(per_block.device)
        return torch.repeat_interleave(per_block, lengths, output_size=self.numel)


def rotation(layout: Layout, stages: int) -> Rotation:
    """The rotation of a layout, made once."""
    return layout.once(("rotation", stages), lambda: Rotation(layout, stages))
