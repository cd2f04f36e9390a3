"""Bucket: one flat buffer, its named tensors, and who in the group is looking at it."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from thinwire.core import randomness
from thinwire.core.layout import Layout, Segment


class Scratch:
    """Memory kept from step to step: fresh pages cost more than the copy into them."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, torch.dtype, torch.device], Tensor] = {}
        self._parts: dict[int, Scratch] = {}

    def take(
        self, name: str, numel: int, dtype: torch.dtype, device: torch.device | str = "cpu", *, pinned: bool = False
    ) -> Tensor:
        """`numel` uninitialised elements; the same memory every time the same name is asked for.

        pinned: CPU memory that a device can copy from and to by itself.
        """
        device = torch.device(device)
        kept = self._kept.get((name, dtype, device))
        if kept is None or kept.numel() < numel:
            kept = self._kept[name, dtype, device] = torch.empty(numel, dtype=dtype, device=device, pin_memory=pinned)
        return kept[:numel]

    def part(self, number: int) -> Scratch:
        """Scratch of its own for one of several requests that are under way at once."""
        if number not in self._parts:
            self._parts[number] = Scratch()
        return self._parts[number]

    @property
    def nbytes(self) -> int:
        own = sum(kept.numel() * kept.element_size() for kept in self._kept.values())
        return own + sum(part.nbytes for part in self._parts.values())


_OF_THREAD = threading.local()


def workspace() -> Scratch:
    """Scratch of this thread's own, for who is called without a bucket and needs it until it returns."""
    if not hasattr(_OF_THREAD, "scratch"):
        _OF_THREAD.scratch = Scratch()
    return _OF_THREAD.scratch


class Verdict:
    """What those who decoded parts of a mean can say of it without looking at it once more."""

    def __init__(self) -> None:
        self.finite: bool | None = None  # True: all of it is, surely; else somebody must look

    def add(self, finite: bool) -> None:
        self.finite = finite if self.finite is None else self.finite and finite


@dataclass(frozen=True)
class Bucket:
    """What one worker brings to one conversation: numbers, their names, and its place in the group.

    `flat` belongs to the conversation: schemes may write over it, and an exchange writes a Mean's answer there, or into
    `out` where there is one.
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
    spare: Tensor | None = None  # memory like `flat` that nobody needs until the conversation has ended
    out: Tensor | None = None  # memory like `flat` for the mean; where it is given, `lost` may be `flat` itself
    owed: Tensor | None = None  # like `flat`, and still to be added to it: only schemes that `settle` meet this
    verdict: Verdict = field(default_factory=Verdict)
    seat: int | None = None  # this worker's place among those that are left; None: nobody was lost, so `worker`

    @classmethod
    def of(cls, tensor: Tensor, name: str = "tensor", workers: int = 1) -> Bucket:
        """A bucket of one tensor, for trying a scheme by hand."""
        return cls(tensor.reshape(-1), Layout.of([(name, tensor.shape)]), workers=workers)

    @property
    def target(self) -> Tensor:
        """Where the mean goes."""
        return self.flat if self.out is None else self.out

    @property
    def place(self) -> int:
        """0 .. workers - 1, other than `worker`, which is for life."""
        return self.worker if self.seat is None else self.seat

    def settle(self, *, in_place: bool) -> Bucket:
        """Add what is owed in a pass of its own, as a scheme that is `in_place`, or is not, would."""
        if self.owed is None:
            return self
        total = self.lost if in_place and self.lost is not None else self.flat
        return replace(self, flat=torch.add(self.flat, self.owed, out=total), owed=None)

    def settled(self) -> Bucket:
        """As it is once what was owed, if anything, has been added to it, into `lost`."""
        return self if self.owed is None or self.lost is None else replace(self, flat=self.lost, owed=None)

    def room(self, name: str) -> Tensor:
        """Kept memory like `flat`, by name: uninitialised, but 0 in the layout's gaps."""
        flat = self.flat
        return self.layout.clear_gaps(self.scratch.take(name, flat.numel(), flat.dtype, flat.device))

    @property
    def segments(self) -> tuple[Segment, ...]:
        return self.layout.segments

    def tensors(self) -> dict[str, Tensor]:
        """Views of the named tensors in `flat`."""
        return {s.name: self.flat[s.start : s.stop].view(s.shape) for s in self.segments}

    def keys(self, *, shared: bool = False) -> Tensor:
        """int64[S]: one random key per segment; `shared`: the same keys on every worker."""
        worker = randomness.SHARED if shared else self.worker
        return torch.from_numpy(randomness.keys(self.seed, self.step, self.layout.name_hashes, worker))

    def split(self, parts: int, grain: int) -> list[Bucket]:
        """The bucket as `parts` buckets over the same memory, cut as `Layout.split` cuts."""
        return [self.part(number, parts, grain) for number in range(parts)]

    def part(self, number: int, parts: int, grain: int) -> Bucket:
        """One of those."""
        start, stop = self.layout.spans(parts, grain)[number]
        return replace(
            self,
            flat=self.flat[start:stop],
            layout=self.layout.split(parts, grain)[number],
            lost=None if self.lost is None else self.lost[start:stop],
            out=None if self.out is None else self.out[start:stop],
            owed=None if self.owed is None else self.owed[start:stop],
        )
