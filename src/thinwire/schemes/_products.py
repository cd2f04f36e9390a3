"""Products of stacks of matrices with thin factors: our own in float32 on the CPU, where PyTorch packs skinny matrices
before it multiplies them; PyTorch's own elsewhere. Matrices are (stack, rows, cols), factors (stack, rank, size).
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels.products import MOST


def times_rows(matrices: Tensor, basis: Tensor, out: Tensor) -> None:
    """out = basis @ matrices^T."""
    if not _ours(matrices, basis):
        torch.bmm(basis, matrices.mT, out=out)
        return
    for each in zip(matrices, basis, out, strict=True):
        kernels.times_rows(*each)


def times_columns(matrices: Tensor, basis: Tensor, out: Tensor) -> None:
    """out = basis @ matrices."""
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


def _ours(matrices: Tensor, factor: Tensor) -> bool:
    return matrices.dtype is torch.float32 and matrices.device.type == "cpu" and factor.shape[1] <= MOST
