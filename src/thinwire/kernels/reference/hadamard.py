"""The randomised Hadamard rotation: y = H D x, and back x = D H y.

H is the matrix of all butterflies (a, b) -> (a + b, a - b), D has +-1/sqrt(block) on its diagonal; H H =
block and D D = 1/block, so the rotation is orthonormal, and going back restores x up to rounding. The signs
are shared: minus where bit c & 31 of random_u32(key, 2^32 - 1 - (c >> 5)) is set, c being the element's
counter. (Counting from the end keeps the signs apart from what else is drawn under the same key.)

A stretch is cut into groups. stride = 1: contiguous blocks of `block` entries. stride > 1: spans of block *
stride entries, of which those `stride` apart belong together. What is left at the end is cut into
contiguous blocks of `block`, then of block / 2, and so on down to 1: nothing is padded, and the last
entries mix with fewer others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from thinwire.kernels.reference.random import COUNTERS, random_u32


def hadamard_(
    x: Tensor, starts: Tensor, block: int, stride: int, keys: Tensor, counters: Tensor, inverse: bool
) -> None:
    """Rotates every stretch of x in place, forth or back; the distances of the butterflies ascend."""
    bounds = starts.tolist()
    for stretch, (a, b) in enumerate(itertools.pairwise(bounds)):
        signs = _signs(int(keys[stretch]), int(counters[stretch]), b - a, x)
        for begin, end, size, apart in _groups(b - a, block, stride):
            entries = x[a + begin : a + end]
            diagonal = signs[begin:end] * (1.0 / size**0.5)
            if not inverse:
                entries *= diagonal
            _butterflies(entries.view(-1, size, apart))
            if inverse:
                entries *= diagonal


def _butterflies(entries: Tensor) -> None:
    """H along the middle dimension, whose length is a power of two."""
    groups, size, apart = entries.shape
    distance = 1
    while distance < size:
        pairs = entries.view(groups, size // (2 * distance), 2, distance, apart)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        total, difference = a + b, a - b
        a.copy_(total)
        b.copy_(difference)
        distance *= 2


def _signs(key: int, counter: int, count: int, like: Tensor) -> Tensor:
    """+1 or -1 for each element."""
    c = torch.arange(counter, counter + count, device=like.device)
    bit = random_u32(key, COUNTERS - 1 - (c >> 5)) >> (c & 31) & 1
    return (1 - 2 * bit).to(like.dtype)


def _groups(length: int, block: int, stride: int) -> Iterator[tuple[int, int, int, int]]:
    """(begin, end, entries of a group, how far apart) of the runs of like groups that cover a stretch."""
    begin = 0
    sizes = [(block, stride)] + [(block >> down, 1) for down in range(block.bit_length())]
    for size, apart in sizes:
        end = begin + (length - begin) // (size * apart) * size * apart
        if end > begin:
            yield begin, end, size, apart
        begin = end
