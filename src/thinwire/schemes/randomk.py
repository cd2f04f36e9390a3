"""Random-k: entries drawn at random, the same on all workers, so no place travels (Stich et al., 2018)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels, randomness
from thinwire.bucket import Bucket
from thinwire.kernels.reference.random import random_u32
from thinwire.memory import Memory
from thinwire.scheme import Conversation, Knob, Scheme
from thinwire.schemes.sparse import check_density, check_shared_values, converse_about, density_knob, kept


@dataclass(frozen=True)
class RandomK(Scheme):
    """k = density * entries of each bucket, at least one, drawn from the shared seed in every step.

    1. All draw the same k places.  2. mean = the mean of the values there, 0 elsewhere.  3. All else is lost.

    Values are not scaled up by 1/density: with error memory that would only add variance.

    Differs from the paper: one entry is drawn from each of k equal stretches of the bucket, laid out as a
    ring with a random beginning. Every entry is as likely as under free drawing, and k draws are enough.
    """

    density: float = 0.01  # lower => fewer bytes, more error; of each bucket (one bucket: of the model)
    values: str = "fp16"  # bf16, fp16, fp32, fp64, or the spec of any scheme without memory

    unbiased: ClassVar[bool] = False
    summary: ClassVar[str] = "entries drawn from a shared seed: summable; the baseline for sparse schemes"

    def __post_init__(self) -> None:
        check_density("randomk", self.density)
        check_shared_values("randomk", self.values)

    @property
    def knob(self) -> Knob:
        return density_knob(self.density)

    def converse(self, bucket: Bucket, memory: Memory, level: float) -> Conversation:
        flat = bucket.flat
        if not kernels.all_finite(flat):
            flat.fill_(torch.nan)  # else an entry that is not drawn would hide it from the group
        key = randomness.key(bucket.seed, bucket.step, bucket.layout.names[0])
        places = draw(key, kept(level, flat.numel()), flat.numel()).to(flat.device)
        return (yield from converse_about(bucket, places, self.values))


def draw(key: int, count: int, numel: int) -> Tensor:
    """int32, ascending: `count` different places below `numel`, each place as likely as any other."""
    bits = random_u32(key, torch.arange(count + 1))
    starts = torch.arange(count + 1) * numel // count
    inside = bits[:-1] * torch.diff(starts) >> 32
    beginning = int(bits[-1]) * numel >> 32
    return ((starts[:-1] + inside + beginning) % numel).sort().values.to(torch.int32)
