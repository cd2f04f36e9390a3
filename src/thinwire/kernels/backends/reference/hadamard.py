"""The randomised Hadamard rotation: y = H D x, and back x = D H y.

H is the matrix of all butterflies (a, b) -> (a + b, a - b), D has +-1/sqrt(block) on its diagonal; H H =
block and D D = 1/block, so the rotation is orthonormal, and going back restores x up to rounding. The signs
are shared: minus where bit c & 31 of random_u32(key, 2^32 - 1 - (c >> 5)) is set, c being the element's
counter. (Counting from the end keeps the signs apart from what else is drawn under the same key.)

A stretch is cut into blocks of `block` elements, what is left at the end into blocks of block / 2, and so on down to
1: nothing is padded, and the last elements mix with fewer others.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import torch
from torch import Tensor

from thinwire.kernels.backends.reference.draws import COUNTERS, random_u32


def hadamard_(x: Tensor, starts: Tensor, block: int, *, keys: Tensor, counters: Tensor, inverse: bool = False) -> None:
    """Rotates every stretch of x in place, forth or back; the distances of the butterflies ascend."""
    bounds = starts.tolist()
    for stretch, (a, b) in enumerate(itertools.pairwise(bounds)):
        signs = _signs(int(keys[stretch]), int(counters[stretch]), b - a, x)
        for begin, end, size in _runs(b - a, block):
            entries = x[a + begin : a + end]
            diagonal = signs[begin:end] * (1.0 / size**0.5)
            if not inverse:
                entries *= diagonal
            _butterflies(entries.view(-1, size))
            if inverse:
                entries *= diagonal


def _butterflies(entries: Tensor) -> None:
    """H along the rows, whose length is a power of two."""
    rows, size = entries.shape
    distance = 1
    while distance < size:
        pairs = entries.view(rows, size // (2 * distance), 2, distance)
        a, b = pairs[:, :, 0], pairs[:, :, 1]
        total, difference = a + b, a - b
        a.copy_(total)
        b.copy_(difference)
        distance *= 2


def _signs(key: int, counter: int, count: int, like: Tensor) -> Tensor:
    """+1 or -1 for each element."""
    c = torch.arange(counter, counter + count, dtype=torch.int64, device=like.device)
    bit = random_u32(key, COUNTERS - 1 - (c >> 5)) >> (c & 31) & 1
    return (1 - 2 * bit).to(like.dtype)


def _runs(length: int, block: int) -> Iterator[tuple[int, int, int]]:
    """(begin, end, size) of the runs of equal blocks that cover a stretch."""
    begin = 0
    for size in (block >> down for down in range(block.bit_length())):
        end = begin + (length - begin) // size * size
        if end > begin:
            yield begin, end, size
        begin = end
