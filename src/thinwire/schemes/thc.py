"""THC: integers that add up without being decoded, after a rotation that makes one step fit all (Li et al., 2024)."""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core import theory
from thinwire.core.bucket import Bucket
from thinwire.core.memory import Memory
from thinwire.core.request import Max, Request, Sum
from thinwire.core.scheme import Conversation, Knob, Scheme
from thinwire.schemes._rotation import Rotation, rotation

REACH = 3.297  # deviations of a rotated element that the range covers: 1 in 1024 of a Gaussian lies outside
# The look-up table of 4 bits: 16 of the 31 points of a grid, in steps from its middle, and the range they cover, which
# leaves 1 in 32 of a Gaussian outside. Of all tables that are their own mirror image this one rounds a Gaussian best.
TABLE = (-15, -12, -10, -8, -6, -4, -2, -1, 1, 2, 4, 6, 8, 10, 12, 15)
TABLE_REACH = 2.1539
_SECOND = 0x5851_F42D_4C95_7F2D  # makes another key of a key
# Elements that are looked up at a time, at most, and the parts of a bucket that is not as long: looking one up takes 49
# bytes of memory, where a message has one byte for it and more.
SLICE, SLICES = 1 << 16, 64


@dataclass(frozen=True)
class THC(Scheme):
    """The sum of all workers' integers is the sum of their gradients, so an all-reduce needs no decoding on its way.

    1. M = max over workers of |x|, block by block of 2^rotate elements.
    2. y = H D x per block, with signs that all workers share.
    3. t = REACH M/sqrt(d), step = 2t/(2^bits - 1): clip y to +-t, round at random to integers.
    4. Sum the integers; mean = step * sum / n, rotated back.

    A sum of n workers needs more bits than one worker's integers: `width`. With `saturate` it gets no more, and the
    running sum is clipped at every addition; 1. and 3. become
    1. E = sum over workers of |x|^2, block by block, and r = |sum of x|/sqrt(E) in the last round, tensor by tensor.
    3. step = kappa r sqrt(E/d)/(2^(bits-1) - 1): the range is kappa deviations of the sum (`theory.saturation_kappa`).

    Ours: twelve stages instead of ten, which are as fast (a block still fits into the first-level cache) and lose less
    where the workers' norms differ from block to block; r is remembered instead of a norm, because E is known afresh in
    every round; and it is measured by how far the workers' gradients agree with the mean that came out, since the norm
    of a saturated sum says little about the true one. With `saturate`, error feedback knows what a worker's own
    clipping lost, but not what the running sum's did. A gradient whose squared norm float32 cannot hold counts as not
    finite.

    levels="table" has the authors' uneven levels: 16 points of a grid of 30 steps, p = 1/32. What adds up are numbers
    of the grid, not 4-bit places in the table, so on an all-reduce they travel as wide as sums of 0..30 are; a server
    that looks them up could take 4 bits. Ours: the table itself, by the rule in TABLE (theirs comes in files that we
    have not seen), and how it is met: rounded at random to the grid, then from there to the table, which is in law the
    same as at once. No kernel does the second half: it is slow.
    """

    bits: int = 4  # of one worker's integers; lower => fewer bytes, more error
    rotate: int = 12  # butterfly stages: blocks of 2^rotate elements; lower => more scales, error; 30 => full, slower
    saturate: bool = False  # True => the sum stays as narrow as its parts: fewer bytes, more error
    levels: str = "even"  # "table" => the authors' 16 uneven levels: wider sums, less error

    unbiased: ClassVar[bool] = False
    settles: ClassVar[bool] = True
    gaps: ClassVar[bool] = True
    family: ClassVar[str] = "integers"
    summary: ClassVar[str] = "integers that an all-reduce adds as they are, without decoding on the way"

    def __post_init__(self) -> None:
        if not isinstance(self.saturate, bool):
            raise ValueError(f"thc: saturate must be True or False, got {self.saturate!r}")
        if self.bits not in range(2, 9):  # one bit over the whole range would be mostly noise
            raise ValueError(f"thc: bits must be 2..8, got {self.bits!r}")
        if self.rotate not in range(6, 31):
            raise ValueError(f"thc: rotate must be 6..30 stages, got {self.rotate!r}")
        if self.levels not in ("even", "table"):
            raise ValueError(f"thc: levels must be 'even' or 'table', got {self.levels!r}")
        if self.levels == "table" and (self.bits != 4 or self.saturate):
            raise ValueError("thc: levels='table' is for bits=4 without saturate: the table has 16 levels")

    @property
    def rank_order(self) -> bool:
        return not self.saturate

    @property
    def knob(self) -> Knob | None:
        return Knob("bits", (2, 3, 4, 5, 6, 7, 8), self.bits) if self.levels == "even" else None

    def width(self, workers: int, bits: int | None = None) -> int:
        """The bits per element on the wire: ceil(log2(n (2^bits - 1) + 1)), or just `bits` where sums saturate."""
        bits = bits or self.bits
        width = bits if self.saturate else (workers * self._intervals(bits)).bit_length()
        if width > 32:
            raise ValueError(
                f"thc: sums of {workers} workers' {bits}-bit integers take {width} bits; 32 at most can travel"
            )
        return width

    def init(self, name: str, like: Tensor, seed: int) -> dict[str, Tensor]:
        """This worker's part of the last round's r; 0 before the first."""
        return {"agreement": torch.zeros((), dtype=torch.float32, device=like.device)} if self.saturate else {}

    def converse(self, bucket: Bucket, memory: Memory, level: float) -> Conversation:
        bits, flat, workers = int(level) or self.bits, bucket.flat, bucket.workers
        width = self.width(workers, bits)
        blocks = rotation(bucket.layout, self.rotate)
        signs = blocks.signs(bucket.keys(shared=True))

        energy = bucket.scratch.take("thc-energy", blocks.blocks, torch.float32, flat.device)
        kernels.block_statistics(flat, blocks.starts, blocks.block, square=energy, owed=bucket.owed, total=flat)
        energy.nan_to_num_(nan=math.inf, posinf=math.inf)  # a NaN may lose a maximum, Inf wins it
        if self.saturate:
            energy, step = yield from self._step_by_agreement(bucket, memory, blocks, energy, bits)
        else:
            step = yield from self._step_by_norm(bucket, blocks, energy, bits)

        integers = bucket.scratch.take("thc-integers", blocks.numel, _holding(width), flat.device)
        offset, low, high = self._steps(bucket, bits)
        kernels.rotate_round(
            flat, blocks.starts, blocks.block, step, offset, low, high, signs=signs,
            keys=blocks.signs(bucket.keys()), counters=blocks.counters, out=integers,
            lost=bucket.lost if self.levels == "even" else None,
        )  # fmt: skip
        if self.levels == "table":
            self._to_table(bucket, blocks, integers, step)
        total = yield Sum(integers, width=width, saturate=self.saturate)

        share = bucket.scratch.take("thc-share", step.numel(), step.dtype, step.device)
        share = torch.div(step, workers, out=share).to(flat.dtype)
        mean = bucket.room("thc-mean") if self.saturate else flat
        offset = 0.5 if workers % 2 and not self.saturate and self.levels == "even" else 0.0
        kernels.unrotate_sum(
            total, blocks.starts, blocks.block, share, offset, signs=signs, counters=blocks.counters, out=mean
        )
        if self.saturate:
            self._remember(bucket, memory, blocks, energy, mean)
            flat.copy_(mean)
        return flat

    def _steps(self, bucket: Bucket, bits: int) -> tuple[float, int, int]:
        """What integers stand for, in steps: (offset, lowest, highest).

        Without saturation they lie half a step off. Workers take turns in rounding that up and down, so that a sum has
        no drift, and fits into the width that n (2^bits - 1) + 1 different sums need.
        """
        if self.saturate:
            return 0.0, -_largest(bits), _largest(bits)
        if self.levels == "table":
            return 0.0, TABLE[0], TABLE[-1]
        half, odd = 1 << (bits - 1), bucket.place % 2
        return 0.5 - odd, odd - half, odd + half - 1

    def _intervals(self, bits: int) -> int:
        """Between the lowest integer of a worker and its highest."""
        return TABLE[-1] - TABLE[0] if self.levels == "table" else (1 << bits) - 1

    def _to_table(self, bucket: Bucket, blocks: Rotation, integers: Tensor, step: Tensor) -> None:
        """Round the grid's integers at random to its points that are in the table, in place; what is lost follows."""
        device, begin, few = integers.device, 0, min(SLICE, max(1024, -(-blocks.numel // SLICES)))
        below, above, share = _table_columns(device)
        for key, counter, size in zip(
            blocks.signs(bucket.keys()).tolist(), blocks.counters.tolist(), blocks.stretches, strict=True
        ):
            for at in range(0, size, few):
                some = integers[begin + at : begin + min(at + few, size)]
                places = counter + at + torch.arange(some.numel(), dtype=torch.int64, device=device)
                drawn = kernels.random_u32(key ^ _SECOND, places)  # rounding to the grid had the key itself
                number = some.long() - TABLE[0]
                some.copy_(torch.where(drawn < share[number], above[number], below[number]))
            begin += size
        if bucket.lost is not None:
            said = bucket.room("thc-said")
            kernels.unrotate_sum(
                integers, blocks.starts, blocks.block, step.to(said.dtype), 0.0,
                signs=blocks.signs(bucket.keys(shared=True)), counters=blocks.counters, out=said,
            )  # fmt: skip
            torch.sub(bucket.flat, said, out=bucket.lost)

    def _step_by_norm(
        self, bucket: Bucket, blocks: Rotation, energy: Tensor, bits: int
    ) -> Generator[Request, Tensor, Tensor]:
        norms = yield Max(energy.sqrt_())
        key = ("roots of lengths", self.rotate, norms.dtype, norms.device)
        roots = bucket.layout.once(key, lambda: blocks.on(norms.device).lengths.to(norms).sqrt())
        step = bucket.scratch.take("thc-step", blocks.blocks, norms.dtype, norms.device)
        torch.mul(norms, TABLE_REACH if self.levels == "table" else REACH, out=step).div_(roots)
        # A rotated element is never larger than its block's norm, which in small blocks is less than REACH deviations.
        return torch.minimum(step, norms, out=step).mul_(2 / self._intervals(bits))

    def _step_by_agreement(
        self, bucket: Bucket, memory: Memory, blocks: Rotation, energy: Tensor, bits: int
    ) -> Generator[Request, Tensor, tuple[Tensor, Tensor]]:
        """(the group's energy, step) of every block."""
        workers = bucket.workers
        agreement = torch.stack([memory[name, "agreement"] for name in bucket.layout.names])
        told = yield Sum(torch.cat([energy, agreement.to(energy.device)]))
        energy, agreement = told[: blocks.blocks], told[blocks.blocks :]
        # 1 for independent gradients, sqrt(n) for equal ones; before the first round, half way between.
        coherence = agreement / theory.saturated_cosine(bits, workers)
        coherence = torch.where(agreement > 0, coherence, workers**0.25).clamp(max=math.sqrt(workers))
        deviation = (energy / blocks.on(energy.device).lengths).sqrt()
        kappa = theory.saturation_kappa(bits, workers)
        return energy, deviation * coherence[blocks.on(energy.device).block_owners] * (kappa / _largest(bits))

    def _remember(self, bucket: Bucket, memory: Memory, blocks: Rotation, energy: Tensor, mean: Tensor) -> None:
        """Keep <x, mean>/(|mean| sqrt(E)), tensor by tensor: over all workers that sums to about |sum of x|/sqrt(E).

        It is measured along the true gradients, so a range that was far too small or too large is mended in one round.
        What is in the bucket is used up.
        """
        square = torch.empty(len(bucket.segments), dtype=torch.float32, device=mean.device)
        kernels.block_statistics(mean, bucket.layout.starts, 0, square=square)
        total = torch.zeros_like(square).index_add_(0, blocks.on(mean.device).block_owners, energy)
        agreement = _dots_(bucket, mean) / (square.double() * total.double()).sqrt()
        values = agreement.tolist() if kernels.at_hand(agreement) else agreement.float().unbind()
        for name, value in zip(bucket.layout.names, values, strict=True):
            kept = memory[name, "agreement"]
            if isinstance(value, Tensor):
                kept.copy_(torch.where(value.isfinite(), value, kept))
            elif math.isfinite(value):
                kept.fill_(value)


def _dots_(bucket: Bucket, mean: Tensor) -> Tensor:
    """float64[S]: the inner product of every tensor in the bucket, which is used up, with its own in `mean`.

    Products, then their sum: the bits of `torch.dot` depend on where in memory, so in its bucket, a tensor lies.
    """
    products = (bucket.flat[s.start : s.stop].mul_(mean[s.start : s.stop]) for s in bucket.segments)
    return torch.stack([product.sum(dtype=torch.float64) for product in products])


@cache
def _table_columns(device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """For every integer of the grid: the table's points below and above it, and 2^32 times how often it goes up."""
    grid = range(TABLE[0], TABLE[-1] + 1)
    below = [max(point for point in TABLE if point <= number) for number in grid]
    above = [min(point for point in TABLE if point >= number) for number in grid]
    share = [(number - low) * 2**32 // max(1, high - low) for number, low, high in zip(grid, below, above, strict=True)]
    columns = torch.tensor([below, above, share], dtype=torch.int64, device="cpu").to(device)
    return columns[0], columns[1], columns[2]


def _holding(width: int) -> torch.dtype:
    """The narrowest dtype that holds integers of `width` bits."""
    return torch.int8 if width <= 8 else torch.int16 if width <= 16 else torch.int32


def _largest(bits: int) -> int:
    """The largest integer of a sum that saturates."""
    return (1 << (bits - 1)) - 1
