"""EDEN: rotate at random, round to the best levels for a Gaussian, scale to be unbiased (Vargaftik et al., 2022)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core import randomness, theory
from thinwire.core.bucket import Bucket
from thinwire.core.layout import Layout
from thinwire.core.scheme import Codec, Knob
from thinwire.schemes._rotation import Rotation, rotation


@dataclass(frozen=True)
class EDEN(Codec):
    """Every block becomes a rotated vector of 2^bits centroids. bits=1 is DRIVE (Vargaftik et al., 2021).

    1. y = H D x per block of 2^rotate entries: the entries of y are nearly Gaussian, whatever x is.
    2. c = the Lloyd-Max centroid of N(0, 1) nearest to y sqrt(d)/|x|, entry by entry.
    3. Send c and the scale |x|^2/<c, y>; the receiver rotates scale * c back.

    The scale makes the estimate unbiased under a uniformly random rotation; a Hadamard one comes close. Every worker
    draws its own rotation, so that errors average out over workers; its key travels with the codes.
    """

    bits: int = 1  # lower => fewer bytes, more error
    rotate: int = 10  # butterfly stages: blocks of 2^rotate entries; lower => faster, more scales on the wire

    unbiased: ClassVar[bool] = True
    summary: ClassVar[str] = "rotation and the best levels for a Gaussian; the least error at 1 bit without memory"

    def __post_init__(self) -> None:
        if self.bits not in range(1, 5):
            raise ValueError(f"eden: bits must be 1..4, got {self.bits!r}")
        if self.rotate not in range(6, 31):
            raise ValueError(f"eden: rotate must be 6..30 stages, got {self.rotate!r}")

    @property
    def grain(self) -> int:
        return 1 << self.rotate

    @property
    def knob(self) -> Knob:
        return Knob("bits", (1, 2, 3, 4), self.bits)

    def nbytes(self, layout: Layout, level: float) -> int:
        blocks = rotation(layout, self.rotate)
        return 8 + 4 * blocks.blocks + kernels.packed_bytes(blocks.starts, blocks.block, int(level))

    def encode(self, bucket: Bucket, level: float, out: Tensor) -> None:
        blocks = rotation(bucket.layout, self.rotate)
        key, scale, codes = self._fields(out, blocks)
        key.fill_(randomness.key(bucket.seed, bucket.step, "eden", bucket.worker) >> 1)  # 63 bits: fits int64
        keys = _keys(key, bucket.layout)
        dtype, device = bucket.flat.dtype, bucket.flat.device
        y = bucket.scratch.take("eden-rotated", blocks.numel, dtype, device)
        said = bucket.scratch.take("eden-said", blocks.numel, dtype, device)
        blocks.spread(bucket.flat, y)
        blocks.rotate_(y, keys)

        energy, error, coded = (torch.empty_like(scale) for _ in range(3))
        kernels.block_statistics(y, blocks.starts, blocks.block, square=energy)
        deviation = (energy / blocks.lengths.to(device)).sqrt()
        table = _centroids(int(level))
        kernels.quantize_levels(
            y, blocks.starts, blocks.block, table, deviation,
            keys=None, counters=blocks.counters, out=codes, lost=y,
        )  # fmt: skip
        kernels.dequantize_levels(codes, blocks.starts, blocks.block, table, deviation, 1.0, out=said)
        kernels.block_statistics(y, blocks.starts, blocks.block, square=error)
        kernels.block_statistics(said, blocks.starts, blocks.block, square=coded)
        # <said, y> by the law of cosines: what was lost, squared, is |y|^2 - 2 <said, y> + |said|^2.
        product = (energy + coded - error) / 2
        corrected = deviation * energy / product
        # deviation * energy is the gradient's third power: where float32 cannot hold it, divide first.
        corrected = torch.where(corrected.isinf() & energy.isfinite(), energy / product * deviation, corrected)
        scale.copy_(torch.where(energy > 0, corrected, energy))  # NaN is not > 0 and stays
        if bucket.lost is not None:
            bucket.lost.copy_(bucket.flat)
            self._decode(codes, blocks, keys, scale, table, said)
            blocks.collect_add(said, bucket.lost, -1.0)

    def decode_add(self, data: Tensor, layout: Layout, level: float, out: Tensor, weight: float) -> None:
        self.check_size(data, layout, level)
        blocks = rotation(layout, self.rotate)
        key, scale, codes = self._fields(data, blocks)
        said = torch.empty(blocks.numel, dtype=out.dtype, device=out.device)
        self._decode(codes, blocks, _keys(key, layout), scale, _centroids(int(level)), said)
        blocks.collect_add(said, out, weight)

    def _decode(
        self, codes: Tensor, blocks: Rotation, keys: Tensor, scale: Tensor, table: kernels.Levels, out: Tensor
    ) -> None:
        kernels.dequantize_levels(codes, blocks.starts, blocks.block, table, scale, 1.0, out=out)
        blocks.rotate_(out, keys, inverse=True)

    def _fields(self, data: Tensor, blocks: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """The rotation's key, a float32 scale per block, then the packed codes."""
        scales = 8 + 4 * blocks.blocks
        return data[:8].view(torch.int64), data[8:scales].view(torch.float32), data[scales:]


def _keys(key: Tensor, layout: Layout) -> Tensor:
    """One key for each tensor, from the payload's key."""
    return torch.from_numpy(randomness.keys(int(key), 0, layout.name_hashes, randomness.SHARED))


@cache
def _centroids(bits: int) -> kernels.Levels:
    return kernels.Levels.of(theory.gaussian_centroids(bits))
