"""Error feedback: what a message lost is added to the next one. A wrapper with a scheme's own interface."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core.bucket import Bucket
from thinwire.core.memory import Memory
from thinwire.core.scheme import Codec, Conversation, Scheme, Wrapper


@dataclass(frozen=True)
class Feedback(Wrapper):
    """A scheme that remembers what its messages lost.

    1. a = g + decay * e, the gradient and what is still owed.
    2. The scheme converses about a, and says what its own message lost: `lost = a - said`.
    3. If the group's mean is finite, e = lost. Else e stays as it was: the mean is the same on all workers, so all
       decide alike, and no residual ever absorbs an Inf or a NaN.

    Law: over any number of steps, sum of means + mean of residuals = sum of mean gradients; with a decay below 1,
    less what was forgotten. `compact`: residuals are kept in bfloat16, and the law holds to its rounding.
    """

    decay: float = 1.0  # lower => what is owed is forgotten sooner
    compact: bool = False

    any_float: ClassVar[bool] = False  # residuals are float32 at least

    @property
    def remembers(self) -> bool:
        return True

    def init(self, name: str, like: Tensor, seed: int) -> dict[str, Tensor]:
        residual = torch.zeros_like(like, dtype=torch.bfloat16 if self.compact else like.dtype)
        return {"residual": residual} | self.scheme.init(name, like, seed)

    def rescale(self, memory: Memory, factor: float) -> None:
        memory.multiply("residual", factor)
        self.scheme.rescale(memory, factor)

    def converse(self, bucket: Bucket, memory: Memory, level: float) -> Conversation:
        residual = memory.flat("residual", bucket.layout)
        lost = bucket.lost
        if lost is None:
            lost = bucket.room("lost") if bucket.spare is None else bucket.layout.clear_gaps(bucket.spare)
        if self.scheme.settles and self.decay == 1.0 and residual.dtype is bucket.flat.dtype:
            part = replace(bucket, lost=lost, owed=residual, out=bucket.target if self.scheme.in_place else bucket.out)
        elif self.scheme.in_place:
            torch.add(bucket.flat, residual, alpha=self.decay, out=lost)
            part = replace(bucket, flat=lost, lost=lost, out=bucket.target)
        else:
            bucket.flat.add_(residual, alpha=self.decay)
            part = replace(bucket, lost=lost)
        mean = yield from self.scheme.converse(part, memory, level)
        if bucket.verdict.finite:
            kernels.keep_(residual, lost)
        else:
            kernels.keep_finite_(residual, lost, mean)
        return mean


def compensated(codec: Codec, bucket: Bucket, residual: Tensor, level: float, out: Tensor) -> None:
    """One message with error feedback, for a sender outside of any conversation: encode `bucket` into `out`, padded.

    As in `Feedback`: a = g + e; encode a; e = what the message lost, unless that is not finite.
    """
    bucket.flat.add_(residual)
    lost = bucket.room("lost")
    codec.encode_padded(replace(bucket, lost=lost), level, out)
    kernels.keep_finite_(residual, lost, lost)


def wrap(scheme: Scheme, feedback: str | bool, decay: float = 1.0, residual: str = "fp32") -> Scheme:
    """`scheme` with or without error feedback; "auto" gives it to schemes that declare themselves biased."""
    if feedback not in ("auto", True, False):
        raise ValueError(f"feedback must be 'auto', True or False, got {feedback!r}")
    if not 0 <= decay <= 1:
        raise ValueError(f"decay must be 0 (nothing is remembered) to 1 (nothing is forgotten), got {decay!r}")
    if residual not in ("fp32", "bf16"):
        raise ValueError(f"residual must be 'fp32' or 'bf16', got {residual!r}")
    wanted = not scheme.unbiased if feedback == "auto" else feedback
    if wanted:
        return Feedback(scheme, decay, residual == "bf16")
    if decay != 1.0 or residual != "fp32":
        raise ValueError(f"{scheme.spec} has no error feedback here, so decay= and residual= ask for feedback=True")
    return scheme
