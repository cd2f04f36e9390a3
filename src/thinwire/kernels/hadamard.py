"""The randomised Hadamard rotation, in place. Meaning: `reference.hadamard`."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.backends.reference import hadamard as reference
from thinwire.kernels.backends.reference.draws import COUNTERS
from thinwire.kernels.native import for_tensors, threads

LARGEST_BLOCK = 2**30


def hadamard_(x: Tensor, starts: Tensor, block: int, *, keys: Tensor, counters: Tensor, inverse: bool = False) -> None:
    """Rotates every stretch of x in blocks of `block` entries (a power of two) with random signs, or back.

    A block as long as the stretch, or longer: the full rotation. Lengths need not be multiples: what is left is
    rotated in smaller blocks.
    """
    check.flat("x", x, dtypes=(torch.float32, torch.float64))
    check.within("block", block, 1, LARGEST_BLOCK)
    if block & (block - 1):
        raise ValueError(f"block must be a power of two, got {block}")
    stretches = check.blocks(starts, block, numel=x.numel()).stretches
    check.flat("keys", keys, dtypes=(torch.int64,), like=starts, numel=stretches)
    check.flat("counters", counters, dtypes=(torch.int64,), like=starts, numel=stretches)
    first = counters.tolist()
    if min(first, default=0) < 0 or max(first, default=0) + x.numel() > COUNTERS:
        raise ValueError(f"counters must stay in 0..2^32 to the end of the buffer, got {first[:8]}")
    native = for_tensors(x) if x.dtype is torch.float32 else None
    if native is None:
        return reference.hadamard_(x, starts, block, keys, counters, inverse)
    native.hadamard(
        x.data_ptr(), x.numel(), starts.data_ptr(), stretches, block, keys.data_ptr(), counters.data_ptr(),
        inverse, threads(),
    )  # fmt: skip
