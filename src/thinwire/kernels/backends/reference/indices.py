"""Ascending indices below n in few bits, in a size that follows from their number k and from n alone.

All workers' messages must be equally long without asking, so what counts is the size in the worst case. The
format is that of Elias and Fano, over the values v_i = index_i - i, which are at most n - k and never
descend:

1. the low bits of every v_i as they are, one after the other;
2. a bitmap of ((n - k) >> low bits) + k bits, in which v_i sets bit (v_i >> low bits) + i.

Both parts begin on a whole byte, little-endian, and padding is 0. The number of low bits is the one that
makes the fewest bytes; at high density that is 0, and the bitmap then is the plain one. No index: no bytes.

A Rice code of the gaps takes as many bits in the worst case, so a fixed size gains nothing from it.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from thinwire.kernels.backends.memory import or_empty
from thinwire.kernels.backends.reference.bits import get_bits, put_bits


@lru_cache(maxsize=1024)
def low_bits(k: int, n: int) -> int:
    """How many low bits of each of k indices below n are written as they are."""
    return min(range(31), key=lambda low: sum(part_bytes(k, n, low)))


def index_bytes(k: int, n: int) -> int:
    """The size of k encoded indices below n."""
    return sum(part_bytes(k, n, low_bits(k, n))) if k else 0


def encode_indices(indices: Tensor, n: int, *, out: Tensor | None = None) -> Tensor:
    """uint8[index_bytes(k, n)]: the indices, encoded."""
    k = indices.numel()
    out = or_empty(out, index_bytes(k, n), torch.uint8, like=indices)
    if k == 0:
        return out
    if int(indices[0]) < 0 or int(indices[-1]) >= n or not bool((indices.diff() > 0).all()):
        raise ValueError("indices must ascend, without repeats, from 0 or more to below n")
    low = low_bits(k, n)
    low_bytes, high_bytes = part_bytes(k, n, low)
    number = torch.arange(k, dtype=torch.int64, device=out.device)
    values = indices - number
    out[:low_bytes] = put_bits(values & ((1 << low) - 1), low, number * low, low_bytes)
    out[low_bytes:] = put_bits(torch.ones_like(values), 1, (values >> low) + number, high_bytes)
    return out


def decode_indices(data: Tensor, k: int, n: int, *, out: Tensor | None = None) -> Tensor:
    """The indices again. Bytes that `encode_indices` cannot have written raise, and leave `out` undefined."""
    out = or_empty(out, k, torch.int32, like=data)
    if k == 0:
        return out
    low = low_bits(k, n)
    low_bytes, high_bytes = part_bytes(k, n, low)
    number = torch.arange(k, dtype=torch.int64, device=data.device)
    bits = get_bits(data[low_bytes:], 1, torch.arange(high_bytes * 8, dtype=torch.int64, device=data.device))
    places = bits.nonzero().squeeze(1)
    if places.numel() != k:
        raise ValueError("encoded indices are damaged: they are more or fewer than they should be")
    spare = k * low % 8
    if int(places[-1]) >= ((n - k) >> low) + k or (spare and int(data[low_bytes - 1]) >> spare):
        raise ValueError("encoded indices are damaged: their padding is not zero")
    values = (places - number) << low | get_bits(data[:low_bytes], low, number * low)
    if int(values[-1]) > n - k or not bool((values.diff() >= 0).all()):
        raise ValueError("encoded indices are damaged: they do not ascend to below n")
    return out.copy_(values + number)


def part_bytes(k: int, n: int, low: int) -> tuple[int, int]:
    """The sizes of the low bits and of the bitmap."""
    return -(-k * low // 8), -(-(((n - k) >> low) + k) // 8)
