"""Casts with the scaling or the sum in the same pass. Meaning: `reference.cast`."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.backends.reference import cast as reference
from thinwire.kernels.native import for_tensors, threads

_SCALE = {torch.float32: "scale", torch.float16: "scale_to_fp16", torch.bfloat16: "scale_to_bf16"}
_NARROW = {torch.float16: "narrow_to_fp16", torch.bfloat16: "narrow_to_bf16"}
_WIDEN = {torch.float16: "widen_from_fp16", torch.bfloat16: "widen_from_bf16"}
_ADD = {torch.float16: "add_from_fp16", torch.bfloat16: "add_from_bf16"}


def scale_cast(x: Tensor, weight: float, out: Tensor) -> None:
    """out = weight * x in x's dtype, then rounded to out's. `out` may be x's own memory if the dtypes are
    equal.
    """
    check.flat("x", x, dtypes=check.FLOATS)
    check.flat("out", out, dtypes=check.FLOATS, like=x, numel=x.numel())
    native = for_tensors(x, out)
    if native is None or x.dtype is not torch.float32 or out.dtype not in _SCALE:
        return reference.scale_cast(x, weight, out)
    getattr(native, _SCALE[out.dtype])(x.data_ptr(), weight, out.data_ptr(), x.numel(), threads())


def narrow(x: Tensor, weight: float, dtype: torch.dtype) -> Tensor:
    """weight * x as by scale_cast, in the front of x's own memory, which is returned. No wider dtype than x's.

    For where x is not needed meanwhile: fresh memory costs more than the cast, and kept memory costs memory.
    """
    check.flat("x", x, dtypes=check.FLOATS)
    if dtype not in check.FLOATS or dtype.itemsize > x.itemsize:
        raise ValueError(f"x is {x.dtype}, so dtype must be a float of at most {x.itemsize} bytes, got {dtype}")
    native = for_tensors(x)
    if native is None or x.dtype is not torch.float32 or dtype not in _NARROW:
        return reference.narrow(x, weight, dtype)
    getattr(native, _NARROW[dtype])(x.data_ptr(), weight, x.numel(), threads())
    return reference.front(x, dtype)


def widen(x: Tensor, out: Tensor) -> None:
    """What `narrow` left in the front of out's memory, back in out's dtype."""
    check.flat("out", out, dtypes=check.FLOATS)
    check.flat("x", x, dtypes=check.FLOATS, like=out, numel=out.numel())
    if x.data_ptr() != out.data_ptr() or x.itemsize > out.itemsize:
        raise ValueError("x must lie in the front of out's memory, as narrow() leaves it")
    native = for_tensors(x)
    if native is None or out.dtype is not torch.float32 or x.dtype not in _WIDEN:
        return reference.widen(x, out)
    getattr(native, _WIDEN[x.dtype])(out.data_ptr(), out.numel(), threads())


def cast_add(x: Tensor, weight: float, out: Tensor) -> None:
    """out += weight * x, in out's dtype."""
    check.flat("x", x, dtypes=check.FLOATS)
    check.flat("out", out, dtypes=check.FLOATS, like=x, numel=x.numel())
    native = for_tensors(x, out)
    if native is None or out.dtype is not torch.float32 or x.dtype not in _ADD:
        return reference.cast_add(x, weight, out)
    getattr(native, _ADD[x.dtype])(x.data_ptr(), weight, out.data_ptr(), x.numel(), threads())
