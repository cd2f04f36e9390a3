"""Scatter and gather: a bucket's parts to their owners, who add, and the parts' means back to all.

Scatter is the first half of a two-shot: every worker sends each owner its part, and the owner adds what came, in rank
order and in float32 at least. gloo's own reduce-scatter is an all-reduce and a slice: twice the bytes, another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.core import randomness
from thinwire.core.bucket import Bucket
from thinwire.core.layout import Layout, Selection
from thinwire.core.partition import working
from thinwire.core.scheme import Codec
from thinwire.exchange import arithmetic
from thinwire.exchange.collectives import AllGathered, AllToAll
from thinwire.exchange.lane import Rounds


@dataclass(frozen=True)
class Part:
    """What one owner has of a bucket: tensors that travel as they are, and those that travel by the codec."""

    exact: Selection
    coded: Selection

    @property
    def layout(self) -> Layout:
        """The exact ones, then the others, end to end."""
        layouts = (self.exact.layout, self.coded.layout)
        return layouts[0].once(("then", layouts[1]), lambda: _end_to_end(layouts))

    def nbytes(self, dtype: torch.dtype, codec: Codec) -> tuple[int, int]:
        """The sizes of the two fields of a message about a bucket of `dtype`, padding included."""
        exact = self.exact.numel * dtype.itemsize
        coded = codec.nbytes(self.coded.layout, codec.level) if self.coded.numel else 0
        return arithmetic.aligned(exact), arithmetic.aligned(coded)


Say = Callable[[Bucket, Tensor], None]  # encode a part's coded tensors into memory that may be longer


def scatter(
    bucket: Bucket, parts: Sequence[Part], codec: Codec, group: dist.ProcessGroup, say: Say, weight: float, out: Tensor
) -> Rounds:
    """out = weight * the sum of everybody's elements of this worker's own part, in the part's order."""
    flat, scratch, worker = bucket.flat, bucket.scratch, group.rank()
    sizes = [part.nbytes(flat.dtype, codec) for part in parts]
    lengths = [sum(each) for each in sizes]
    outgoing = scratch.take("scatter-out", sum(lengths), torch.uint8, flat.device)
    for part, message, fields in zip(parts, outgoing.split(lengths), sizes, strict=True):
        exact, coded = message.split(fields)
        part.exact.gather(flat, _values(exact, part.exact.numel, flat.dtype))
        exact[part.exact.numel * flat.itemsize :].zero_()
        if part.coded.numel:
            dtype = working(codec, flat.dtype)
            copy = part.coded.gather(flat, scratch.take("scatter-coded", part.coded.numel, dtype, flat.device))
            say(replace(bucket, flat=copy, layout=part.coded.layout, spare=None), coded)

    mine, length = parts[worker], lengths[worker]
    incoming = scratch.take("scatter-in", length * len(parts), torch.uint8, flat.device)
    yield [AllToAll(incoming, outgoing, [length] * len(parts), lengths, worker, group)]

    exact = out[: mine.exact.numel]
    wide = torch.promote_types(flat.dtype, torch.float32)
    summed = exact if out.dtype is wide else scratch.take("scatter-exact", exact.numel(), wide, flat.device)
    coded = _zeros(bucket, "scatter-sum", mine.coded.numel, working(codec, flat.dtype))
    for number, message in enumerate(incoming.split(length) if length else ()):
        fields = message.split(sizes[worker])
        values = _values(fields[0], exact.numel(), flat.dtype)
        summed.add_(values) if number else summed.copy_(values)
        if mine.coded.numel:
            size = codec.nbytes(mine.coded.layout, codec.level)
            codec.decode_add(fields[1][:size], mine.coded.layout, codec.level, coded, 1.0)
    summed.mul_(weight)
    if summed is not exact:
        exact.copy_(summed)
    out[mine.exact.numel :].copy_(coded.mul_(weight))


def gather(mean: Tensor, bucket: Bucket, parts: Sequence[Part], codec: Codec, group: dist.ProcessGroup) -> Rounds:
    """Everybody's own part, in the part's order and the bucket's dtype, to its places in every bucket.

    All read the same messages, the owner his own too, so all have the same bits.
    """
    flat, scratch, worker = bucket.flat, bucket.scratch, group.rank()
    mine = parts[worker]
    sizes = [part.nbytes(flat.dtype, codec) for part in parts]
    longest = max(sum(each) for each in sizes)
    message = scratch.take("gather-out", longest, torch.uint8, flat.device)
    exact, coded, padding = message.split([*sizes[worker], longest - sum(sizes[worker])])
    _values(exact, mine.exact.numel, flat.dtype).copy_(mean[: mine.exact.numel])
    exact[mine.exact.numel * flat.itemsize :].zero_()
    padding.zero_()
    if mine.coded.numel:
        # Groups that hold the same mean, each on its own machine, make the same message of it.
        again = scratch.take("gather-coded", mine.coded.numel, working(codec, flat.dtype), flat.device)
        again.copy_(mean[mine.exact.numel :])
        said = replace(bucket, flat=again, layout=mine.coded.layout, worker=randomness.RELAY, lost=None, spare=None)
        codec.encode_padded(said, codec.level, coded)
    everyone = scratch.take("gather-in", longest * len(parts), torch.uint8, flat.device)
    yield [AllGathered(everyone, message, group)]

    for part, message, (exact_size, coded_size) in zip(parts, everyone.split(longest), sizes, strict=True):
        part.exact.scatter(_values(message, part.exact.numel, flat.dtype), flat)
        if part.coded.numel:
            data = message[exact_size : exact_size + coded_size]
            decoded = scratch.take("gather-coded", part.coded.numel, working(codec, flat.dtype), flat.device)
            arithmetic.add_payloads(codec, part.coded.layout, codec.level, [data], 1.0, decoded)
            part.coded.scatter(decoded, flat)


def _zeros(bucket: Bucket, name: str, numel: int, dtype: torch.dtype) -> Tensor:
    return bucket.scratch.take(name, numel, dtype, bucket.flat.device).zero_()


def _values(data: Tensor, numel: int, dtype: torch.dtype) -> Tensor:
    return data[: numel * dtype.itemsize].view(dtype)


def _end_to_end(layouts: Sequence[Layout]) -> Layout:
    first, second = layouts
    return Layout([
        *first.segments,
        *(s._replace(start=s.start + first.numel, stop=s.stop + first.numel) for s in second.segments),
    ])  # fmt: skip
