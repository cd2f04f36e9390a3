"""Matrices times thin factors. Factors are kept wide, (rank, size).

An inner product is taken in 16 interleaved sums: element j goes into sum j % 16; in the end sums 8, 4, 2 and 1 apart
are added. A combination of rows adds them one after the other, from zeros; an outer product its terms likewise, from
the first. Nothing is fused.
"""

from __future__ import annotations

import torch
from torch import Tensor

SUMS = 16


def times_rows(
    matrix: Tensor, basis: Tensor, out: Tensor, *, owed: Tensor | None = None, total: Tensor | None = None
) -> None:
    """out[k, i] = <row i of the matrix, basis[k]>; with `owed`, total = matrix + owed, and that is multiplied."""
    if owed is not None:
        matrix = torch.add(matrix, owed, out=total)
    filled = -matrix.shape[1] % SUMS
    m, q = (torch.nn.functional.pad(each, (0, filled)) for each in (matrix, basis))
    total = torch.zeros((*out.shape, SUMS), dtype=out.dtype, device=out.device)
    for begin in range(0, m.shape[1], SUMS):
        total += m[None, :, begin : begin + SUMS] * q[:, None, begin : begin + SUMS]
    half = SUMS // 2
    while half:
        total = total[..., :half] + total[..., half : 2 * half]
        half //= 2
    out.copy_(total.squeeze(-1))


def times_columns(matrix: Tensor, basis: Tensor, out: Tensor) -> None:
    """out[k] = the sum of the matrix's rows, row i times basis[k, i]."""
    out.zero_()
    for row, factor in zip(matrix, basis.t(), strict=True):
        out += row * factor[:, None]


def outer_product(
    p: Tensor, q: Tensor, out: Tensor, *, matrix: Tensor | None = None, lost: Tensor | None = None
) -> None:
    """out = p^T q; lost = matrix - out."""
    total = p[0][:, None] * q[0]
    for left, right in zip(p[1:], q[1:], strict=True):
        total += left[:, None] * right
    if matrix is not None and lost is not None:
        lost.copy_(matrix - total)
    out.copy_(total)
