"""Warm-up: the first steps dense, or milder. A wrapper with a scheme's own interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from thinwire.core.bucket import Bucket
from thinwire.core.memory import Memory
from thinwire.core.request import Sum
from thinwire.core.scheme import Conversation, Scheme, Wrapper


@dataclass(frozen=True)
class WarmUp(Wrapper):
    """A scheme that holds back for its first steps, while gradients change fast and residuals would be stale.

    Before step `steps`: the exact mean, or the scheme itself at `milder`, a level of its knob. From then on:
    the scheme, at the level asked for. Goes inside error feedback, so that a dense step pays what is owed.
    """

    steps: int
    milder: float | None = None

    in_place: ClassVar[bool] = False  # a dense step sends the bucket's own memory
    settles: ClassVar[bool] = False

    def converse(self, bucket: Bucket, memory: Memory, level: float) -> Conversation:
        if bucket.step >= self.steps:
            return (yield from self.scheme.converse(bucket, memory, level))
        if self.milder is not None:
            return (yield from self.scheme.converse(bucket, memory, self.milder))
        if bucket.lost is not None:
            bucket.lost.zero_()
        return (yield Sum(bucket.flat.mul_(1.0 / bucket.workers)))


def warm_up(scheme: Scheme, warmup_steps: int, warmup_level: float | None = None) -> Scheme:
    """`scheme`, dense or at `warmup_level` for its first steps; 0 steps: the scheme as it is."""
    if not isinstance(warmup_steps, int) or warmup_steps < 0:
        raise ValueError(f"warmup_steps must be an integer, 0 or more, got {warmup_steps!r}")
    if warmup_level is not None:
        knob = scheme.knob
        if knob is None:
            raise ValueError(f"{scheme.name} has no level to turn, so warmup_level must be None, got {warmup_level!r}")
        if not knob.menu[0] <= warmup_level <= knob.menu[-1]:
            raise ValueError(
                f"warmup_level must be a {knob.name} of {scheme.name}, {knob.menu[0]}..{knob.menu[-1]}, "
                f"got {warmup_level!r}"
            )
    return WarmUp(scheme, warmup_steps, warmup_level) if warmup_steps else scheme
