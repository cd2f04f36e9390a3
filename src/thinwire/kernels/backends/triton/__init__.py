"""The operations in Triton, for CUDA and ROCm devices; imported when the first tensor there asks for one.

To the bit the references' results, but for sums that those take in float64, too. Arithmetic is in float32, nothing is
fused, divisions and roots are rounded to the nearest. No operation but `all_finite` waits for the device.
"""

from __future__ import annotations

import torch
import triton

if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):  # the oldest that the kernels were tried with
    raise ImportError(f"the kernels need triton 3.9 or newer, found {triton.__version__}")

from thinwire.kernels.backends.triton.blockstats import all_finite, block_statistics, keep_finite_
from thinwire.kernels.backends.triton.cast import cast_add, narrow, scale_cast, widen
from thinwire.kernels.backends.triton.draws import draw_places, random_u32
from thinwire.kernels.backends.triton.hadamard import hadamard_
from thinwire.kernels.backends.triton.indices import decode_indices, encode_indices
from thinwire.kernels.backends.triton.integers import add_packed, add_packed_saturating, pack_ints
from thinwire.kernels.backends.triton.products import outer_product, times_columns, times_rows
from thinwire.kernels.backends.triton.quantize import (
    dequantize_bank_add,
    dequantize_levels_add,
    dequantize_levels_sum,
    dequantize_uniform_add,
    dequantize_uniform_sum,
    quantize_bank,
    quantize_levels,
    quantize_uniform,
)
from thinwire.kernels.backends.triton.rotated import (
    rotate_quantize,
    rotate_round,
    unrotate_levels_sum,
    unrotate_sum,
)
from thinwire.kernels.backends.triton.select import top_k
from thinwire.kernels.backends.triton.sparse import gather, put_, scatter_add, take_

__all__ = [
    "add_packed", "add_packed_saturating", "all_finite", "block_statistics", "cast_add", "decode_indices",
    "dequantize_bank_add", "dequantize_levels_add", "dequantize_levels_sum", "dequantize_uniform_add",
    "dequantize_uniform_sum", "draw_places", "encode_indices", "gather", "hadamard_", "keep_finite_", "narrow",
    "outer_product", "pack_ints", "put_", "quantize_bank", "quantize_levels", "quantize_uniform", "random_u32",
    "rotate_quantize", "rotate_round", "scale_cast", "scatter_add", "take_", "takes", "times_columns", "times_rows",
    "top_k", "unrotate_levels_sum", "unrotate_sum", "widen",
]  # fmt: skip

_FLOATS = {torch.float32, torch.float16, torch.bfloat16}
_ANY = {"all_finite", "cast_add", "gather", "keep_finite_", "narrow", "put_", "scale_cast", "take_", "widen"}


def takes(operation: str, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether the operation does these dtypes: float32 throughout, but for casts and moves, which do halves, too."""
    return set(dtypes) <= (_FLOATS if operation in _ANY else {torch.float32})
