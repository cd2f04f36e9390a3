"""Codes of any width at any bit position of a byte string, little-endian."""

from __future__ import annotations

import torch
from torch import Tensor


def put_bits(codes: Tensor, width: int, position: Tensor, nbytes: int) -> Tensor:
    """uint8[nbytes]: code i (int64, >= 0, under 2^width) in the bits from position[i] on; all others are 0."""
    out = torch.zeros(nbytes + 5, dtype=torch.int32, device=codes.device)
    shifted = codes << (position & 7)
    for byte in range((width + 14) // 8):
        out.index_add_(0, (position >> 3) + byte, ((shifted >> (8 * byte)) & 0xFF).to(torch.int32))
    return out[:nbytes].to(torch.uint8)


def get_bits(data: Tensor, width: int, position: Tensor) -> Tensor:
    """int64: the codes that `put_bits` put there."""
    padded = torch.nn.functional.pad(data, (0, 5)).to(torch.int64)
    word = torch.zeros_like(position)
    for byte in range((width + 14) // 8):
        word |= padded[(position >> 3) + byte] << (8 * byte)
    return (word >> (position & 7)) & ((1 << width) - 1)
