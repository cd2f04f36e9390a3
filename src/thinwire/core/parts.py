"""Parts: which rows of which tensors are whose, where workers divide a model among them."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from thinwire.core.layout import Layout, Segment, Selection, joined

_PIECE = re.compile(r"(.*)\[(\d+):\d+\]", re.DOTALL)


class Piece(NamedTuple):
    """Some rows of a tensor, or all of it: to whoever owns it a tensor of its own, with a name of its own.

    So what is remembered of it is found by name and offset, and low rank sees a matrix.
    """

    name: str  # the tensor's, or with the rows, "w[0:19]", where that is not all of it
    whole: str  # the tensor's
    start: int  # the first element's index in the tensor
    shape: tuple[int, ...]
    owner: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def like(self, tensor: Tensor) -> Tensor:
        """Shape, dtype and device of these rows of `tensor`, in no memory."""
        return torch.empty((), dtype=tensor.dtype, device=tensor.device).expand(self.shape)


def rows(whole: str, shape: Sequence[int], first: int, last: int) -> Piece:
    """The rows first .. last - 1 of a tensor."""
    if not shape or (first, last) == (0, shape[0]):
        return Piece(whole, whole, 0, tuple(shape))
    return Piece(f"{whole}[{first}:{last}]", whole, first * math.prod(shape[1:]), (last - first, *shape[1:]))


def undivided(tensors: Mapping[str, Tensor]) -> list[Piece]:
    """Where every worker has all."""
    return [Piece(name, name, 0, tuple(tensor.shape)) for name, tensor in tensors.items()]


def deal(tensors: Mapping[str, Tensor], owners: int, whole: int, exact: Collection[str] = ()) -> list[Piece]:
    """All tensors, dealt to so many owners: a function of the tensors alone, whatever buckets they come in.

    1. A tensor of at most `whole` elements stays whole. A larger one is cut between rows into as few pieces, about
       equally long, as that takes, at most one for each owner.
    2. One piece after the other goes to the owner who has the fewest elements so far, the first of equals. Those of
       `exact` tensors are counted apart: on the wire they weigh more than others.
    """
    loads = {True: [0] * owners, False: [0] * owners}
    dealt = []
    for name, tensor in tensors.items():
        load = loads[name in exact]
        for piece in _cut(name, tuple(tensor.shape), min(owners, -(-tensor.numel() // whole))):
            owner = load.index(min(load))
            load[owner] += piece.numel
            dealt.append(piece._replace(owner=owner))
    return dealt


def select(layout: Layout, pieces: Iterable[Piece]) -> Selection:
    """Where pieces of a layout's tensors lie in its buffer, and their layout end to end."""
    starts = {segment.name: segment.start for segment in layout.segments}
    return placed((piece, starts[piece.whole] + piece.start) for piece in pieces)


def placed(pieces: Iterable[tuple[Piece, int]]) -> Selection:
    """Pieces that lie in a buffer, each with where it begins there."""
    segments: list[Segment] = []
    runs: list[tuple[int, int]] = []
    at = 0
    for piece, start in pieces:
        segments.append(Segment(piece.name, at, at + piece.numel, piece.shape))
        at += piece.numel
        runs.append((start, start + piece.numel))
    return Selection(Layout(segments), joined(runs))


Remembered: TypeAlias = Mapping[str, Mapping[str, Tensor]]  # by piece and key


def recut(saved: Remembered, own: Remembered) -> dict[str, Mapping[str, Tensor]]:
    """What is remembered of pieces, for one who has other pieces of the same tensors: `own`.

    Of equal names as it is. Of others, what has the residual's shape is put together row by row; all else stays as in
    `own`, and a piece whose rows are not all there is left out. Without pieces, `saved`.
    """
    if saved.keys() == own.keys() or not any(_PIECE.fullmatch(name) for name in (*saved, *own)):
        return dict(saved)
    held: dict[str, list[tuple[int, Mapping[str, Tensor]]]] = {}
    for name, entry in saved.items():
        whole, first = _origin(name)
        held.setdefault(whole, []).append((first, entry))
    found = {name: saved[name] if name in saved else _joined(name, entry, held) for name, entry in own.items()}
    return {name: entry for name, entry in found.items() if entry is not None}


def _joined(
    name: str, entry: Mapping[str, Tensor], held: Mapping[str, Sequence[tuple[int, Mapping[str, Tensor]]]]
) -> Mapping[str, Tensor] | None:
    if "residual" not in entry:
        return entry
    whole, first = _origin(name)
    shape = entry["residual"].shape
    joined = {}
    for key, tensor in entry.items():
        if tensor.shape != shape:
            joined[key] = tensor
            continue
        out, missing = torch.empty_like(tensor), shape[0]
        for start, other in held.get(whole, ()):
            theirs = other.get(key)
            if theirs is None or theirs.shape[1:] != shape[1:]:
                return None
            low, high = max(first, start), min(first + shape[0], start + theirs.shape[0])
            if low < high:
                out[low - first : high - first] = theirs[low - start : high - start]
                missing -= high - low
        if missing:
            return None
        joined[key] = out
    return joined


def _origin(name: str) -> tuple[str, int]:
    """The tensor that a piece is of, and its first row there."""
    piece = _PIECE.fullmatch(name)
    return (piece[1], int(piece[2])) if piece else (name, 0)


def _cut(name: str, shape: tuple[int, ...], pieces: int) -> list[Piece]:
    length = shape[0] if shape else 1
    pieces = max(1, min(pieces, length))
    return [rows(name, shape, i * length // pieces, (i + 1) * length // pieces) for i in range(pieces)]
