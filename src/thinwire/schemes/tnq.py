"""TNQ, two-stage quantisation: truncate, then round to non-uniform levels, both fitted to the gradient."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core import theory
from thinwire.core.bucket import Bucket
from thinwire.core.layout import Layout, Selection, integers
from thinwire.core.memory import Memory
from thinwire.core.request import Mean, Sum
from thinwire.core.scheme import Conversation, Knob
from thinwire.schemes import _banks, _tables

SAMPLE = 16384  # elements of a tensor that a tail is fitted to
_WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8)


@dataclass(frozen=True)
class TNQ(_tables.Grouped):
    """Each element becomes one of 2^bits levels over [-a, a], denser where the gradient's density is.

    1. c = the scale of a Laplace distribution, from the moments of the group (`scale`).
    2. a = 3c ln(1 + s/k), s = 2^bits - 1: clip to [-a, a].
    3. level_j = -3c sgn(2j - s) ln(1 - |2j - s|/(s + k)), j = 0..s.
    4. x lies between two neighbouring levels; send the upper with probability (x - lower)/(upper - lower).

    On Laplace data the error stays under 27 c^2/(s + k)^2 per element (see `theory`); it is unbiased inside [-a, a].
    `model="powerlaw"` fits a power-law tail instead, and takes the threshold with the least predicted error.
    `budget` replaces `bits`: an average per coordinate, shared out over a bucket's tensors by the bound.

    Ours: the scale uses two moments instead of mean |x|, the plain Laplace fit (which estimator the paper has is not
    known to us), and belongs to 1024 elements, since real gradients are sparser and less alike than Laplace; a range
    never exceeds the largest element, so constant tensors are exact from 2 bits on; a tensor (not a block) is not
    truncated where one element holds most of its energy; inside the knee of a power law the density is even; and the
    closed forms are derived from the published bound.
    """

    bits: int = 4  # lower => fewer bytes, more error
    group: str | int = "auto"  # what shares a scale: "tensor" or a number of elements; auto: 1024, power laws: tensor
    model: str = "laplace"  # "powerlaw" for heavier tails
    constant: str = "worst"  # rounding variance that the threshold assumes; "average" => truncates a little less
    scale: str = "moments"  # how the scale is estimated; "mean" => mean |x|, the plain Laplace fit
    levels: str = "nonuniform"  # of the power law: also "uniform", "biscaled"
    budget: float | None = None  # bits per coordinate on average, instead of `bits`

    unbiased: ClassVar[bool] = False
    settles: ClassVar[bool] = True
    gaps: ClassVar[bool] = True
    family: ClassVar[str] = "quantisers"
    summary: ClassVar[str] = "truncated non-uniform quantisation: the least error of the plain quantisers"

    def __post_init__(self) -> None:
        if self.bits not in range(1, 9):
            raise ValueError(f"tnq: bits must be 1..8, got {self.bits!r}")
        if self.group != "auto":
            _tables.check_group("tnq", self.group)
        if self.model not in ("laplace", "powerlaw"):
            raise ValueError(f"tnq: model must be 'laplace' or 'powerlaw', got {self.model!r}")
        _tables.check_scale("tnq", self.scale)
        if self.constant not in theory.CONSTANTS:
            raise ValueError(f"tnq: constant must be 'worst' or 'average', got {self.constant!r}")
        if self.levels not in theory.SHAPES:
            raise ValueError(f"tnq: levels must be one of {', '.join(theory.SHAPES)}, got {self.levels!r}")
        if self.model == "laplace" and self.levels != "nonuniform":
            raise ValueError(f"tnq: levels={self.levels!r} needs model='powerlaw'; uniform levels for Laplace are tq")
        if self.model == "powerlaw" and self.block:
            raise ValueError(f"tnq: model='powerlaw' fits whole tensors: group must be 'tensor', got {self.group!r}")
        if self.budget is not None and not 1 <= self.budget <= 8:
            raise ValueError(f"tnq: budget must be 1..8 bits per coordinate, got {self.budget!r}")

    @property
    def block(self) -> int:
        """Elements that share a scale; 0: the tensor's."""
        if self.group == "auto":
            return 0 if self.model == "powerlaw" else _tables.BLOCK
        return super().block

    @property
    def rank_order(self) -> bool:
        return self.budget is None

    @property
    def sized_by_numbers(self) -> bool:
        return self.budget is not None

    @property
    def knob(self) -> Knob:
        if self.budget is None:
            return Knob("bits", _WIDTHS, self.bits)
        return Knob("budget", tuple(sorted({*_WIDTHS, self.budget})), self.budget)

    # The payload: one float32 radius per group; for tensors also the shape of their levels; then the codes.

    @property
    def _shape_fields(self) -> int:
        """Laplace: the radius in scales. Power law: the radius in knees, exponent and tail; exponent 0: Laplace."""
        return 0 if self.block else 3 if self.model == "powerlaw" else 1

    def nbytes(self, layout: Layout, level: float) -> int:
        header = 4 * layout.blocks(self.block) * (1 + self._shape_fields)
        return header + layout.packed_bytes(self.block, int(level))

    def encode(self, bucket: Bucket, level: float, out: Tensor) -> None:
        layout, bits = bucket.layout, int(level)
        radius, shapes, codes = self.fields(out, layout)
        if 0 < self.block <= kernels.LONGEST and kernels.at_hand(bucket.flat):  # the same as below, in one pass
            kernels.quantize_laplace(
                bucket.flat, layout.starts, self.block, _tables.laplace_blocks(bits, self.block, self._threshold(bits)),
                self._threshold(bits), moments=self.scale == "moments", radius=radius, keys=bucket.keys(),
                counters=layout.counters, out=codes, owed=bucket.owed, lost=bucket.lost,
            )  # fmt: skip
            return
        group = _tables.laplace_statistics(bucket, self.block, self.scale, radius)
        torch.minimum(torch.mul(group.scale, self._threshold(bits), out=radius), group.largest, out=radius)
        if self.block:
            table = _tables.laplace_blocks(bits, self.block, self._threshold(bits))
            kernels.quantize_levels(
                bucket.flat, layout.starts, self.block, table, radius,
                keys=bucket.keys(), counters=layout.counters, out=codes, lost=bucket.lost,
            )  # fmt: skip
            return
        self._fit_laplace(group, bits, radius, shapes)
        if self.model == "powerlaw":
            self._fit_tails(bucket, bits, group.largest, radius, shapes)
        _tables.encode(bucket, radius, shapes, self._tables_of(bits), codes)

    def decode_add(self, data: Tensor, layout: Layout, level: float, out: Tensor, weight: float) -> None:
        self.check_size(data, layout, level)
        bits = int(level)
        radius, shapes, codes = self.fields(data, layout)
        if self.block:
            table = _tables.laplace_blocks(bits, self.block, self._threshold(bits))
            kernels.dequantize_levels_add(codes, layout.starts, self.block, table, radius, weight, out=out)
        else:
            _tables.decode_add(codes, layout, radius, shapes, self._tables_of(bits), weight, out)

    def decode_sum(self, datas: Sequence[Tensor], layout: Layout, level: float, out: Tensor, weight: float) -> bool:
        if not self.block:
            return super().decode_sum(datas, layout, level, out, weight)
        radius, _, codes = self.fields_of(datas, layout, level)
        table = _tables.laplace_blocks(int(level), self.block, self._threshold(int(level)))
        return kernels.dequantize_levels_sum(codes, layout.starts, self.block, table, radius, weight, out=out)

    def fields(self, data: Tensor, layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
        groups = layout.blocks(self.block)
        header = 4 * groups * (1 + self._shape_fields)
        numbers = data[:header].view(torch.float32)
        return numbers[:groups], numbers[groups:].view(groups, self._shape_fields), data[header:]

    def _threshold(self, bits: int) -> float:
        """The truncation threshold, in scales."""
        return theory.laplace_threshold(bits, constant=self.constant)  # type: ignore[arg-type]

    def _tables_of(self, bits: int) -> _banks.Laplace:
        threshold = self._threshold(bits)
        if self.model == "laplace":
            return _banks.Laplace(bits, threshold)
        return _banks.PowerLaw(bits, threshold, self.levels)

    def _fit_laplace(self, group: _tables.Statistics, bits: int, radius: Tensor, shapes: Tensor) -> None:
        """Choose between truncation and the whole range; write each tensor's radius and the shape of its levels.

        The whole range where nothing lies beyond the threshold, and where one element holds most of the tensor's
        energy: there truncation would lose nearly all. One bit has no inner levels that a wide range could leave in
        place.
        """
        ratio, largest = self._threshold(bits), group.largest
        reach = largest / group.scale  # NaN where the tensor is all zero or not finite: compares false
        alone = (largest.double() ** 2 > 0.5 * group.square.double()) & torch.isfinite(reach) & (bits > 1)
        reach = torch.where(alone, largest / group.mean, reach)
        whole = (reach < ratio) | alone
        shapes.zero_()
        shapes[:, 0] = torch.where(whole, _banks.coarse(reach), ratio)
        radius.copy_(torch.where(whole, largest, radius))

    def _fit_tails(self, bucket: Bucket, bits: int, largest: Tensor, radius: Tensor, shapes: Tensor) -> None:
        """Give tensors with a power-law tail its threshold and levels; leave others to Laplace: an exponent of 0.

        So are those in which something is not finite: a sample need not show that, and their radius must.
        """
        if not kernels.at_hand(largest):
            self._fit_tails_there(bucket, bits, largest, radius, shapes)
            return
        for j, values in enumerate(_samples(bucket)):
            law = theory.PowerLaw.fit(values.abs(), bits, self.levels)  # type: ignore[arg-type]
            if law is not None and math.isfinite(float(largest[j])):
                radius[j] = min(law.threshold(bits, self.levels), float(largest[j]))  # type: ignore[arg-type]
                shapes[j] = shapes.new_tensor([float(radius[j]) / law.knee, law.exponent, law.tail])
                shapes[j, 0] = _banks.coarse(shapes[j, 0])

    def _fit_tails_there(self, bucket: Bucket, bits: int, largest: Tensor, radius: Tensor, shapes: Tensor) -> None:
        """The same of a device's bucket: all tensors at once, and nobody looks."""
        samples = _samples(bucket)
        enough = [j for j, values in enumerate(samples) if values.numel() >= theory.FEWEST]
        if not enough:
            return
        key = ("tnq: enough to fit a tail to", bucket.flat.device)
        which = bucket.layout.once(key, lambda: integers(enough).to(bucket.flat.device))
        law = _banks.fit_power_laws([samples[j].abs() for j in enough], bits, self.levels)
        most = largest[which]
        reach = torch.minimum(law.threshold, most.double()).to(radius.dtype)
        ratio = _banks.coarse((reach.double() / law.knee).to(shapes.dtype))
        found = (law.exponent > 0) & torch.isfinite(most)
        own = torch.stack([ratio, law.exponent.to(ratio.dtype), law.tail.to(ratio.dtype)], dim=1)
        radius.index_copy_(0, which, torch.where(found, reach, radius[which]))
        shapes.index_copy_(0, which, torch.where(found[:, None], own, shapes[which]))

    # Laplace fallbacks, and budgets.

    def init(self, name: str, like: Tensor, seed: int) -> dict[str, Tensor]:
        return {"fallbacks": torch.zeros((), dtype=torch.int64, device="cpu")} if self.model == "powerlaw" else {}

    def report(self, memory: Memory) -> dict[str, float]:
        if self.model != "powerlaw":
            return {}
        counted = sum(int(tensor) for (_, key), tensor in memory.items() if key == "fallbacks")
        return {"powerlaw_fallbacks": float(counted)}

    def converse(self, bucket: Bucket, memory: Memory, level: float) -> Conversation:
        if self.budget is not None:
            return (yield from self._share_out(bucket, level))
        if self.model != "powerlaw" or not kernels.at_hand(bucket.flat):  # whom counting would have to wait for
            return (yield Mean(self, bucket, level))
        fallbacks = memory[bucket.layout.names[0], "fallbacks"]

        def counting(part: Bucket, level: float, out: Tensor) -> None:
            self.encode(part, level, out)
            _, shapes, _ = self.fields(out, part.layout)
            fallbacks.add_((shapes[:, 1] == 0).sum())

        return (yield Mean(self, bucket, level, encode=counting))

    def _share_out(self, bucket: Bucket, budget: float) -> Conversation:
        """Tensors of the same width travel together, one Mean for each width in use, all at once.

        The widths follow from the group's summed scales, so they are the same on all workers, and each Mean's
        payload has the size that its own layout and width give.
        """
        scales = torch.empty(len(bucket.segments), dtype=torch.float32, device=bucket.flat.device)
        owed, flat = bucket.owed, bucket.flat
        kernels.block_statistics(flat, bucket.layout.starts, 0, absmean=scales, owed=owed, total=flat)
        total = yield Sum(scales)
        widths = theory.allocate(budget, total.tolist(), [segment.numel for segment in bucket.segments])
        plain = replace(self, budget=None)
        parts = {}
        for width in sorted(set(widths)):
            names = [name for name, own in zip(bucket.layout.names, widths, strict=True) if own == width]
            tensors = bucket.layout.select(names)
            parts[width] = tensors, _part(bucket, tensors, width)
        means = yield tuple(Mean(plain, part, width) for width, (_, part) in parts.items())
        for mean, (tensors, part) in zip(means, parts.values(), strict=True):
            tensors.scatter(mean, bucket.flat)
            if bucket.lost is not None and part.lost is not None:
                tensors.scatter(part.lost, bucket.lost)
        return bucket.flat


def _part(bucket: Bucket, tensors: Selection, width: int) -> Bucket:
    """A bucket of some tensors, in memory of its own."""
    scratch = bucket.scratch.part(width)
    like = (tensors.numel, bucket.flat.dtype, bucket.flat.device)
    lost = None if bucket.lost is None else scratch.take("tnq-lost", *like)
    flat = tensors.gather(bucket.flat, scratch.take("tnq-part", *like))
    return replace(bucket, flat=flat, layout=tensors.layout, lost=lost, owed=None, scratch=scratch)


def _samples(bucket: Bucket) -> list[Tensor]:
    """Of every tensor the elements that a tail is fitted to."""
    return [bucket.flat[s.start : s.stop : max(1, -(-s.numel // SAMPLE))] for s in bucket.segments]
