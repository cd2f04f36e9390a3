"""Checks that every kernel makes of its arguments before it touches memory: bad ones raise ValueError."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from thinwire.kernels.backends.reference.draws import COUNTERS

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def flat(name: str, tensor: Tensor, *, dtypes: tuple[torch.dtype, ...], like: Tensor | None = None,
         numel: int | None = None, at_least: int | None = None) -> None:  # fmt: skip
    """`tensor` is 1-d, contiguous, of one of `dtypes`, on `like`'s device, and has the length asked for."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {tensor.dtype}, accepted: {', '.join(map(str, dtypes))}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"{name} must be 1-d and contiguous, got shape {tuple(tensor.shape)}, stride {tensor.stride()}"
        )
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, expected {like.device}")
    if numel is not None and tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} elements, expected {numel}")
    if at_least is not None and tensor.numel() < at_least:
        raise ValueError(f"{name} has {tensor.numel()} elements, expected at least {at_least}")


def optional(name: str, tensor: Tensor | None, *, dtypes: tuple[torch.dtype, ...], like: Tensor, numel: int) -> None:
    """The same of a tensor that need not be given."""
    if tensor is not None:
        flat(name, tensor, dtypes=dtypes, like=like, numel=numel)


def owed(x: Tensor, owed: Tensor | None, total: Tensor | None) -> None:
    """What is owed to x has a place for the sum, and both are like x."""
    if owed is None:
        return
    if total is None:
        raise ValueError("what is owed is added into a total: owed needs total=")
    flat("owed", owed, dtypes=(x.dtype,), like=x, numel=x.numel())
    flat("total", total, dtypes=(x.dtype,), like=x, numel=x.numel())


def within(name: str, value: int, low: int, high: int) -> None:
    """`value` is an integer in low..high."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer in {low}..{high}, got {value!r}")


class BlockSizes(NamedTuple):
    """What follows from `starts`, `block` and `bits`."""

    stretches: int
    count: int  # of blocks
    packed: int  # bytes of all packed codes


def bounds(starts: Tensor) -> list[tuple[int, int]]:
    """(begin, end) of every stretch. Plain integers: for a few hundred cheaper than a dozen tensor operations."""
    ends = starts.tolist()
    return list(pairwise(ends)) if starts.dim() == 1 else [(begin, end) for begin, end in ends]


def padded(length: int, block: int, smallest: int) -> int:
    """The length of a stretch whose last block is filled up to a power of two, `smallest` at least."""
    full, rest = divmod(length, block)
    return full * block + (max(smallest, 1 << (rest - 1).bit_length()) if rest else 0)


def blocks(starts: Tensor, block: int, *, bits: int = 0, numel: int | None = None) -> BlockSizes:
    """`starts` and `block` describe the blocks of a buffer (see `reference`), of `numel` elements if that is known."""
    within("block", block, 0, 1 << 48)
    with_gaps = isinstance(starts, Tensor) and starts.dim() == 2 and starts.shape[1] == 2
    flat("starts", starts.view(-1) if with_gaps else starts, dtypes=(torch.int64,), at_least=0 if with_gaps else 1)
    if starts.device.type != "cpu":
        raise ValueError(f"starts must be in CPU memory, got {starts.device}")
    count = packed = last = 0
    block_bytes = (block * bits + 7) // 8
    spans = bounds(starts)
    for begin, end in spans:
        if not last <= begin <= end:
            raise ValueError(f"starts must not decrease, got {max(last, begin)} before {min(begin, end)}")
        last = end
        full, rest = divmod(end - begin, block) if block else (0, end - begin)
        count += full + (rest > 0) if block else 1
        packed += full * block_bytes + (rest * bits + 7) // 8
    first = spans[0][0] if spans else 0 if with_gaps else int(starts[0])
    if not with_gaps and (first != 0 or (numel is not None and last != numel)):
        raise ValueError(f"starts must go from 0 to {numel}, got {first} to {last}")
    if numel is not None and last > numel:
        raise ValueError(f"starts must end at {numel} at most, got {last}")
    return BlockSizes(len(spans), count, packed)


def elements(starts: Tensor, numel: int) -> int:
    """How many elements the stretches of a buffer of `numel` have."""
    blocks(starts, 0, numel=numel)
    return sum(end - begin for begin, end in bounds(starts))


def draws(keys: Tensor, counters: Tensor, starts: Tensor, stretches: int, like: Tensor) -> None:
    """Every stretch has a key and a first counter, and counters do not run out before the end of the buffer, `like`.

    Keys are in CPU memory, or where the buffer is, if they came in a message.
    """
    flat("keys", keys, dtypes=(torch.int64,), like=like if keys.device == like.device else starts, numel=stretches)
    flat("counters", counters, dtypes=(torch.int64,), like=starts, numel=stretches)
    first = counters.tolist()
    if min(first, default=0) < 0 or max(first, default=0) + like.numel() > COUNTERS:
        raise ValueError(f"counters must stay in 0..2^32 to the end of the buffer, got {first[:8]}")
