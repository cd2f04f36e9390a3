"""Products of stacks of matrices with thin factors: our own in float32 on the CPU, where PyTorch packs skinny matrices
before it multiplies them; PyTorch's own elsewhere. Matrices are (stack, rows, cols), factors (stack, rank, size).
And a device's way to an orthonormal basis of a factor.
"""

from __future__ import annotations

import math
from functools import lru_cache

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels.products import MOST


def times_rows(
    matrices: Tensor, basis: Tensor, out: Tensor, owed: Tensor | None = None, total: Tensor | None = None
) -> None:
    """out = basis @ matrices^T; with `owed`, of matrices + owed, which is formed in `total`."""
    if not _ours(matrices, basis):
        torch.bmm(basis, _settled(matrices, owed, total).mT, out=out)
        return
    for number, each in enumerate(zip(matrices, basis, out, strict=True)):
        if owed is None or total is None:
            kernels.times_rows(*each)
        else:
            kernels.times_rows(*each, owed=owed[number], total=total[number])


def times_columns(
    matrices: Tensor, basis: Tensor, out: Tensor, owed: Tensor | None = None, total: Tensor | None = None
) -> None:
    """out = basis @ matrices; with `owed`, of matrices + owed, which is formed in `total`."""
    matrices = _settled(matrices, owed, total)
    if not _ours(matrices, basis):
        torch.bmm(basis, matrices, out=out)
        return
    for each in zip(matrices, basis, out, strict=True):
        kernels.times_columns(*each)


def outer(p: Tensor, q: Tensor, out: Tensor, matrices: Tensor | None = None, lost: Tensor | None = None) -> None:
    """out = p^T q; where asked for, lost = matrices - out. `out` or `lost` may be the matrices' own memory."""
    if not _ours(out, p):
        if matrices is not None and lost is not None:
            if lost.data_ptr() != matrices.data_ptr():
                lost.copy_(matrices)
            lost.baddbmm_(p.mT, q, alpha=-1)
        torch.bmm(p.mT, q, out=out)
        return
    for number in range(len(out)):
        if matrices is None or lost is None:
            kernels.outer_product(p[number], q[number], out[number])
        else:
            kernels.outer_product(p[number], q[number], out[number], matrix=matrices[number], lost=lost[number])


def _settled(matrices: Tensor, owed: Tensor | None, total: Tensor | None) -> Tensor:
    if owed is None or total is None:
        return matrices
    return total.copy_(matrices).add_(owed)  # torch.add(out=) would make strided memory anew


def _ours(matrices: Tensor, factor: Tensor) -> bool:
    return matrices.dtype is torch.float32 and matrices.device.type == "cpu" and factor.shape[1] <= MOST


def gram_schmidt(wide: Tensor, out: Tensor) -> Tensor:
    """out = an orthonormal basis of each factor's rows, on a device: a QR decomposition may wait for one, and stop at a
    NaN. What is made here on the way is a few numbers for each row.

    Each row is freed of those before it more than once, which is as good as reflections. Where nothing of it is left,
    a row drawn at random, which is never among the others, takes its place.
    """
    drawn = _directions(*wide.shape[-2:], wide.dtype, wide.device)
    for row in range(wide.shape[-2]):
        found, before = out[..., row : row + 1, :], out[..., :row, :]
        found.copy_(wide[..., row : row + 1, :])
        _free_(_unit_(found), before)
        gone = torch.linalg.vector_norm(found, dim=-1, keepdim=True) < 2.0**-10
        # One of the two is multiplied by 0. A row that is not finite is not gone, and stays so.
        _free_(_unit_(found.mul_(~gone).addcmul_(drawn[row], gone.to(found.dtype))), before)
        _free_(_unit_(found), before)
        _unit_(found)
    return out


def _free_(vectors: Tensor, of: Tensor) -> Tensor:
    """The vectors, (stack, 1, size), without their part in the span of `of`."""
    if of.shape[-2]:
        vectors.baddbmm_(torch.bmm(vectors, of.mT), of, alpha=-1)
    return vectors


def _unit_(vectors: Tensor) -> Tensor:
    """Of length 1; zero stays zero. Scaled first: tiny elements have no squares."""
    for norm in (math.inf, 2):
        length = torch.linalg.vector_norm(vectors, norm, dim=-1, keepdim=True)
        vectors.div_(length.clamp_(min=torch.finfo(vectors.dtype).tiny))
    return vectors


@lru_cache(maxsize=256)  # a few for every model: made in the first step, read in all
def _directions(rank: int, size: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """(rank, size): rows of numbers drawn at random, the same on every worker."""
    places = torch.arange(size, dtype=torch.int64, device="cpu")
    rows = [kernels.random_u32(row, places).double() / 2**32 - 0.5 for row in range(rank)]
    return torch.stack(rows).to(dtype).to(device)  # waited for: it is kept for every stream
