"""EDEN: rotate at random, round to the best levels for a Gaussian, scale to be unbiased (Vargaftik et al., 2022)."""

from __future__ import annotations

from collections.abc import Sequence
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

    1. y = H D x per block of 2^rotate elements: the elements of y are nearly Gaussian, whatever x is.
    2. c = the Lloyd-Max centroid of N(0, 1) nearest to y sqrt(d)/|x|, element by element.
    3. Send c and the scale |x|^2/<c, y>; the receiver rotates scale * c back.

    The scale makes the estimate unbiased under a uniformly random rotation; a Hadamard one comes close. Every worker
    draws its own rotation, so that errors average out over workers; its key travels with the codes.
    """

    bits: int = 1  # lower => fewer bytes, more error
    rotate: int = 10  # butterfly stages: blocks of 2^rotate elements; lower => faster, more scales on the wire

    unbiased: ClassVar[bool] = True
    gaps: ClassVar[bool] = True
    family: ClassVar[str] = "quantisers"
    summary: ClassVar[str] = "rotation and the best levels for a Gaussian; the least error at 1 bit without feedback"

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
        return 8 + 4 * blocks.blocks + blocks.numel * int(level) // 8

    def encode(self, bucket: Bucket, level: float, out: Tensor) -> None:
        blocks = rotation(bucket.layout, self.rotate)
        key, scale, codes = self._fields(out, blocks)
        number = randomness.key(bucket.seed, bucket.step, "eden", bucket.worker) >> 1  # 63 bits: fits int64
        key.fill_(number)
        kernels.rotate_quantize(
            bucket.flat, blocks.starts, blocks.block, _centroids(int(level)), scale=scale, out=codes, lost=bucket.lost,
            signs=_signs(number, bucket.layout, blocks), counters=blocks.counters,
        )  # fmt: skip

    def decode_add(self, data: Tensor, layout: Layout, level: float, out: Tensor, weight: float) -> None:
        self._decode([data], layout, level, out, weight, add=True)

    def decode_sum(self, datas: Sequence[Tensor], layout: Layout, level: float, out: Tensor, weight: float) -> bool:
        self._decode(datas, layout, level, out, weight, add=False)
        return False

    def _decode(
        self, datas: Sequence[Tensor], layout: Layout, level: float, out: Tensor, weight: float, *, add: bool
    ) -> None:
        for data in datas:
            self.check_size(data, layout, level)
        blocks = rotation(layout, self.rotate)
        fields = [self._fields(data, blocks) for data in datas]
        kernels.unrotate_levels_sum(
            [codes for _, _, codes in fields], blocks.starts, blocks.block, _centroids(int(level)),
            [scale for _, scale, _ in fields], weight, signs=[_signs(key, layout, blocks) for key, _, _ in fields],
            counters=blocks.counters, out=out, add=add,
        )  # fmt: skip

    def _fields(self, data: Tensor, blocks: Rotation) -> tuple[Tensor, Tensor, Tensor]:
        """The rotation's key, a float32 scale per block, then the packed codes."""
        scales = 8 + 4 * blocks.blocks
        return data[:8].view(torch.int64), data[8:scales].view(torch.float32), data[scales:]


def _signs(key: int | Tensor, layout: Layout, blocks: Rotation) -> Tensor:
    """The rotation's key for every stretch, from the payload's key; on the payload's device, where that is one."""
    if isinstance(key, Tensor) and not kernels.at_hand(key):
        hashes = layout.name_hashes_on(key.device)
        return blocks.signs(randomness.keys_on_device(key, 0, hashes, randomness.SHARED))
    keys = randomness.keys(int(key), 0, layout.name_hashes, randomness.SHARED)
    return blocks.signs(torch.from_numpy(keys))


@cache
def _centroids(bits: int) -> kernels.Levels:
    return kernels.Levels.of(theory.gaussian_centroids(bits))
