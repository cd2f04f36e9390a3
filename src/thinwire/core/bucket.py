"""Bucket: one flat buffer, its named tensors, and who in the group is looking at it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire.core import randomness


class Segment(NamedTuple):
    """One named tensor's stretch of a flat buffer."""

    name: str
    start: int
    stop: int
    shape: tuple[int, ...]
    offset: int = 0  # where in its tensor the stretch begins: not 0 only where a bucket was split

    @property
    def numel(self) -> int:
        return self.stop - self.start


class Layout:
    """Where each named tensor lies in a flat buffer. Made once per bucket and kept, with all that follows from it.

    Stretches follow each other without gaps, in order.
    """

    def __init__(self, segments: Sequence[Segment]):
        self.segments = tuple(segments)
        self.numel = self.segments[-1].stop if self.segments else 0
        self._splits: dict[tuple[int, int], list[Layout]] = {}

    @classmethod
    def of(cls, shapes: Sequence[tuple[str, Sequence[int]]]) -> Layout:
        """The layout of tensors laid end to end."""
        segments, start = [], 0
        for name, shape in shapes:
            stop = start + int(np.prod(shape, dtype=np.int64))
            segments.append(Segment(name, start, stop, tuple(shape)))
            start = stop
        return cls(segments)

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(segment.name for segment in self.segments)

    @cached_property
    def starts(self) -> Tensor:
        """int64[S + 1]: where each stretch begins, and the end."""
        return torch.tensor([segment.start for segment in self.segments] + [self.numel], dtype=torch.int64)

    @cached_property
    def counters(self) -> Tensor:
        """int64[S]: the index, in its own tensor, of each stretch's first element. Randomness counts from there."""
        return torch.tensor([segment.offset for segment in self.segments], dtype=torch.int64)

    @cached_property
    def name_hashes(self) -> np.ndarray:
        return np.array([randomness.name_hash(name) for name in self.names], dtype=np.uint64)

    def blocks(self, block: int) -> int:
        """How many blocks of at most `block` elements the stretches hold; blocks do not cross tensors."""
        return sum(-(-segment.numel // block) for segment in self.segments) if block else len(self.segments)

    def split(self, parts: int, grain: int) -> list[Layout]:
        """`parts` consecutive layouts of about equal length that together cover this one.

        A cut inside a tensor lies a multiple of `grain` elements from the tensor's beginning, so that blocks and
        bytes stay whole. Short layouts give empty parts.
        """
        if (parts, grain) not in self._splits:
            cuts = [0]
            for part in range(1, parts):
                cuts.append(max(cuts[-1], self._cut_near(part * self.numel // parts, grain)))
            cuts.append(self.numel)
            self._splits[parts, grain] = [self._between(a, b) for a, b in pairwise(cuts)]
        return self._splits[parts, grain]

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
        return Layout(pieces)


class Scratch:
    """Memory kept from step to step: fresh pages cost more than the copy into them."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}

    def take(self, name: str, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
        """`numel` uninitialised elements; the same memory every time the same name is asked for."""
        device = torch.device(device)
        kept = self._kept.get((name, dtype, device))
        if kept is None or kept.numel() < numel:
            kept = self._kept[name, dtype, device] = torch.empty(numel, dtype=dtype, device=device)
        return kept[:numel]

    @property
    def nbytes(self) -> int:
        return sum(kept.numel() * kept.element_size() for kept in self._kept.values())


@dataclass(frozen=True)
class Bucket:
    """What one worker brings to one conversation: numbers, their names, and its place in the group.

    `flat` belongs to the conversation: schemes may write over it, and an exchange writes a Mean's answer there.
    A bucket does not know about the network, the model or the optimizer.
    """

    flat: Tensor
    layout: Layout
    workers: int = 1
    worker: int = 0
    step: int = 0
    seed: int = 0
    lost: Tensor | None = None  # where asked for: the scheme writes `flat - what this worker's message says`
    scratch: Scratch = field(default_factory=Scratch)

    @classmethod
    def of(cls, tensor: Tensor, name: str = "tensor", workers: int = 1) -> Bucket:
        """A bucket of one tensor, for trying a scheme by hand."""
        return cls(tensor.reshape(-1), Layout.of([(name, tensor.shape)]), workers=workers)

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.layout.segments

    def tensors(self) -> dict[str, Tensor]:
        """Views of the named tensors in `flat`."""
        return {s.name: self.flat[s.start : s.stop].view(s.shape) for s in self.segments}

    def keys(self, *, shared: bool = False) -> Tensor:
        """int64[S]: one random key per stretch; `shared`: the same keys on every worker."""
        worker = randomness.SHARED if shared else self.worker
        return torch.from_numpy(randomness.keys(self.seed, self.step, self.layout.name_hashes, worker))

    def split(self, parts: int, grain: int) -> list[Bucket]:
        """The bucket as `parts` buckets over the same memory, cut as `Layout.split` cuts."""
        pieces, start = [], 0
        for layout in self.layout.split(parts, grain):
            stop = start + layout.numel
            pieces.append(
                replace(
                    self,
                    flat=self.flat[start:stop],
                    layout=layout,
                    lost=None if self.lost is None else self.lost[start:stop],
                )
            )
            start = stop
        return pieces
