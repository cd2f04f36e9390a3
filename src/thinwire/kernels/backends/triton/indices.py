"""Ascending indices in few bits, in the reference's format.

Low bits are packed byte by byte. A byte of the bitmap looks up by halving which indices set its bits; back, bits are
counted tile by tile, so that each knows its number. Nobody waits for a device to say that bytes are damaged: then all
indices are -1, and whoever uses them leaves a NaN (`sparse`).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.backends.memory import or_empty
from thinwire.kernels.backends.reference.indices import index_bytes, low_bits, part_bytes
from thinwire.kernels.backends.triton.integers import unpacked
from thinwire.kernels.backends.triton.launch import launch
from thinwire.kernels.backends.triton.select import sums_before

TILE = 1024


@triton.jit(do_not_specialize=["k", "nbytes"])
def _encode_low(indices, out, k, nbytes, LOW: tl.constexpr, TILE: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    first = (byte * 8) // LOW
    said = tl.zeros((TILE,), tl.int64)
    for each in tl.static_range(7 // LOW + 2):
        number = first + each
        value = (tl.load(indices + number, mask=number < k, other=0) - number) & ((1 << LOW) - 1)
        value = tl.where(number < k, value, 0)
        shift = number * LOW - byte * 8
        right = value >> tl.where(shift < 0, -shift, 0)
        said = said | tl.where(shift < 8, right << tl.where(shift > 0, tl.minimum(shift, 8), 0), 0)
    tl.store(out + byte, (said & 0xFF).to(tl.uint8), mask=byte < nbytes)


@triton.jit
def _bit(indices, number, k, LOW: tl.constexpr):
    """The bit that an index sets; beyond the last there is none."""
    index = tl.load(indices + number, mask=number < k, other=0).to(tl.int64)
    return tl.where(number < k, ((index - number) >> LOW) + number, 1 << 40)


@triton.jit(do_not_specialize=["k", "nbytes", "steps"])
def _encode_high(indices, out, k, nbytes, steps, LOW: tl.constexpr, TILE: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    low, high = byte * 0, byte * 0 + k  # the first index whose bit is not before the byte
    for _ in range(steps):
        middle = (low + high) // 2
        before = (low < high) & (_bit(indices, middle, k, LOW) < byte * 8)
        high = tl.where((low < high) & (before == 0), middle, high)
        low = tl.where(before, middle + 1, low)
    said = tl.zeros((TILE,), tl.int32)
    for each in tl.static_range(8):
        bit = _bit(indices, low + each, k, LOW) - byte * 8
        said = said | tl.where((bit >= 0) & (bit < 8), 1 << (bit & 7).to(tl.int32), 0)
    tl.store(out + byte, said.to(tl.uint8), mask=byte < nbytes)


@triton.jit(do_not_specialize=["bits"])
def _tally(data, bits, tallies, TILE: tl.constexpr):
    bit = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    byte = tl.load(data + bit // 8, mask=bit < bits, other=0).to(tl.int32)
    tl.store(tallies + tl.program_id(0), tl.sum((byte >> (bit & 7).to(tl.int32)) & 1, axis=0))


@triton.jit(do_not_specialize=["bits", "limit", "k"])
def _decode(data, high, bits, limit, k, tallies, out, counted, bad, LOW: tl.constexpr, TILE: tl.constexpr):
    bit = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    byte = tl.load(high + bit // 8, mask=bit < bits, other=0).to(tl.int32)
    is_set = (byte >> (bit & 7).to(tl.int32)) & 1
    first = tl.load(tallies + tl.program_id(0))
    number = (first + tl.cumsum(is_set, 0) - is_set).to(tl.int64)
    there = (is_set > 0) & (number < k)
    value = bit - number
    if LOW > 0:
        value = (value << LOW) | unpacked(data, number, there, LOW)
    tl.store(out + number, (value + number).to(tl.int32), mask=there)
    if tl.max(((is_set > 0) & ((number >= k) | (bit >= limit))).to(tl.int32), axis=0) > 0:
        tl.store(bad, 1)  # too many, or padding that is not 0
    tl.atomic_add(counted, tl.sum(is_set, axis=0))


@triton.jit(do_not_specialize=["k", "n", "low_bytes", "spare"])
def _examine(data, out, k, n, low_bytes, spare, counted, bad, TILE: tl.constexpr):
    number = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    here = number < k
    index = tl.load(out + number, mask=here, other=0)
    before = tl.load(out + number - 1, mask=here & (number > 0), other=-1)
    wrong = here & ((index <= before) | (index >= n))
    padded = spare > 0
    last = tl.load(data + low_bytes - 1, mask=padded, other=0).to(tl.int32)
    dirty = padded & ((last >> spare) != 0)
    if (tl.max(wrong.to(tl.int32), axis=0) > 0) | (tl.load(counted) != k) | dirty:
        tl.store(bad, 1)


@triton.jit(do_not_specialize=["k"])
def _withdraw(out, k, bad, TILE: tl.constexpr):
    if tl.load(bad) != 0:
        number = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
        tl.store(out + number, tl.full((TILE,), -1, tl.int32), mask=number < k)


def encode_indices(indices: Tensor, n: int, *, out: Tensor | None = None) -> Tensor:
    k = indices.numel()
    out = or_empty(out, index_bytes(k, n), torch.uint8, like=indices)
    if k:
        low = low_bits(k, n)
        sizes = part_bytes(k, n, low)
        how = {"LOW": low, "TILE": TILE}
        launch(_encode_low, -(-sizes[0] // TILE), indices, out, k, sizes[0], **how)
        launch(_encode_high, -(-sizes[1] // TILE), indices, out[sizes[0] :], k, sizes[1], k.bit_length(), **how)
    return out


def decode_indices(data: Tensor, k: int, n: int, *, out: Tensor | None = None) -> Tensor:
    out = or_empty(out, k, torch.int32, like=data)
    if k == 0:
        return out
    low = low_bits(k, n)
    low_bytes, high_bytes = part_bytes(k, n, low)
    tiles = -(-8 * high_bytes // TILE)
    counts = torch.zeros(tiles + 2, dtype=torch.int32, device=data.device)
    bad, counted, tallies = counts[:1], counts[1:2], counts[2:]
    high, limit = data[low_bytes:], ((n - k) >> low) + k
    launch(_tally, tiles, high, 8 * high_bytes, tallies, TILE=TILE)
    launch(sums_before, 1, tallies, tiles, COLUMNS=1, PARTS=1024)
    launch(_decode, tiles, data, high, 8 * high_bytes, limit, k, tallies, out, counted, bad, LOW=low, TILE=TILE)
    programs = -(-k // TILE)
    launch(_examine, programs, data, out, k, n, low_bytes, k * low % 8, counted, bad, TILE=TILE)
    launch(_withdraw, programs, out, k, bad, TILE=TILE)
    return out
