"""RegTop-k: Top-k that holds back elements which the other workers cancelled last time."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core.bucket import Bucket
from thinwire.core.memory import Memory
from thinwire.core.request import Mean
from thinwire.core.scheme import Conversation, Knob, Scheme
from thinwire.schemes._sparse import Message, check_density, density_knob, kept
from thinwire.schemes.topk import TopK


@dataclass(frozen=True)
class RegTopK(Scheme):
    """Bayesian-regularised Top-k: the k largest of |a| tanh(|1 + D| / mu), at Top-k's price.

    1. 1 + D = n G / b for an element that this worker sent last round, b being what it had there and G the mean
       that came back: near 0 the others cancelled it, so it waits. Elsewhere, and at 0/0, the factor is 1.
    2. Send a where |a| tanh(|1 + D| / mu) is among the k largest; lost = a elsewhere.
    3. Remember the factor for the next round.

    `denominator="current"` is the second form in print: D = (n G - b) / a, over what the worker has now. It
    is not equivalent, and does not reproduce the authors' regression.
    `weights`: G is the sum of w_i a_i instead of the mean, w_i a worker's share of all weights; 1 + D = G / (w_i b).
    Tensors that travel exact stay the plain mean: with weights, exempt none.
    `guard`: the authors' rule against what rounding throws back. A G at least so many times as long, squared, as the
    last that was accepted becomes 0, and nothing else changes: what was sent in that round is gone.

    Memory: one number per element, finite, below 0 where the element was sent last round. A round whose mean is not
    finite leaves it as it was. `stats()["resent"]`: the share of all sent elements that had been sent the round before,
    too. At a vanishing mu, which is Top-k, those are the elements that the factor could act on; else those that it let
    pass.
    """

    density: float = 0.01  # lower => fewer bytes, more error; of each bucket (one bucket: of the model)
    mu: float = 1.0  # lower => closer to Top-k
    denominator: str = "previous"  # "current": the other form in print
    values: str = "bf16"  # bf16, fp16, fp32, fp64, or a quantiser's spec
    weights: tuple[float, ...] | None = None  # of every worker, in their order; None: all alike
    guard: float | None = None  # lower => more rounds are rejected; the authors have 100; of each bucket by itself

    unbiased: ClassVar[bool] = False
    in_place: ClassVar[bool] = True
    settles: ClassVar[bool] = True
    shared_state: ClassVar[frozenset[str]] = frozenset({"accepted"})
    gaps: ClassVar[bool] = True
    family: ClassVar[str] = "sparse"
    summary: ClassVar[str] = "Top-k that learns from what came back which elements cancel; the same bytes"

    def __post_init__(self) -> None:
        check_density("regtopk", self.density)
        if not self.mu > 0:
            raise ValueError(f"regtopk: mu must be above 0, got {self.mu!r}")
        if self.denominator not in ("previous", "current"):
            raise ValueError(f"regtopk: denominator must be 'previous' or 'current', got {self.denominator!r}")
        if self.weights is not None:
            _check_weights(self.weights)
        if self.guard is not None and not (isinstance(self.guard, int | float) and self.guard > 1):
            raise ValueError(f"regtopk: guard must be above 1, or None, got {self.guard!r}")
        _ = self._message

    @property
    def _message(self) -> Message:
        return Message.of("regtopk", self.values)

    @property
    def wide(self) -> bool:
        return self.values == "fp64"

    @property
    def knob(self) -> Knob:
        return density_knob(self.density)

    def init(self, name: str, like: Tensor, seed: int) -> dict[str, Tensor]:
        device = like.device
        counts = {key: torch.zeros((), dtype=torch.int64, device=device) for key in ("sent", "resent")}
        if self.guard is not None:
            counts["accepted"] = torch.zeros((), dtype=like.dtype, device=device)
        if self.denominator == "previous":
            return {"factor": torch.ones(like.shape, dtype=like.dtype, device=device)} | counts
        # n G - b of the elements sent last round; "huge" says of all others that they were not sent.
        huge = torch.finfo(like.dtype).max
        return {"others": torch.full(like.shape, huge, dtype=like.dtype, device=device)} | counts

    def report(self, memory: Memory) -> dict[str, float]:
        return {"resent": memory.shown("resent") / max(memory.shown("sent"), 1.0)}

    def converse(self, bucket: Bucket, memory: Memory, level: float) -> Conversation:
        layout, device = bucket.layout, bucket.flat.device
        count, share = kept(level, layout.numel), self._share(bucket)
        places = bucket.scratch.take("places", count, torch.int32, device)
        bucket = self._choose(bucket, memory, places)
        flat = bucket.flat
        had = kernels.gather(flat, places, out=bucket.scratch.take("had", count, flat.dtype, device)).mul_(share)
        # The same message as Top-k's, about elements chosen otherwise; and what came back must be G itself.
        codec, say = TopK(self.density, self.values), self._message.encode
        mean = yield Mean(
            codec, bucket, level, encode=lambda bucket, level, out: say(bucket, places, out, share), exact=True
        )
        if bucket.verdict.finite or not kernels.seen_nonfinite(mean):
            total = kernels.gather(mean, places, out=bucket.scratch.take("total", count, flat.dtype, device))
            self._count(bucket, memory, places)
            self._remember(bucket, memory, places, had, total.mul_(bucket.workers))
            if self.guard is not None:
                self._judge(mean, memory[layout.names[0], "accepted"], self.guard)
        return mean

    def rescale(self, memory: Memory, factor: float) -> None:
        for (_, key), others in memory.items():
            if key == "others":  # the other form keeps ratios
                huge = torch.finfo(others.dtype).max
                others.copy_(torch.where(others == huge, others, others * factor))

    def _choose(self, bucket: Bucket, memory: Memory, places: Tensor) -> Bucket:
        """Find the places of the largest |a| tanh(|1 + D| / mu); the bucket with what was owed in it."""
        count = places.numel()
        if self.denominator == "previous":
            factor = memory.flat("factor", bucket.layout)
            how = {"starts": bucket.layout.starts, "owed": bucket.owed, "total": bucket.lost}
            kernels.top_k(bucket.flat, count, factor, out=places, **how)
            return bucket.settled()
        bucket = bucket.settle(in_place=True)  # the factor itself follows from the sum
        others = memory.flat("others", bucket.layout)
        factor = bucket.scratch.take("factor", others.numel(), others.dtype, others.device)
        factor = self._squash(torch.div(others, bucket.flat, out=factor).add_(1))
        kernels.top_k(bucket.flat, count, factor, starts=bucket.layout.starts, out=places)
        return bucket

    def _share(self, bucket: Bucket) -> float:
        """What this worker's elements are multiplied by, so that their mean is the weighted sum."""
        if self.weights is None:
            return 1.0
        if len(self.weights) != bucket.workers:
            raise ValueError(f"regtopk: weights of {len(self.weights)} workers were given to {bucket.workers}")
        return bucket.workers * self.weights[bucket.worker] / math.fsum(self.weights)

    def _count(self, bucket: Bucket, memory: Memory, places: Tensor) -> None:
        """Take note how many of the elements that were sent were sent last round, too; not of a step that is lost."""
        key, name = "factor" if self.denominator == "previous" else "others", bucket.layout.names[0]
        last = memory.flat(key, bucket.layout)
        last = kernels.gather(last, places, out=bucket.scratch.take("last", places.numel(), last.dtype, last.device))
        again = bucket.scratch.take("again", places.numel(), torch.bool, last.device)
        if key == "factor":
            torch.signbit(last, out=again)
        else:
            torch.ne(last, torch.finfo(last.dtype).max, out=again)
        for count, more in (("resent", again.sum()), ("sent", places.numel())):
            if kernels.at_hand(last):
                memory[name, count].add_(more)
            else:  # where nobody knows yet whether the mean is finite
                kernels.keep_finite_(memory[name, count], memory[name, count] + more, bucket.target)
                memory.show(name, count)

    def _judge(self, mean: Tensor, accepted: Tensor, guard: float) -> None:
        """Make the mean 0 if it is too long, else remember how long it is. What is not finite stays to be seen."""
        length = torch.dot(mean, mean)
        finite = torch.isfinite(length)
        rejected = finite & (accepted > 0) & (length >= guard * accepted)
        accepted.copy_(torch.where(finite & ~rejected, length, accepted))
        mean.masked_fill_(rejected, 0.0)

    def _remember(self, bucket: Bucket, memory: Memory, places: Tensor, had: Tensor, total: Tensor) -> None:
        if self.denominator == "previous":
            # Top-k looks at magnitudes: the sign is free to say that the element was sent.
            key, rest, news = "factor", 1.0, self._squash(total.div_(had)).neg_()
        else:
            key, rest, news = "others", torch.finfo(total.dtype).max, total.sub_(had).div_(self._share(bucket))
        kept = memory.flat(key, bucket.layout)
        if kernels.at_hand(kept):
            kernels.put_(kept.fill_(rest), places, news)
        else:
            new = bucket.scratch.take("regtopk-new", kept.numel(), kept.dtype, kept.device).fill_(rest)
            kernels.put_(new, places, news)
            kernels.keep_finite_(kept, new, bucket.target)

    def _squash(self, ratio: Tensor) -> Tensor:
        """tanh(|ratio| / mu), and 1 where the ratio is 0/0: nothing was sent, so nothing was cancelled."""
        return ratio.abs_().mul_(1 / self.mu).tanh_().nan_to_num_(nan=1.0)


def _check_weights(weights: object) -> None:
    numbers = weights if isinstance(weights, tuple) else ()
    if not numbers or not all(isinstance(each, int | float) and 0 < each < math.inf for each in numbers):
        raise ValueError(f"regtopk: weights must be numbers above 0, such as (1, 2, 1), got {weights!r}")
