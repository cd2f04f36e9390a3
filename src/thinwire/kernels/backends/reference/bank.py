"""Quantisation of every stretch to a table of its own, out of a bank of tables that are where the numbers are.

As `quantize_levels` with block = 0, to the bit; but which table a stretch has is said by a number that nobody on the
host need know: `row`, on the device. A row that the bank does not have makes its stretch decode to NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.backends.reference.bits import get_bits, put_bits
from thinwire.kernels.backends.reference.blocks import Blocks
from thinwire.kernels.backends.reference.draws import stretch_draws
from thinwire.kernels.backends.reference.quantize import effective


def quantize_bank(
    x: Tensor, starts: Tensor, bank: Tensor, row: Tensor, scale: Tensor, *,
    keys: Tensor | None, counters: Tensor, out: Tensor, lost: Tensor | None = None,
) -> None:  # fmt: skip
    """Quantise to the values bank[row_j, c, 0] * scale_j per stretch; bank[..., 1] is 1 / the gap above each level.

    The rest as in `quantize_levels`. Stretches without a finite scale above 0, or without a row, get codes 0.
    """
    blocks, bits = Blocks.of(starts, 0, x.device), bank.shape[1].bit_length() - 1
    x = blocks.take(x)
    number, (own, r) = blocks.of_element, _chosen(bank, row, scale)
    inverse = torch.where(r > 0, 1.0 / r, 0.0)[number]
    y, own = x * inverse, own[number]
    below = _below(y, bank, own, bits)
    share = (y - bank[own, below, 0]) * bank[own, below, 1]
    codes = torch.where(inverse > 0, below + (stretch_draws(blocks, keys, counters) < share), 0)
    if lost is not None:
        blocks.put(x - r[number] * bank[own, codes, 0], lost)
    out.copy_(put_bits(codes, bits, blocks.bit_positions(bits), out.numel()))


def dequantize_bank_add(
    codes: Tensor, starts: Tensor, bank: Tensor, row: Tensor, scale: Tensor, weight: float, *, out: Tensor
) -> None:
    """out += (weight * scale_j) * bank[row_j, c, 0], for codes c made by `quantize_bank`."""
    blocks, bits = Blocks.of(starts, 0, out.device), bank.shape[1].bit_length() - 1
    own, r = _chosen(bank, row, scale)
    c = get_bits(codes, bits, blocks.bit_positions(bits))
    blocks.add((weight * r)[blocks.of_element] * bank[own[blocks.of_element], c, 0], out)


def _chosen(bank: Tensor, row: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """For every stretch: a row that there is, and the scale as it counts: NaN where there is none."""
    there = (row >= 0) & (row < len(bank))
    return row.clamp(0, len(bank) - 1), torch.where(there, effective(scale), torch.nan)


def _below(y: Tensor, bank: Tensor, own: Tensor, bits: int) -> Tensor:
    """The interval of its own table that each y is in, by halving; the first for a NaN."""
    below, last = torch.zeros_like(own), (1 << bits) - 1
    for bit in reversed(range(bits)):
        probe = below + (1 << bit)
        level = bank[own, probe.clamp(max=last), 0]
        below = torch.where((probe < last) & (level <= y), probe, below)
    return below
