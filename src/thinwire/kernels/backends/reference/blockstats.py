"""Statistics of every block in one pass.

Sums are taken in float64 and rounded once to float32, so the order of the additions shows at most in the
last bit: native and reference agree within one unit in the last place. Native sums have a fixed order: the
same bits for any number of threads and any instruction set. Maxima agree to the bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from thinwire.kernels.backends.memory import pieces
from thinwire.kernels.backends.reference.blocks import Blocks


def all_finite(x: Tensor) -> bool:
    """Whether x holds no Inf and no NaN."""
    return bool(torch.isfinite(x).all())


def keep_(kept: Tensor, new: Tensor) -> None:
    """kept = new, in kept's dtype."""
    kept.copy_(new)


def keep_finite_(kept: Tensor, new: Tensor, judged: Tensor) -> None:
    """kept = new where all of `judged` is finite, else kept stays: decided where the tensors are, nobody waits."""
    # The largest magnitude takes no memory of its own, and a NaN is the largest.
    largest = torch.linalg.vector_norm(judged, math.inf) if judged.numel() else judged.new_zeros(())
    fine = torch.isfinite(largest)
    for old, each in zip(pieces(kept.view(-1)), pieces(new.view(-1)), strict=True):
        torch.where(fine, each.to(kept.dtype), old, out=old)


def block_statistics(
    x: Tensor, starts: Tensor, block: int, *,
    absmean: Tensor | None = None, absmax: Tensor | None = None, square: Tensor | None = None,
    owed: Tensor | None = None, total: Tensor | None = None,
) -> None:  # fmt: skip
    """Per block: the mean of |x|, the maximum of |x|, the sum of x^2, each where asked for; an empty block has 0.

    An Inf in the block makes all three Inf, a NaN makes all three NaN: `isfinite(absmax)` says whether the block is
    clean. A sum that float32 cannot hold is Inf too. With `owed`, total = x + owed, and that is looked at.
    """
    blocks = Blocks.of(starts, block, x.device)
    if owed is not None:
        assert total is not None
        if blocks.at is None:
            torch.add(x, owed, out=total)
        else:
            blocks.put(blocks.take(x) + blocks.take(owed), total)
        x = total
    x = blocks.take(x)
    number, magnitude = blocks.of_element, x.abs()
    if absmean is not None:
        total = torch.zeros(len(blocks.begin), dtype=torch.float64, device=x.device)
        total.index_add_(0, number, magnitude.to(torch.float64))
        absmean.copy_(total / blocks.lengths.clamp(min=1))
    if absmax is not None:
        absmax.zero_()
        absmax.scatter_reduce_(0, number, magnitude.to(absmax.dtype), "amax")
    if square is not None:
        total = torch.zeros(len(blocks.begin), dtype=torch.float64, device=x.device)
        square.copy_(total.index_add_(0, number, magnitude.to(torch.float64) ** 2))
