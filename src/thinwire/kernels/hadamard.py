"""The randomised Hadamard rotation, in place. Meaning: `reference.hadamard`."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.native import for_tensors, threads
from thinwire.kernels.reference import hadamard as reference
from thinwire.kernels.reference.random import COUNTERS

LARGEST_BLOCK = 2**30
LARGEST_STRIDE = 2**31 - 1
_CPU = torch.empty(0)  # where starts, keys and counters live, whatever x is on


def hadamard_(
    x: Tensor,
    starts: Tensor,
    block: int,
    *,
    keys: Tensor,
    counters: Tensor,
    stride: int = 1,
    inverse: bool = False,
) -> None:
    """Rotates every stretch of x in groups of `block` entries (a power of two) with random signs, or back.

    stride = 1: contiguous blocks; a block as long as the stretch, or longer: the full rotation. stride > 1:
    the entries of a group lie `stride` apart. Lengths need not be multiples: what is left is rotated in
    smaller blocks.
    """
    check.flat("x", x, dtypes=(torch.float32, torch.float64))
    check.flat("starts", starts, dtypes=(torch.int64,), like=_CPU, at_least=1)
    check.flat("keys", keys, dtypes=(torch.int64,), like=_CPU, numel=starts.numel() - 1)
    check.flat("counters", counters, dtypes=(torch.int64,), like=_CPU, numel=starts.numel() - 1)
    check.within("block", block, 1, LARGEST_BLOCK)
    check.within("stride", stride, 1, LARGEST_STRIDE)
    if block & (block - 1):
        raise ValueError(f"block must be a power of two, got {block}")
    if int(starts[0]) != 0 or int(starts[-1]) != x.numel() or bool((starts.diff() < 0).any()):
        raise ValueError(f"starts must ascend from 0 to the length of x, {x.numel()}, got {starts.tolist()}")
    if counters.numel() and not 0 <= int(counters.min()) <= int(counters.max()) <= COUNTERS - x.numel():
        raise ValueError(f"counters must be in 0..2**32 - {x.numel()}, got {counters.tolist()}")
    native = for_tensors(x) if x.dtype is torch.float32 else None
    if native is None:
        return reference.hadamard_(x, starts, block, stride, keys, counters, inverse)
    native.hadamard(
        x.data_ptr(), x.numel(), starts.data_ptr(), starts.numel() - 1, block, stride, keys.data_ptr(),
        counters.data_ptr(), inverse, threads(),
    )  # fmt: skip
