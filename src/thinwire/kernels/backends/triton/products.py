"""Matrices times thin factors, in the order of additions that the reference defines: to the bit its results."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from thinwire.kernels.backends.triton.launch import launch

SUMS = 16  # interleaved, as in the reference
ROWS, COLS = 16, 64
VECTORS = 4  # of a factor at a time


@triton.jit(do_not_specialize=["rows", "cols", "rank"])
def _times_rows(matrix, basis, out, rows, cols, rank, ROWS: tl.constexpr, VECTORS: tl.constexpr, SUMS: tl.constexpr):
    tiles = (rows + ROWS - 1) // ROWS
    row = (tl.program_id(0) % tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)[None, :, None]
    vector = (tl.program_id(0) // tiles) * VECTORS + tl.arange(0, VECTORS)[:, None, None]
    lane = tl.arange(0, SUMS)[None, None, :]
    total = tl.zeros((VECTORS, ROWS, SUMS), tl.float32)
    for begin in range(0, cols, SUMS):
        col = begin + lane
        m = tl.load(matrix + row * cols + col, mask=(row < rows) & (col < cols), other=0.0)
        q = tl.load(basis + vector.to(tl.int64) * cols + col, mask=(vector < rank) & (col < cols), other=0.0)
        total = total + m * q
    for stage in tl.static_range(4):  # sums 8, 4, 2 and 1 apart
        total = tl.sum(tl.reshape(total, (VECTORS, ROWS, 2, 8 >> stage)), axis=2)
    total = tl.reshape(total, (VECTORS, ROWS, 1))
    tl.store(out + vector.to(tl.int64) * rows + row, total, mask=(vector < rank) & (row < rows))


@triton.jit(do_not_specialize=["rows", "cols", "rank"])
def _times_columns(matrix, basis, out, rows, cols, rank, COLS: tl.constexpr, VECTORS: tl.constexpr):
    tiles = (cols + COLS - 1) // COLS
    col = (tl.program_id(0) % tiles).to(tl.int64) * COLS + tl.arange(0, COLS)[None, :]
    vector = ((tl.program_id(0) // tiles) * VECTORS + tl.arange(0, VECTORS)[:, None]).to(tl.int64)
    total = tl.zeros((VECTORS, COLS), tl.float32)
    for row in range(rows):
        m = tl.load(matrix + row * cols.to(tl.int64) + col, mask=col < cols, other=0.0)
        p = tl.load(basis + vector * rows + row, mask=vector < rank, other=0.0)
        total = total + m * p
    tl.store(out + vector * cols + col, total, mask=(vector < rank) & (col < cols))


@triton.jit(do_not_specialize=["rows", "cols", "rank"])
def _outer(p, q, out, matrix, lost, rows, cols, rank, ROWS: tl.constexpr, COLS: tl.constexpr):
    tiles = (cols + COLS - 1) // COLS
    row = (tl.program_id(0) // tiles).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    col = (tl.program_id(0) % tiles).to(tl.int64) * COLS + tl.arange(0, COLS)
    total = _term(p, q, row, col, rows, cols, 0)
    for vector in range(1, rank):
        total = total + _term(p, q, row, col, rows, cols, vector)
    at = row[:, None] * cols + col[None, :]
    there = (row < rows)[:, None] & (col < cols)[None, :]
    if matrix is not None:
        rest = tl.load(matrix + at, mask=there, other=0.0) - total
        tl.debug_barrier()  # out or lost may be the matrix
        tl.store(lost + at, rest, mask=there)
    tl.store(out + at, total, mask=there)


@triton.jit
def _term(p, q, row, col, rows, cols, vector):
    left = tl.load(p + vector * rows + row, mask=row < rows, other=0.0)
    right = tl.load(q + vector * cols + col, mask=col < cols, other=0.0)
    return left[:, None] * right[None, :]


def times_rows(
    matrix: Tensor, basis: Tensor, out: Tensor, *, owed: Tensor | None = None, total: Tensor | None = None
) -> None:
    if owed is not None:
        matrix = torch.add(matrix, owed, out=total)
    (rows, cols), rank = matrix.shape, len(basis)
    how = {"ROWS": ROWS, "VECTORS": VECTORS, "SUMS": SUMS}
    launch(_times_rows, -(-rows // ROWS) * -(-rank // VECTORS), matrix, basis, out, rows, cols, rank, **how)


def times_columns(matrix: Tensor, basis: Tensor, out: Tensor) -> None:
    (rows, cols), rank = matrix.shape, len(basis)
    how = {"COLS": COLS, "VECTORS": VECTORS}
    launch(_times_columns, -(-cols // COLS) * -(-rank // VECTORS), matrix, basis, out, rows, cols, rank, **how, warps=2)


def outer_product(
    p: Tensor, q: Tensor, out: Tensor, *, matrix: Tensor | None = None, lost: Tensor | None = None
) -> None:
    rows, cols = out.shape
    programs = -(-rows // ROWS) * -(-cols // COLS)
    launch(_outer, programs, p, q, out, matrix, lost, rows, cols, len(p), ROWS=ROWS, COLS=COLS)
