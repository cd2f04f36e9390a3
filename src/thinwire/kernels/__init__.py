"""The operations that touch every element: checked here, done by one of the `backends`."""

from thinwire.kernels.backends import native, reference
from thinwire.kernels.backends.memory import carried, outlive
from thinwire.kernels.bank import dequantize_bank_add, quantize_bank
from thinwire.kernels.blockstats import (
    all_finite,
    at_hand,
    block_absmax,
    block_statistics,
    doubt,
    keep_,
    keep_finite_,
    seen_nonfinite,
    spoil_,
)
from thinwire.kernels.cast import cast_add, narrow, scale_cast, sum_halves, widen
from thinwire.kernels.draws import draw_places, random_u32
from thinwire.kernels.hadamard import hadamard_
from thinwire.kernels.indices import decode_indices, encode_indices, index_bytes
from thinwire.kernels.integers import add_packed, add_packed_saturating, pack_ints, packed_int_bytes
from thinwire.kernels.levels import Levels
from thinwire.kernels.products import outer_product, times_columns, times_rows
from thinwire.kernels.quantize import (
    LONGEST,
    dequantize_levels_add,
    dequantize_levels_sum,
    dequantize_uniform_add,
    dequantize_uniform_sum,
    packed_bytes,
    quantize_laplace,
    quantize_levels,
    quantize_uniform,
)
from thinwire.kernels.rotated import padded_numel, rotate_quantize, rotate_round, unrotate_levels_sum, unrotate_sum
from thinwire.kernels.sparse import gather, put_, scatter_add, take_, top_k
from thinwire.kernels.warm import Shapes, warm_up

__all__ = [
    "LONGEST", "Levels", "Shapes", "add_packed", "add_packed_saturating", "all_finite", "at_hand", "block_absmax",
    "block_statistics", "carried", "cast_add", "decode_indices", "dequantize_bank_add", "dequantize_levels_add",
    "dequantize_levels_sum", "dequantize_uniform_add", "dequantize_uniform_sum", "doubt", "draw_places",
    "encode_indices", "gather", "hadamard_", "index_bytes", "keep_", "keep_finite_", "narrow", "native",
    "outer_product", "outlive", "pack_ints", "packed_bytes", "packed_int_bytes", "padded_numel", "put_",
    "quantize_bank", "quantize_laplace", "quantize_levels", "quantize_uniform", "random_u32", "reference",
    "rotate_quantize", "rotate_round", "scale_cast", "scatter_add", "seen_nonfinite", "spoil_", "sum_halves", "take_",
    "times_columns", "times_rows", "top_k", "unrotate_levels_sum", "unrotate_sum", "warm_up", "widen",
]  # fmt: skip
