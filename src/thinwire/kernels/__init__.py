"""The operations that touch every entry. `reference` says what each means; native code does the same, fast."""

from thinwire.kernels.cast import cast_add, scale_cast
from thinwire.kernels.quantize import dequantize_uniform, dequantize_uniform_add, packed_bytes, quantize_uniform
from thinwire.kernels.statistics import all_finite, block_absmax, block_statistics

__all__ = [
    "all_finite",
    "block_absmax",
    "block_statistics",
    "cast_add",
    "dequantize_uniform",
    "dequantize_uniform_add",
    "packed_bytes",
    "quantize_uniform",
    "scale_cast",
]
