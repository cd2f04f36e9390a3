"""Casts with the scaling or the sum in the same pass. Meaning: `reference.cast`."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.native import for_tensors, threads
from thinwire.kernels.reference import cast as reference

_SCALE = {torch.float32: "scale", torch.float16: "scale_to_fp16", torch.bfloat16: "scale_to_bf16"}
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


def cast_add(x: Tensor, weight: float, out: Tensor) -> None:
    """out += weight * x, in out's dtype."""
    check.flat("x", x, dtypes=check.FLOATS)
    check.flat("out", out, dtypes=check.FLOATS, like=x, numel=x.numel())
    native = for_tensors(x, out)
    if native is None or out.dtype is not torch.float32 or x.dtype not in _ADD:
        return reference.cast_add(x, weight, out)
    getattr(native, _ADD[x.dtype])(x.data_ptr(), weight, out.data_ptr(), x.numel(), threads())
