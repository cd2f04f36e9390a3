"""Rotate and quantise, decode and rotate back, for blocks of any length.

Blocks as everywhere; here `block` is a power of two, 64 or more. A block that is shorter is padded with zeros up to the
next power of two, 64 at least, and rotated by itself (`hadamard`): the signs of its elements go on from its stretch's
counter, padding included. Integers and codes are those of padded blocks, end to end; codes fill whole bytes there.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.kernels.backends.reference.bits import get_bits, put_bits
from thinwire.kernels.backends.reference.draws import random_unit
from thinwire.kernels.backends.reference.hadamard import hadamard_
from thinwire.kernels.backends.reference.quantize import effective, working
from thinwire.kernels.check import bounds, padded
from thinwire.kernels.levels import Levels

SMALLEST = 64  # the smallest block: fewer elements do not mix into anything like a Gaussian


class _Padded:
    """Where the elements of a buffer lie among padded blocks."""

    def __init__(self, starts: Tensor, block: int, device: torch.device) -> None:
        spans = bounds(starts)
        lengths = [padded(end - begin, block, SMALLEST) for begin, end in spans]
        sizes = [size for length in lengths for size in _sizes(length, block)]
        firsts = list(itertools.accumulate(lengths, initial=0))
        self.block, self.numel = block, firsts[-1]
        self.starts = _integers(firsts)
        self.real = _ranges(spans).to(device)
        moved = [(at, at + end - begin) for at, (begin, end) in zip(firsts[:-1], spans, strict=True)]
        self.place = _ranges(moved).to(device)
        self.sizes = _integers(sizes)
        self.stretch = torch.repeat_interleave(_integers(list(range(len(lengths)))), _integers(lengths))
        self.number = torch.repeat_interleave(_integers(list(range(len(sizes)))), self.sizes).to(device)

    def take(self, x: Tensor) -> Tensor:
        """The elements of x at their padded places, and zeros."""
        return x.new_zeros(self.numel).index_copy_(0, self.place, x[self.real])

    def rotate_(self, y: Tensor, signs: Tensor, counters: Tensor, *, inverse: bool = False) -> Tensor:
        hadamard_(y, self.starts, self.block, keys=signs, counters=counters, inverse=inverse)
        return y

    def draws(self, keys: Tensor, counters: Tensor, device: torch.device) -> Tensor:
        counter = _numbers(self.numel) + (counters - self.starts[:-1])[self.stretch]
        return random_unit(keys[self.stretch], counter).to(device)

    def put(self, y: Tensor, out: Tensor) -> None:
        out[self.real] = y[self.place]

    def subtracted(self, x: Tensor, y: Tensor, out: Tensor) -> None:
        out[self.real] = x[self.real] - y[self.place]


def _integers(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64, device="cpu")


def _ranges(spans: list[tuple[int, int]]) -> Tensor:
    return torch.cat([_numbers(0), *(begin + _numbers(end - begin) for begin, end in spans)])


def _numbers(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int64, device="cpu")


def _sizes(length: int, block: int) -> list[int]:
    return [block] * (length // block) + [length % block] * (length % block > 0)


def rotate_round(
    x: Tensor, starts: Tensor, block: int, step: Tensor, offset: float, low: int, high: int, *,
    signs: Tensor, keys: Tensor, counters: Tensor, out: Tensor, lost: Tensor | None = None,
) -> None:  # fmt: skip
    """y = the padded block, rotated; u = y * (1 / step); q = ceil(u - offset - draw), kept to low..high.

    With draws in [0, 1) that is unbiased inside. Without a finite step above 0 it is `low`. `lost` gets
    x - step * (q + offset), rotated back.
    """
    blocks = _Padded(starts, block, x.device)
    y = blocks.rotate_(blocks.take(x), signs, counters)
    r = effective(step.to(working(x)))[blocks.number]
    u = y * torch.where(r > 0, 1.0 / r, 0.0) - offset - blocks.draws(keys, counters, x.device)
    q = torch.where(r > 0, u.nan_to_num(low, torch.inf, -torch.inf), low).clamp(low, high).ceil()
    out.copy_(q)
    if lost is not None:
        said = blocks.rotate_(r * (q + offset), signs, counters, inverse=True)
        blocks.subtracted(x, said, lost)


def unrotate_sum(
    total: Tensor, starts: Tensor, block: int, scale: Tensor, offset: float, *,
    signs: Tensor, counters: Tensor, out: Tensor,
) -> None:  # fmt: skip
    """out = total * scale + offset * scale, rotated back."""
    blocks = _Padded(starts, block, out.device)
    share = scale.to(working(out))[blocks.number]
    y = total.to(share.dtype) * share + offset * share
    blocks.put(blocks.rotate_(y, signs, counters, inverse=True) + 0.0, out)


def rotate_quantize(
    x: Tensor, starts: Tensor, block: int, levels: Levels, *,
    signs: Tensor, counters: Tensor, scale: Tensor, out: Tensor, lost: Tensor | None = None,
) -> None:  # fmt: skip
    """y = the padded block, rotated; deviation = |y| / sqrt(its length); c = the nearest level to y / deviation.

    The scale is deviation * |y|^2 / <deviation * c, y>, the inner product by the law of cosines: what is lost,
    squared, is |y|^2 - 2 <said, y> + |said|^2. Sums are in float64, as in `block_statistics`.
    """
    blocks = _Padded(starts, block, x.device)
    y = blocks.rotate_(blocks.take(x), signs, counters)
    energy = _squares(y, blocks, scale.dtype)
    # In float64, then rounded: PyTorch's own float32 root is not always the nearest.
    deviation = (energy / blocks.sizes.to(x.device)).double().sqrt().to(scale.dtype)
    table = levels.table.to(device=x.device, dtype=working(x))
    codes = _nearest(y, table, effective(deviation)[blocks.number])
    said = effective(deviation)[blocks.number] * table[codes]
    coded, error = _squares(said, blocks, scale.dtype), _squares(y - said, blocks, scale.dtype)
    product = (energy + coded - error) / 2
    corrected = deviation * energy / product
    # deviation * energy is the gradient's third power: where float32 cannot hold it, divide first.
    corrected = torch.where(corrected.isinf() & energy.isfinite(), energy / product * deviation, corrected)
    scale.copy_(torch.where(energy > 0, corrected, energy))  # NaN is not > 0 and stays
    out.copy_(put_bits(codes, levels.bits, _numbers(blocks.numel).to(x.device) * levels.bits, out.numel()))
    if lost is not None:
        blocks.subtracted(x, _decoded(out, blocks, levels, scale, signs, counters, x), lost)


def unrotate_levels_sum(
    codes: Sequence[Tensor], starts: Tensor, block: int, levels: Levels, scale: Sequence[Tensor], weight: float, *,
    signs: Sequence[Tensor], counters: Tensor, out: Tensor, add: bool = False,
) -> None:  # fmt: skip
    """out = 0 (unless `add`), then for each: out += weight * (scale * level, rotated back)."""
    blocks = _Padded(starts, block, out.device)
    if not add:
        out[blocks.real] = 0.0
    for each_codes, each_scale, each_signs in zip(codes, scale, signs, strict=True):
        y = _decoded(each_codes, blocks, levels, each_scale, each_signs, counters, out)
        out[blocks.real] = out[blocks.real] + weight * y[blocks.place]


def _squares(y: Tensor, blocks: _Padded, dtype: torch.dtype) -> Tensor:
    total = torch.zeros(len(blocks.sizes), dtype=torch.float64, device=y.device)
    return total.index_add_(0, blocks.number, y.to(torch.float64) ** 2).to(dtype)


def _nearest(y: Tensor, table: Tensor, range_: Tensor) -> Tensor:
    """As `quantize_levels` without keys."""
    inverse = torch.where(range_ > 0, 1.0 / range_, 0.0)
    u = y * inverse
    ends = u.nan_to_num(float("-inf"), float("inf"), float("-inf"))
    below = torch.searchsorted(table[1:-1].contiguous(), ends, right=True)
    share = (u - table[below]) * (1.0 / torch.diff(table))[below]
    return torch.where(inverse > 0, below + (share > 0.5), 0)


def _decoded(
    codes: Tensor, blocks: _Padded, levels: Levels, scale: Tensor, signs: Tensor, counters: Tensor, like: Tensor
) -> Tensor:
    position = _numbers(blocks.numel).to(like.device) * levels.bits
    table = levels.table.to(device=like.device, dtype=working(like))
    range_ = effective(scale.to(working(like)))[blocks.number]
    return blocks.rotate_(range_ * table[get_bits(codes, levels.bits, position)], signs, counters, inverse=True)
