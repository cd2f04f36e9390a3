"""The counter-based generator, for those who draw by themselves. Meaning: `reference.draws`."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.backends import implementation, reference


def random_u32(key: int | Tensor, counter: Tensor) -> Tensor:
    """32 bits (in int64) for each counter (int64, 0 <= counter < 2^32) under a key: one, or one per counter (int64)."""
    for name, tensor in (("key", key), ("counter", counter)):
        if isinstance(tensor, Tensor) and tensor.dtype is not torch.int64:
            raise ValueError(f"{name} has dtype {tensor.dtype}, accepted: torch.int64")
    return implementation(reference.random_u32, counter.device)(key, counter)
