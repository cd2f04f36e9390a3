"""Random-k: elements drawn at random, the same on all workers, so no place travels (Stich et al., 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from thinwire import kernels
from thinwire.core.bucket import Bucket
from thinwire.core.layout import Layout
from thinwire.core.memory import Memory
from thinwire.core.scheme import Conversation, Knob, Scheme
from thinwire.schemes._sparse import check_density, check_shared_values, converse_about, density_knob, kept


@dataclass(frozen=True)
class RandomK(Scheme):
    """k = density * elements of each tensor, at least one, drawn from the shared seed in every step.

    1. All draw the same k places.  2. mean = the mean of the values there, 0 elsewhere.  3. All else is lost.

    Values are not scaled up by 1/density: with error feedback that would only add variance.

    Differs from the paper: one element is drawn from each of k equal segments of the tensor, laid out as a
    ring with a random beginning. Every element is as likely as under free drawing, and k draws are enough.
    """

    density: float = 0.01  # lower => fewer bytes, more error; of each tensor
    values: str = "fp16"  # bf16, fp16, fp32, fp64, or the spec of any scheme without memory

    unbiased: ClassVar[bool] = False
    in_place: ClassVar[bool] = True
    gaps: ClassVar[bool] = True
    family: ClassVar[str] = "sparse"
    summary: ClassVar[str] = "elements drawn from a shared seed: summable; the baseline for sparse schemes"

    def __post_init__(self) -> None:
        check_density("randomk", self.density)
        check_shared_values("randomk", self.values)

    @property
    def wide(self) -> bool:
        return self.values == "fp64"

    @property
    def knob(self) -> Knob:
        return density_knob(self.density)

    def converse(self, bucket: Bucket, memory: Memory, level: float) -> Conversation:
        flat = bucket.flat
        kernels.spoil_(flat, flat)  # else an element that is not drawn would hide it from the group
        layout = bucket.layout
        few = layout.once(("few", level), lambda: _few(layout, level))
        places = bucket.scratch.take("drawn", few.numel, torch.int32, flat.device)
        kernels.draw_places(layout.starts, few.starts, bucket.keys(shared=True), out=places)
        return (yield from converse_about(bucket, places, few, self.values))


def _few(layout: Layout, density: float) -> Layout:
    return Layout.of([(s.name, (kept(density, s.numel),)) for s in layout.segments], chosen=True)
