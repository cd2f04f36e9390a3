"""Statistics of blocks in one pass. Meaning: `reference.blockstats`."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.backends.reference import blockstats as reference
from thinwire.kernels.native import address, for_tensors, threads


def all_finite(x: Tensor) -> bool:
    """Whether x holds no Inf and no NaN."""
    native = for_tensors(x)
    if native is None or x.dtype is not torch.float32 or not x.is_contiguous():
        return reference.all_finite(x)
    return native.all_finite(x.data_ptr(), x.numel(), threads())


def block_statistics(
    x: Tensor, starts: Tensor, block: int, *,
    absmean: Tensor | None = None, absmax: Tensor | None = None, square: Tensor | None = None,
) -> None:  # fmt: skip
    """Per block: the mean of |x|, the maximum of |x|, the sum of x^2, each where asked for; 0 for an empty
    block.

    An Inf in the block makes all three Inf, a NaN makes all three NaN: `isfinite(absmax)` says whether the
    block is clean. Squared norms of chunks of C elements are `block_statistics(x, starts, C, square=...)`.
    """
    check.flat("x", x, dtypes=check.FLOATS)
    sizes = check.blocks(starts, block, numel=x.numel())
    wanted = {"absmean": absmean, "absmax": absmax, "square": square}
    for name, out in wanted.items():
        if out is not None:
            check.flat(name, out, dtypes=(torch.float32, torch.float64), like=x, numel=sizes.count)
    native = for_tensors(x)
    if native is None or any(t is not None and t.dtype is not torch.float32 for t in (x, absmean, absmax, square)):
        return reference.block_statistics(x, starts, block, absmean=absmean, absmax=absmax, square=square)
    native.block_statistics(
        x.data_ptr(), x.numel(), starts.data_ptr(), sizes.stretches, block,
        address(absmean), address(absmax), address(square), sizes.count, threads(),
    )  # fmt: skip


def block_absmax(x: Tensor, starts: Tensor, block: int, out: Tensor) -> None:
    """out[j] = max |x| over block j; NaN if the block holds a NaN; 0 for an empty block."""
    block_statistics(x, starts, block, absmax=out)
