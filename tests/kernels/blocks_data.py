"""Buffers cut into stretches and blocks, with everything in them that a float can be."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from thinwire.kernels import check

_ODD = [0.0, -0.0, 1e-45, -1e-40, 1.1754944e-38, 3.4028234e38, -3.4028234e38, 1e-30, 65504.0, 65520.0]
_NOT_FINITE = [float("inf"), float("-inf"), float("nan")]


@dataclass
class Buffer:
    x: Tensor
    starts: Tensor
    block: int
    keys: Tensor
    counters: Tensor

    @property
    def blocks(self) -> int:
        return check.blocks(self.starts, self.block).count

    def codes(self, bits: int) -> Tensor:
        return torch.full((check.blocks(self.starts, self.block, bits=bits).packed,), 0xAA, dtype=torch.uint8)


@st.composite
def buffers(draw, *, finite: bool = False) -> Buffer:
    """Lengths divisible by nothing, memory aligned to nothing but a float, stretches that may be empty."""
    lengths = draw(st.lists(st.one_of(st.integers(0, 9), st.integers(60, 300)), max_size=4))
    if draw(st.integers(0, 19)) == 0:
        lengths.append(draw(st.integers(65_000, 140_000)))  # more than one piece of work
    starts = torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int64)
    numel, offset = int(starts[-1]), draw(st.integers(0, 3))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    scale = draw(st.sampled_from([1.0, 1.0, 1e-42, 1e-36, 1e30, 3e38]))
    x = (torch.randn(offset + numel, generator=generator) * scale)[offset:]
    for value in draw(st.lists(st.sampled_from(_ODD if finite else _ODD + _NOT_FINITE), max_size=4)):
        if numel:
            x[draw(st.integers(0, numel - 1))] = value
    if finite:
        x.nan_to_num_()
    return Buffer(
        x, starts, draw(st.sampled_from([0, 1, 7, 8, 64, 100, 1024, 70_000])),
        torch.randint(-(2**63), 2**63 - 1, (len(lengths),), generator=generator),
        torch.randint(0, 2**31, (len(lengths),), generator=generator),
    )  # fmt: skip


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, but any NaN equals any NaN."""
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(
        a.nan_to_num(0).view(torch.int32), b.nan_to_num(0).view(torch.int32)
    )
