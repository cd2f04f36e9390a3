"""What every kernel means, in plain PyTorch. Native kernels equal these to the bit; CUDA tensors run on them.

Blocks: a buffer `x` holds S stretches, `starts` (int64[S + 1]) says where each begins. Each stretch is cut into blocks
of `block` elements (the last may be shorter; block = 0 means the whole stretch is one block). Per-block arrays
are in order. Codes are packed little-endian, `bits` bits each, and every block begins on a whole byte.
"""

from __future__ import annotations

import torch
from torch import Tensor


def packed_bytes(starts: Tensor, block: int, bits: int) -> int:
    """The size of the packed codes of all blocks."""
    total = 0
    for length in torch.diff(starts).tolist():
        full, rest = divmod(length, block) if block else (0, length)
        total += full * (-(-block * bits // 8)) + -(-rest * bits // 8)
    return total


def all_finite(x: Tensor) -> bool:
    """Whether x holds no Inf and no NaN."""
    return bool(torch.isfinite(x).all())


def scale_cast(x: Tensor, weight: float, out: Tensor) -> None:
    """out = weight * x, rounded once to out's dtype."""
    out.copy_(x * weight)


def block_absmax(x: Tensor, starts: Tensor, block: int, out: Tensor) -> None:
    """out[j] = max |x| over block j; NaN if the block holds a NaN; 0 for an empty block."""
    for number, (a, b) in enumerate(_bounds(starts, block)):
        out[number] = x[a:b].abs().max() if b > a else 0.0


def random_u32(key: int, counter: Tensor) -> Tensor:
    """The counter-based generator: 32 bits (in int64) for each counter (int64, >= 0) under a 64-bit key."""
    low, high = key & 0xFFFFFFFF, (key >> 32) & 0xFFFFFFFF
    x = (counter * 0x9E3779B9 + low) & 0xFFFFFFFF
    x = x ^ (counter >> 32)
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & 0xFFFFFFFF
    x = x ^ high
    x = ((x ^ (x >> 15)) * 0x735A2D97) & 0xFFFFFFFF
    return x ^ (x >> 15)


def random_unit(key: int, counter: Tensor) -> Tensor:
    """float32 in [0, 1), 24 bits, from `random_u32`."""
    return (random_u32(key, counter) >> 8).to(torch.float32) * 2.0**-24


def quantize_uniform(
    x: Tensor, starts: Tensor, block: int, bits: int, radius: Tensor, *,
    keys: Tensor | None, counters: Tensor, out: Tensor, lost: Tensor | None = None,
) -> None:  # fmt: skip
    """Quantise to s + 1 = 2^bits even levels over [-radius_j, radius_j] per block, pack into `out`.

    Position u = (clip(x) + radius) * (s / (2 radius)); the code is floor(u + random_unit(key, counter)), at most s;
    with keys None it is round-half-down to nearest: ceil(u - 0.5). The code c stands for radius * (c * (2/s) - 1).
    `lost`, where given, gets x - that value; it may be x's own memory. Blocks whose radius is 0 or not finite get codes 0.
    """
    levels = (1 << bits) - 1
    position = 0
    for number, (a, b, stretch, first) in enumerate(_stretches(starts, block, counters)):
        r = radius[number]
        values = x[a:b]
        if not bool(torch.isfinite(r)) or r == 0:
            codes = torch.zeros(b - a, dtype=torch.int64, device=x.device)
        else:
            u = (values.clamp(-r, r) + r) * (levels / (2 * r))
            if keys is None:
                codes = torch.ceil(u - 0.5)
            else:
                counter = torch.arange(first, first + b - a, dtype=torch.int64, device=x.device)
                codes = torch.floor(u + random_unit(int(keys[stretch]), counter))
            codes = codes.clamp(0, levels).to(torch.int64)
        if lost is not None:
            lost[a:b] = values - _uniform_value(codes, r, levels)
        packed = pack_bits(codes, bits)
        out[position : position + packed.numel()] = packed
        position += packed.numel()


def dequantize_uniform_add(
    codes: Tensor, starts: Tensor, block: int, bits: int, radius: Tensor, weight: float, *, out: Tensor
) -> None:
    """out += weight * value, for codes made by `quantize_uniform`."""
    levels = (1 << bits) - 1
    position = 0
    for number, (a, b) in enumerate(_bounds(starts, block)):
        size = -(-(b - a) * bits // 8)
        unpacked = unpack_bits(codes[position : position + size], bits, b - a)
        out[a:b] += weight * _uniform_value(unpacked, radius[number], levels)
        position += size


def _uniform_value(codes: Tensor, radius: Tensor, levels: int) -> Tensor:
    return radius * (codes.to(radius.dtype) * (2.0 / levels) - 1.0)


def pack_bits(codes: Tensor, bits: int) -> Tensor:
    """uint8: code i in bits [i*bits, (i+1)*bits), little-endian; the last byte is padded with zeros."""
    bit = (codes.unsqueeze(1) >> torch.arange(bits, device=codes.device)) & 1
    stream = torch.nn.functional.pad(bit.reshape(-1), (0, -codes.numel() * bits % 8))
    weights = 1 << torch.arange(8, device=codes.device)
    return (stream.view(-1, 8) * weights).sum(1).to(torch.uint8)


def unpack_bits(packed: Tensor, bits: int, count: int) -> Tensor:
    """int64: the `count` codes that `pack_bits` packed."""
    bit = (packed.to(torch.int64).unsqueeze(1) >> torch.arange(8, device=packed.device)) & 1
    stream = bit.reshape(-1)[: count * bits].view(count, bits)
    return (stream << torch.arange(bits, device=packed.device)).sum(1)


def _bounds(starts: Tensor, block: int):
    """(begin, end) of every block."""
    ends = starts.tolist()
    for a, b in zip(ends, ends[1:], strict=False):
        step = block or max(b - a, 1)
        if block == 0 and a == b:
            yield a, b
        for begin in range(a, b, step):
            yield begin, min(begin + step, b)


def _stretches(starts: Tensor, block: int, counters: Tensor):
    """(begin, end, stretch number, counter of the first element) of every block."""
    ends = starts.tolist()
    for stretch, (a, b) in enumerate(zip(ends, ends[1:], strict=False)):
        step = block or max(b - a, 1)
        if block == 0 and a == b:
            yield a, b, stretch, int(counters[stretch])
        for begin in range(a, b, step):
            yield begin, min(begin + step, b), stretch, int(counters[stretch]) + begin - a
