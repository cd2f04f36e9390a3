"""Products of stacks of matrices with thin factors: our own in float32 on the CPU, where PyTorch packs skinny matrices
before it multiplies them; PyTorch's own elsewhere. Matrices are (stack, rows, cols), factors (stack, rank, size).
"""

from __future__ import annotations

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
