"""Where stretches, blocks and payloads lie, as the kernels are told: small tables, moved to the device once per layout.

A stretch is cut into blocks, a block into pieces of `width` elements, and `rows` pieces of one stretch are a tile: one
program's work. Tables are kept by content, the most recent ones, so that a step copies nothing but its keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.kernels.backends.reference.rotated import SMALLEST

FIELDS = 6  # int64 per stretch: where it begins, its length, its first tile, block, byte and piece
KEPT = 1 << 16  # tables: a few for every bucket, or for each worker's part of it; one that is made makes the host wait


class Places(NamedTuple):
    table: Tensor  # int64[stretches * FIELDS]
    stretch: Tensor  # int32[tiles]: the stretch of every tile
    tiles: int
    pieces: int
    block_stretch: Tensor  # int32[blocks], of blocks that are longer than a piece; else empty
    blocks: int


def places(
    starts: Tensor, block: int, device: torch.device, *, width: int, rows: int, bits: int = 0, padded: bool = False
) -> Places:
    """`padded`: blocks are filled up as `reference.rotated` has it, and a byte is an element among the padded ones."""
    return _places(starts.numpy().tobytes(), starts.dim(), block, device, width, rows, bits, padded)


@lru_cache(maxsize=KEPT)
def _places(
    content: bytes, dim: int, block: int, device: torch.device, width: int, rows: int, bits: int, padded: bool
) -> Places:
    numbers = np.frombuffer(content, dtype=np.int64)
    begin, end = (numbers[:-1], numbers[1:]) if dim == 1 else (numbers[0::2], numbers[1::2])
    length = end - begin
    full, rest = (length // block, length % block) if block else (np.zeros_like(length), length)
    blocks = full + (rest > 0) if block else np.ones_like(length)
    pieces = full * -(-block // width) + -(-rest // width)
    if not block:
        pieces = np.maximum(pieces, 1)  # an empty stretch is a block, too
    sizes = full * block + _filled(rest) if padded else full * (-(-block * bits // 8)) + -(-rest * bits // 8)
    tiles = -(-pieces // rows)
    fields = [begin, length, *(np.cumsum(each) - each for each in (tiles, blocks, sizes, pieces))]
    number = np.arange(len(length), dtype=np.int32)
    block_stretch = np.repeat(number, blocks if not 0 < block <= width else 0)
    # To be there for every stream, these copies are waited for: once per layout.
    return Places(
        torch.from_numpy(np.stack(fields, axis=1).reshape(-1)).to(device),
        torch.from_numpy(np.repeat(number, tiles)).to(device), int(tiles.sum()), int(pieces.sum()),
        torch.from_numpy(block_stretch).to(device), int(blocks.sum()),
    )  # fmt: skip


def _filled(rest: np.ndarray) -> np.ndarray:
    """The next powers of two, `SMALLEST` at least, of what is not 0."""
    powers = np.left_shift(1, np.ceil(np.log2(np.maximum(rest, 1))).astype(np.int64))
    return np.where(rest > 0, np.maximum(powers, SMALLEST), 0)


def kept(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device of what stays the same from step to step: made once."""
    return _kept(tensor.numpy().tobytes(), tensor.dtype, device)


@lru_cache(maxsize=KEPT)
def _kept(content: bytes, dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.frombuffer(bytearray(content or b"\0" * 8), dtype=dtype).to(device)


def together(*lists: Sequence[Tensor]) -> tuple[int, ...] | None:
    """How many elements apart the tensors of each list lie, if they are equally far apart in one memory."""
    apart = [_apart(tensors) for tensors in lists]
    return None if None in apart else tuple(apart)  # type: ignore[arg-type]


def _apart(tensors: Sequence[Tensor]) -> int | None:
    if len({(each.dtype, each.untyped_storage()._cdata) for each in tensors}) > 1:
        return None
    offsets = [each.storage_offset() for each in tensors]
    distances = {after - before for before, after in pairwise(offsets)} or {0}
    return distances.pop() if len(distances) == 1 else None
