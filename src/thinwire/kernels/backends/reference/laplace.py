"""Truncation of Laplace data, block by block, and their quantisation: what follows from each block's own statistics."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.backends.reference.blocks import Blocks
from thinwire.kernels.backends.reference.blockstats import block_statistics
from thinwire.kernels.backends.reference.quantize import quantize_levels
from thinwire.kernels.levels import Levels


def quantize_laplace(
    x: Tensor, starts: Tensor, block: int, levels: Levels, threshold: float, *,
    moments: bool, radius: Tensor, keys: Tensor | None, counters: Tensor, out: Tensor,
    owed: Tensor | None = None, lost: Tensor | None = None,
) -> None:  # fmt: skip
    """As `quantize_levels` of x + owed, each block's scale being where it is truncated, which `radius` gets."""
    x = x if owed is None else x + owed
    mean, largest, square = (torch.empty_like(radius) for _ in range(3))
    block_statistics(x, starts, block, absmean=mean, absmax=largest, square=square)
    lengths = Blocks.of(starts, block, x.device).lengths
    radius.copy_(truncation(mean, largest, square, lengths, threshold, moments))
    quantize_levels(x, starts, block, levels, radius, keys=keys, counters=counters, out=out, lost=lost)


def truncation(
    mean: Tensor, largest: Tensor, square: Tensor, lengths: Tensor, threshold: float, moments: bool
) -> Tensor:
    """`threshold` scales c out, or at the largest |x| where that is nearer.

    c = E|x|; `moments`: c = (E x^2 / 2)^(3/4) / (E|x|)^(1/2), where float32 holds E x^2 / 2.
    """
    scale = mean
    if moments:
        half = square / (2 * lengths).to(square)
        root = _root(half)
        found = root * _root(root) / _root(mean)
        scale = torch.where((half > 2.0**-100) & (half < torch.inf), found, mean)
    return torch.minimum(scale * threshold, largest)


def _root(x: Tensor) -> Tensor:
    """To the nearest: PyTorch's own of float32 may be one off in the last place."""
    return x.double().sqrt().to(x.dtype)
