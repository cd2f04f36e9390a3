"""Kernels compiled before the first step: one call of every operation, on small tensors of a device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels import check
from thinwire.kernels.levels import Levels

Calls = dict[str, Callable[[], object]]


@dataclass(frozen=True)
class Shapes:
    """What a scheme's kernels are compiled for: every other number may change from call to call."""

    block: int = 1024
    bits: int = 4
    rotated: int = 1024  # elements of a block that is rotated
    width: int = 8  # bits of packed integers
    rank: int = 4
    chunk: int = 64
    numel: int = 3000


USUAL = Shapes()
LONGER = 4096  # elements that some program holds


def warm_up(device: torch.device, shapes: Iterable[Shapes] = (USUAL,), *, operations: Iterable[str] = ()) -> None:
    """Compile what these operations (all, where none are named) need on a device, for such shapes.

    Call it before the first step, which otherwise waits for the compiler. In CPU memory nothing is compiled.
    """
    named = set(operations)
    if device.type != "cpu":
        for each in shapes:
            for name, call in calls(device, each).items():
                if not named or name.split(",")[0] in named:
                    call()


def calls(device: torch.device, shapes: Shapes = USUAL) -> Calls:
    """{operation, and what sets it apart: a call of it}, through the faces."""
    families = (_statistics, _quantizers, _integers, _casts, _moves, _rotations, _longer_rotations, _products)
    return {name: call for family in families for name, call in family(device, shapes).items()}


def _floats(device: torch.device, numel: int) -> Tensor:
    return torch.ones(numel, dtype=torch.float32, device=device)


def _bytes(device: torch.device, numel: int) -> Tensor:
    return torch.zeros(numel, dtype=torch.uint8, device=device)


def _integers_in_cpu(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int64, device="cpu")


def _statistics(device: torch.device, shapes: Shapes) -> Calls:
    n, x = shapes.numel, _floats(device, shapes.numel)
    starts = _integers_in_cpu(0, n)

    def statistics(block: int, owed: bool) -> object:
        count = check.blocks(starts, block).count
        outs = {name: _floats(device, count) for name in ("absmean", "absmax", "square")}
        kernels.block_statistics(x, starts, block, **outs, owed=x if owed else None, total=x if owed else None)
        return [kernels.block_statistics(x, starts, block, **{name: out}) for name, out in outs.items()]

    return {
        "all_finite": lambda: kernels.all_finite(x),
        "keep_finite_": lambda: kernels.keep_finite_(x, x, x),
        "block_statistics": lambda: statistics(shapes.block, False),
        "block_statistics, owed": lambda: statistics(shapes.block, True),
        "block_statistics, whole tensors": lambda: statistics(0, False),
        "block_statistics, chunks": lambda: statistics(shapes.chunk, False),
    }


def _quantizers(device: torch.device, shapes: Shapes) -> Calls:
    n, block, bits = shapes.numel, shapes.block, shapes.bits
    x, starts, one = _floats(device, n), _integers_in_cpu(0, n), _integers_in_cpu(0)
    codes = _bytes(device, kernels.packed_bytes(starts, block, bits))
    ranges = _floats(device, check.blocks(starts, block).count)
    levels = Levels(torch.arange(1 << bits, dtype=torch.float32, device="cpu"))

    def both(encode, how, keys, lost) -> object:
        return encode(x, starts, block, how, ranges, keys=keys, counters=one, out=codes, lost=lost)

    named = {"uniform": bits, "levels": levels}
    calls: Calls = {}
    for name, how in named.items():
        encode, add = getattr(kernels, f"quantize_{name}"), getattr(kernels, f"dequantize_{name}_add")
        total = getattr(kernels, f"dequantize_{name}_sum")
        calls |= {
            f"quantize_{name}": lambda e=encode, h=how: both(e, h, one, None),
            f"quantize_{name}, lost": lambda e=encode, h=how: both(e, h, one, x),
            f"quantize_{name}, nearest": lambda e=encode, h=how: both(e, h, None, None),
            f"quantize_{name}, nearest, lost": lambda e=encode, h=how: both(e, h, None, x),
            f"dequantize_{name}_add": lambda a=add, h=how: a(codes, starts, block, h, ranges, 0.5, out=x),
            f"dequantize_{name}_sum": lambda t=total, h=how: t(
                [codes, codes], starts, block, h, [ranges, ranges], 0.5, out=x
            ),
        }
    return calls | _bank(device, shapes) | _draws(device, shapes)


def _draws(device: torch.device, shapes: Shapes) -> Calls:
    counters = torch.zeros(shapes.numel, dtype=torch.int64, device=device)
    places = torch.zeros(max(1, shapes.numel // 100), dtype=torch.int32, device=device)
    stretch, few, key = (_integers_in_cpu(*each) for each in ((0, shapes.numel), (0, places.numel()), (7,)))
    return {
        "random_u32": lambda: kernels.random_u32(7, counters),
        "draw_places": lambda: kernels.draw_places(stretch, few, key, places),
    }


def _bank(device: torch.device, shapes: Shapes) -> Calls:
    x, starts, one = _floats(device, shapes.numel), _integers_in_cpu(0, shapes.numel), _integers_in_cpu(0)
    codes = _bytes(device, kernels.packed_bytes(starts, 0, shapes.bits))
    bank = torch.ones(3, 1 << shapes.bits, 2, dtype=torch.float32, device=device)
    how = starts, bank, torch.zeros(1, dtype=torch.int64, device=device), _floats(device, 1)

    def encode(lost: Tensor | None) -> None:
        kernels.quantize_bank(x, *how, keys=one, counters=one, out=codes, lost=lost)

    return {
        "quantize_bank": lambda: encode(None),
        "quantize_bank, lost": lambda: encode(x),
        "dequantize_bank_add": lambda: kernels.dequantize_bank_add(codes, *how, 0.5, out=x),
    }


def _integers(device: torch.device, shapes: Shapes) -> Calls:
    dtype = torch.int8 if shapes.width <= 8 else torch.int16 if shapes.width <= 16 else torch.int32
    values = torch.zeros(shapes.numel, dtype=dtype, device=device)
    data, width = _bytes(device, kernels.packed_int_bytes(shapes.numel, shapes.width)), shapes.width
    return {
        "pack_ints": lambda: kernels.pack_ints(values, width, data),
        "add_packed": lambda: kernels.add_packed(data, width, values),
        "add_packed_saturating": lambda: kernels.add_packed_saturating(data, width, values),
    }


def _casts(device: torch.device, shapes: Shapes) -> Calls:
    x, calls = _floats(device, shapes.numel), {}
    for name, dtype in {"fp16": torch.float16, "bf16": torch.bfloat16}.items():
        halves = torch.zeros(shapes.numel, dtype=dtype, device=device)
        calls |= {
            f"scale_cast, {name}": lambda h=halves: kernels.scale_cast(x, 0.5, h),
            f"cast_add, {name}": lambda h=halves: kernels.cast_add(h, 0.5, x),
            f"narrow, {name}": lambda d=dtype: kernels.narrow(x.clone(), 0.5, d),
            f"widen, {name}": lambda d=dtype: kernels.widen(x.view(d)[: x.numel()], x),
        }
    return calls


def _moves(device: torch.device, shapes: Shapes) -> Calls:
    n, x = shapes.numel, _floats(device, shapes.numel)
    k, values = max(1, n // 100), _floats(device, n)
    places = torch.arange(k, dtype=torch.int32, device=device)
    chunks = torch.arange(max(1, k // shapes.chunk), dtype=torch.int32, device=device)
    data = _bytes(device, kernels.index_bytes(k, n))
    some, chunk = values[: chunks.numel() * shapes.chunk], shapes.chunk
    return {
        "top_k": lambda: kernels.top_k(x, k, out=places.clone()),
        "top_k, weighted": lambda: kernels.top_k(x, k, x, out=places.clone()),
        "gather": lambda: kernels.gather(x, places, out=values[:k]),
        "take_": lambda: kernels.take_(x, chunks, chunk=chunk, out=some),
        "put_": lambda: kernels.put_(x, places, values[:k]),
        "scatter_add": lambda: kernels.scatter_add(values[:k], places, 0.5, x),
        "encode_indices": lambda: kernels.encode_indices(places, n, out=data),
        "decode_indices": lambda: kernels.decode_indices(data, k, n, out=places),
    }


def _rotations(device: torch.device, shapes: Shapes) -> Calls:
    n, block, bits = shapes.numel, shapes.rotated, shapes.bits
    x, starts, key = _floats(device, n), _integers_in_cpu(0, n), _integers_in_cpu(0)
    padded = kernels.padded_numel(starts, block)
    ranges = _floats(device, check.blocks(starts, block).count)
    integers, codes = torch.zeros(padded, dtype=torch.int8, device=device), _bytes(device, padded * bits // 8)
    levels = Levels(torch.arange(1 << bits, dtype=torch.float32, device="cpu"))
    how = {"signs": key, "counters": key}

    def rounded(lost: Tensor | None) -> None:
        kernels.rotate_round(x, starts, block, ranges, 0.5, -8, 7, **how, keys=key, out=integers, lost=lost)

    def quantized(lost: Tensor | None) -> None:
        kernels.rotate_quantize(x, starts, block, levels, **how, scale=ranges, out=codes, lost=lost)

    def estimated(add: bool) -> None:
        several = ([codes, codes], starts, block, levels, [ranges, ranges], 0.5)
        kernels.unrotate_levels_sum(*several, signs=[key, key], counters=key, out=x, add=add)

    return {
        "hadamard_": lambda: kernels.hadamard_(x, starts, block, keys=key, counters=key),
        "hadamard_, back": lambda: kernels.hadamard_(x, starts, block, keys=key, counters=key, inverse=True),
        "rotate_round": lambda: rounded(None),
        "rotate_round, lost": lambda: rounded(x),
        "unrotate_sum": lambda: kernels.unrotate_sum(integers, starts, block, ranges, 0.5, **how, out=x),
        "rotate_quantize": lambda: quantized(None),
        "rotate_quantize, lost": lambda: quantized(x),
        "unrotate_levels_sum": lambda: estimated(False),
        "unrotate_levels_sum, add": lambda: estimated(True),
    }


def _longer_rotations(device: torch.device, shapes: Shapes) -> Calls:
    """Of blocks that are longer than any program holds, whatever the shapes say."""
    rotated = _rotations(device, replace(shapes, rotated=2 * LONGER, numel=max(LONGER, shapes.numel) + 1))
    return {f"{name}, long": call for name, call in rotated.items()}


def _products(device: torch.device, shapes: Shapes) -> Calls:
    rows, cols = 50, shapes.numel // 50
    matrix = _floats(device, rows * cols).view(rows, cols)
    left, right = (_floats(device, shapes.rank * size).view(shapes.rank, size) for size in (rows, cols))
    return {
        "times_rows": lambda: kernels.times_rows(matrix, right, left),
        "times_columns": lambda: kernels.times_columns(matrix, left, right),
        "outer_product": lambda: kernels.outer_product(left, right, matrix),
        "outer_product, lost": lambda: kernels.outer_product(left, right, matrix, matrix=matrix, lost=matrix),
    }
