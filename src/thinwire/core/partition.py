"""Partition: some tensors of a bucket travel exact, beside what the scheme does with the others."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core.bucket import Bucket
from thinwire.core.layout import Layout, Selection
from thinwire.core.memory import Memory
from thinwire.core.request import Sum, holds_sum
from thinwire.core.scheme import Conversation, Scheme, Wrapper, side_by_side

Exempt: TypeAlias = str | Sequence[str] | Callable[[str, Tensor], bool]

GAPS = 0.25  # of what is compressed may lie in gaps: what is remembered has them, too, and some passes go over them
SMALL = 1024  # tensors with fewer elements travel exact by default: scales would eat what the codes save


def small(shape: Sequence[int], numel: int) -> bool:
    """What travels exact unless somebody says otherwise: vectors, and tensors under SMALL elements."""
    return len(shape) <= 1 or numel < SMALL


def exempted(exempt: Exempt, scheme: Scheme, name: str, tensor: Tensor) -> bool:
    """Whether a tensor is exempt: "auto" (`small` ones), name patterns, or a function of (name, tensor)."""
    if callable(exempt):
        return bool(exempt(name, tensor))
    if exempt == "auto":
        return not scheme.exact and small(tensor.shape, tensor.numel())
    if isinstance(exempt, str):
        raise ValueError(f"exempt must be 'auto', a sequence of name patterns or a function, got {exempt!r}")
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in exempt)


def like(tensor: Tensor, scheme: Scheme, device: torch.device) -> Tensor:
    """Shape and working dtype of a tensor, on a device, in no memory: what `Scheme.init` is given."""
    return torch.empty((), dtype=working(scheme, tensor.dtype), device=device).expand(tensor.shape)


def working(scheme: Scheme, dtype: torch.dtype) -> torch.dtype:
    """Float32, which kernels are fast in, unless the scheme is there to keep what float64 has more."""
    return torch.promote_types(dtype, torch.float32) if scheme.wide else torch.float32


@dataclass(frozen=True)
class Partition(Wrapper):
    """A scheme for the tensors of a bucket that are not `exempt`; those are summed as they are, at the same time.

    1. Exempt tensors, end to end, divided by the number of workers: a Sum, asked beside the scheme's first question.
    2. The others, in the dtype that the scheme works in: the scheme's own conversation. In CPU memory they stay where
       they are, with gaps where exempt tensors were; elsewhere, in another dtype, for a scheme that does not take gaps,
       or where these are long, they are copied end to end.
    3. Exempt tensors' mean goes back to its places, and so does all that was copied, in the bucket's dtype.
    """

    exempt: frozenset[str]

    any_float: ClassVar[bool] = True

    def converse(self, bucket: Bucket, memory: Memory, level: float) -> Conversation:
        assert bucket.lost is None, "nothing outside of a partition asks for what was lost"
        flat, layout = bucket.flat, bucket.layout
        compressed, exempt = layout.once(("partition", self.exempt), lambda: self._divide(layout))
        if exempt.numel:
            dtype = flat.dtype if holds_sum(flat.dtype, bucket.workers) else torch.float32
            exact = bucket.scratch.take("exact", exempt.numel, dtype, flat.device)
            exempt.gather(flat, exact).mul_(1.0 / bucket.workers)
            if not compressed.numel:
                exempt.scatter((yield Sum(exact)), flat)
                return flat
        part, own = self._part(bucket, compressed)
        conversation = self.scheme.converse(part, memory, level)
        if exempt.numel:
            mean, total = yield from side_by_side(conversation, _sum(exact))
        else:
            mean = yield from conversation
        if not own:
            compressed.scatter(mean, flat)
        elif mean.data_ptr() != part.flat.data_ptr():
            part.flat.copy_(mean)
        if exempt.numel:
            exempt.scatter(total, flat)
        return flat

    def _divide(self, layout: Layout) -> tuple[Selection, Selection]:
        return layout.select(set(layout.names) - self.exempt), layout.select(self.exempt)

    def _part(self, bucket: Bucket, compressed: Selection) -> tuple[Bucket, bool]:
        """The compressed tensors as a bucket of their own, and whether that is the bucket's own memory. What is exempt
        was taken out before."""
        flat = bucket.flat
        dtype = flat.dtype if self.scheme.any_float else working(self.scheme, flat.dtype)
        if dtype is not flat.dtype:
            copy = compressed.gather(flat, bucket.scratch.take("working", compressed.numel, dtype, flat.device))
            return replace(bucket, flat=copy, layout=compressed.layout), False
        if len(compressed.runs) == 1 or self._bears(compressed.in_place, flat):
            view, own = compressed.view(flat), compressed.in_place
            own.clear_gaps(view)
            return bucket if own is bucket.layout else replace(bucket, flat=view, layout=own), True
        # The name is feedback's for what was lost: it takes that where nothing is copied, and the spare memory here.
        copy = compressed.gather(flat, bucket.scratch.take("lost", compressed.numel, dtype, flat.device))
        return replace(bucket, flat=copy, layout=compressed.layout, spare=flat[: copy.numel()]), False

    def _bears(self, layout: Layout, flat: Tensor) -> bool:
        """Whether the gaps may stay."""
        short = layout.extent - layout.numel <= GAPS * layout.numel
        return self.scheme.gaps and short and kernels.at_hand(flat) and flat.is_contiguous()


def _sum(tensor: Tensor) -> Conversation:
    return (yield Sum(tensor))
