"""TQ: truncate, then even levels: the ablation that shows what non-uniform levels are worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core import theory
from thinwire.core.bucket import Bucket
from thinwire.core.layout import Layout
from thinwire.core.scheme import Knob
from thinwire.schemes import _tables


@dataclass(frozen=True)
class TQ(_tables.Grouped):
    """Each element becomes one of 2^bits levels, evenly spaced over [-a, a].

    1. c = the scale of a Laplace distribution, from the moments of the group (`scale`).
    2. a = c W(s^2), s = 2^bits - 1, W Lambert's function, and never more than the largest magnitude: clip to [-a, a].
    3. Round at random to a neighbouring level, unbiased inside [-a, a].
    """

    bits: int = 4  # lower => fewer bytes, more error
    group: str | int = _tables.BLOCK  # what shares a scale: "tensor" or a number of elements; lower => more scales
    scale: str = "moments"  # how the scale is estimated; "mean" => mean |x|, best on pure Laplace data

    unbiased: ClassVar[bool] = False
    settles: ClassVar[bool] = True
    gaps: ClassVar[bool] = True
    family: ClassVar[str] = "quantisers"
    summary: ClassVar[str] = "truncated uniform quantisation; TNQ with even levels"

    def __post_init__(self) -> None:
        if self.bits not in range(1, 9):
            raise ValueError(f"tq: bits must be 1..8, got {self.bits!r}")
        _tables.check_group("tq", self.group)
        _tables.check_scale("tq", self.scale)

    @property
    def knob(self) -> Knob:
        return Knob("bits", (1, 2, 3, 4, 5, 6, 7, 8), self.bits)

    def nbytes(self, layout: Layout, level: float) -> int:
        return 4 * layout.blocks(self.block) + layout.packed_bytes(self.block, int(level))

    def encode(self, bucket: Bucket, level: float, out: Tensor) -> None:
        radius, codes = self.fields(out, bucket.layout)
        group = _tables.laplace_statistics(bucket, self.block, self.scale, radius)
        torch.mul(group.scale, theory.uniform_threshold(int(level)), out=radius)
        torch.minimum(radius, group.largest, out=radius)
        kernels.quantize_uniform(
            bucket.flat, bucket.layout.starts, self.block, int(level), radius,
            keys=bucket.keys(), counters=bucket.layout.counters, out=codes, lost=bucket.lost,
        )  # fmt: skip

    def decode_add(self, data: Tensor, layout: Layout, level: float, out: Tensor, weight: float) -> None:
        self.check_size(data, layout, level)
        radius, codes = self.fields(data, layout)
        kernels.dequantize_uniform_add(codes, layout.starts, self.block, int(level), radius, weight, out=out)

    def decode_sum(self, datas: Sequence[Tensor], layout: Layout, level: float, out: Tensor, weight: float) -> bool:
        radius, codes = self.fields_of(datas, layout, level)
        return kernels.dequantize_uniform_sum(codes, layout.starts, self.block, int(level), radius, weight, out=out)

    def fields(self, data: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """A float32 radius per group, then the packed codes."""
        scales = 4 * layout.blocks(self.block)
        return data[:scales].view(torch.float32), data[scales:]
