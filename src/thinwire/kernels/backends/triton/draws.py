"""The counter-based generator, for those who draw by themselves."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.backends.reference import draws as reference
from thinwire.kernels.backends.triton.launch import launch
from thinwire.kernels.backends.triton.pieces import random_bits, scrambled

TILE = 1024


@triton.jit(do_not_specialize=["n", "low", "high"])
def _random(keys, low, high, counter, out, n, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    if keys is None:
        key = (high.to(tl.int64) << 32) | (low.to(tl.int64) & 0xFFFFFFFF)
    else:
        key = tl.load(keys + at, mask=at < n, other=0)
    bits = random_bits(scrambled(key), tl.load(counter + at, mask=at < n, other=0).to(tl.uint32))
    tl.store(out + at, bits.to(tl.int64), mask=at < n)


def random_u32(key: int | Tensor, counter: Tensor) -> Tensor:
    one = isinstance(key, int)
    if not counter.is_contiguous() or not (one or (key.shape == counter.shape and key.is_contiguous())):
        return reference.random_u32(key, counter)
    out, n = torch.empty_like(counter), counter.numel()
    low, high = (_signed(key), _signed(key >> 32)) if one else (0, 0)
    launch(_random, -(-n // TILE), None if one else key, low, high, counter, out, n, TILE=TILE)
    return out


def _signed(number: int) -> int:
    """The int32 with the same low 32 bits: of one type for every key."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)
