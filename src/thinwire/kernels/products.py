"""Matrices times thin factors, each reading the matrix once, row by row. Meaning: `reference.products`."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.backends import implementation, reference

MOST = 64  # vectors of a factor
_WORKING = (torch.float32, torch.float64)


def times_rows(
    matrix: Tensor, basis: Tensor, out: Tensor, *, owed: Tensor | None = None, total: Tensor | None = None
) -> None:
    """out[k, i] = <row i of the matrix, basis[k]>: (rank, rows) from (rows, cols) and (rank, cols).

    With `owed`, matrix + owed is formed in `total`, which may be the matrix, and that is multiplied.
    """
    rows, cols, rank = _shape(matrix, basis)
    _check("matrix", matrix, (rows, cols), matrix)
    _check("basis", basis, (rank, cols), matrix)
    _check("out", out, (rank, rows), matrix)
    if (owed is None) != (total is None):
        raise ValueError("what is owed is added into a total: owed and total come together")
    for name, tensor in (("owed", owed), ("total", total)):
        if tensor is not None:
            _check(name, tensor, (rows, cols), matrix)
    implementation(reference.times_rows, matrix.device, matrix.dtype)(matrix, basis, out, owed=owed, total=total)


def times_columns(matrix: Tensor, basis: Tensor, out: Tensor) -> None:
    """out[k] = the sum of rows i times basis[k, i]: (rank, cols) from (rows, cols) and (rank, rows)."""
    rows, cols, rank = _shape(matrix, basis)
    _check("matrix", matrix, (rows, cols), matrix)
    _check("basis", basis, (rank, rows), matrix)
    _check("out", out, (rank, cols), matrix)
    implementation(reference.times_columns, matrix.device, matrix.dtype)(matrix, basis, out)


def outer_product(
    p: Tensor, q: Tensor, out: Tensor, *, matrix: Tensor | None = None, lost: Tensor | None = None
) -> None:
    """out = p^T q, (rows, cols) from (rank, rows) and (rank, cols); where asked for, lost = matrix - out.

    `out` or `lost` may be the matrix's own memory.
    """
    rows, cols, rank = _shape(out, p)
    _check("out", out, (rows, cols), out)
    _check("p", p, (rank, rows), out)
    _check("q", q, (rank, cols), out)
    if (matrix is None) != (lost is None):
        raise ValueError("what is lost follows from the matrix: matrix and lost come together")
    for name, tensor in (("matrix", matrix), ("lost", lost)):
        if tensor is not None:
            _check(name, tensor, (rows, cols), out)
    implementation(reference.outer_product, out.device, out.dtype)(p, q, out, matrix=matrix, lost=lost)


def _shape(matrix: Tensor, factor: Tensor) -> tuple[int, int, int]:
    if matrix.dim() != 2 or factor.dim() != 2 or matrix.dtype not in _WORKING:
        raise ValueError(
            f"expected a matrix of float32 or float64 and a factor, got {tuple(matrix.shape)} {matrix.dtype} and "
            f"{tuple(factor.shape)}"
        )
    check.within("the rank of a factor", factor.shape[0], 1, MOST)
    return (*matrix.shape, factor.shape[0])  # type: ignore[return-value]


def _check(name: str, tensor: Tensor, shape: tuple[int, int], like: Tensor) -> None:
    if tuple(tensor.shape) != shape or not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous and {shape}, got {tuple(tensor.shape)}, {tensor.stride()}")
    if tensor.dtype is not like.dtype or tensor.device != like.device:
        raise ValueError(f"{name} is {tensor.dtype} on {tensor.device}, expected {like.dtype} on {like.device}")
