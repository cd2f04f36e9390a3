"""The counter-based generator: 32 bits that are a pure function of a 64-bit key and a counter. Ours."""

from __future__ import annotations

import torch
from torch import Tensor

COUNTERS = 1 << 32  # counters are below this


def random_u32(key: int | Tensor, counter: Tensor) -> Tensor:
    """32 bits (in int64) for each counter (int64, 0 <= counter < 2^32) under a key: one, or one per counter
    (int64).

    The key's halves choose one of 2^63 affine walks through the 32-bit integers, a two-round multiplicative
    hash hides that it is a walk. Two keys so visit the integers in different orders, not in one order from
    different beginnings. Keys must themselves look random, as `randomness.key` makes them: of small or
    regular numbers some give poor walks.
    """
    low, high = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
    x = (counter * (high | 1) + low) & 0xFFFFFFFF
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


def random_unit(key: int | Tensor, counter: Tensor) -> Tensor:
    """float32 in [0, 1), 24 bits, from `random_u32`."""
    return (random_u32(key, counter) >> 8).to(torch.float32) * 2.0**-24
