"""Quantise and pack, unpack and add, every stretch by a table of a bank. Meaning: `reference.bank`."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels import check
from thinwire.kernels.backends import implementation, reference

_FLOAT = (torch.float32,)


def quantize_bank(
    x: Tensor, starts: Tensor, bank: Tensor, row: Tensor, scale: Tensor, *,
    keys: Tensor | None, counters: Tensor, out: Tensor, lost: Tensor | None = None,
) -> None:  # fmt: skip
    """Quantise stretch j to the levels of the bank's row_j times scale_j, pack into `out`: as `quantize_levels`.

    bank: float32[rows, 2^bits, 2], levels that increase strictly and 1 / the gap above each; row: int64, one per
    stretch, where the bank is. A row that is not there makes its stretch decode to NaN.
    """
    check.flat("x", x, dtypes=_FLOAT)
    blocks = _check_bank(bank, row, scale, starts, x)
    check.flat("out", out, dtypes=(torch.uint8,), like=x, numel=blocks.packed)
    check.optional("lost", lost, dtypes=_FLOAT, like=x, numel=x.numel())
    if keys is not None:
        check.draws(keys, counters, starts, blocks.stretches, x)
    implementation(reference.quantize_bank, x.device, x.dtype)(
        x, starts, bank, row, scale, keys=keys, counters=counters, out=out, lost=lost
    )


def dequantize_bank_add(
    codes: Tensor, starts: Tensor, bank: Tensor, row: Tensor, scale: Tensor, weight: float, *, out: Tensor
) -> None:
    """out += weight * value, for codes made by `quantize_bank`."""
    check.flat("out", out, dtypes=_FLOAT)
    blocks = _check_bank(bank, row, scale, starts, out)
    check.flat("codes", codes, dtypes=(torch.uint8,), like=out, numel=blocks.packed)
    implementation(reference.dequantize_bank_add, out.device, out.dtype)(
        codes, starts, bank, row, scale, weight, out=out
    )


def _check_bank(bank: Tensor, row: Tensor, scale: Tensor, starts: Tensor, like: Tensor) -> check.BlockSizes:
    if bank.dim() != 3 or bank.shape[1] not in (2, 4, 8, 16, 32, 64, 128, 256) or bank.shape[2] != 2 or not len(bank):
        raise ValueError(f"bank must be [rows, 2, 4, ... 256 levels, 2], got {tuple(bank.shape)}")
    check.flat("bank", bank.view(-1), dtypes=_FLOAT, like=like)
    blocks = check.blocks(starts, 0, bits=bank.shape[1].bit_length() - 1, numel=like.numel())
    check.flat("row", row, dtypes=(torch.int64,), like=like, numel=blocks.count)
    check.flat("scale", scale, dtypes=_FLOAT, like=like, numel=blocks.count)
    return blocks
