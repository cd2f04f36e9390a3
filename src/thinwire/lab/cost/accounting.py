"""What an exchange among any number of workers sends. Messages have sizes, which follow from layouts; no contents."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.core.bucket import Scratch
from thinwire.core.request import Max, Mean, Sum
from thinwire.exchange import arithmetic
from thinwire.exchange.collectives import AllGathered, AllToAll
from thinwire.exchange.lane import Rounds
from thinwire.lab.cost.rehearsal import Rehearsal


class Accounting(Rehearsal):
    """A rehearsal in which nobody's payload is decoded, so that it takes as long with thousands as with two.

    A test holds it against the rehearsal that is the exchange's own code.
    """

    def answer(self, request: Sum | Max | Mean, workers: int, scratch: Scratch) -> Rounds:
        if isinstance(request, Mean):
            return (yield from self._mean(request))
        if isinstance(request, Max) or request.width is None:
            return (yield from super().answer(request, workers, scratch))
        places = arithmetic.integer_parts(request.tensor.numel(), self.workers)
        yield from self._two_shot_of([arithmetic.packed_size(stop - start, request.width) for start, stop in places])
        return request.tensor

    def _mean(self, mean: Mean) -> Rounds:
        codec, bucket, level = mean.codec, mean.bucket, mean.level
        size = arithmetic.aligned(codec.nbytes(bucket.layout, level))
        own = bucket.scratch.take("payload", size, torch.uint8, bucket.flat.device)
        codec.encode_padded(bucket, level, own, mean.encode)  # what is lost is asked for
        if arithmetic.route_for(mean, self.route, self.workers, self.link) == "gather":
            yield [AllGathered(_sized(size * self.workers), _sized(size), self.group)]
        else:
            assert codec.grain is not None
            yield from self._two_shot_of(arithmetic.part_bytes(codec, bucket.layout, self.workers, level))
        return bucket.target

    def _two_shot_of(self, sizes: Sequence[int]) -> Rounds:
        size, longest = sizes[self.worker], max(sizes)
        there = [size] * self.workers
        yield [AllToAll(_sized(sum(there)), _sized(sum(sizes)), there, list(sizes), self.worker, self.group)]
        yield [AllGathered(_sized(longest * self.workers), _sized(longest), self.group)]


def _sized(nbytes: int) -> Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")
