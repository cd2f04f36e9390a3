"""What `thinwire bench` measures. A case makes its tensors once and returns a call that does the work on them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import ModuleType

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.kernels import Levels, reference

Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One kernel. Both functions take a number of elements, and prepare the same work on fresh tensors."""

    name: str
    native: Callable[[int], Call]
    reference: Callable[[int], Call]
    target: float | None = None  # least share of memcpy, one thread, 25 M elements


def all_cases() -> list[Case]:
    """Every case, family by family."""
    return [
        *_statistics(),
        *_quantizers(),
        *_integers(),
        *_casts(),
        *_selections(),
        *_moves(),
        *_rotations(),
        *_products(),
    ]


BLOCK, CHUNK, BITS = 1024, 64, range(1, 9)


def _both(name: str, prepare: Callable[[ModuleType, int], Call], target: float | None = None) -> Case:
    """A case that is the same work for the kernel and for its reference."""
    return Case(name, partial(prepare, kernels), partial(prepare, reference), target)


def tnq_levels(bits: int) -> Tensor:
    """The levels of algorithms such as TNQ for Laplace data of scale 1: dense around 0, sparse outside."""
    s, k = (1 << bits) - 1, 3 * math.sqrt(6) / 2
    offset = 2 * torch.arange(s + 1, dtype=torch.float64) - s
    return (-3 * torch.sign(offset) * torch.log(1 - offset.abs() / (s + k))).to(torch.float32)


def _laplace(numel: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    u = torch.rand(numel, generator=generator) - 0.5
    return -torch.sign(u) * torch.log1p(-2 * u.abs().clamp(max=0.4999999))


def _statistics() -> list[Case]:
    def finite(module, numel):
        return partial(module.all_finite, _laplace(numel))

    def blocks(block, wanted, module, numel):
        x, starts = _laplace(numel), torch.tensor([0, numel])
        outs = {name: torch.zeros(-(-numel // block)) for name in wanted}
        return lambda: module.block_statistics(x, starts, block, **outs)

    everything = ("absmean", "absmax", "square")
    return [
        _both("all_finite", finite, 0.8),
        _both(f"mean, max, square / {BLOCK}", partial(blocks, BLOCK, everything), 0.8),
        _both(f"absmax / {BLOCK}", partial(blocks, BLOCK, ("absmax",)), 0.8),
        _both(f"chunk norms / {CHUNK}", partial(blocks, CHUNK, ("square",)), 0.8),
        _both(f"chunk norms / {2 * CHUNK}", partial(blocks, 2 * CHUNK, ("square",)), 0.8),
    ]


def _quantizers() -> list[Case]:
    def setting(numel, bits):
        starts = torch.tensor([0, numel])
        codes = torch.zeros(kernels.packed_bytes(starts, BLOCK, bits), dtype=torch.uint8)
        return _laplace(numel), starts, codes, torch.ones(-(-numel // BLOCK))

    def uniform(bits, stochastic, residual, module, numel):
        x, starts, codes, ones = setting(numel, bits)
        keys = torch.tensor([0x1234567890ABCDE]) if stochastic else None
        counters, radius = torch.zeros(1, dtype=torch.int64), 8 * ones
        lost = torch.zeros(numel) if residual else None
        return lambda: module.quantize_uniform(
            x, starts, BLOCK, bits, radius, keys=keys, counters=counters, out=codes, lost=lost
        )

    def uniform_add(bits, module, numel):
        out, starts, codes, ones = setting(numel, bits)
        return lambda: module.dequantize_uniform_add(codes, starts, BLOCK, bits, ones, 0.5, out=out)

    def levels(bits, residual, module, numel):
        x, starts, codes, ones = setting(numel, bits)
        table = Levels(tnq_levels(bits))
        keys, counters = torch.tensor([0x1234567890ABCDE]), torch.zeros(1, dtype=torch.int64)
        lost = torch.zeros(numel) if residual else None
        return lambda: module.quantize_levels(
            x, starts, BLOCK, table, ones, keys=keys, counters=counters, out=codes, lost=lost
        )

    def levels_add(bits, module, numel):
        out, starts, codes, ones = setting(numel, bits)
        table = Levels(tnq_levels(bits))
        return lambda: module.dequantize_levels_add(codes, starts, BLOCK, table, ones, 0.5, out=out)

    cases = [_both(f"uniform {b} bit, stochastic", partial(uniform, b, True, False), 0.5) for b in BITS]
    cases += [
        _both("uniform 4 bit, nearest", partial(uniform, 4, False, False), 0.5),
        _both("uniform 4 bit, stochastic, with residual", partial(uniform, 4, True, True)),
    ]
    cases += [_both(f"uniform {b} bit, unpack + add", partial(uniform_add, b), 0.5) for b in BITS]
    cases += [_both(f"TNQ {b} bit, stochastic", partial(levels, b, False), 0.35) for b in BITS]
    cases += [_both("TNQ 4 bit, stochastic, with residual", partial(levels, 4, True))]
    cases += [_both(f"TNQ {b} bit, unpack + add", partial(levels_add, b), 0.5) for b in (2, 4, 8)]
    return cases


def _integers() -> list[Case]:
    def setting(numel, width):
        generator = torch.Generator().manual_seed(0)
        limit = 1 << (width - 1)
        values = torch.randint(-limit, limit, (numel,), dtype=torch.int32, generator=generator)
        return values, torch.zeros(kernels.packed_int_bytes(numel, width), dtype=torch.uint8)

    def pack(width, module, numel):
        values, data = setting(numel, width)
        return lambda: module.pack_ints(values, width, data)

    def add(name, width, module, numel):
        out, data = setting(numel, width)
        return lambda: getattr(module, name)(data, width, out)

    cases = [_both(f"integers {w} bit, pack", partial(pack, w)) for w in (4, 8, 11)]
    cases += [_both(f"integers {w} bit, unpack + add", partial(add, "add_packed", w), 0.5) for w in (4, 8, 11)]
    saturating = partial(add, "add_packed_saturating")
    cases += [_both(f"integers {w} bit, saturating add", partial(saturating, w), 0.5) for w in (4, 8)]
    return cases


def _casts() -> list[Case]:
    def scale(dtype, module, numel):
        x, out = _laplace(numel), torch.zeros(numel, dtype=dtype)
        return lambda: module.scale_cast(x, 0.25, out)

    def add(dtype, module, numel):
        x, out = _laplace(numel).to(dtype), torch.zeros(numel)
        return lambda: module.cast_add(x, 0.25, out)

    def in_place(dtype, module, numel):
        x = _laplace(numel)
        return lambda: module.widen(module.narrow(x, 0.25, dtype), x)

    names = {torch.float16: "fp16", torch.bfloat16: "bf16"}
    return [
        _both(title.format(name), partial(prepare, dtype))
        for title, prepare in (
            ("scale + cast to {}", scale),
            ("cast from {} + add", add),
            ("cast to {} and back", in_place),
        )
        for dtype, name in names.items()
    ]


def _selections() -> list[Case]:
    """Top-k stands against `torch.topk` of the absolute values, which is what one would call instead."""

    def select(share, weighted, numel):
        x, out = _laplace(numel), torch.zeros(int(numel * share), dtype=torch.int32)
        weight = torch.rand(numel) if weighted else None
        return lambda: kernels.top_k(x, out.numel(), weight, out=out)

    def torch_topk(share, weighted, numel):
        x, weight = _laplace(numel), torch.rand(numel)
        return lambda: torch.topk((x * weight if weighted else x).abs(), int(numel * share))

    settings = [(0.01, False, 0.2), (0.001, False, 0.3), (0.01, True, None)]
    return [
        Case(
            f"top-k {share:.1%}" + ", weighted" * weighted,
            partial(select, share, weighted),
            partial(torch_topk, share, weighted),
            target,
        )
        for share, weighted, target in settings
    ]


def _moves() -> list[Case]:
    """Speeds are per element of the whole buffer, of which 1% (of chunks: 10%) moves."""

    def setting(chunk, numel):
        x = _laplace(numel)
        if chunk == 1:
            return x, kernels.top_k(x, numel // 100), torch.zeros(numel // 100)
        chosen = torch.randperm(numel // chunk)[: numel // chunk // 10].sort().values.to(torch.int32)
        return x, chosen, torch.zeros(chosen.numel() * chunk)

    def gather(name, chunk, module, numel):
        x, chosen, values = setting(chunk, numel)
        return lambda: getattr(module, name)(x, chosen, chunk=chunk, out=values)

    def scatter_add(chunk, module, numel):
        x, chosen, values = setting(chunk, numel)
        return lambda: module.scatter_add(values, chosen, 0.5, x, chunk=chunk)

    def encode(module, numel):
        _, chosen, _ = setting(1, numel)
        data = kernels.encode_indices(chosen, numel)
        return lambda: module.encode_indices(chosen, numel, out=data)

    def decode(module, numel):
        _, chosen, _ = setting(1, numel)
        data = kernels.encode_indices(chosen, numel)
        return lambda: module.decode_indices(data, chosen.numel(), numel, out=chosen)

    cases = [_both(f"{name.strip('_')} 1%", partial(gather, name, 1)) for name in ("gather", "take_")]
    cases += [_both(f"gather chunks / {CHUNK}", partial(gather, "gather", CHUNK))]
    cases += [_both("scatter + add 1%", partial(scatter_add, 1))]
    cases += [_both(f"scatter + add chunks / {CHUNK}", partial(scatter_add, CHUNK))]
    return [*cases, _both("indices 1%, encode", encode), _both("indices 1%, decode", decode)]


def _rotations() -> list[Case]:
    def rotate(block, inverse, module, numel):
        x, starts = _laplace(numel), torch.tensor([0, numel])
        keys, counters = torch.tensor([1 << 40]), torch.tensor([0])
        return lambda: module.hadamard_(x, starts, block, keys=keys, counters=counters, inverse=inverse)

    def rotate_round(block, residual, module, numel):
        x, starts, counters = _laplace(numel), torch.tensor([0, numel]), torch.tensor([0])
        out = torch.zeros(kernels.padded_numel(starts, block), dtype=torch.int8)
        step, lost = torch.full((-(-numel // block),), 0.3), torch.zeros(numel) if residual else None
        how = {"signs": torch.tensor([1 << 40]), "keys": torch.tensor([1 << 41]), "counters": counters}
        return lambda: module.rotate_round(x, starts, block, step, 0.5, -8, 7, **how, out=out, lost=lost)

    return [
        _both("rotate + round / 4096", partial(rotate_round, 4096, False)),
        _both("rotate + round / 4096, with residual", partial(rotate_round, 4096, True)),
        _both(f"rotation / {BLOCK}", partial(rotate, BLOCK, False), 0.3),
        _both(f"rotation / {BLOCK}, back", partial(rotate, BLOCK, True), 0.3),
        _both("rotation, full", partial(rotate, 1 << 30, False)),
    ]


def _products() -> list[Case]:
    """A matrix of rows of 1,000 elements, and factors of rank 4."""

    def times(name, size, made, module, numel):
        matrix = _laplace(numel // 1000 * 1000).view(-1, 1000)
        basis, out = torch.ones(4, matrix.shape[size]), torch.zeros(4, matrix.shape[made])
        return lambda: getattr(module, name)(matrix, basis, out)

    return [
        _both("matrix x factor, rank 4", partial(times, "times_rows", 1, 0)),
        _both("transposed matrix x factor, rank 4", partial(times, "times_columns", 0, 1)),
    ]
