"""The operations that touch every entry. `reference` says what each means; native code does the same, fast."""

from thinwire.kernels.reference import (
    all_finite,
    block_absmax,
    dequantize_uniform_add,
    packed_bytes,
    quantize_uniform,
    scale_cast,
)

__all__ = [
    "all_finite",
    "block_absmax",
    "dequantize_uniform_add",
    "packed_bytes",
    "quantize_uniform",
    "scale_cast",
]
