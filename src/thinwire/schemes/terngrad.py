"""TernGrad: every element becomes -1, 0 or 1 times its tensor's largest magnitude (Wen et al., 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core.bucket import Bucket
from thinwire.core.layout import Layout
from thinwire.core.scheme import Codec


@dataclass(frozen=True)
class TernGrad(Codec):
    """x becomes m sign(x) with probability |x|/m, else 0, where m is the largest magnitude in the tensor.

    `clip` cuts elements at so many standard deviations first (the paper trains with 2.5): a far smaller m, and a bias.
    Differs from the paper: off unless asked for, because with it the mean is not unbiased any more and gets error
    feedback; and each worker keeps its own m. The codes take 2 bits where log2(3) would do.
    """

    clip: float = 0.0  # lower => less noise, more bias; 0 => no clipping

    grain: ClassVar[int | None] = 8
    per_tensor: ClassVar[bool] = True
    gaps: ClassVar[bool] = True
    family: ClassVar[str] = "quantisers"
    summary: ClassVar[str] = "three levels, unbiased: 2 bits per element and noise to match"

    def __post_init__(self) -> None:
        if not isinstance(self.clip, int | float) or not 0 <= self.clip < float("inf"):
            raise ValueError(f"terngrad: clip must be 0 (off) or a positive number of deviations, got {self.clip!r}")

    @property
    def unbiased(self) -> bool:
        return self.clip == 0

    def nbytes(self, layout: Layout, level: float) -> int:
        return 4 * len(layout.segments) + layout.packed_bytes(0, 2)

    def encode(self, bucket: Bucket, level: float, out: Tensor) -> None:
        starts = bucket.layout.starts
        radius, codes = self.fields(out, bucket.layout)
        square = torch.empty_like(radius)
        kernels.block_statistics(bucket.flat, starts, 0, absmax=radius, square=square)
        if self.clip:
            deviation = (square / bucket.layout.lengths_on(square.device)).sqrt()
            torch.minimum(radius, self.clip * deviation, out=radius)
        kernels.quantize_levels(
            bucket.flat, starts, 0, _ternary(), radius,
            keys=bucket.keys(), counters=bucket.layout.counters, out=codes, lost=bucket.lost,
        )  # fmt: skip

    def decode_add(self, data: Tensor, layout: Layout, level: float, out: Tensor, weight: float) -> None:
        self.check_size(data, layout, level)
        radius, codes = self.fields(data, layout)
        kernels.dequantize_levels_add(codes, layout.starts, 0, _ternary(), radius, weight, out=out)

    def decode_sum(self, datas: Sequence[Tensor], layout: Layout, level: float, out: Tensor, weight: float) -> bool:
        radius, codes = self.fields_of(datas, layout, level)
        return kernels.dequantize_levels_sum(codes, layout.starts, 0, _ternary(), radius, weight, out=out)

    def fields(self, data: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """A float32 radius per tensor, then the packed codes."""
        scales = 4 * len(layout.segments)
        return data[:scales].view(torch.float32), data[scales:]


@cache
def _ternary() -> kernels.Levels:
    """A 2-bit code has room for a fourth level: one a hair above 1 keeps the table sorted, and says the same."""
    return kernels.Levels.of([-1.0, 0.0, 1.0, 1.0 + 2.0**-23])
