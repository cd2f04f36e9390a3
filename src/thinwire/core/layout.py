"""Layout: where named tensors lie in a flat buffer, and all that follows from it."""

from __future__ import annotations

import ctypes
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core import randomness

Derived = TypeVar("Derived")
KEPT = 256  # of what follows from a layout: schemes that divide a bucket anew in every step would add without end


class Segment(NamedTuple):
    """One named tensor's segment of a flat buffer."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]
    offset: int = 0  # where in its tensor the segment begins: not 0 only where a bucket was split

    @property
    def numel(self) -> int:
        return self.stop - self.start


class Layout:
    """Where each named tensor lies in a flat buffer. Made once per bucket and kept, with all that follows from it.

    Segments follow each other without gaps, in order. `chosen`: they are elements that were picked for this step, other
    ones in the next, so nothing can be remembered of them by name.
    """

    def __init__(self, segments: Sequence[Segment], *, chosen: bool = False):
        self.segments: tuple[Segment, ...] = tuple(segments)
        self.chosen = chosen
        self.numel: int = self.segments[-1].stop if self.segments else 0
        self._derived: OrderedDict[Hashable, Any] = OrderedDict()

    @classmethod
    def of(cls, shapes: Sequence[tuple[str, Sequence[int]]], *, chosen: bool = False) -> Layout:
        """The layout of tensors laid end to end."""
        segments, start = [], 0
        for name, shape in shapes:
            stop = start + int(np.prod(shape, dtype=np.int64))
            segments.append(Segment(name, start, stop, tuple(shape)))
            start = stop
        return cls(segments, chosen=chosen)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(segment.name for segment in self.segments)

    @cached_property
    def starts(self) -> Tensor:
        """int64[S + 1]: where each segment begins, and the end."""
        return integers([segment.start for segment in self.segments] + [self.numel])

    @cached_property
    def counters(self) -> Tensor:
        """int64[S]: the index, in its own tensor, of each segment's first element. Randomness counts from there."""
        return integers([segment.offset for segment in self.segments])

    @cached_property
    def name_hashes(self) -> np.ndarray:
        return np.array([randomness.name_hash(name) for name in self.names], dtype=np.uint64)

    def name_hashes_on(self, device: torch.device) -> Tensor:
        """int64[S], moved there once."""
        hashes = torch.from_numpy(self.name_hashes.view(np.int64))
        return self.once(("name hashes", device), lambda: hashes.to(device))

    def lengths_on(self, device: torch.device) -> Tensor:
        """int64[S]: how many elements each segment has; moved there once."""
        return self.once(("lengths", device), lambda: torch.diff(self.starts).to(device))

    def blocks(self, block: int) -> int:
        """How many blocks of at most `block` elements the segments hold; blocks do not cross tensors."""
        if not block:
            return len(self.segments)
        return self.once(("blocks", block), lambda: sum(-(-segment.numel // block) for segment in self.segments))

    def packed_bytes(self, block: int, bits: int) -> int:
        """The size of packed codes of so many bits, every block's on whole bytes."""
        return self.once(("packed", block, bits), lambda: kernels.packed_bytes(self.starts, block, bits))

    def once(self, key: Hashable, make: Callable[[], Derived]) -> Derived:
        """What follows from this layout alone: made when it is first asked for, and kept with the layout.

        Of more than `KEPT` the one that was not asked for longest is forgotten.
        """
        if key in self._derived:
            self._derived.move_to_end(key)
            return self._derived[key]
        made = self._derived[key] = make()
        if len(self._derived) > KEPT:
            self._derived.popitem(last=False)
        return made

    def split(self, parts: int, grain: int) -> list[Layout]:
        """`parts` consecutive layouts of about equal length that together cover this one.

        A cut inside a tensor lies a multiple of `grain` elements from the tensor's beginning, so that blocks and
        bytes stay whole. Short layouts give empty parts.
        """
        return self.once(("split", parts, grain), lambda: self._split(parts, grain))

    def select(self, names: Collection[str]) -> Selection:
        """The tensors with these names, end to end. Names that are not here select nothing."""
        chosen = frozenset(names)
        return self.once(("select", chosen), lambda: self._select(chosen))

    def _split(self, parts: int, grain: int) -> list[Layout]:
        cuts = [0]
        for part in range(1, parts):
            cuts.append(max(cuts[-1], self._cut_near(part * self.numel // parts, grain)))
        cuts.append(self.numel)
        return [self._between(a, b) for a, b in pairwise(cuts)]

    def _select(self, names: frozenset[str]) -> Selection:
        if names.issuperset(self.names):
            return Selection(self, ((0, self.numel),))
        segments: list[Segment] = []
        runs: list[tuple[int, int]] = []
        at = 0
        for segment in self.segments:
            if segment.name in names:
                segments.append(segment._replace(start=at, stop=at + segment.numel))
                at += segment.numel
                begin = runs.pop()[0] if runs and runs[-1][1] == segment.start else segment.start
                runs.append((begin, segment.stop))
        return Selection(Layout(segments, chosen=self.chosen), tuple(runs))

    def _cut_near(self, wanted: int, grain: int) -> int:
        for segment in self.segments:
            if segment.start <= wanted < segment.stop:
                inside = wanted - segment.start + segment.offset
                return min(segment.start - segment.offset + round(inside / grain) * grain, segment.stop)
        return self.numel

    def _between(self, start: int, stop: int) -> Layout:
        pieces = []
        for segment in self.segments:
            a, b = max(segment.start, start), min(segment.stop, stop)
            if a < b:
                whole = (a, b) == (segment.start, segment.stop)
                shape = segment.shape if whole else (b - a,)
                pieces.append(Segment(segment.name, a - start, b - start, shape, segment.offset + a - segment.start))
        return Layout(pieces, chosen=self.chosen)


@dataclass(frozen=True)
class Selection:
    """Some tensors of a buffer: their layout end to end, and the runs of the buffer's memory that hold them."""

    layout: Layout
    runs: tuple[tuple[int, int], ...]  # in order; end to end they are the layout

    @property
    def numel(self) -> int:
        return self.layout.numel

    def view(self, whole: Tensor) -> Tensor | None:
        """The buffer's own memory, where the tensors lie end to end there already."""
        if len(self.runs) != 1:
            return None
        start, stop = self.runs[0]
        return whole if stop - start == whole.numel() else whole[start:stop]

    def close_up(self, whole: Tensor) -> Tensor:
        """The tensors end to end in the buffer's own CPU memory: the longest run stays, all others move up to it.

        What was between them is lost. `spread_out` is the way back.
        """
        for run, moved in self._moves:
            _move(whole, run, moved)
        first = self._closed[0]
        return whole[first : first + self.numel]

    def spread_out(self, whole: Tensor) -> None:
        """Move what `close_up` moved back to its places."""
        for run, moved in reversed(self._moves):
            _move(whole, (moved, moved + run[1] - run[0]), run[0])

    @cached_property
    def _closed(self) -> list[int]:
        """Where each run begins when all have closed up."""
        longest = max(range(len(self.runs)), key=lambda i: self.runs[i][1] - self.runs[i][0])
        lengths = [stop - start for start, stop in self.runs]
        first = self.runs[longest][0] - sum(lengths[:longest])
        return [first + sum(lengths[:number]) for number in range(len(lengths))]

    @cached_property
    def _moves(self) -> list[tuple[tuple[int, int], int]]:
        """(run, where it goes), in an order in which none is overwritten before it has moved."""
        moves = [(run, to) for run, to in zip(self.runs, self._closed, strict=True) if run[0] != to]
        right = [move for move in moves if move[1] > move[0][0]]  # those before the longest, nearest first
        return right[::-1] + [move for move in moves if move[1] < move[0][0]]

    def gather(self, whole: Tensor, out: Tensor) -> Tensor:
        """out = the tensors, end to end."""
        at = 0
        for start, stop in self.runs:
            out[at : at + stop - start].copy_(whole[start:stop])
            at += stop - start
        return out

    def add(self, whole: Tensor, total: Tensor) -> None:
        """total += the tensors, end to end."""
        at = 0
        for start, stop in self.runs:
            total[at : at + stop - start].add_(whole[start:stop])
            at += stop - start

    def scatter(self, values: Tensor, whole: Tensor) -> None:
        """Write what `gather` took back to its places."""
        at = 0
        for start, stop in self.runs:
            whole[start:stop].copy_(values[at : at + stop - start])
            at += stop - start


def _move(whole: Tensor, run: tuple[int, int], to: int) -> None:
    """whole[to : ...] = whole[run], which may overlap."""
    assert whole.device.type == "cpu" and whole.is_contiguous()
    size = whole.element_size()
    ctypes.memmove(whole.data_ptr() + to * size, whole.data_ptr() + run[0] * size, (run[1] - run[0]) * size)


def integers(values: list[int]) -> Tensor:
    """int64, in CPU memory: where things lie, which is never on a device."""
    return torch.tensor(values, dtype=torch.int64, device="cpu")
