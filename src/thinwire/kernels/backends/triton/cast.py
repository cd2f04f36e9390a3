"""Casts with the scaling or the sum in the same pass. In place they go by way of fresh memory, as large as the message:
other programs still read what one would write over."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.backends.triton.launch import launch
from thinwire.kernels.backends.triton.pieces import narrowed, widened

TILE = 1024


@triton.jit(do_not_specialize=["n"])
def _scale_cast(x, weight, out, lost, back, n, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    value = tl.load(x + at, mask=at < n, other=0.0)
    product = narrowed(widened(value) * weight, x.dtype.element_ty)
    said = narrowed(widened(product), out.dtype.element_ty)
    tl.store(out + at, said, mask=at < n)
    if lost is not None:
        again = narrowed(widened(narrowed(widened(said), x.dtype.element_ty)) * back, x.dtype.element_ty)
        rest = narrowed(widened(value) - widened(again), x.dtype.element_ty)
        tl.store(lost + at, narrowed(widened(rest), lost.dtype.element_ty), mask=at < n)


@triton.jit(do_not_specialize=["n"])
def _widen(x, out, n, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    value = widened(tl.load(x + at, mask=at < n, other=0.0))
    tl.store(out + at, narrowed(value, out.dtype.element_ty), mask=at < n)


@triton.jit(do_not_specialize=["n"])
def _cast_add(x, weight, out, n, TILE: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    value = widened(narrowed(widened(tl.load(x + at, mask=at < n, other=0.0)), out.dtype.element_ty))
    product = widened(narrowed(value * weight, out.dtype.element_ty))
    total = widened(tl.load(out + at, mask=at < n, other=0.0)) + product
    tl.store(out + at, narrowed(total, out.dtype.element_ty), mask=at < n)


def scale_cast(x: Tensor, weight: float, out: Tensor, *, lost: Tensor | None = None, back: float = 1.0) -> None:
    launch(_scale_cast, -(-x.numel() // TILE), x, float(weight), out, lost, float(back), x.numel(), TILE=TILE)


def narrow(x: Tensor, weight: float, dtype: torch.dtype) -> Tensor:
    out = x.view(dtype)[: x.numel()]
    if dtype.itemsize == x.itemsize:
        scale_cast(x, weight, out)
    else:
        scale_cast(x, weight, aside := torch.empty(x.numel(), dtype=dtype, device=x.device))
        out.copy_(aside)
    return out


def widen(x: Tensor, out: Tensor) -> None:
    source = x if x.itemsize == out.itemsize else x.clone()
    launch(_widen, -(-out.numel() // TILE), source, out, out.numel(), TILE=TILE)


def cast_add(x: Tensor, weight: float, out: Tensor) -> None:
    launch(_cast_add, -(-x.numel() // TILE), x, float(weight), out, x.numel(), TILE=TILE)
