"""TopKC: Top-k over chunks that the group chooses together, so values are summed and no index travels."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core import randomness
from thinwire.core.bucket import Bucket
from thinwire.core.layout import integers
from thinwire.core.memory import Memory
from thinwire.core.request import Sum, holds_sum
from thinwire.core.scheme import Conversation, Knob, Scheme
from thinwire.schemes._sparse import check_density, check_shared_values, converse_about, density_knob, kept, kept_layout


@dataclass(frozen=True)
class TopKC(Scheme):
    """The chunks with the largest squared norm over all workers.

    1. n_i[j] = |chunk j|^2 on worker i, chunks of `chunk` elements of the bucket.
    2. N = sum of n_i, in bfloat16: squares overflow fp16.
    3. Every worker picks the same J = density * chunks largest, of equals the first.
    4. mean = the mean of the values there, 0 elsewhere. All else is lost.

    With 16-bit values it costs 16 (J chunk / elements + 1 / chunk) bits per element, for any number of workers.
    It lives on large elements being neighbours, as they are in gradients.

    Differs from the paper: sqrt(N) bounds every value, so the group knows a power of two that brings them
    into fp16's range, whatever theirs is.
    """

    density: float = 0.1  # lower => fewer bytes, more error; of each bucket (one bucket: of the model)
    chunk: int = 64  # higher => fewer norms on the wire, a coarser choice
    values: str = "fp16"  # bf16, fp16, fp32, fp64, or the spec of any scheme without memory
    shuffle: bool = False  # True => chunks of elements from all over the bucket: what locality is worth, never better

    unbiased: ClassVar[bool] = False
    in_place: ClassVar[bool] = True
    settles: ClassVar[bool] = True
    gaps: ClassVar[bool] = True
    family: ClassVar[str] = "sparse"
    summary: ClassVar[str] = "the largest chunks, chosen by all together: summable, no indices, two rounds"

    def __post_init__(self) -> None:
        check_density("topkc", self.density)
        if not isinstance(self.chunk, int) or self.chunk < 1:
            raise ValueError(f"topkc: chunk must be a positive integer, got {self.chunk!r}")
        if not isinstance(self.shuffle, bool):
            raise ValueError(f"topkc: shuffle must be True or False, got {self.shuffle!r}")
        check_shared_values("topkc", self.values)

    @property
    def wide(self) -> bool:
        return self.values == "fp64"

    @property
    def knob(self) -> Knob:
        return density_knob(self.density)

    def converse(self, bucket: Bucket, memory: Memory, level: float) -> Conversation:
        if self.shuffle:
            return (yield from self._shuffled(bucket.settle(in_place=True), memory, level))
        flat = bucket.flat
        chunks = -(-flat.numel() // self.chunk)
        own = bucket.scratch.take("norms", chunks, torch.float32, flat.device)
        whole = bucket.layout.once("whole", lambda: integers([0, flat.numel()]))
        kernels.block_statistics(flat, whole, self.chunk, square=own, owed=bucket.owed, total=bucket.lost)
        bucket = bucket.settled()
        if holds_sum(torch.bfloat16, bucket.workers):
            short = bucket.scratch.take("norms", chunks, torch.bfloat16, flat.device)
            norms = own.copy_((yield Sum(short.copy_(own))))
        else:
            norms = yield Sum(own)
        if kernels.seen_nonfinite(norms):
            # Somebody's gradient is not finite, or past 1e19: nobody can use this step, and all see it alike.
            return bucket.target.fill_(torch.nan)
        count = kept(level, chunks)
        places = kernels.top_k(norms, count, out=bucket.scratch.take("chunks", count, torch.int32, flat.device))
        few = kept_layout(bucket.layout, count * self.chunk)
        mean = yield from converse_about(bucket, places, few, self.values, chunk=self.chunk, scale=_scale(norms))
        return mean if kernels.at_hand(norms) else kernels.spoil_(mean, norms)

    def _shuffled(self, bucket: Bucket, memory: Memory, level: float) -> Conversation:
        """The same about the bucket's elements in another order, and all of it put back."""
        flat, order = bucket.flat, self._order(bucket)
        mixed, mean = (
            bucket.scratch.take(f"shuffled-{what}", flat.numel(), flat.dtype, flat.device) for what in ("flat", "mean")
        )
        kernels.gather(flat, order, out=mixed)
        part = replace(bucket, flat=mixed, lost=None if bucket.lost is None else mixed, spare=None, out=mean)
        mean = yield from replace(self, shuffle=False).converse(part, memory, level)
        if bucket.lost is not None:
            kernels.put_(bucket.lost, order, mixed)
        kernels.put_(bucket.target, order, mean)
        return bucket.target

    def _order(self, bucket: Bucket) -> Tensor:
        """int32: the bucket's elements in an order that all workers draw alike, the same in every step."""

        def draw() -> Tensor:
            names = bucket.layout.names
            generator = torch.Generator("cpu").manual_seed(randomness.key(bucket.seed, 0, "\n".join(names)) >> 1)
            order = torch.randperm(bucket.flat.numel(), dtype=torch.int64, device="cpu", generator=generator)
            return order.to(torch.int32).to(bucket.flat.device)

        return bucket.layout.once(("shuffled", bucket.seed, bucket.flat.device), draw)


def _scale(norms: Tensor) -> float | Tensor:
    """A power of two that takes the largest chunk's norm to about 2^14."""
    if kernels.at_hand(norms):
        return 2.0 ** (14 - math.frexp(norms.max().item())[1] // 2)
    _, exponent = torch.frexp(norms.max())
    return torch.ldexp(torch.ones_like(norms[:1]), 14 - exponent.div(2, rounding_mode="floor"))
