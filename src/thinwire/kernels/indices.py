"""Ascending indices in few bits; the decoder believes nothing. Meaning and format: `reference.indices`."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.backends import implementation, reference

LONGEST = 2**31 - 1  # indices are int32


def index_bytes(k: int, n: int) -> int:
    """The size of k encoded indices below n: a function of these two numbers alone."""
    check.within("n", n, 0, LONGEST)
    check.within("k", k, 0, n)
    return reference.index_bytes(k, n)


def encode_indices(indices: Tensor, n: int, *, out: Tensor | None = None) -> Tensor:
    """uint8[index_bytes(k, n)]: k ascending int32 indices below n."""
    check.flat("indices", indices, dtypes=(torch.int32,))
    check.optional("out", out, dtypes=(torch.uint8,), like=indices, numel=index_bytes(indices.numel(), n))
    return implementation(reference.encode_indices, indices.device)(indices, n, out=out)


def decode_indices(data: Tensor, k: int, n: int, *, out: Tensor | None = None) -> Tensor:
    """int32[k], ascending, below n. Bytes that `encode_indices` cannot have written raise ValueError."""
    check.flat("data", data, dtypes=(torch.uint8,), numel=index_bytes(k, n))
    check.optional("out", out, dtypes=(torch.int32,), like=data, numel=k)
    return implementation(reference.decode_indices, data.device)(data, k, n, out=out)
