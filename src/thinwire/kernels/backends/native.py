"""The compiled kernels (native/), for CPU memory. They trust their arguments: call them through thinwire.kernels.

Where the module cannot be loaded, `status` says why, `takes` takes nothing, and the reference does all.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from thinwire.kernels.backends import reference
from thinwire.kernels.backends.memory import or_empty
from thinwire.kernels.backends.reference.indices import index_bytes, low_bits
from thinwire.kernels.levels import Levels

ABI = 7  # what this package expects of the compiled module

_F32, _F16, _BF16 = torch.float32, torch.float16, torch.bfloat16
PER_THREAD = 1 << 20  # elements: to wake a thread for fewer costs more than it saves
MISS = 8  # what an element that may be missing from every cache counts for
# The casts that there are: by operation, then from which dtype to which.
_CASTS = {
    "scale_cast": {(_F32, _F32): "scale", (_F32, _F16): "scale_to_fp16", (_F32, _BF16): "scale_to_bf16"},
    "narrow": {(_F32, _F16): "narrow_to_fp16", (_F32, _BF16): "narrow_to_bf16"},
    "widen": {(_F16, _F32): "widen_from_fp16", (_BF16, _F32): "widen_from_bf16"},
    "cast_add": {(_F16, _F32): "add_from_fp16", (_BF16, _F32): "add_from_bf16"},
    "sum_halves": {(_F16,): "sum_fp16", (_BF16,): "sum_bf16"},
}


@cache
def _load() -> tuple[ModuleType | None, str]:
    try:
        module = importlib.import_module("thinwire.kernels._native")
    except ImportError as error:
        return None, f"references only: {error}"  # where nothing could be compiled, CMakeLists.txt left the reason
    if module.abi != ABI:
        return None, f"references only: the compiled kernels have ABI {module.abi}, expected {ABI}"
    return module, f"native kernels, {module.instruction_set()}"


def module() -> Any:
    """The compiled kernels, or None."""
    return _load()[0]


def status() -> str:
    """One line: which kernels run here, and why."""
    return _load()[1]


def takes(operation: str, dtypes: tuple[torch.dtype, ...]) -> bool:
    """Whether the operation, if there is one, does these dtypes: float32 throughout, but for the casts."""
    if module() is None:
        return False
    return dtypes in _CASTS[operation] if operation in _CASTS else set(dtypes) <= {torch.float32}


def all_finite(x: Tensor) -> bool:
    x = x.contiguous()
    return module().all_finite(x.data_ptr(), x.numel(), _threads(x))


def keep_(kept: Tensor, new: Tensor) -> None:
    module().keep(kept.data_ptr(), new.data_ptr(), kept.numel(), _threads(kept))


def block_statistics(
    x: Tensor, starts: Tensor, block: int, *,
    absmean: Tensor | None = None, absmax: Tensor | None = None, square: Tensor | None = None,
    owed: Tensor | None = None, total: Tensor | None = None,
) -> None:  # fmt: skip
    wanted = [out for out in (absmean, absmax, square) if out is not None]
    if wanted or owed is not None:
        module().block_statistics(
            x.data_ptr(), x.numel(), *_stretches(starts), block,
            _address(absmean), _address(absmax), _address(square), wanted[0].numel() if wanted else -1,
            _address(owed), _address(total), _threads(x),
        )  # fmt: skip


def scale_cast(x: Tensor, weight: float, out: Tensor, *, lost: Tensor | None = None, back: float = 1.0) -> None:
    if lost is None:
        _cast("scale_cast", x.dtype, out.dtype)(x.data_ptr(), weight, out.data_ptr(), x.numel(), _threads(x))
    elif out.dtype is _F32:  # nobody casts to what it was and asks what that lost
        reference.scale_cast(x, weight, out, lost=lost, back=back)
    else:
        losing = module().losing_to_fp16 if out.dtype is _F16 else module().losing_to_bf16
        losing(x.data_ptr(), weight, back, out.data_ptr(), lost.data_ptr(), x.numel(), _threads(x))


def narrow(x: Tensor, weight: float, dtype: torch.dtype) -> Tensor:
    _cast("narrow", x.dtype, dtype)(x.data_ptr(), weight, x.numel(), _threads(x))
    return x.view(dtype)[: x.numel()]


def widen(x: Tensor, out: Tensor) -> None:
    _cast("widen", x.dtype, out.dtype)(out.data_ptr(), out.numel(), _threads(out))


def cast_add(x: Tensor, weight: float, out: Tensor) -> None:
    _cast("cast_add", x.dtype, out.dtype)(x.data_ptr(), weight, out.data_ptr(), x.numel(), _threads(x))


def sum_halves(x: Tensor, count: int, out: Tensor) -> None:
    _cast("sum_halves", x.dtype)(x.data_ptr(), count, out.numel(), out.data_ptr(), _threads(x))


def _cast(operation: str, *dtypes: torch.dtype) -> Any:
    return getattr(module(), _CASTS[operation][dtypes])


def hadamard_(x: Tensor, starts: Tensor, block: int, *, keys: Tensor, counters: Tensor, inverse: bool = False) -> None:
    module().hadamard(
        x.data_ptr(), x.numel(), starts.data_ptr(), starts.numel() - 1, block, keys.data_ptr(), counters.data_ptr(),
        inverse, _threads(x),
    )  # fmt: skip


def rotate_round(
    x: Tensor, starts: Tensor, block: int, step: Tensor, offset: float, low: int, high: int, *,
    signs: Tensor, keys: Tensor, counters: Tensor, out: Tensor, lost: Tensor | None = None,
) -> None:  # fmt: skip
    module().rotate_round(
        x.data_ptr(), x.numel(), *_stretches(starts), block, step.data_ptr(), step.numel(), offset, low, high,
        signs.data_ptr(), keys.data_ptr(), counters.data_ptr(), out.element_size(), out.data_ptr(), out.numel(),
        _address(lost), _threads(x),
    )  # fmt: skip


def unrotate_sum(
    total: Tensor, starts: Tensor, block: int, scale: Tensor, offset: float, *,
    signs: Tensor, counters: Tensor, out: Tensor,
) -> None:  # fmt: skip
    module().unrotate_sum(
        total.data_ptr(), total.numel(), total.element_size(), *_stretches(starts), block, scale.data_ptr(),
        scale.numel(), offset, signs.data_ptr(), counters.data_ptr(), out.data_ptr(), out.numel(), _threads(out),
    )  # fmt: skip


def rotate_quantize(
    x: Tensor, starts: Tensor, block: int, levels: Levels, *,
    signs: Tensor, counters: Tensor, scale: Tensor, out: Tensor, lost: Tensor | None = None,
) -> None:  # fmt: skip
    module().rotate_quantize(
        x.data_ptr(), x.numel(), *_stretches(starts), block, levels.bits, _table(levels.table), _table(levels.next),
        _table(levels.interval), _table(levels.cell), levels.cells, levels.crowd, levels.cells_per_unit,
        signs.data_ptr(), counters.data_ptr(), scale.data_ptr(), scale.numel(), out.data_ptr(), out.numel(),
        _address(lost), _threads(x),
    )  # fmt: skip


def unrotate_levels_sum(
    codes: Sequence[Tensor], starts: Tensor, block: int, levels: Levels, scale: Sequence[Tensor], weight: float, *,
    signs: Sequence[Tensor], counters: Tensor, out: Tensor, add: bool = False,
) -> None:  # fmt: skip
    module().unrotate_levels_sum(
        *_all(codes), *_stretches(starts), block, levels.bits, _table(levels.table), *_all(scale), weight,
        _all(signs)[0], counters.data_ptr(), add, out.data_ptr(), out.numel(), _threads(out),
    )  # fmt: skip


def times_rows(
    matrix: Tensor, basis: Tensor, out: Tensor, *, owed: Tensor | None = None, total: Tensor | None = None
) -> None:
    module().with_rows(
        matrix.data_ptr(), *matrix.shape, basis.data_ptr(), len(basis), out.data_ptr(), _address(owed), _address(total),
        _threads(matrix),
    )  # fmt: skip


def times_columns(matrix: Tensor, basis: Tensor, out: Tensor) -> None:
    module().with_columns(
        matrix.data_ptr(), *matrix.shape, basis.data_ptr(), len(basis), out.data_ptr(), _threads(matrix)
    )


def outer_product(
    p: Tensor, q: Tensor, out: Tensor, *, matrix: Tensor | None = None, lost: Tensor | None = None
) -> None:
    module().outer(
        p.data_ptr(), q.data_ptr(), len(p), *out.shape, out.data_ptr(), _address(matrix), _address(lost), _threads(out)
    )


def encode_indices(indices: Tensor, n: int, *, out: Tensor | None = None) -> Tensor:
    k = indices.numel()
    out = or_empty(out, index_bytes(k, n), torch.uint8, like=indices)
    if k:
        module().encode_indices(indices.data_ptr(), k, n, low_bits(k, n), out.data_ptr())
    return out


def decode_indices(data: Tensor, k: int, n: int, *, out: Tensor | None = None) -> Tensor:
    out = or_empty(out, k, torch.int32, like=data)
    if k:
        module().decode_indices(data.data_ptr(), k, n, low_bits(k, n), out.data_ptr())
    return out


def draw_places(starts: Tensor, few: Tensor, keys: Tensor, out: Tensor) -> None:
    module().draw_places(*_stretches(starts), few.data_ptr(), keys.data_ptr(), out.data_ptr())


def pack_ints(values: Tensor, width: int, out: Tensor) -> None:
    module().pack_ints(
        values.data_ptr(), values.numel(), values.element_size(), width, out.data_ptr(), out.numel(), _threads(values)
    )


def add_packed(data: Tensor, width: int, out: Tensor) -> None:
    module().add_packed(*_packed(data, width, out))


def add_packed_saturating(data: Tensor, width: int, out: Tensor) -> None:
    module().add_packed_saturating(*_packed(data, width, out))


def _packed(data: Tensor, width: int, out: Tensor) -> tuple[int, ...]:
    return data.data_ptr(), data.numel(), width, out.data_ptr(), out.numel(), out.element_size(), _threads(out)


def quantize_uniform(
    x: Tensor, starts: Tensor, block: int, bits: int, radius: Tensor, *,
    keys: Tensor | None, counters: Tensor, out: Tensor, lost: Tensor | None = None,
) -> None:  # fmt: skip
    module().quantize_uniform(
        x.data_ptr(), x.numel(), *_stretches(starts), block, bits, radius.data_ptr(), radius.numel(),
        _address(keys), counters.data_ptr(), out.data_ptr(), out.numel(), _address(lost), _threads(x),
    )  # fmt: skip


def dequantize_uniform_add(
    codes: Tensor, starts: Tensor, block: int, bits: int, radius: Tensor, weight: float, *, out: Tensor
) -> None:
    _dequantize_uniform([codes], starts, block, bits, [radius], weight, True, out)


def dequantize_uniform_sum(
    codes: Sequence[Tensor], starts: Tensor, block: int, bits: int, radius: Sequence[Tensor], weight: float, *,
    out: Tensor,
) -> bool:  # fmt: skip
    return _dequantize_uniform(codes, starts, block, bits, radius, weight, False, out)


def _dequantize_uniform(codes, starts, block, bits, radius, weight, add, out) -> bool:
    return module().dequantize_uniform(
        *_all(codes), *_stretches(starts), block, bits, *_all(radius), weight, add, out.data_ptr(),
        out.numel(), _threads(out),
    )  # fmt: skip


def quantize_levels(
    x: Tensor, starts: Tensor, block: int, levels: Levels, scale: Tensor, *,
    keys: Tensor | None, counters: Tensor, out: Tensor, lost: Tensor | None = None,
) -> None:  # fmt: skip
    module().quantize_levels(
        x.data_ptr(), x.numel(), *_stretches(starts), block, levels.bits, _table(levels.table),
        _table(levels.next), _table(levels.interval), _table(levels.cell), levels.cells, levels.crowd,
        levels.cells_per_unit, scale.data_ptr(), scale.numel(),
        _address(keys), counters.data_ptr(), out.data_ptr(), out.numel(), _address(lost), _threads(x),
    )  # fmt: skip


def quantize_laplace(
    x: Tensor, starts: Tensor, block: int, levels: Levels, threshold: float, *,
    moments: bool, radius: Tensor, keys: Tensor | None, counters: Tensor, out: Tensor,
    owed: Tensor | None = None, lost: Tensor | None = None,
) -> None:  # fmt: skip
    module().quantize_laplace(
        x.data_ptr(), x.numel(), *_stretches(starts), block, levels.bits, _table(levels.table),
        _table(levels.next), _table(levels.interval), _table(levels.cell), levels.cells, levels.crowd,
        levels.cells_per_unit, threshold, moments, _address(owed), radius.data_ptr(), radius.numel(),
        _address(keys), counters.data_ptr(), out.data_ptr(), out.numel(), _address(lost), _threads(x),
    )  # fmt: skip


def dequantize_levels_add(
    codes: Tensor, starts: Tensor, block: int, levels: Levels, scale: Tensor, weight: float, *, out: Tensor
) -> None:
    _dequantize_levels([codes], starts, block, levels, [scale], weight, True, out)


def dequantize_levels_sum(
    codes: Sequence[Tensor], starts: Tensor, block: int, levels: Levels, scale: Sequence[Tensor], weight: float, *,
    out: Tensor,
) -> bool:  # fmt: skip
    return _dequantize_levels(codes, starts, block, levels, scale, weight, False, out)


def _dequantize_levels(codes, starts, block, levels, scale, weight, add, out) -> bool:
    return module().dequantize_levels(
        *_all(codes), *_stretches(starts), block, levels.bits, _table(levels.table), *_all(scale),
        weight, add, out.data_ptr(), out.numel(), _threads(out),
    )  # fmt: skip


def top_k(
    x: Tensor, k: int, weight: Tensor | None = None, *, starts: Tensor | None = None,
    out: Tensor | None = None, owed: Tensor | None = None, total: Tensor | None = None,
) -> Tensor:  # fmt: skip
    out = or_empty(out, k, torch.int32, like=x)
    module().top_k(
        x.data_ptr(), _address(owed), _address(total), _address(weight), x.numel(),
        *(_stretches(starts) if starts is not None else (0, -1, 1)), k, out.data_ptr(), _threads(x),
    )  # fmt: skip
    return out


def gather(x: Tensor, indices: Tensor, *, chunk: int = 1, out: Tensor | None = None) -> Tensor:
    out = or_empty(out, indices.numel() * chunk, x.dtype, like=x)
    module().gather(*_chunks(x, indices, chunk), out.data_ptr(), _threads(out, MISS))
    return out


def take_(x: Tensor, indices: Tensor, *, chunk: int = 1, out: Tensor | None = None) -> Tensor:
    out = or_empty(out, indices.numel() * chunk, x.dtype, like=x)
    module().take(*_chunks(x, indices, chunk), out.data_ptr(), _threads(out, MISS))
    return out


def put_(x: Tensor, indices: Tensor, values: Tensor, *, chunk: int = 1) -> None:
    module().put(*_chunks(x, indices, chunk), values.data_ptr(), _threads(values, MISS))


def scatter_add(values: Tensor, indices: Tensor, weight: float, out: Tensor, *, chunk: int = 1) -> None:
    module().scatter_add(*_chunks(out, indices, chunk), values.data_ptr(), weight, _threads(values, MISS))


def _chunks(x: Tensor, indices: Tensor, chunk: int) -> tuple[int, int, int, int, int]:
    return x.data_ptr(), x.numel(), indices.data_ptr(), indices.numel(), chunk


def _stretches(starts: Tensor) -> tuple[int, int, int]:
    """Where the bounds of stretches lie, how many stretches there are, and how far apart their bounds are."""
    return (starts.data_ptr(), starts.numel() - 1, 1) if starts.dim() == 1 else (starts.data_ptr(), len(starts), 2)


def _all(tensors: Sequence[Tensor]) -> tuple[list[int], int]:
    """Where tensors of one length lie, and that length."""
    return [tensor.data_ptr() for tensor in tensors], tensors[0].numel() if tensors else 0


def _address(tensor: Tensor | None) -> int:
    """Where the tensor's memory begins; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def _table(tensor: Tensor) -> int:
    """Where a table of floats begins. What is anything else is refused: it would be read as floats all the same."""
    if tensor.dtype is not torch.float32 or tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(f"levels must be float32, contiguous, in CPU memory; got {tensor.dtype} on {tensor.device}")
    return tensor.data_ptr()


def _threads(over: Tensor, weight: int = 1) -> int:
    """How many threads a kernel uses for what it goes over: as many as PyTorch, where each has enough to do."""
    return min(torch.get_num_threads(), 1 + over.numel() * weight // PER_THREAD)
