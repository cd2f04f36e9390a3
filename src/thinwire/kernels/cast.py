"""Casts with the scaling or the sum in the same pass. Meaning: `reference.cast`."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.backends import implementation, reference

_HALVES = (torch.float16, torch.bfloat16)


def scale_cast(x: Tensor, weight: float, out: Tensor, *, lost: Tensor | None = None, back: float = 1.0) -> None:
    """out = weight * x in x's dtype, then rounded to out's, which may be x's own memory if the dtypes are equal.

    `lost`, where given, gets x - back * out, in x's dtype; it may be x's own memory if out is not.
    """
    check.flat("x", x, dtypes=check.FLOATS)
    check.flat("out", out, dtypes=check.FLOATS, like=x, numel=x.numel())
    check.optional("lost", lost, dtypes=(x.dtype,), like=x, numel=x.numel())
    if lost is not None and out.data_ptr() == x.data_ptr() != 0:  # 0: there is no memory
        raise ValueError("what is lost follows from x, which out must not overwrite")
    implementation(reference.scale_cast, x.device, x.dtype, out.dtype)(x, weight, out, lost=lost, back=back)


def narrow(x: Tensor, weight: float, dtype: torch.dtype) -> Tensor:
    """weight * x as by scale_cast, in the front of x's own memory, which is returned. No wider dtype than x's.

    For where x is not needed meanwhile: fresh memory costs more than the cast, and kept memory costs memory.
    """
    check.flat("x", x, dtypes=check.FLOATS)
    if dtype not in check.FLOATS or dtype.itemsize > x.itemsize:
        raise ValueError(f"x is {x.dtype}, so dtype must be a float of at most {x.itemsize} bytes, got {dtype}")
    return implementation(reference.narrow, x.device, x.dtype, dtype)(x, weight, dtype)


def widen(x: Tensor, out: Tensor) -> None:
    """What `narrow` left in the front of out's memory, back in out's dtype."""
    check.flat("out", out, dtypes=check.FLOATS)
    check.flat("x", x, dtypes=check.FLOATS, like=out, numel=out.numel())
    if x.data_ptr() != out.data_ptr() or x.itemsize > out.itemsize:
        raise ValueError("x must lie in the front of out's memory, as narrow() leaves it")
    implementation(reference.widen, x.device, x.dtype, out.dtype)(x, out)


def sum_halves(x: Tensor, count: int, out: Tensor) -> None:
    """out = the sum of `count` equally long parts of x, 16-bit floats, in order: taken in float32 and rounded once.

    `out` may be the first part.
    """
    check.flat("x", x, dtypes=_HALVES)
    check.within("count", count, 1, max(1, x.numel()))
    check.flat("out", out, dtypes=(x.dtype,), like=x)
    if out.numel() * count != x.numel():
        raise ValueError(f"{count} parts of {out.numel()} are {out.numel() * count} elements, got {x.numel()}")
    implementation(reference.sum_halves, x.device, x.dtype)(x, count, out)


def cast_add(x: Tensor, weight: float, out: Tensor) -> None:
    """out += weight * x, in out's dtype."""
    check.flat("x", x, dtypes=check.FLOATS)
    check.flat("out", out, dtypes=check.FLOATS, like=x, numel=x.numel())
    implementation(reference.cast_add, x.device, x.dtype, out.dtype)(x, weight, out)
