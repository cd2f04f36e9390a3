"""Selecting entries, and moving selected entries in and out. Meaning: `reference.sparse`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.backends.reference import sparse as reference
from thinwire.kernels.native import for_tensors, threads

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
    native = _check_chunks("x", x, indices, chunk)
    out = _out(out, indices.numel() * chunk, x.dtype, like=x)
    if native is None:
        reference.gather(x, indices, chunk, out)
    else:
        native.gather(*_chunks(x, indices, chunk), out.data_ptr(), threads())
    return out


def take_(x: Tensor, indices: Tensor, *, chunk: int = 1, out: Tensor | None = None) -> Tensor:
    """`gather`, and the chosen chunks of x are 0 afterwards: what was taken is no longer owed."""
    native = _check_chunks("x", x, indices, chunk)
    out = _out(out, indices.numel() * chunk, x.dtype, like=x)
    if native is None:
        reference.take_(x, indices, chunk, out)
    else:
        native.take(*_chunks(x, indices, chunk), out.data_ptr(), threads())
    return out


def put_(x: Tensor, indices: Tensor, values: Tensor, *, chunk: int = 1) -> None:
    """The chosen chunks of x = values. Where an index repeats, one of its values stays."""
    native = _check_chunks("x", x, indices, chunk)
    check.flat("values", values, dtypes=(x.dtype,), like=x, numel=indices.numel() * chunk)
    if native is None:
        reference.put_(x, indices, values, chunk)
    else:
        native.put(*_chunks(x, indices, chunk), values.data_ptr(), threads())


def scatter_add(values: Tensor, indices: Tensor, weight: float, out: Tensor, *, chunk: int = 1) -> None:
    """The chosen chunks of out += weight * values, in the order of the indices, which may repeat."""
    native = _check_chunks("out", out, indices, chunk)
    check.flat("values", values, dtypes=(out.dtype,), like=out, numel=indices.numel() * chunk)
    if native is None:
        reference.scatter_add(values, indices, weight, chunk, out)
    else:
        native.scatter_add(*_chunks(out, indices, chunk), values.data_ptr(), weight, threads())


def _check_chunks(name: str, x: Tensor, indices: Tensor, chunk: int) -> Any:
    """The native kernels, if they serve x. Whether indices are in range is checked where they are used."""
    check.flat(name, x, dtypes=check.FLOATS)
    check.within("chunk", chunk, 1, LONGEST)
    check.within("the number of chunks", -(-x.numel() // chunk), 0, LONGEST)
    check.flat("indices", indices, dtypes=(torch.int32,), like=x)
    return for_tensors(x) if x.dtype is torch.float32 else None


def _chunks(x: Tensor, indices: Tensor, chunk: int) -> tuple[int, int, int, int, int]:
    return x.data_ptr(), x.numel(), indices.data_ptr(), indices.numel(), chunk


def _out(out: Tensor | None, numel: int, dtype: torch.dtype, *, like: Tensor) -> Tensor:
    if out is None:
        return torch.empty(numel, dtype=dtype, device=like.device)
    check.flat("out", out, dtypes=(dtype,), like=like, numel=numel)
    return out
