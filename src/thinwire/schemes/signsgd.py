"""signSGD: the sign of every element and one norm per tensor, with error feedback.

Bernstein et al., 2018; the scale and the memory: Karimireddy et al., 2019.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core.bucket import Bucket
from thinwire.core.layout import Layout
from thinwire.core.scheme import Codec


@dataclass(frozen=True)
class SignSGD(Codec):
    """x becomes sign(x) |x|_1 / numel, tensor by tensor: 1 bit per element.

    The sign of 0 is taken as +. Differs from the first paper, whose workers vote and whose server knows no scale: this
    is the scaled sign with error feedback of the second, which converges where the vote need not.
    """

    unbiased: ClassVar[bool] = False
    settles: ClassVar[bool] = True
    grain: ClassVar[int | None] = 8
    per_tensor: ClassVar[bool] = True
    gaps: ClassVar[bool] = True
    family: ClassVar[str] = "quantisers"
    summary: ClassVar[str] = "one bit per element and one scale per tensor; needs error feedback"

    def nbytes(self, layout: Layout, level: float) -> int:
        return 4 * len(layout.segments) + layout.packed_bytes(0, 1)

    def encode(self, bucket: Bucket, level: float, out: Tensor) -> None:
        scale, codes = self.fields(out, bucket.layout)
        flat = bucket.flat
        kernels.block_statistics(flat, bucket.layout.starts, 0, absmean=scale, owed=bucket.owed, total=flat)
        # Two levels, -scale and +scale, and the nearer one: the sign.
        kernels.quantize_uniform(
            flat, bucket.layout.starts, 0, 1, scale,
            keys=None, counters=bucket.layout.counters, out=codes, lost=bucket.lost,
        )  # fmt: skip

    def decode_add(self, data: Tensor, layout: Layout, level: float, out: Tensor, weight: float) -> None:
        self.check_size(data, layout, level)
        scale, codes = self.fields(data, layout)
        kernels.dequantize_uniform_add(codes, layout.starts, 0, 1, scale, weight, out=out)

    def decode_sum(self, datas: Sequence[Tensor], layout: Layout, level: float, out: Tensor, weight: float) -> bool:
        scale, codes = self.fields_of(datas, layout, level)
        return kernels.dequantize_uniform_sum(codes, layout.starts, 0, 1, scale, weight, out=out)

    def fields(self, data: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
        """A float32 scale per tensor, then the packed signs."""
        scales = 4 * len(layout.segments)
        return data[:scales].view(torch.float32), data[scales:]
