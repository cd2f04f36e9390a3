"""Scatter and gather: a bucket's parts to their owners, who add, and the parts' means back to all.

Scatter is the first half of a two-shot: every worker sends each owner its part, and the owner adds what came, in rank
order and in float32 at least. gloo's own reduce-scatter is an all-reduce and a slice: twice the bytes, another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

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


class Way(Protocol):
    """How messages get from worker to worker: through a group's sockets, or memory that all of them see."""

    @property
    def worker(self) -> int: ...

    def outgoing(self, bucket: Bucket, name: str, nbytes: int) -> Tensor:
        """Where to write messages. Until the next swap or share of this way it is the writer's."""
        ...

    def swap(self, bucket: Bucket, outgoing: Tensor, sizes: Sequence[int]) -> Rounds:
        """Everybody's message to this worker; its own is not there.

        outgoing: one message to each other worker, in rank order. sizes: that of every worker's, whoever writes to it.
        """
        ...

    def share(self, bucket: Bucket, message: Tensor) -> Rounds:
        """Everybody's message, equally long, this worker's own too."""
        ...


@dataclass(frozen=True)
class Sockets:
    """By the collectives of a process group."""

    group: dist.ProcessGroup

    @property
    def worker(self) -> int:
        return self.group.rank()

    def outgoing(self, bucket: Bucket, name: str, nbytes: int) -> Tensor:
        return bucket.scratch.take(name, nbytes, torch.uint8, bucket.flat.device)

    def swap(self, bucket: Bucket, outgoing: Tensor, sizes: Sequence[int]) -> Rounds:
        worker, workers = self.worker, self.group.size()
        there = [0 if other == worker else sizes[other] for other in range(workers)]
        back = [0 if other == worker else sizes[worker] for other in range(workers)]
        incoming = bucket.scratch.take("scatter-in", sum(back), torch.uint8, bucket.flat.device)
        yield [AllToAll(incoming, outgoing, back, there, worker, self.group)]
        return incoming.split(back)

    def share(self, bucket: Bucket, message: Tensor) -> Rounds:
        nbytes = message.numel()
        everyone = bucket.scratch.take("gather-in", nbytes * self.group.size(), torch.uint8, message.device)
        yield [AllGathered(everyone, message, self.group)]
        return everyone.split(nbytes)


def scatter(
    bucket: Bucket, parts: Sequence[Part], codec: Codec, way: Way, say: Say, weight: float, out: Tensor
) -> Rounds:
    """out = weight * the sum of everybody's elements of this worker's own part, in the part's order."""
    flat, scratch, worker = bucket.flat, bucket.scratch, way.worker
    sizes = [part.nbytes(flat.dtype, codec) for part in parts]
    lengths = [sum(each) for each in sizes]
    outgoing = way.outgoing(bucket, "scatter-out", sum(lengths) - lengths[worker])
    own = scratch.take("scatter-own", lengths[worker], torch.uint8, flat.device)
    messages = list(outgoing.split(lengths[:worker] + lengths[worker + 1 :]))
    messages.insert(worker, own)
    for number, (part, message, fields) in enumerate(zip(parts, messages, sizes, strict=True)):
        exact, coded = message.split(fields)
        if number != worker:
            part.exact.gather(flat, _values(exact, part.exact.numel, flat.dtype))
            exact[part.exact.numel * flat.itemsize :].zero_()
        if part.coded.numel:
            dtype = working(codec, flat.dtype)
            copy = part.coded.gather(flat, scratch.take("scatter-coded", part.coded.numel, dtype, flat.device))
            say(replace(bucket, flat=copy, layout=part.coded.layout, spare=None), coded)

    came = list((yield from way.swap(bucket, outgoing, lengths)))
    came[worker] = own

    mine = parts[worker]
    exact = out[: mine.exact.numel]
    wide = torch.promote_types(flat.dtype, torch.float32)
    summed = exact if out.dtype is wide else scratch.take("scatter-exact", exact.numel(), wide, flat.device)
    coded = _zeros(bucket, "scatter-sum", mine.coded.numel, working(codec, flat.dtype))
    if lengths[worker]:
        fields = [message.split(sizes[worker]) for message in came]
        terms = [_values(exact_field, exact.numel(), flat.dtype) for exact_field, _ in fields]
        for start, stop, at in mine.exact.places:
            own = [flat[start:stop] if n == worker else term[at : at + stop - start] for n, term in enumerate(terms)]
            _sum(own, summed[at : at + stop - start])
        size = codec.nbytes(mine.coded.layout, codec.level) if mine.coded.numel else 0
        for _, coded_field in fields if mine.coded.numel else ():
            codec.decode_add(coded_field[:size], mine.coded.layout, codec.level, coded, 1.0)
    summed.mul_(weight)
    if summed is not exact:
        exact.copy_(summed)
    out[mine.exact.numel :].copy_(coded.mul_(weight))


def _sum(terms: Sequence[Tensor], out: Tensor) -> None:
    """out = the sum, in the order given; a pass for each term but the first."""
    if len(terms) == 1:
        out.copy_(terms[0])
        return
    if terms[0].dtype is out.dtype:
        torch.add(terms[0], terms[1], out=out)
    else:
        out.copy_(terms[0]).add_(terms[1])
    for term in terms[2:]:
        out.add_(term)


def own_memory(bucket: Bucket, parts: Sequence[Part], codec: Codec, way: Way) -> Tensor:
    """Memory for this worker's own part, in the bucket's dtype. Where it can be, it is that of the message by which
    `gather` will tell of it, which then need not be written."""
    mine, dtype = parts[way.worker], bucket.flat.dtype
    if mine.coded.numel:
        return bucket.scratch.take("own-part", mine.layout.numel, dtype, bucket.flat.device)
    return _values(way.outgoing(bucket, "gather-out", _longest(parts, dtype, codec)), mine.exact.numel, dtype)


def gather(mean: Tensor, bucket: Bucket, parts: Sequence[Part], codec: Codec, way: Way) -> Rounds:
    """Everybody's own part, in the part's order and the bucket's dtype, to its places in every bucket.

    All read the same messages, the owner his own too, so all have the same bits.
    """
    flat, scratch, worker = bucket.flat, bucket.scratch, way.worker
    mine = parts[worker]
    sizes = [part.nbytes(flat.dtype, codec) for part in parts]
    message = way.outgoing(bucket, "gather-out", _longest(parts, flat.dtype, codec))
    exact, coded, padding = message.split([*sizes[worker], message.numel() - sum(sizes[worker])])
    values = _values(exact, mine.exact.numel, flat.dtype)
    if values.data_ptr() != mean.data_ptr():
        values.copy_(mean[: mine.exact.numel])
    exact[mine.exact.numel * flat.itemsize :].zero_()
    padding.zero_()
    if mine.coded.numel:
        # Groups that hold the same mean, each on its own machine, make the same message of it.
        again = scratch.take("gather-coded", mine.coded.numel, working(codec, flat.dtype), flat.device)
        again.copy_(mean[mine.exact.numel :])
        said = replace(bucket, flat=again, layout=mine.coded.layout, worker=randomness.RELAY, lost=None, spare=None)
        codec.encode_padded(said, codec.level, coded)
    everyone = yield from way.share(bucket, message)

    for part, message, (exact_size, coded_size) in zip(parts, everyone, sizes, strict=True):
        part.exact.scatter(_values(message, part.exact.numel, flat.dtype), flat)
        if part.coded.numel:
            data = message[exact_size : exact_size + coded_size]
            decoded = scratch.take("gather-coded", part.coded.numel, working(codec, flat.dtype), flat.device)
            arithmetic.add_payloads(codec, part.coded.layout, codec.level, [data], 1.0, decoded)
            part.coded.scatter(decoded, flat)


def _longest(parts: Sequence[Part], dtype: torch.dtype, codec: Codec) -> int:
    return max(sum(part.nbytes(dtype, codec)) for part in parts)


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
