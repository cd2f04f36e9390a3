"""What every kernel means, in plain PyTorch. Native and Triton kernels equal these to the bit.

Blocks: a buffer `x` holds S stretches, `starts` (int64[S + 1], in CPU memory) says where each begins; or, where there
are gaps between them that are not looked at, where each begins and ends (int64[S, 2]). Each stretch is cut into blocks
of `block` elements (the last may be shorter; block = 0 means the whole stretch is one block). Per-block arrays are in
order. Codes are packed little-endian, `bits` bits each, and every block begins on a whole byte.

Randomness: the draw of an element is a function of its stretch's key and of its counter, which is
`counters[stretch]` plus the element's place in the stretch.
"""

from thinwire.kernels.backends.reference.bank import dequantize_bank_add, quantize_bank
from thinwire.kernels.backends.reference.blockstats import all_finite, block_statistics, keep_, keep_finite_
from thinwire.kernels.backends.reference.cast import cast_add, narrow, scale_cast, sum_halves, widen
from thinwire.kernels.backends.reference.draws import draw_places, random_u32
from thinwire.kernels.backends.reference.hadamard import hadamard_
from thinwire.kernels.backends.reference.indices import decode_indices, encode_indices, index_bytes
from thinwire.kernels.backends.reference.integers import add_packed, add_packed_saturating, pack_ints
from thinwire.kernels.backends.reference.laplace import quantize_laplace
from thinwire.kernels.backends.reference.products import outer_product, times_columns, times_rows
from thinwire.kernels.backends.reference.quantize import (
    dequantize_levels_add,
    dequantize_levels_sum,
    dequantize_uniform_add,
    dequantize_uniform_sum,
    quantize_levels,
    quantize_uniform,
)
from thinwire.kernels.backends.reference.rotated import (
    rotate_quantize,
    rotate_round,
    unrotate_levels_sum,
    unrotate_sum,
)
from thinwire.kernels.backends.reference.sparse import gather, put_, scatter_add, take_, top_k

__all__ = [
    "add_packed", "add_packed_saturating", "all_finite", "block_statistics", "cast_add", "decode_indices",
    "dequantize_bank_add", "dequantize_levels_add", "dequantize_levels_sum", "dequantize_uniform_add",
    "dequantize_uniform_sum", "draw_places", "encode_indices", "gather", "hadamard_", "index_bytes", "keep_",
    "keep_finite_", "narrow", "outer_product", "pack_ints", "put_", "quantize_bank", "quantize_laplace",
    "quantize_levels", "quantize_uniform", "random_u32", "rotate_quantize", "rotate_round", "scale_cast",
    "scatter_add", "sum_halves", "take_", "times_columns", "times_rows", "top_k", "unrotate_levels_sum",
    "unrotate_sum", "widen",
]  # fmt: skip
