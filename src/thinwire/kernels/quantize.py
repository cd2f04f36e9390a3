"""Quantise and pack, unpack and add. Meaning: `reference.quantize`."""

from __future__ import annotations

from thinwire.kernels.reference.quantize import dequantize_uniform, dequantize_uniform_add, quantize_uniform

__all__ = ["dequantize_uniform", "dequantize_uniform_add", "packed_bytes", "quantize_uniform"]


def packed_bytes(starts, block: int, bits: int) -> int:
    """The size of the packed codes of all blocks."""
    ends = starts.tolist()
    total = 0
    for a, b in zip(ends, ends[1:], strict=False):
        full, rest = divmod(b - a, block) if block else (0, b - a)
        total += full * (-(-block * bits // 8)) + -(-rest * bits // 8)
    return total
