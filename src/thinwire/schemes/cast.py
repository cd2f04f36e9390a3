"""fp64, fp32, fp16, bf16: the gradient itself, in at most so many bits. The baselines every other scheme must beat."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core.bucket import Bucket
from thinwire.core.layout import Layout
from thinwire.core.memory import Memory
from thinwire.core.request import Mean, Sum, holds_sum
from thinwire.core.scheme import Codec, Conversation
from thinwire.kernels.backends.memory import pieces


class _Cast(Codec):
    """Divide by the number of workers, cast, sum.

    The division comes first, as in plain DDP: the same bits come out, and 16-bit sums do not overflow where the mean
    does not. A sum is never wider than what is summed: a bfloat16 gradient stays 16 bits under fp32.

    A codec too, for where one worker speaks to another: every element in the dtype, rounded to the nearest. And for
    groups too large for a 16-bit sum (`holds_sum`): a `Mean`, which is added up in float32, in as many bytes. There
    a worker's own element overflows fp16 past 65504, and not only the mean.
    """

    unbiased: ClassVar[bool] = True
    exact: ClassVar[bool] = True
    any_float: ClassVar[bool] = True
    rank_order: ClassVar[bool] = False
    grain: ClassVar[int | None] = 8
    dtype: ClassVar[torch.dtype]
    family: ClassVar[str] = "casts"

    def summed_as(self, dtype: torch.dtype, workers: int) -> torch.dtype | None:
        sent = self._sent(dtype)
        return sent if holds_sum(sent, workers) else None

    def _sent(self, dtype: torch.dtype) -> torch.dtype:
        return dtype if dtype.itemsize < self.dtype.itemsize else self.dtype

    def converse(self, bucket: Bucket, memory: Memory, level: float) -> Conversation:
        flat, lost = bucket.flat, bucket.lost
        sent = self._sent(flat.dtype)
        if not holds_sum(sent, bucket.workers):
            wide = flat
            if flat.dtype is not torch.float32:
                wide = bucket.scratch.take("wide", flat.numel(), torch.float32, flat.device).copy_(flat)
            mean = yield Mean(_NARROW[sent], replace(bucket, flat=wide), level)
            return flat.copy_(mean)
        if sent is flat.dtype:
            if lost is not None:
                lost.zero_()
            return (yield Sum(flat.mul_(1.0 / bucket.workers)))
        narrow = bucket.scratch.take("cast", flat.numel(), self.dtype, flat.device)
        self._narrow(flat, bucket.workers, narrow, lost)
        total = yield Sum(narrow)
        return flat.copy_(total)

    def _narrow(self, flat: Tensor, workers: int, narrow: Tensor, lost: Tensor | None) -> None:
        """narrow = this worker's share; lost = what that does not say.

        Where somebody remembers what is lost, send what lies beyond the dtype's range as its end: the rest comes
        later. Without memory it overflows, so that a GradScaler sees it.
        """
        kernels.scale_cast(flat, 1.0 / workers, narrow, lost=lost, back=workers)
        if lost is None or (kernels.at_hand(lost) and kernels.all_finite(lost)):
            return
        most = (1 - 2.0**-8) * torch.finfo(self.dtype).max  # so that no rounding takes a sum of them beyond
        # `narrow` is not finite where `lost` is not; on a device that is known only there.
        fine = None if kernels.at_hand(lost) else kernels.doubt(lost) == 0
        for whole, said, left in zip(pieces(flat), pieces(narrow), pieces(lost), strict=True):
            ends = torch.div(whole, workers, out=left).clamp_(-most / workers, most / workers)
            finite = torch.lt(whole, torch.inf).logical_and_(torch.gt(whole, -torch.inf))
            ends = torch.where(finite, ends, whole, out=left)
            said.copy_(ends) if fine is None else torch.where(fine, said, ends.to(said.dtype), out=said)
            torch.sub(whole, left.copy_(said), alpha=workers, out=left)

    def lossless(self, dtype: torch.dtype) -> bool:
        return torch.promote_types(dtype, self.dtype) is self.dtype

    def nbytes(self, layout: Layout, level: float) -> int:
        return layout.numel * self.dtype.itemsize

    def encode(self, bucket: Bucket, level: float, out: Tensor) -> None:
        self._narrow(bucket.flat, 1, out.view(self.dtype), bucket.lost)

    def decode_add(self, data: Tensor, layout: Layout, level: float, out: Tensor, weight: float) -> None:
        self.check_size(data, layout, level)
        kernels.cast_add(data.view(self.dtype), weight, out)


@dataclass(frozen=True)
class FP64(_Cast):
    """The working dtype, as it is: a gradient is rarely wider than 32 bits."""

    dtype: ClassVar[torch.dtype] = torch.float64
    summary: ClassVar[str] = "every bit of a float64 gradient; others as they are"


@dataclass(frozen=True)
class FP32(_Cast):
    """Plain DDP: 32 bits, summed."""

    dtype: ClassVar[torch.dtype] = torch.float32
    summary: ClassVar[str] = "what plain DDP sends; the exact reference"


@dataclass(frozen=True)
class FP16(_Cast):
    """IEEE half precision: 11 significant bits, overflows past 65504."""

    dtype: ClassVar[torch.dtype] = torch.float16
    summary: ClassVar[str] = "half the bytes, nothing to tune; the baseline to beat"


@dataclass(frozen=True)
class BF16(_Cast):
    """bfloat16: the range of float32 with 8 significant bits."""

    dtype: ClassVar[torch.dtype] = torch.bfloat16
    summary: ClassVar[str] = "half the bytes and no overflow, at 3 bits less precision than fp16"


_NARROW: dict[torch.dtype, Codec] = {torch.float16: FP16(), torch.bfloat16: BF16()}
