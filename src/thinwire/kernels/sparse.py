"""Selecting entries, and moving selected entries in and out. Meaning: `reference.sparse`."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.native import for_tensors, threads
from thinwire.kernels.reference import sparse as reference

LONGEST = 2**31 - 1  # indices are int32


def top_k(x: Tensor, k: int, weight: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """int32[k], ascending: where the k largest |x| are, or |x * weight|. Exact.

    NaN counts as larger than Inf, so that non-finite values travel. Among equals the lowest index is taken.
    """
    check.flat("x", x, dtypes=check.FLOATS)
    check.within("the length of x", x.numel(), 0, LONGEST)
    check.within("k", k, 0, x.numel())
    if weight is not None:
        check.flat("weight", weight, dtypes=(x.dtype,), like=x, numel=x.numel())
    out = _out(out, k, torch.int32, like=x)
    native = for_tensors(x) if x.dtype is torch.float32 else None
    if native is None:
        reference.top_k(x, k, weight, out)
    else:
        weights = 0 if weight is None else weight.data_ptr()
        native.top_k(x.data_ptr(), weights, x.numel(), k, out.data_ptr(), threads())
    return out


def gather(x: Tensor, indices: Tensor, *, chunk: int = 1, out: Tensor | None = None) -> Tensor:
    """The chosen chunks of x, one after the other; a short last chunk is filled up with 0."""
    return _gather("gather", x, indices, chunk, out)


def take_(x: Tensor, indices: Tensor, *, chunk: int = 1, out: Tensor | None = None) -> Tensor:
    """`gather`, and the chosen chunks of x are 0 afterwards: what was taken is no longer owed."""
    return _gather("take_", x, indices, chunk, out)


def scatter_add(values: Tensor, indices: Tensor, weight: float, out: Tensor, *, chunk: int = 1) -> None:
    """The chosen chunks of out += weight * values, in the order of the indices, which may repeat."""
    check.flat("out", out, dtypes=check.FLOATS)
    _check_chunks(out, indices, chunk)
    check.flat("values", values, dtypes=(out.dtype,), like=out, numel=indices.numel() * chunk)
    native = for_tensors(out) if out.dtype is torch.float32 else None
    if native is None:
        return reference.scatter_add(values, indices, weight, chunk, out)
    native.scatter_add(
        values.data_ptr(), indices.data_ptr(), indices.numel(), chunk, weight, out.data_ptr(), out.numel(), threads()
    )


def _gather(name: str, x: Tensor, indices: Tensor, chunk: int, out: Tensor | None) -> Tensor:
    check.flat("x", x, dtypes=check.FLOATS)
    _check_chunks(x, indices, chunk)
    out = _out(out, indices.numel() * chunk, x.dtype, like=x)
    native = for_tensors(x) if x.dtype is torch.float32 else None
    if native is None:
        getattr(reference, name)(x, indices, chunk, out)
    else:
        function = native.gather if name == "gather" else native.take
        function(x.data_ptr(), x.numel(), indices.data_ptr(), indices.numel(), chunk, out.data_ptr(), threads())
    return out


def _check_chunks(x: Tensor, indices: Tensor, chunk: int) -> None:
    check.within("chunk", chunk, 1, LONGEST)
    check.within("the number of chunks", -(-x.numel() // chunk), 0, LONGEST)
    check.flat("indices", indices, dtypes=(torch.int32,), like=x)


def _out(out: Tensor | None, numel: int, dtype: torch.dtype, *, like: Tensor) -> Tensor:
    if out is None:
        return torch.empty(numel, dtype=dtype, device=like.device)
    check.flat("out", out, dtypes=(dtype,), like=like, numel=numel)
    return out
