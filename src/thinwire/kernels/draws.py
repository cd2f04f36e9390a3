"""The counter-based generator, for those who draw by themselves. Meaning: `reference.draws`."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.backends import implementation, reference

LONGEST = 2**31 - 1  # places are int32


def random_u32(key: int | Tensor, counter: Tensor) -> Tensor:
    """32 bits (in int64) for each counter (int64, 0 <= counter < 2^32) under a key: one, or one per counter (int64)."""
    for name, tensor in (("key", key), ("counter", counter)):
        if isinstance(tensor, Tensor) and tensor.dtype is not torch.int64:
            raise ValueError(f"{name} has dtype {tensor.dtype}, accepted: torch.int64")
    return implementation(reference.random_u32, counter.device)(key, counter)


def draw_places(starts: Tensor, few: Tensor, keys: Tensor, out: Tensor) -> None:
    """out, int32: few[s + 1] - few[s] different places in stretch s of a buffer, each as likely as any other.

    starts, few: int64[S + 1], ascending from 0, starts with gaps: int64[S, 2]; keys: int64[S]; all in CPU memory. `out`
    may be on a device.
    """
    spans, counts = (check.bounds(each) for each in (starts, few))
    check.blocks(starts, 0)
    check.blocks(few, 0)
    check.flat("few", few, dtypes=(torch.int64,), numel=len(spans) + 1)
    check.flat("keys", keys, dtypes=(torch.int64,), like=starts, numel=len(spans))
    check.flat("out", out, dtypes=(torch.int32,), numel=counts[-1][1] if counts else 0)
    check.within("the length of the buffer", spans[-1][1] if spans else 0, 0, LONGEST)
    for (begin, end), (first, last) in zip(spans, counts, strict=True):
        check.within("the number of places in a stretch", last - first, 0, end - begin)
    implementation(reference.draw_places, out.device)(starts, few, keys, out)
