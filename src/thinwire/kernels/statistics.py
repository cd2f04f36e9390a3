"""Statistics in one pass. Meaning: `reference.statistics`."""

from __future__ import annotations

from torch import Tensor

from thinwire.kernels.reference.statistics import all_finite, block_statistics

__all__ = ["all_finite", "block_absmax", "block_statistics"]


def block_absmax(x: Tensor, starts: Tensor, block: int, out: Tensor) -> None:
    """out[j] = max |x| over block j; NaN if the block holds a NaN; 0 for an empty block."""
    block_statistics(x, starts, block, absmax=out)
