"""Layout: where named tensors lie in a flat buffer, and all that follows from it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
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

    Segments are in order, from the buffer's first element to its last. There may be gaps between them, for which only
    buffers are longer: messages are the same as about the same tensors end to end. `chosen`: they are elements that
    were picked for this step, other ones in the next, so nothing can be remembered of them by name.
    """

    def __init__(self, segments: Sequence[Segment], *, chosen: bool = False):
        self.segments: tuple[Segment, ...] = tuple(segments)
        self.chosen = chosen
        self.numel: int = sum(segment.numel for segment in self.segments)
        self.extent: int = self.segments[-1].stop if self.segments else 0  # of a buffer, gaps included
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

    @property
    def has_gaps(self) -> bool:
        return self.numel < self.extent

    @cached_property
    def key(self) -> tuple[tuple[str, int], ...]:
        """The name of each segment, and where it begins: what tells layouts of the same tensors apart."""
        return tuple((segment.name, segment.start) for segment in self.segments)

    @cached_property
    def closed(self) -> Layout:
        """The same tensors end to end: this one, if it has no gaps."""
        return self.select(self.names).layout

    @cached_property
    def starts(self) -> Tensor:
        """int64[S + 1]: where each segment begins, and the end; with gaps int64[S, 2]: where each begins and ends."""
        return self.starts_of(0, len(self.segments))

    def starts_of(self, first: int, last: int) -> Tensor:
        """The same of the segments first .. last - 1, counted from where the first of them begins."""
        return bounds([(segment.start, segment.stop) for segment in self.segments[first:last]])

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
        return self.once(("lengths", device), lambda: integers([s.numel for s in self.segments]).to(device))

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
        return self._split(parts, grain)[0]

    def spans(self, parts: int, grain: int) -> list[tuple[int, int]]:
        """Where in the buffer each of those begins and ends."""
        return self._split(parts, grain)[1]

    def clear_gaps(self, flat: Tensor) -> Tensor:
        """A buffer of this layout, with nothing but 0 in its gaps."""
        for (_, stop), (start, _) in pairwise(self.runs):
            flat[stop:start].zero_()
        return flat

    def close_(self, places: Tensor) -> None:
        """Places in the buffer, ascending, become those of the same elements end to end."""
        for first, last, gaps in self._behind_gaps(places, [start for start, _ in self.runs]):
            places[first:last].sub_(gaps)

    def open_(self, places: Tensor) -> None:
        """The way back."""
        ends = accumulate((stop - start for start, stop in self.runs), initial=0)
        for first, last, gaps in self._behind_gaps(places, list(ends)[:-1]):
            places[first:last].add_(gaps)

    def _behind_gaps(self, places: Tensor, begins: list[int]) -> Iterator[tuple[int, int, int]]:
        """(first, last + 1, how much lies in gaps before them) of the places in each run but the first, which begin,
        as those places are counted, so."""
        if not self.has_gaps:
            return
        cuts = torch.searchsorted(places, integers(begins).to(places.dtype)).tolist()
        at = gaps = 0
        for number, (start, stop) in enumerate(self.runs):
            gaps += start - at
            at = stop
            last = cuts[number + 1] if number + 1 < len(cuts) else len(places)
            if gaps and cuts[number] < last:
                yield cuts[number], last, gaps

    @cached_property
    def runs(self) -> tuple[tuple[int, int], ...]:
        """The buffer without its gaps: where what lies end to end begins and ends."""
        return joined((segment.start, segment.stop) for segment in self.segments)

    def select(self, names: Collection[str]) -> Selection:
        """The tensors with these names, end to end. Names that are not here select nothing."""
        chosen = frozenset(names)
        return self.once(("select", chosen), lambda: self._select(chosen))

    def _split(self, parts: int, grain: int) -> tuple[list[Layout], list[tuple[int, int]]]:
        return self.once(("split", parts, grain), lambda: self._cut(parts, grain))

    def _cut(self, parts: int, grain: int) -> tuple[list[Layout], list[tuple[int, int]]]:
        cuts = [0]
        for part in range(1, parts):
            cuts.append(max(cuts[-1], self._cut_near(part * self.numel // parts, grain)))
        cuts.append(self.numel)
        found = [self._between(a, b) for a, b in pairwise(cuts)]
        return [layout for layout, _ in found], [(at, at + layout.extent) for layout, at in found]

    def _select(self, names: frozenset[str]) -> Selection:
        if names.issuperset(self.names) and not self.has_gaps:
            return Selection(self, ((0, self.numel),))
        segments: list[Segment] = []
        runs: list[tuple[int, int]] = []
        at = 0
        for segment in self.segments:
            if segment.name in names:
                segments.append(segment._replace(start=at, stop=at + segment.numel))
                at += segment.numel
                runs.append((segment.start, segment.stop))
        return Selection(Layout(segments, chosen=self.chosen), joined(runs))

    def _cut_near(self, wanted: int, grain: int) -> int:
        """Elements are counted end to end."""
        for segment in self.closed.segments:
            if segment.start <= wanted < segment.stop:
                inside = wanted - segment.start + segment.offset
                return min(segment.start - segment.offset + round(inside / grain) * grain, segment.stop)
        return self.numel

    def _between(self, start: int, stop: int) -> tuple[Layout, int]:
        """Of the elements start .. stop - 1, counted end to end: their layout, and where in the buffer it begins."""
        pieces: list[Segment] = []
        for segment, counted in zip(self.segments, self.closed.segments, strict=True):
            a, b = max(counted.start, start), min(counted.stop, stop)
            if a < b:
                inside = a - counted.start
                shape = segment.shape if b - a == segment.numel else (b - a,)
                at = segment.start + inside
                pieces.append(Segment(segment.name, at, at + b - a, shape, segment.offset + inside))
        first = pieces[0].start if pieces else 0
        moved = [piece._replace(start=piece.start - first, stop=piece.stop - first) for piece in pieces]
        return Layout(moved, chosen=self.chosen), first


@dataclass(frozen=True)
class Selection:
    """Some tensors of a buffer: their layout end to end, and the runs of the buffer's memory that hold them."""

    layout: Layout
    runs: tuple[tuple[int, int], ...]  # in order; end to end they are the layout

    @property
    def numel(self) -> int:
        return self.layout.numel

    @cached_property
    def in_place(self) -> Layout:
        """The tensors as they lie in the buffer, from the first to the last, with gaps where others are."""
        if len(self.runs) < 2:
            return self.layout
        first, segments = self.runs[0][0], []
        ahead = iter(self.runs)
        at, stop = next(ahead)
        for segment in self.layout.segments:
            while at == stop and segment.numel:
                at, stop = next(ahead)
            segments.append(segment._replace(start=at - first, stop=at - first + segment.numel))
            at += segment.numel
        return Layout(segments, chosen=self.layout.chosen)

    def view(self, whole: Tensor) -> Tensor:
        """The buffer's own memory that `in_place` is the layout of."""
        start, stop = self.runs[0][0], self.runs[-1][1]
        return whole if stop - start == whole.numel() else whole[start:stop]

    @cached_property
    def places(self) -> list[tuple[int, int, int]]:
        """Where each run begins and ends in the buffer, and where it begins end to end."""
        ends = accumulate(stop - start for start, stop in self.runs)
        return [(start, stop, end - (stop - start)) for (start, stop), end in zip(self.runs, ends, strict=True)]

    def gather(self, whole: Tensor, out: Tensor) -> Tensor:
        """out = the tensors, end to end."""
        for start, stop, at in self.places:
            out[at : at + stop - start].copy_(whole[start:stop])
        return out

    def scatter(self, values: Tensor, whole: Tensor) -> None:
        """Write what `gather` took back to its places."""
        for start, stop, at in self.places:
            whole[start:stop].copy_(values[at : at + stop - start])


def joined(spans: Iterable[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """Spans, (begin, end), of which those that follow each other have become one."""
    runs: list[tuple[int, int]] = []
    for begin, end in spans:
        runs.append((runs.pop()[0] if runs and runs[-1][1] == begin else begin, end))
    return tuple(runs)


def bounds(spans: Sequence[tuple[int, int]]) -> Tensor:
    """Spans as kernels are told of them, counted from the first: int64[S + 1], or int64[S, 2] where there are gaps."""
    first = spans[0][0] if spans else 0
    if len(joined(spans)) < 2:
        return integers([begin - first for begin, _ in spans] + [spans[-1][1] - first if spans else 0])
    return integers([bound - first for span in spans for bound in span]).view(-1, 2)


def integers(values: list[int]) -> Tensor:
    """int64, in CPU memory: where things lie, which is never on a device."""
    return torch.tensor(values, dtype=torch.int64, device="cpu")
