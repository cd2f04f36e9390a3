"""Quantising each tensor of a bucket with a level table of its own. Shared by the schemes with non-uniform levels."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core.bucket import Bucket
from thinwire.core.layout import Layout, integers
from thinwire.core.scheme import Codec
from thinwire.schemes import _banks

BLOCK = 1024  # elements that share a scale unless asked otherwise: 32/1024 of a bit each


def check_group(scheme: str, group: str | int) -> None:
    """A group is "tensor", or a number of elements that fills whole bytes at any width."""
    if group != "tensor" and (not isinstance(group, int) or group < 8 or group % 8):
        raise ValueError(f"{scheme}: group must be 'tensor' or a positive multiple of 8, got {group!r}")


class Grouped(Codec):
    """A codec whose ranges belong to groups: each a tensor, or so many elements of one."""

    group: str | int

    @property
    def block(self) -> int:
        """Elements that share a range; 0: the tensor's."""
        return 0 if isinstance(self.group, str) else self.group

    @property
    def per_tensor(self) -> bool:
        return not self.block

    @property
    def blockwise(self) -> bool:
        return not self.per_tensor

    @property
    def grain(self) -> int:
        return self.block or 8


def check_scale(scheme: str, scale: str) -> None:
    if scale not in ("moments", "mean"):
        raise ValueError(f"{scheme}: scale must be 'moments' or 'mean', got {scale!r}")


class Statistics(NamedTuple):
    """One number for each group."""

    scale: Tensor  # of the Laplace distribution
    mean: Tensor  # E|x|
    largest: Tensor  # max |x|
    square: Tensor  # the sum of x^2


def laplace_statistics(bucket: Bucket, block: int, scale: str, like: Tensor) -> Statistics:
    """All that a range is chosen from, in one pass over the bucket; `like`: a number for each group.

    scale "mean": c = E|x|. "moments": c = (E x^2 / 2)^(3/4) / (E|x|)^(1/2), the same on Laplace data. Real gradients
    are more than half near zero, with a wide tail; there E|x| is small, E x^2 / (2 E|x|) is the scale of the tail, and
    their mean, geometric and weighted 1:3, the range that loses least (by trial, on gradients of small networks).
    """

    def room(name: str, dtype: torch.dtype = like.dtype) -> Tensor:
        return bucket.scratch.take(f"laplace-{name}", like.numel(), dtype, like.device)

    mean, largest, square = room("mean"), room("largest"), room("square")
    kernels.block_statistics(
        bucket.flat, bucket.layout.starts, block,
        absmean=mean, absmax=largest, square=square, owed=bucket.owed, total=bucket.flat,
    )  # fmt: skip
    if scale == "mean":
        return Statistics(mean, mean, largest, square)
    key = ("twice the lengths", block, like.dtype, like.device)
    twice = bucket.layout.once(key, lambda: (2 * _lengths(bucket.layout, block)).to(like))
    half = torch.div(square, twice, out=room("half"))
    # By square roots to the nearest, as `kernels.quantize_laplace` has them: PyTorch's of float32 may be one off in the
    # last place, those of float64, rounded, are not.
    wide = room("wide", torch.float64)

    def root(x: Tensor, name: str) -> Tensor:
        return room(name).copy_(wide.copy_(x).sqrt_())

    c = root(half, "scale")
    c.mul_(root(c, "rest")).div_(root(mean, "rest"))
    # A square that float32 cannot hold says nothing.
    held = torch.gt(half, 2.0**-100, out=room("large", torch.bool))
    held.logical_and_(torch.lt(half, torch.inf, out=room("small", torch.bool)))
    torch.where(held, c, mean, out=c)
    return Statistics(c, mean, largest, square)


def _lengths(layout: Layout, block: int) -> Tensor:
    """How many elements every group has."""
    lengths: list[int] = []
    for segment in layout.segments:
        full, rest = divmod(segment.numel, block) if block else (0, segment.numel)
        lengths += [block] * full + [rest] * (rest > 0 or not block)
    return integers(lengths)


def laplace_blocks(bits: int, block: int, threshold: float) -> kernels.Levels:
    """One shape for all blocks, truncated at `threshold` scales or at their largest elements.

    Those lie ln(block) + 0.58 scales out on average, by Laplace's law: levels for what is beyond would go unused.
    """
    return _banks.laplace(bits, min(threshold, math.log(block) + 0.58))


@lru_cache(maxsize=64)
def signed(bits: int, spacing: str) -> kernels.Levels:
    """A sign and 2^(bits-1) - 1 magnitudes up to 1, and 0: magnitudes "even", or "halves", 1 and 1/2 and so on.

    That leaves one code over. It stands for a level beyond 1, which nothing within the range is rounded to.
    """
    count = (1 << bits - 1) - 1
    if spacing == "even":
        magnitudes = [number / count for number in range(1, count + 1)]
    else:
        magnitudes = [2.0 ** (number - count) for number in range(1, count + 1)]
    beyond = 2 * magnitudes[-1] - magnitudes[-2] if count > 1 else 2.0
    return kernels.Levels.of([*(-each for each in reversed(magnitudes)), 0.0, *magnitudes, beyond])


def norms(bucket: Bucket, block: int, out: Tensor) -> None:
    """out = the 2-norm of every group; the largest magnitude where float32 cannot hold the sum of squares."""
    largest = bucket.scratch.take("norms-largest", out.numel(), out.dtype, out.device)
    square = bucket.scratch.take("norms-square", out.numel(), out.dtype, out.device)
    kernels.block_statistics(bucket.flat, bucket.layout.starts, block, absmax=largest, square=square)
    held = (square > 2.0**-100) & (square < torch.inf)
    # Of one element alone the root may be rounded to below it.
    torch.where(held, torch.maximum(square.sqrt_(), largest), largest, out=out)


def encode(bucket: Bucket, radius: Tensor, shapes: Tensor, tables: _banks.Laplace, codes: Tensor) -> None:
    """Quantise tensor j to radius[j] * the table of shapes[j], rounding at random."""
    keys = bucket.keys()
    if not kernels.at_hand(shapes):
        how = {"keys": keys, "counters": bucket.layout.counters, "out": codes, "lost": bucket.lost}
        kernels.quantize_bank(bucket.flat, bucket.layout.starts, *tables.bank(shapes), radius, **how)
        return
    for first, last, a, b, row, code in _runs(bucket.layout, tables.bits, shapes, codes):
        kernels.quantize_levels(
            bucket.flat[a:b], bucket.layout.starts_of(first, last), 0, tables.levels(row), radius[first:last],
            keys=keys[first:last], counters=bucket.layout.counters[first:last], out=code,
            lost=None if bucket.lost is None else bucket.lost[a:b],
        )  # fmt: skip


def decode_add(
    codes: Tensor,
    layout: Layout,
    radius: Tensor,
    shapes: Tensor,
    tables: _banks.Laplace,
    weight: float,
    out: Tensor,
) -> None:
    """out += weight * what `encode` made."""
    if not kernels.at_hand(shapes):
        kernels.dequantize_bank_add(codes, layout.starts, *tables.bank(shapes), radius, weight, out=out)
        return
    for first, last, a, b, row, code in _runs(layout, tables.bits, shapes, codes):
        kernels.dequantize_levels_add(
            code, layout.starts_of(first, last), 0, tables.levels(row), radius[first:last], weight, out=out[a:b]
        )


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
