"""Packed narrow integers. Whether a value fits is not looked at here: nobody waits for a device to say so, and what
does not fit loses its high bits."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.backends.triton.launch import launch

TILE = 1024


@triton.jit
def packed_byte(values, byte, n, WIDTH: tl.constexpr):
    """Byte by byte: what those integers say that reach into it, of int32 and narrower at most 32 bits each."""
    first = (byte * 8) // WIDTH
    said = tl.zeros(byte.shape, tl.int64)
    for each in tl.static_range(7 // WIDTH + 2):
        number = first + each
        value = tl.load(values + number, mask=number < n, other=0).to(tl.int64) & ((1 << WIDTH) - 1)
        shift = number * WIDTH - byte * 8  # above -32, and from 8 on it says nothing
        right = value >> tl.where(shift < 0, -shift, 0)
        said = said | tl.where(shift < 8, right << tl.where(shift > 0, tl.minimum(shift, 8), 0), 0)
    return (said & 0xFF).to(tl.uint8)


@triton.jit
def unpacked(data, number, there, WIDTH: tl.constexpr):
    """int64, 0 or more: the integers of so many bits that `packed_byte` made."""
    bit = number * WIDTH
    word = tl.zeros(number.shape, tl.int64)
    for each in tl.static_range((WIDTH + 14) // 8):
        byte = (bit >> 3) + each
        read = there & (byte * 8 < bit + WIDTH)
        word = word | (tl.load(data + byte, mask=read, other=0).to(tl.int64) << (8 * each))
    return (word >> (bit & 7)) & ((1 << WIDTH) - 1)


@triton.jit(do_not_specialize=["n", "nbytes"])
def _pack(values, out, n, nbytes, WIDTH: tl.constexpr, TILE: tl.constexpr):
    byte = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    tl.store(out + byte, packed_byte(values, byte, n, WIDTH), mask=byte < nbytes)


@triton.jit(do_not_specialize=["n"])
def _add(data, out, n, WIDTH: tl.constexpr, SATURATE: tl.constexpr, TILE: tl.constexpr):
    number = tl.program_id(0).to(tl.int64) * TILE + tl.arange(0, TILE)
    code = unpacked(data, number, number < n, WIDTH)
    total = tl.load(out + number, mask=number < n, other=0).to(tl.int64) + code - ((code >> (WIDTH - 1)) << WIDTH)
    if SATURATE:
        MOST: tl.constexpr = (1 << (WIDTH - 1)) - 1
        total = tl.maximum(tl.minimum(total, MOST), -MOST)
    tl.store(out + number, total.to(out.dtype.element_ty), mask=number < n)


def pack_ints(values: Tensor, width: int, out: Tensor) -> None:
    launch(_pack, -(-out.numel() // TILE), values, out, values.numel(), out.numel(), WIDTH=width, TILE=TILE)


def add_packed(data: Tensor, width: int, out: Tensor) -> None:
    launch(_add, -(-out.numel() // TILE), data, out, out.numel(), WIDTH=width, SATURATE=False, TILE=TILE)


def add_packed_saturating(data: Tensor, width: int, out: Tensor) -> None:
    launch(_add, -(-out.numel() // TILE), data, out, out.numel(), WIDTH=width, SATURATE=True, TILE=TILE)
