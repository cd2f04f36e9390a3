"""QSGD: uniform levels over each block's range, rounded at random so that the mean is right (Alistarh et al., 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core.bucket import Bucket
from thinwire.core.layout import Layout
from thinwire.core.scheme import Codec, Knob
from thinwire.schemes import _tables


@dataclass(frozen=True)
class QSGD(Codec):
    """Each element becomes one of 2^bits levels, evenly spaced over [-m, m], m the largest magnitude in its block.

    1. m_j = max |x| over block j.
    2. x lies between two neighbouring levels; send the upper with probability (x - lower)/(upper - lower).

    Differs from the paper: the range is the block's maximum instead of the 2-norm, which is never narrower, and the
    codes have a fixed width instead of an entropy code, so the size is known before the data.

    `range="norm"` is the paper's: m_j = |block j|, and levels are a sign, 0 and 2^(bits-1) - 1 even magnitudes up to m
    (one code of 2^bits goes unused). The paper has one m for the whole gradient; a huge `block` has one per tensor.
    """

    bits: int = 4  # lower => fewer bytes, more error
    block: int = 1024  # lower => less error, more scales on the wire (32/block bits per element)
    range: str = "max"  # "norm": the paper's range, the block's 2-norm, for comparisons: far more error

    unbiased: ClassVar[bool] = True
    blockwise: ClassVar[bool] = True
    gaps: ClassVar[bool] = True
    family: ClassVar[str] = "quantisers"
    summary: ClassVar[str] = "uniform stochastic quantisation, unbiased, no feedback; the quantiser to compare with"

    def __post_init__(self) -> None:
        if self.range not in ("max", "norm"):
            raise ValueError(f"qsgd: range must be 'max' or 'norm', got {self.range!r}")
        if self.bits not in self._widths:
            raise ValueError(f"qsgd: bits must be {self._widths[0]}..8, got {self.bits!r}")
        if not isinstance(self.block, int) or self.block < 8 or self.block % 8:
            raise ValueError(f"qsgd: block must be a positive multiple of 8, got {self.block!r}")

    @property
    def _widths(self) -> tuple[int, ...]:
        """A sign, a 0 and a magnitude take 2 bits at least."""
        return (1, 2, 3, 4, 5, 6, 7, 8) if self.range == "max" else (2, 3, 4, 5, 6, 7, 8)

    @property
    def grain(self) -> int:
        return self.block

    @property
    def knob(self) -> Knob:
        return Knob("bits", self._widths, self.bits)

    def nbytes(self, layout: Layout, level: float) -> int:
        return 4 * layout.blocks(self.block) + layout.packed_bytes(self.block, int(level))

    def encode(self, bucket: Bucket, level: float, out: Tensor) -> None:
        radius, codes = self.fields(out, bucket.layout)
        if self.range == "norm":
            _tables.norms(bucket, self.block, radius)
            kernels.quantize_levels(
                bucket.flat, bucket.layout.starts, self.block, _tables.signed(int(level), "even"), radius,
                keys=bucket.keys(), counters=bucket.layout.counters, out=codes, lost=bucket.lost,
            )  # fmt: skip
            return
        kernels.block_absmax(bucket.flat, bucket.layout.starts, self.block, out=radius)
        kernels.quantize_uniform(
            bucket.flat, bucket.layout.starts, self.block, int(level), radius,
            keys=bucket.keys(), counters=bucket.layout.counters, out=codes, lost=bucket.lost,
        )  # fmt: skip

    def decode_add(self, data: Tensor, layout: Layout, level: float, out: Tensor, weight: float) -> None:
        self.check_size(data, layout, level)
        radius, codes = self.fields(data, layout)
        if self.range == "norm":
            table = _tables.signed(int(level), "even")
            kernels.dequantize_levels_add(codes, layout.starts, self.block, table, radius, weight, out=out)
        else:
            kernels.dequantize_uniform_add(codes, layout.starts, self.block, int(level), radius, weight, out=out)

    def decode_sum(self, datas: Sequence[Tensor], layout: Layout, level: float, out: Tensor, weight: float) -> bool:
        radius, codes = self.fields_of(datas, layout, level)
        if self.range == "norm":
            table = _tables.signed(int(level), "even")
            return kernels.dequantize_levels_sum(codes, layout.starts, self.block, table, radius, weight, out=out)
        return kernels.dequantize_uniform_sum(codes, layout.starts, self.block, int(level), radius, weight, out=out)

    def fields(self, data: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """The payload's two fields: a float32 radius per block, then the packed codes."""
        scales = 4 * layout.blocks(self.block)
        return data[:scales].view(torch.float32), data[scales:]
