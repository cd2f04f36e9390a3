"""NQ: the non-uniform levels of TNQ over the whole range: the ablation that shows what truncation is worth."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels, theory
from thinwire.bucket import Bucket, Layout
from thinwire.scheme import Codec, Knob
from thinwire.schemes import _tables


@dataclass(frozen=True)
class NQ(Codec):
    """Each entry becomes one of 2^bits levels over [-m, m], m its tensor's largest magnitude, denser near 0.

    1. c = mean |x| and m = max |x| of the tensor.
    2. level_j = -3c sgn(2j - s) ln(1 - |2j - s|/s (1 - exp(-m/3c))), j = 0..s, s = 2^bits - 1.
    3. Round at random to a neighbouring level, unbiased everywhere.
    """

    bits: int = 4  # lower => fewer bytes, more error

    unbiased: ClassVar[bool] = True
    grain: ClassVar[int | None] = 8
    summary: ClassVar[str] = "TNQ without truncation: unbiased, good where outliers carry the gradient"

    def __post_init__(self) -> None:
        if self.bits not in range(1, 9):
            raise ValueError(f"nq: bits must be 1..8, got {self.bits!r}")

    @property
    def knob(self) -> Knob:
        return Knob("bits", (1, 2, 3, 4, 5, 6, 7, 8), self.bits)

    def nbytes(self, layout: Layout, level: float) -> int:
        return 8 * len(layout.segments) + kernels.packed_bytes(layout.starts, 0, int(level))

    def encode(self, bucket: Bucket, level: float, out: Tensor) -> None:
        radius, reach, codes = self._fields(out, bucket.layout)
        c = torch.empty_like(radius)
        kernels.block_statistics(bucket.flat, bucket.layout.starts, 0, absmean=c, absmax=radius)
        whole = _tables.coarse((radius / c).clamp(min=1.0))
        reach.copy_(torch.where(torch.isfinite(whole), whole, 1.0)[:, None])
        _tables.encode(bucket, int(level), radius, reach, lambda shape: _table(int(level), *shape), codes)

    def decode_add(self, data: Tensor, layout: Layout, level: float, out: Tensor, weight: float) -> None:
        expected = self.nbytes(layout, level)
        if data.numel() != expected:
            raise ValueError(f"nq: a payload of {layout.numel} entries has {expected} bytes, got {data.numel()}")
        radius, reach, codes = self._fields(data, layout)

        def table(shape: tuple[float, ...]) -> kernels.Levels:
            return _table(int(level), *shape)

        _tables.decode_add(codes, layout, int(level), radius, reach, table, weight, out)

    def _fields(self, data: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        """A float32 radius per tensor, then the same in scales, then the packed codes."""
        tensors = len(layout.segments)
        numbers = data[: 8 * tensors].view(torch.float32)
        return numbers[:tensors], numbers[tensors:].view(tensors, 1), data[8 * tensors :]


@lru_cache(maxsize=1024)
def _table(bits: int, reach: float) -> kernels.Levels:
    if not 1 <= reach < float("inf"):
        raise ValueError(f"nq: a range of {reach} scales in a payload")
    return kernels.Levels(torch.tensor(theory.laplace_unit_levels(bits, reach), dtype=torch.float32))
