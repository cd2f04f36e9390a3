"""Natural compression: round every element at random to a power of two (Horvath et al., 2019)."""

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
from thinwire.core.scheme import Codec, Knob


@dataclass(frozen=True)
class Natural(Codec):
    """Each element becomes 0 or +-2^e, one of the two powers of two around it, unbiased; the variance is x^2/8 at most.

    Exponents count down from the tensor's largest element: 2^(bits-1) - 1 of them, then 0.
    Differs from the paper: a code has 5 bits instead of 9, because exponents are relative to the tensor's largest
    element and end 2^-14 below it; what is smaller still is rounded at random, up to there or to 0. The paper calls
    fewer levels natural dithering.
    """

    bits: int = 5  # lower => fewer bytes, fewer powers of two: more error on small elements

    unbiased: ClassVar[bool] = True
    grain: ClassVar[int | None] = 8
    per_tensor: ClassVar[bool] = True
    gaps: ClassVar[bool] = True
    family: ClassVar[str] = "quantisers"
    summary: ClassVar[str] = "powers of two only: unbiased, small error on elements of every size"

    def __post_init__(self) -> None:
        if self.bits not in range(2, 6):
            raise ValueError(f"natural: bits must be 2..5, got {self.bits!r}")

    @property
    def knob(self) -> Knob:
        return Knob("bits", (2, 3, 4, 5), self.bits)

    def nbytes(self, layout: Layout, level: float) -> int:
        return 4 * len(layout.segments) + layout.packed_bytes(0, int(level))

    def encode(self, bucket: Bucket, level: float, out: Tensor) -> None:
        scale, codes = self.fields(out, bucket.layout)
        kernels.block_statistics(bucket.flat, bucket.layout.starts, 0, absmax=scale)
        mantissa, exponent = torch.frexp(scale)  # mantissa in [1/2, 1)
        above = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
        # The power above the largest finite numbers is not finite: they round down to the largest power there is.
        above.clamp_(max=2.0**127)
        scale.copy_(torch.where(torch.isfinite(scale) & (scale > 0), above, scale))
        kernels.quantize_levels(
            bucket.flat, bucket.layout.starts, 0, _table(int(level)), scale,
            keys=bucket.keys(), counters=bucket.layout.counters, out=codes, lost=bucket.lost,
        )  # fmt: skip

    def decode_add(self, data: Tensor, layout: Layout, level: float, out: Tensor, weight: float) -> None:
        self.check_size(data, layout, level)
        scale, codes = self.fields(data, layout)
        kernels.dequantize_levels_add(codes, layout.starts, 0, _table(int(level)), scale, weight, out=out)

    def decode_sum(self, datas: Sequence[Tensor], layout: Layout, level: float, out: Tensor, weight: float) -> bool:
        scale, codes = self.fields_of(datas, layout, level)
        return kernels.dequantize_levels_sum(codes, layout.starts, 0, _table(int(level)), scale, weight, out=out)

    def fields(self, data: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """A float32 scale per tensor, then the packed codes."""
        scales = 4 * len(layout.segments)
        return data[:scales].view(torch.float32), data[scales:]


@cache
def _table(bits: int) -> kernels.Levels:
    """-1, -1/2, ..., 0, ..., 1/2, 1, and one level a hair above 1 that makes it 2^bits."""
    powers = [2.0**-power for power in range((1 << (bits - 1)) - 1)]
    return kernels.Levels.of([*(-power for power in powers), 0.0, *reversed(powers), 1.0 + 2.0**-23])
