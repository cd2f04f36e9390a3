"""The randomised Hadamard rotation, in place. Meaning: `reference.hadamard`."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.backends import implementation, reference

LARGEST_BLOCK = 2**30


def hadamard_(x: Tensor, starts: Tensor, block: int, *, keys: Tensor, counters: Tensor, inverse: bool = False) -> None:
    """Rotates every stretch of x in blocks of `block` elements (a power of two) with random signs, or back.

    A block as long as the stretch, or longer: the full rotation. What is left over is rotated in smaller blocks.
    """
    check.flat("x", x, dtypes=(torch.float32, torch.float64))
    check.within("block", block, 1, LARGEST_BLOCK)
    if block & (block - 1):
        raise ValueError(f"block must be a power of two, got {block}")
    if starts.dim() != 1:
        raise ValueError("starts must be without gaps: int64[S + 1]")
    stretches = check.blocks(starts, block, numel=x.numel()).stretches
    check.draws(keys, counters, starts, stretches, x)
    implementation(reference.hadamard_, x.device, x.dtype)(
        x, starts, block, keys=keys, counters=counters, inverse=inverse
    )
