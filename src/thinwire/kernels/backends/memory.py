"""Memory that a caller may bring along."""

from __future__ import annotations

import torch
from torch import Tensor


def or_empty(out: Tensor | None, numel: int, dtype: torch.dtype, *, like: Tensor) -> Tensor:
    """`out`, or fresh memory on the device of `like`."""
    return torch.empty(numel, dtype=dtype, device=like.device) if out is None else out
