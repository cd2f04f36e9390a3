"""Casts, as PyTorch does them: round to nearest even; Inf and NaN are kept."""

from __future__ import annotations

from torch import Tensor


def scale_cast(x: Tensor, weight: float, out: Tensor) -> None:
    """out = weight * x in x's dtype, then rounded to out's."""
    out.copy_(x * weight)


def cast_add(x: Tensor, weight: float, out: Tensor) -> None:
    """out += weight * x, in out's dtype."""
    out.add_(x.to(out.dtype) * weight)
