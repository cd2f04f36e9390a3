"""Selecting elements, and moving selected elements in and out. Meaning: `reference.sparse`."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.backends import implementation, reference

LONGEST = 2**31 - 1  # indices are int32


def top_k(
    x: Tensor, k: int, weight: Tensor | None = None, *, starts: Tensor | None = None,
    out: Tensor | None = None, owed: Tensor | None = None, total: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """int32[k], ascending: where the k largest |x| are, or |x * weight|. Exact.

    NaN counts as larger than Inf, so that non-finite values travel. Among equals the lowest index is taken. With
    `owed`, x + owed is formed in `total`, which may be x, and that is looked at; without, `total` is left alone.
    `starts`: of a buffer with gaps, that are not looked at.
    """
    check.flat("x", x, dtypes=check.FLOATS)
    check.within("the length of x", x.numel(), 0, LONGEST)
    check.within("k", k, 0, x.numel() if starts is None else check.elements(starts, x.numel()))
    check.optional("weight", weight, dtypes=(x.dtype,), like=x, numel=x.numel())
    check.optional("out", out, dtypes=(torch.int32,), like=x, numel=k)
    check.owed(x, owed, total)
    return implementation(reference.top_k, x.device, x.dtype)(
        x, k, weight, starts=starts, out=out, owed=owed, total=total
    )


def gather(x: Tensor, indices: Tensor, *, chunk: int = 1, out: Tensor | None = None) -> Tensor:
    """The chosen chunks of x, one after the other; a short last chunk is filled up with 0."""
    _check_chunks("x", x, indices, chunk)
    check.optional("out", out, dtypes=(x.dtype,), like=x, numel=indices.numel() * chunk)
    return implementation(reference.gather, x.device, x.dtype)(x, indices, chunk=chunk, out=out)


def take_(x: Tensor, indices: Tensor, *, chunk: int = 1, out: Tensor | None = None) -> Tensor:
    """`gather`, and the chosen chunks of x are 0 afterwards: what was taken is no longer owed."""
    _check_chunks("x", x, indices, chunk)
    check.optional("out", out, dtypes=(x.dtype,), like=x, numel=indices.numel() * chunk)
    return implementation(reference.take_, x.device, x.dtype)(x, indices, chunk=chunk, out=out)


def put_(x: Tensor, indices: Tensor, values: Tensor, *, chunk: int = 1) -> None:
    """The chosen chunks of x = values. Where an index repeats, one of its values stays."""
    _check_chunks("x", x, indices, chunk)
    check.flat("values", values, dtypes=(x.dtype,), like=x, numel=indices.numel() * chunk)
    implementation(reference.put_, x.device, x.dtype)(x, indices, values, chunk=chunk)


def scatter_add(values: Tensor, indices: Tensor, weight: float, out: Tensor, *, chunk: int = 1) -> None:
    """The chosen chunks of out += weight * values, in the order of the indices, which may repeat."""
    _check_chunks("out", out, indices, chunk)
    check.flat("values", values, dtypes=(out.dtype,), like=out, numel=indices.numel() * chunk)
    implementation(reference.scatter_add, out.device, out.dtype)(values, indices, weight, out, chunk=chunk)


def _check_chunks(name: str, x: Tensor, indices: Tensor, chunk: int) -> None:
    """Whether indices are in range is checked where they are used."""
    check.flat(name, x, dtypes=check.FLOATS)
    check.within("chunk", chunk, 1, LONGEST)
    check.within("the number of chunks", -(-x.numel() // chunk), 0, LONGEST)
    check.flat("indices", indices, dtypes=(torch.int32,), like=x)
