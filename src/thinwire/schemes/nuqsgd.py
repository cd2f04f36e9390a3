"""NUQSGD: magnitudes that halve from level to level, over the 2-norm (Ramezani-Kebrya et al., 2021)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core.bucket import Bucket
from thinwire.core.layout import Layout
from thinwire.core.scheme import Knob
from thinwire.schemes import _tables

_WIDTHS = (2, 3, 4, 5, 6, 7)


@dataclass(frozen=True)
class NUQSGD(_tables.Grouped):
    """Each element becomes 0 or +-m 2^-i, i = 0 .. 2^(bits-1) - 2, m the 2-norm of its group.

    1. m_j = |group j|, or its largest magnitude (`range`).
    2. x lies between two neighbouring levels; send the upper with probability (x - lower)/(upper - lower).

    Differs from the paper: the codes have a fixed width instead of an entropy code, of which one goes unused. The
    authors' published code leaves out the 0 and has one more magnitude instead; these are the levels in print.
    """

    bits: int = 4  # lower => fewer bytes, more error
    group: str | int = _tables.BLOCK  # what shares a range: "tensor" or a number of elements; lower => more ranges
    range: str = "norm"  # "max": the largest magnitude, never wider

    unbiased: ClassVar[bool] = True
    gaps: ClassVar[bool] = True
    family: ClassVar[str] = "quantisers"
    summary: ClassVar[str] = "levels that halve towards 0, unbiased, over the 2-norm: a rival to compare with"

    def __post_init__(self) -> None:
        if self.bits not in _WIDTHS:
            raise ValueError(f"nuqsgd: bits must be {_WIDTHS[0]}..{_WIDTHS[-1]}, got {self.bits!r}")
        _tables.check_group("nuqsgd", self.group)
        if self.range not in ("norm", "max"):
            raise ValueError(f"nuqsgd: range must be 'norm' or 'max', got {self.range!r}")

    @property
    def knob(self) -> Knob:
        return Knob("bits", _WIDTHS, self.bits)

    def nbytes(self, layout: Layout, level: float) -> int:
        return 4 * layout.blocks(self.block) + layout.packed_bytes(self.block, int(level))

    def encode(self, bucket: Bucket, level: float, out: Tensor) -> None:
        radius, codes = self.fields(out, bucket.layout)
        if self.range == "norm":
            _tables.norms(bucket, self.block, radius)
        else:
            kernels.block_absmax(bucket.flat, bucket.layout.starts, self.block, out=radius)
        kernels.quantize_levels(
            bucket.flat, bucket.layout.starts, self.block, self._table(level), radius,
            keys=bucket.keys(), counters=bucket.layout.counters, out=codes, lost=bucket.lost,
        )  # fmt: skip

    def decode_add(self, data: Tensor, layout: Layout, level: float, out: Tensor, weight: float) -> None:
        self.check_size(data, layout, level)
        radius, codes = self.fields(data, layout)
        kernels.dequantize_levels_add(codes, layout.starts, self.block, self._table(level), radius, weight, out=out)

    def decode_sum(self, datas: Sequence[Tensor], layout: Layout, level: float, out: Tensor, weight: float) -> bool:
        radius, codes = self.fields_of(datas, layout, level)
        table = self._table(level)
        return kernels.dequantize_levels_sum(codes, layout.starts, self.block, table, radius, weight, out=out)

    def _table(self, level: float) -> kernels.Levels:
        return _tables.signed(int(level), "halves")

    def fields(self, data: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """A float32 range per group, then the packed codes."""
        scales = 4 * layout.blocks(self.block)
        return data[:scales].view(torch.float32), data[scales:]
