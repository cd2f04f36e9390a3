"""Top-k: only the largest elements travel, each worker's own, with their places (Aji and Heafield, 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core.bucket import Bucket, workspace
from thinwire.core.layout import Layout
from thinwire.core.scheme import Codec, Knob
from thinwire.schemes._sparse import Message, check_density, density_knob, kept


@dataclass(frozen=True)
class TopK(Codec):
    """Exactly k = density * elements of each bucket, at least one: the largest |x|, of equals the first.

    1. Find the k largest |x|.  2. Send their values, and their places in few bits.  3. All else is lost.

    Workers choose different elements, so messages are gathered, not summed: traffic grows with the workers.

    `mean="senders"`, after SparseLoCo's code: of every element the mean is over those who sent it. Where few chose the
    same, that is up to as many times the mean over all as there are workers, and what is owed no longer adds up: made
    for the weight changes of `LocalSteps`, where larger steps are an outer rate.
    """

    density: float = 0.01  # lower => fewer bytes, more error; of each bucket (one bucket: of the model)
    values: str = "bf16"  # bf16, fp16, fp32, fp64, or a quantiser's spec
    places: str = "coded"  # "plain" => 32 bits each, as Top-k is usually counted: a baseline, never better
    mean: str = "workers"  # "senders" => of each element over those who sent it: larger steps, for local steps

    unbiased: ClassVar[bool] = False
    in_place: ClassVar[bool] = True
    settles: ClassVar[bool] = True
    gaps: ClassVar[bool] = True
    family: ClassVar[str] = "sparse"
    summary: ClassVar[str] = "the largest elements with their places; few bytes for few workers"

    def __post_init__(self) -> None:
        check_density("topk", self.density)
        if self.mean not in ("workers", "senders"):
            raise ValueError(f"topk: mean must be over 'workers' or 'senders', got {self.mean!r}")
        _ = self._message

    @property
    def _message(self) -> Message:
        return Message.of("topk", self.values, self.places)

    @property
    def wide(self) -> bool:
        return self.values == "fp64"

    @property
    def linear(self) -> bool:
        return self.mean == "workers"

    @property
    def knob(self) -> Knob:
        return density_knob(self.density)

    def nbytes(self, layout: Layout, level: float) -> int:
        return self._message.nbytes(layout, kept(level, layout.numel))

    def encode(self, bucket: Bucket, level: float, out: Tensor) -> None:
        flat, count = bucket.flat, kept(level, bucket.layout.numel)
        places = bucket.scratch.take("places", count, torch.int32, flat.device)
        starts = bucket.layout.starts
        kernels.top_k(flat, count, starts=starts, out=places, owed=bucket.owed, total=bucket.lost)
        self._message.encode(bucket.settled(), places, out)

    def decode_add(self, data: Tensor, layout: Layout, level: float, out: Tensor, weight: float) -> None:
        self._message.decode_add(data, layout, kept(level, layout.numel), out, weight)

    def decode_sum(self, datas: Sequence[Tensor], layout: Layout, level: float, out: Tensor, weight: float) -> bool:
        out.zero_()
        count, finite = kept(level, layout.numel), True
        senders = None if self.linear else workspace().take("senders", out.numel(), out.dtype, out.device).zero_()
        for data in datas:
            finite &= self._message.decode_add(data, layout, count, out, weight, senders)
        if senders is not None:
            out.mul_(len(datas)).div_(senders.clamp_(min=1))
        return finite
