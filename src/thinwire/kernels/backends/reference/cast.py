"""Casts, as PyTorch does them: round to nearest even; Inf and NaN are kept."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.backends.memory import pieces


def scale_cast(x: Tensor, weight: float, out: Tensor, *, lost: Tensor | None = None, back: float = 1.0) -> None:
    """out = weight * x in x's dtype, then rounded to out's; lost = x - back * out in x's, rounded twice."""
    parts = [pieces(x), pieces(out), [None] * len(pieces(x)) if lost is None else pieces(lost)]
    for values, said, left in zip(*parts, strict=True):
        said.copy_(values * weight)
        if left is not None:
            left.copy_(values - said.to(x.dtype) * back)


def narrow(x: Tensor, weight: float, dtype: torch.dtype) -> Tensor:
    """weight * x as by scale_cast, in the front of x's own memory, which is returned."""
    out = x.view(dtype)[: x.numel()]
    for piece in _pieces(x):  # writing never overtakes reading
        out[piece] = (x[piece] * weight).to(dtype)
    return out


def widen(x: Tensor, out: Tensor) -> None:
    """What `narrow` left in the front of out's memory, back in out's dtype."""
    for piece in reversed(_pieces(out)):
        out[piece] = x[piece].to(out.dtype, copy=True)


def sum_halves(x: Tensor, count: int, out: Tensor) -> None:
    """out = the sum of `count` equally long parts of x, in order: taken in float32 and rounded once."""
    first, *others = x.view(count, -1)
    total = first.to(torch.float32)
    for part in others:
        total += part.to(torch.float32)
    out.copy_(total)


def cast_add(x: Tensor, weight: float, out: Tensor) -> None:
    """out += weight * x, in out's dtype."""
    for values, total in zip(pieces(x), pieces(out), strict=True):
        total.add_(values.to(out.dtype) * weight)


def _pieces(x: Tensor) -> list[slice]:
    return [slice(begin, begin + 65_536) for begin in range(0, x.numel(), 65_536)]
