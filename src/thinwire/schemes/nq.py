"""NQ: the non-uniform levels of TNQ over the whole range: the ablation that shows what truncation is worth."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core.bucket import Bucket
from thinwire.core.layout import Layout
from thinwire.core.scheme import Knob
from thinwire.schemes import _banks, _tables


@dataclass(frozen=True)
class NQ(_tables.Grouped):
    """Each element becomes one of 2^bits levels over [-m, m], m its group's largest magnitude, denser near 0.

    1. c = mean |x| and m = max |x| of the group.
    2. level_j = -3c sgn(2j - s) ln(1 - |2j - s|/s (1 - exp(-m/3c))), j = 0..s, s = 2^bits - 1; for blocks with the
       m/c that is to be expected of a Laplace block, scaled to the block's own m.
    3. Round at random to a neighbouring level, unbiased everywhere.
    """

    bits: int = 4  # lower => fewer bytes, more error
    group: str | int = _tables.BLOCK  # what shares a scale: "tensor" or a number of elements; lower => more scales

    unbiased: ClassVar[bool] = True
    gaps: ClassVar[bool] = True
    family: ClassVar[str] = "quantisers"
    summary: ClassVar[str] = "TNQ without truncation: unbiased, good where outliers carry the gradient"

    def __post_init__(self) -> None:
        if self.bits not in range(1, 9):
            raise ValueError(f"nq: bits must be 1..8, got {self.bits!r}")
        _tables.check_group("nq", self.group)

    @property
    def knob(self) -> Knob:
        return Knob("bits", (1, 2, 3, 4, 5, 6, 7, 8), self.bits)

    def nbytes(self, layout: Layout, level: float) -> int:
        header = 4 * layout.blocks(self.block) * (1 if self.block else 2)
        return header + layout.packed_bytes(self.block, int(level))

    def encode(self, bucket: Bucket, level: float, out: Tensor) -> None:
        layout, bits = bucket.layout, int(level)
        radius, reach, codes = self.fields(out, layout)
        if self.block:
            kernels.block_statistics(bucket.flat, layout.starts, self.block, absmax=radius)
            kernels.quantize_levels(
                bucket.flat, layout.starts, self.block, _tables.laplace_blocks(bits, self.block, math.inf), radius,
                keys=bucket.keys(), counters=layout.counters, out=codes, lost=bucket.lost,
            )  # fmt: skip
            return
        c = torch.empty_like(radius)
        kernels.block_statistics(bucket.flat, layout.starts, 0, absmean=c, absmax=radius)
        whole = _banks.coarse((radius / c).clamp(min=1.0))
        reach.copy_(torch.where(torch.isfinite(whole), whole, 1.0)[:, None])
        _tables.encode(bucket, radius, reach, _banks.Laplace(bits), codes)

    def decode_add(self, data: Tensor, layout: Layout, level: float, out: Tensor, weight: float) -> None:
        self.check_size(data, layout, level)
        bits = int(level)
        radius, reach, codes = self.fields(data, layout)
        if self.block:
            table = _tables.laplace_blocks(bits, self.block, math.inf)
            kernels.dequantize_levels_add(codes, layout.starts, self.block, table, radius, weight, out=out)
        else:
            _tables.decode_add(codes, layout, radius, reach, _banks.Laplace(bits), weight, out)

    def decode_sum(self, datas: Sequence[Tensor], layout: Layout, level: float, out: Tensor, weight: float) -> bool:
        if not self.block:
            return super().decode_sum(datas, layout, level, out, weight)
        radius, _, codes = self.fields_of(datas, layout, level)
        table = _tables.laplace_blocks(int(level), self.block, math.inf)
        return kernels.dequantize_levels_sum(codes, layout.starts, self.block, table, radius, weight, out=out)

    def fields(self, data: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """A float32 radius per group, for tensors the same again in scales, then the packed codes."""
        groups = layout.blocks(self.block)
        header = 4 * groups * (1 if self.block else 2)
        numbers = data[:header].view(torch.float32)
        return numbers[:groups], numbers[groups:].view(-1, 1), data[header:]
