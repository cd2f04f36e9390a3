"""One call of each operation, for whatever does it and wherever."""

import inspect

import torch

from thinwire import kernels
from thinwire.kernels import Levels, reference

COMPOSED = {"block_absmax"}  # of other operations, in the face
WITHOUT_TRITON = {"keep_", "quantize_laplace", "sum_halves"}  # a copy, two passes there, and what is for gloo

N, BLOCK, BITS = 300, 64, 4
STARTS, KEYS, COUNTERS = torch.tensor([0, 100, N]), torch.tensor([5, -7]), torch.tensor([0, 9])
RANGES = torch.full((6,), 2.5)  # 2 blocks of the first stretch, 4 of the second
LEVELS = Levels(torch.linspace(-1, 1, 1 << BITS))
PLACES = torch.arange(0, N, 7, dtype=torch.int32)
BANK = torch.stack([torch.linspace(-1, 1, 1 << BITS).pow(power) for power in (1, 3, 5)])
BANK = torch.stack([BANK, torch.cat([1 / BANK.diff(), torch.zeros(3, 1)], dim=1)], dim=2)


FACTORS = torch.linspace(-1, 1, 40).view(4, 10), torch.linspace(-2, 1, 120).view(4, 30)


def x(seed: int = 0) -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(seed))


def codes() -> torch.Tensor:
    return torch.arange(kernels.packed_bytes(STARTS, BLOCK, BITS)).mul(37).to(torch.uint8)


def quantized(operation, *how):
    out, lost = torch.zeros_like(codes()), torch.zeros(N)
    operation(x(), STARTS, BLOCK, *how, keys=KEYS, counters=COUNTERS, out=out, lost=lost)
    return torch.cat([out.float(), lost])


def decoded(operation, *how):
    out = x()
    operation(codes(), STARTS, BLOCK, *how, 0.3, out=out)
    return out


def decoded_sum(operation, how):
    out = x()
    operation([codes(), codes() * 3], STARTS, BLOCK, how, [RANGES, RANGES / 3], 0.3, out=out)
    return out


def banked(operation):
    out, lost = torch.zeros(N // 2, dtype=torch.uint8), torch.zeros(N)
    how = {"keys": KEYS, "counters": COUNTERS, "out": out, "lost": lost}
    operation(x(), STARTS, BANK, torch.tensor([2, 0]), RANGES[:2], **how)
    return torch.cat([out.float(), lost])


def truncated(operation):
    radius, out, lost = torch.zeros(6), torch.zeros(N // 2, dtype=torch.uint8), torch.zeros(N)
    how = {"keys": KEYS, "counters": COUNTERS, "out": out, "owed": x(1), "lost": lost}
    operation(x(), STARTS, BLOCK, LEVELS, 2.5, moments=True, radius=radius, **how)
    return torch.cat([radius, out.float(), lost])


def unbanked(operation):
    codes, out = torch.arange(N // 2).mul(37).to(torch.uint8), x()
    operation(codes, STARTS, BANK, torch.tensor([2, 0]), RANGES[:2], 0.3, out=out)
    return out


def into(operation, *arguments):
    """The last argument, which the operation has changed."""
    operation(*arguments)
    return arguments[-1]


def within(operation, y, *arguments, **options):
    """The first argument, which the operation has changed."""
    operation(y, *arguments, **options)
    return y


def statistics(operation):
    outs = {name: torch.zeros(6) for name in ("absmean", "absmax", "square")}
    operation(x(), STARTS, BLOCK, **outs, owed=x(1), total=(total := torch.zeros(N)))
    return torch.cat([*outs.values(), total])


def ints(count: int) -> torch.Tensor:
    return torch.arange(count, dtype=torch.int32) % 13 - 6


def rounded(operation):
    out, lost = torch.zeros(kernels.padded_numel(STARTS, BLOCK), dtype=torch.int8), torch.zeros(N)
    how = {"signs": KEYS, "keys": KEYS + 1, "counters": COUNTERS}
    operation(x(), STARTS, BLOCK, RANGES / 5, 0.5, -8, 7, **how, out=out, lost=lost)
    return torch.cat([out.float(), lost])


def summed(operation):
    out, total = torch.zeros(N), ints(kernels.padded_numel(STARTS, BLOCK)).to(torch.int8)
    operation(total, STARTS, BLOCK, RANGES, 0.5, signs=KEYS, counters=COUNTERS, out=out)
    return out


def estimated(operation):
    size = kernels.padded_numel(STARTS, BLOCK) * BITS // 8
    out, scale, lost = torch.zeros(size, dtype=torch.uint8), torch.zeros(6), torch.zeros(N)
    operation(x(), STARTS, BLOCK, LEVELS, signs=KEYS, counters=COUNTERS, scale=scale, out=out, lost=lost)
    return torch.cat([out.float(), scale, lost])


def estimates(operation):
    size, out = kernels.padded_numel(STARTS, BLOCK) * BITS // 8, x()
    codes = [torch.arange(size).mul(factor).to(torch.uint8) for factor in (37, 41)]
    how = {"signs": [KEYS, KEYS + 1], "counters": COUNTERS}
    operation(codes, STARTS, BLOCK, LEVELS, [RANGES, RANGES / 3], 0.3, **how, out=out)
    return out


# One call of each operation, and all that it has made.
CASES = {
    "add_packed": lambda call: into(call, codes(), BITS, ints(2 * len(codes()))),
    "add_packed_saturating": lambda call: into(call, codes(), BITS, ints(2 * len(codes()))),
    "all_finite": lambda call: torch.tensor([call(x()), call(x() / 0)]),
    "block_absmax": lambda call: into(call, x(), STARTS, BLOCK, torch.zeros(6)),
    "block_statistics": lambda call: statistics(call),
    "cast_add": lambda call: into(call, x().half(), 0.3, x(1)),
    "decode_indices": lambda call: call(reference.encode_indices(PLACES, N), len(PLACES), N),
    "dequantize_bank_add": lambda call: unbanked(call),
    "dequantize_levels_add": lambda call: decoded(call, LEVELS, RANGES),
    "dequantize_levels_sum": lambda call: decoded_sum(call, LEVELS),
    "dequantize_uniform_add": lambda call: decoded(call, BITS, RANGES),
    "dequantize_uniform_sum": lambda call: decoded_sum(call, BITS),
    "encode_indices": lambda call: call(PLACES, N),
    "gather": lambda call: call(x(), PLACES),
    "hadamard_": lambda call: within(call, x(), STARTS, BLOCK, keys=KEYS, counters=COUNTERS),
    "keep_finite_": lambda call: torch.cat([within(call, x(), x(1), x(2)), within(call, x(), x(1), x(2) / 0)]),
    "narrow": lambda call: call(x(), 0.3, torch.bfloat16).float(),
    "outer_product": lambda call: into(call, *FACTORS, torch.zeros(10, 30)),
    "pack_ints": lambda call: into(call, ints(N), BITS, torch.zeros(N // 2, dtype=torch.uint8)),
    "put_": lambda call: within(call, x(), PLACES, x(1)[: len(PLACES)]),
    "quantize_bank": lambda call: banked(call),
    "quantize_laplace": lambda call: truncated(call),
    "quantize_levels": lambda call: quantized(call, LEVELS, RANGES),
    "quantize_uniform": lambda call: quantized(call, BITS, RANGES),
    "random_u32": lambda call: call(KEYS[:1], torch.arange(N)),
    "rotate_quantize": lambda call: estimated(call),
    "rotate_round": lambda call: rounded(call),
    "scale_cast": lambda call: into(call, x(), 0.3, torch.zeros(N, dtype=torch.float16)).float(),
    "scatter_add": lambda call: into(call, x(1)[: len(PLACES)], PLACES, 0.3, x()),
    "sum_halves": lambda call: into(call, x().to(torch.bfloat16), 3, torch.zeros(100, dtype=torch.bfloat16)),
    "keep_": lambda call: within(call, x(), x(1)),
    "draw_places": lambda call: into(
        call, STARTS, torch.arange(len(STARTS)), KEYS, torch.zeros(len(KEYS), dtype=torch.int32)
    ),
    "take_": lambda call: torch.cat([call(y := x(), PLACES), y]),
    "times_columns": lambda call: into(call, x().view(10, 30), FACTORS[0], torch.zeros(4, 30)),
    "times_rows": lambda call: into(call, x().view(10, 30), FACTORS[1], torch.zeros(4, 10)),
    "top_k": lambda call: call(x(), 20, x(1)),
    "unrotate_levels_sum": lambda call: estimates(call),
    "unrotate_sum": lambda call: summed(call),
    "widen": lambda call: into(call, reference.narrow(y := x(), 0.3, torch.float16), y),
}


HERE = {"starts", "few", "counters", "keys", "signs", "levels"}  # in CPU memory, wherever an operation works


def elsewhere(operation, device):
    """The operation done on a device, and what it makes or changes brought back."""

    def call(*args, **kwargs):
        bound = inspect.signature(operation).bind(*args, **kwargs)
        given = {name: each for name, each in bound.arguments.items() if name not in HERE}
        there = {name: moved(each, device) for name, each in given.items()}
        bound.arguments.update(there)
        made = operation(*bound.args, **bound.kwargs)
        for name, each in given.items():
            if isinstance(each, torch.Tensor):
                each.copy_(there[name])
        return made.cpu() if isinstance(made, torch.Tensor) else made

    return call


def moved(value, device):
    """A copy, also where it is there already."""
    if isinstance(value, list):
        return [moved(each, device) for each in value]
    return value.to(device, copy=True) if isinstance(value, torch.Tensor) else value
