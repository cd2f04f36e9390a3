"""Small buffers cut into stretches, for programs that run one after the other."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from thinwire.kernels import check

_ODD = [0.0, -0.0, 1e-45, -1e-40, 1.1754944e-38, 3.4028234e38, -3.4028234e38, 1e-30, 65504.0, 65520.0]
_NOT_FINITE = [math.inf, -math.inf, math.nan]


@dataclass
class Buffer:
    x: Tensor
    starts: Tensor
    keys: Tensor
    counters: Tensor
    seed: int

    def count(self, block: int) -> int:
        return check.blocks(self.starts, block).count

    def like(self, salt: int = 1) -> Tensor:
        """Other values for the same places."""
        return torch.randn(self.x.shape, generator=torch.Generator().manual_seed(self.seed + salt))

    def ranges(self, block: int) -> Tensor:
        """About as large as x; some of every kind that there is."""
        generator = torch.Generator().manual_seed(self.seed)
        scale = self.x.nan_to_num(0, 1, 1).abs().max() if self.x.numel() else torch.tensor(1.0)
        ranges = torch.rand(self.count(block), generator=generator) * scale
        kinds = torch.tensor([0.0, 1e-40, 3.4e38, math.inf, math.nan, -1.0])
        chosen = torch.rand(len(ranges), generator=generator) < 0.2
        return torch.where(chosen, kinds[torch.randint(6, (len(ranges),), generator=generator)], ranges)


@st.composite
def buffers(draw, *, gaps: bool = False, longest: int = 2500) -> Buffer:
    """Lengths divisible by nothing, memory aligned to nothing but a float, stretches that may be empty."""
    size = st.one_of(st.integers(0, 9), st.integers(60, 300), st.integers(1000, longest))
    lengths = draw(st.lists(size, max_size=3))
    spans, at = [], draw(st.integers(0, 3)) if gaps else 0
    for length in lengths:
        spans.append((at, at + length))
        at += length + (draw(st.integers(0, 5)) if gaps else 0)
    seed, offset = draw(st.integers(0, 2**31)), draw(st.integers(0, 3))
    generator = torch.Generator().manual_seed(seed)
    scale = draw(st.sampled_from([1.0, 1.0, 1e-3, 1e-42, 1e-36, 1e30, 3e38]))
    x = (torch.randn(offset + at, generator=generator) * scale)[offset:]
    for value in draw(st.lists(st.sampled_from(_ODD + _NOT_FINITE), max_size=3)):
        if at:
            x[draw(st.integers(0, at - 1))] = value
    bounds = spans if gaps else [0, *(end for _, end in spans)]
    starts = torch.tensor(bounds, dtype=torch.int64).reshape((-1, 2) if gaps else (-1,))
    keys = torch.randint(-(2**63), 2**63 - 1, (len(spans),), generator=generator)
    return Buffer(x, starts, keys, torch.randint(0, 2**31, (len(spans),), generator=generator), seed)


def every_length() -> Buffer:
    """Stretches that are empty, shorter than a piece, longer than a tile, and just beside powers of two."""
    starts = torch.tensor([0, 0, 5, 69, 1169, 1170, 3219, 3474])
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(int(starts[-1]), generator=generator)
    keys = torch.randint(-(2**63), 2**63 - 1, (len(starts) - 1,), generator=generator)
    return Buffer(x, starts, keys, torch.randint(0, 2**31, keys.shape, generator=generator), seed=3)


def several_lengths() -> Buffer:
    """Stretches with gaps between them, around a tile of 4,096 entries and twice that; one has an Inf."""
    starts = torch.tensor([[1, 4098], [4100, 12292], [12292, 12292], [12300, 12400], [12400, 12400 + 2 * 8192 + 5000]])
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(int(starts[-1, 1]) + 3, generator=generator)
    x[12_310] = math.inf
    keys = torch.randint(-(2**63), 2**63 - 1, (len(starts),), generator=generator)
    return Buffer(x, starts, keys, torch.randint(0, 2**31, keys.shape, generator=generator), seed=4)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Equal to the bit, but any NaN equals any NaN."""
    word = {2: torch.int16, 4: torch.int32}[a.element_size()]
    ours, theirs = (each.nan_to_num(0, math.inf, -math.inf).view(word) for each in (a, b))
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(ours, theirs)


def units_apart(a: Tensor, b: Tensor) -> int:
    """How many floats lie between, at most."""
    if not torch.equal(a.isnan(), b.isnan()):
        return 1 << 31
    bits = [each.nan_to_num(0, math.inf, -math.inf).view(torch.int32).long() for each in (a, b)]
    return int((bits[0] - bits[1]).abs().max()) if len(a) else 0
