"""Ascending indices in few bits; the decoder believes nothing. Meaning and format: `reference.indices`."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.backends.reference import indices as reference
from thinwire.kernels.native import for_tensors

LONGEST = 2**31 - 1  # indices are int32


def index_bytes(k: int, n: int) -> int:
    """The size of k encoded indices below n: a function of these two numbers alone."""
    check.within("n", n, 0, LONGEST)
    check.within("k", k, 0, n)
    return reference.index_bytes(k, n)


def encode_indices(indices: Tensor, n: int, *, out: Tensor | None = None) -> Tensor:
    """uint8[index_bytes(k, n)]: k ascending int32 indices below n."""
    check.flat("indices", indices, dtypes=(torch.int32,))
    k = indices.numel()
    nbytes = index_bytes(k, n)
    if out is None:
        out = torch.empty(nbytes, dtype=torch.uint8, device=indices.device)
    check.flat("out", out, dtypes=(torch.uint8,), like=indices, numel=nbytes)
    native = for_tensors(indices)
    if native is None:
        reference.encode_indices(indices, n, out)
    elif k:
        native.encode_indices(indices.data_ptr(), k, n, reference.low_bits(k, n), out.data_ptr())
    return out


def decode_indices(data: Tensor, k: int, n: int, *, out: Tensor | None = None) -> Tensor:
    """int32[k], ascending, below n. Bytes that `encode_indices` cannot have written raise ValueError."""
    check.flat("data", data, dtypes=(torch.uint8,), numel=index_bytes(k, n))
    if out is None:
        out = torch.empty(k, dtype=torch.int32, device=data.device)
    check.flat("out", out, dtypes=(torch.int32,), like=data, numel=k)
    native = for_tensors(data)
    if native is None:
        reference.decode_indices(data, k, n, out)
    elif k:
        native.decode_indices(data.data_ptr(), k, n, reference.low_bits(k, n), out.data_ptr())
    return out
