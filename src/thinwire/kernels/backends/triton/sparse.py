"""Moving selected elements in and out.

Nobody waits for a device to say that an index is out of range. Such an index touches nothing that it should not; it
reads as NaN, and where elements are written it leaves a NaN in the first: what follows shows it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.backends.memory import or_empty
from thinwire.kernels.backends.triton.launch import launch

TILE = 1024


@triton.jit
def _spots(indices, k, n, chunk, TILE: tl.constexpr):
    """For a tile of the values: which, where in the buffer, whether there, and whether the index is any."""
    value = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    number = value // chunk
    index = tl.load(indices + number, mask=number < k, other=0).to(tl.int64)
    good = (index >= 0) & (index * chunk < n)
    at = index * chunk + (value - number * chunk)
    return value, at, (number < k) & good & (at < n), (number < k) & good, number < k


@triton.jit(do_not_specialize=["k", "n", "chunk"])
def _gather(x, indices, out, k, n, chunk, TILE: tl.constexpr):
    value, at, there, good, asked = _spots(indices, k, n, chunk, TILE)
    found = tl.load(x + at, mask=there, other=0.0)
    tl.store(out + value, tl.where(good, found, float("nan")), mask=asked)


@triton.jit(do_not_specialize=["k", "n", "chunk"])
def _erase(x, indices, k, n, chunk, bad, TILE: tl.constexpr):
    _, at, there, good, asked = _spots(indices, k, n, chunk, TILE)
    tl.store(x + at, (at * 0).to(x.dtype.element_ty), mask=there)
    if tl.max((asked & (good == 0)).to(tl.int32), axis=0) > 0:
        tl.store(bad, 1)


@triton.jit(do_not_specialize=["k", "n", "chunk"])
def _put(x, indices, values, weight, k, n, chunk, bad, unordered, ADD: tl.constexpr, TILE: tl.constexpr):
    """Side by side. Sums of indices that do not ascend are left to `_add_in_order`."""
    if unordered is not None:  # noqa: SIM102 - this is known when it is compiled, what follows is not
        if tl.load(unordered) != 0:
            return
    value, at, there, good, asked = _spots(indices, k, n, chunk, TILE)
    news = tl.load(values + value, mask=there, other=0.0)
    if ADD:
        news = tl.load(x + at, mask=there, other=0.0) + news * weight
    tl.store(x + at, news, mask=there)
    if tl.max((asked & (good == 0)).to(tl.int32), axis=0) > 0:
        tl.store(bad, 1)


@triton.jit(do_not_specialize=["k"])
def _ascending(indices, k, unordered, TILE: tl.constexpr):
    number = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = number + 1 < k
    before, after = tl.load(indices + number, mask=here, other=0), tl.load(indices + number + 1, mask=here, other=1)
    if tl.max((before >= after).to(tl.int32), axis=0) > 0:
        tl.store(unordered, 1)


@triton.jit(do_not_specialize=["k", "n", "chunk"])
def _add_in_order(x, indices, values, weight, k, n, chunk, bad, unordered, TILE: tl.constexpr):
    """One program, index by index: an index may come again, and sums have an order."""
    if tl.load(unordered) == 0:
        return
    lane = tl.arange(0, TILE)
    for number in range(k):
        index = tl.load(indices + number).to(tl.int64)
        if (index < 0) | (index * chunk >= n):
            tl.store(bad, 1)
        else:
            for begin in range(0, chunk, TILE):
                at = index * chunk + begin + lane
                there = (begin + lane < chunk) & (at < n)
                news = tl.load(values + number * chunk.to(tl.int64) + begin + lane, mask=there, other=0.0) * weight
                tl.store(x + at, tl.load(x + at, mask=there, other=0.0) + news, mask=there)
        tl.debug_barrier()  # what one index has written, the next may read


@triton.jit
def _poison(x, bad):
    if tl.load(bad) != 0:
        tl.store(x, float("nan"))


def _programs(indices: Tensor, chunk: int) -> int:
    return -(-indices.numel() * chunk // TILE)


def _flags(like: Tensor) -> tuple[Tensor, Tensor]:
    flags = torch.zeros(2, dtype=torch.int32, device=like.device)
    return flags[:1], flags[1:]


def gather(x: Tensor, indices: Tensor, *, chunk: int = 1, out: Tensor | None = None) -> Tensor:
    out = or_empty(out, indices.numel() * chunk, x.dtype, like=x)
    launch(_gather, _programs(indices, chunk), x, indices, out, indices.numel(), x.numel(), chunk, TILE=TILE)
    return out


def take_(x: Tensor, indices: Tensor, *, chunk: int = 1, out: Tensor | None = None) -> Tensor:
    out = gather(x, indices, chunk=chunk, out=out)
    if x.numel() and indices.numel():
        bad, _ = _flags(x)
        launch(_erase, _programs(indices, chunk), x, indices, indices.numel(), x.numel(), chunk, bad, TILE=TILE)
        launch(_poison, 1, x, bad, warps=1)
    return out


def put_(x: Tensor, indices: Tensor, values: Tensor, *, chunk: int = 1) -> None:
    if x.numel() and indices.numel():
        bad, _ = _flags(x)
        sizes = (indices.numel(), x.numel(), chunk)
        launch(_put, _programs(indices, chunk), x, indices, values, 1.0, *sizes, bad, None, ADD=False, TILE=TILE)
        launch(_poison, 1, x, bad, warps=1)


def scatter_add(values: Tensor, indices: Tensor, weight: float, out: Tensor, *, chunk: int = 1) -> None:
    """Indices that ascend, as schemes send them, are added side by side; any others one after the other, slowly."""
    if out.numel() and indices.numel():
        k = indices.numel()
        bad, unordered = _flags(out)
        how = (out, indices, values, float(weight), k, out.numel(), chunk, bad, unordered)
        launch(_ascending, -(-k // TILE), indices, k, unordered, TILE=TILE)
        launch(_put, _programs(indices, chunk), *how, ADD=True, TILE=TILE)
        launch(_add_in_order, 1, *how, TILE=TILE)
        launch(_poison, 1, out, bad, warps=1)
