"""Quantising each tensor of a bucket with a level table of its own. Shared by the schemes with non-uniform levels."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TypeAlias

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.bucket import Bucket, Layout

# The 2^bits levels over [-1, 1] for one row of shape parameters.
Table: TypeAlias = Callable[[tuple[float, ...]], kernels.Levels]


def coarse(ratio: Tensor) -> Tensor:
    """`ratio` up to the next 16th of a binary order: few enough values for their tables to be kept."""
    return torch.exp2(torch.ceil(torch.log2(ratio) * 16) / 16)


def encode(bucket: Bucket, bits: int, radius: Tensor, shapes: Tensor, table: Table, codes: Tensor) -> None:
    """Quantise tensor j to radius[j] * table(shapes[j]), rounding at random."""
    keys = bucket.keys()
    for first, last, a, b, row, code in _runs(bucket.layout, bits, shapes, codes):
        kernels.quantize_levels(
            bucket.flat[a:b], bucket.layout.starts[first : last + 1] - a, 0, table(row), radius[first:last],
            keys=keys[first:last], counters=bucket.layout.counters[first:last], out=code,
            lost=None if bucket.lost is None else bucket.lost[a:b],
        )  # fmt: skip


def decode_add(
    codes: Tensor,
    layout: Layout,
    bits: int,
    radius: Tensor,
    shapes: Tensor,
    table: Table,
    weight: float,
    out: Tensor,
) -> None:
    """out += weight * what `encode` made."""
    for first, last, a, b, row, code in _runs(layout, bits, shapes, codes):
        starts = layout.starts[first : last + 1] - a
        kernels.dequantize_levels_add(code, starts, 0, table(row), radius[first:last], weight, out=out[a:b])


def _runs(
    layout: Layout, bits: int, shapes: Tensor, codes: Tensor
) -> Iterator[tuple[int, int, int, int, tuple[float, ...], Tensor]]:
    """Neighbouring tensors with the same shape parameters, to go through a kernel together: usually all of them.

    (first tensor, last tensor + 1, first element, last element + 1, shape parameters, their codes)
    """
    segments = layout.segments
    rows = [tuple(row) for row in shapes.tolist()]
    first = position = 0
    while first < len(rows):
        last, size = first, 0
        while last < len(rows) and rows[last] == rows[first]:
            size += -(-segments[last].numel * bits // 8)
            last += 1
        a, b = segments[first].start, segments[last - 1].stop
        yield first, last, a, b, rows[first], codes[position : position + size]
        first, position = last, position + size
