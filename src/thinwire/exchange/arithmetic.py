"""What an answer is, to the bit: the network's ranks and the Simulation's virtual workers share this.

Additions run in rank order, so there is no hidden float order.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core import randomness
from thinwire.core.bucket import Bucket
from thinwire.core.layout import Layout
from thinwire.core.request import Mean
from thinwire.core.scheme import Codec, Scheme, innermost

Route: TypeAlias = Literal["auto", "gather", "two-shot"]
ROUTES = ("auto", "gather", "two-shot")
ALIGN = 16  # parts begin at multiples of this many bytes, so that float32 fields inside them can be viewed
SHORT = 1 << 18  # elements: about what encoding a part costs beyond its elements, against copying its message once


class Link(NamedTuple):
    """What a worker's messages go over, as far as a route depends on it."""

    latency: float  # seconds until a message begins to arrive
    bandwidth: float  # bits per second that leave a worker

    def check(self) -> None:
        if not (0 <= self.latency < math.inf and 0 < self.bandwidth < math.inf):
            raise ValueError(f"a link has a latency of 0 s or more and a bandwidth above 0 bit/s, got {self}")


def link_of(given: tuple[float, float] | None) -> Link | None:
    """(latency in seconds, bits per second), checked."""
    if given is None:
        return None
    link = Link(*given)
    link.check()
    return link


def aligned(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def check_route(route: str, scheme: Scheme) -> None:
    """Raise ValueError for a route that is none, or that `scheme`'s payloads cannot take."""
    if route not in ROUTES:
        raise ValueError(f"route must be one of {', '.join(ROUTES)}, got {route!r}")
    scheme = innermost(scheme)
    if route == "two-shot" and isinstance(scheme, Codec) and scheme.grain is None:
        raise ValueError(f"{scheme.name} payloads cannot be cut into parts; accepted routes: auto, gather")


def route_for(mean: Mean, route: Route, workers: int, link: Link | None = None) -> Literal["gather", "two-shot"]:
    """How a Mean travels. Automatic: by bytes that leave a worker; at a tie the gather, which encodes only once.

    Where the link is known, by time: both end with everybody's message going around, and a two-shot has one more
    before that, so the bytes that it saves must take longer than a latency.
    """
    codec = mean.codec
    if route == "two-shot" and codec.grain is None:
        raise ValueError("these payloads cannot be cut into parts; accepted routes: auto, gather")
    if mean.exact or (route == "auto" and (codec.grain is None or workers <= 2)):
        return "gather"
    if route != "auto":
        return route
    assert codec.grain is not None
    gather = (workers - 1) * aligned(codec.nbytes(mean.bucket.layout, mean.level))
    parts = part_bytes(codec, mean.bucket.layout, workers, mean.level)
    two_shot = sum(parts) - min(parts) + (workers - 1) * max(parts)
    saved = gather - two_shot
    return "two-shot" if saved > (link.latency * link.bandwidth / 8 if link else 0) else "gather"


def part_bytes(codec: Codec, layout: Layout, parts: int, level: float) -> list[int]:
    """How long the messages about each part of a bucket are, padding included."""
    assert codec.grain is not None
    layouts = layout.split(parts, codec.grain)
    key = ("part bytes", codec, parts, level)
    return layout.once(key, lambda: [aligned(codec.nbytes(each, level)) for each in layouts])


def encode_parts(mean: Mean, parts: int, out: Tensor) -> None:
    """The messages about each part of the bucket, as if each were encoded by itself, end to end, with padding."""
    codec, bucket, level = mean.codec, mean.bucket, mean.level
    assert codec.grain is not None
    lengths = part_bytes(codec, bucket.layout, parts, level)
    if mean.encode is not None or not _at_once(codec, bucket.layout, parts):
        for part, data in zip(bucket.split(parts, codec.grain), out.split(lengths), strict=True):
            codec.encode_padded(part, level, data, mean.encode)
        return
    whole, fields, paddings = _cut(mean, parts, out, lengths)
    codec.encode(bucket, level, whole)
    for field, pieces in fields:
        torch.split_with_sizes_copy(field, [len(piece) for piece in pieces], out=pieces)
    for padding in paddings:
        padding.zero_()


def decode_parts(mean: Mean, parts: int, data: Tensor) -> bool:
    """The bucket's target = what the messages about its parts say, which are padded to one length, end to end.

    Whether it is surely finite.
    """
    codec, bucket, level = mean.codec, mean.bucket, mean.level
    assert codec.grain is not None
    lengths = [data.numel() // parts] * parts
    if not _at_once(codec, bucket.layout, parts):
        layouts = bucket.layout.split(parts, codec.grain)
        targets = [bucket.target[start:stop] for start, stop in bucket.layout.spans(parts, codec.grain)]
        said = [
            add_payloads(codec, layout, level, [message], 1.0, target)
            for layout, message, target in zip(layouts, data.split(lengths), targets, strict=True)
        ]
        return all(said)
    whole, fields, _ = _cut(mean, parts, data, lengths)
    for field, pieces in fields:
        torch.cat(pieces, out=field)
    return codec.decode_sum([whole], bucket.layout, level, bucket.target, 1.0)


def _at_once(codec: Codec, layout: Layout, parts: int) -> bool:
    """Whether one message about the whole bucket, cut up, costs less than a call for each part."""
    return codec.blockwise and parts > 2 and 0 < layout.numel < parts * SHORT


def _cut(
    mean: Mean, parts: int, data: Tensor, lengths: Sequence[int]
) -> tuple[Tensor, list[tuple[Tensor, list[Tensor]]], list[Tensor]]:
    """Memory for a message about the whole bucket; of each of its fields, the bytes there and, in `data`, which holds
    messages about parts that are so long, those about every part; the paddings of those messages.
    """
    codec, layout, level = mean.codec, mean.bucket.layout, mean.level
    assert codec.grain is not None
    layouts = layout.split(parts, codec.grain)
    key = ("fields", codec, parts, level)
    sizes = layout.once(key, lambda: [_field_bytes(codec, each, level) for each in (layout, *layouts)])
    whole = mean.bucket.scratch.take("whole", sum(sizes[0]), torch.uint8, data.device)
    cuts = [size for each, length in zip(sizes[1:], lengths, strict=True) for size in (*each, length - sum(each))]
    pieces = data.split(cuts)
    step = len(sizes[0]) + 1
    fields = [(field, list(pieces[at::step])) for at, field in enumerate(whole.split(sizes[0]))]
    return whole, fields, [padding for padding in pieces[step - 1 :: step] if padding.numel()]


def _field_bytes(codec: Codec, layout: Layout, level: float) -> list[int]:
    """How long the fields of a message are, one after the other."""
    message = torch.empty(codec.nbytes(layout, level), dtype=torch.uint8, device="meta")
    sizes = [field.numel() * field.itemsize for field in codec.fields(message, layout)]
    assert sum(sizes) == message.numel(), f"{codec.name}: a message is its fields, end to end"
    return sizes


def add_payloads(
    codec: Codec, layout: Layout, level: float, datas: Sequence[Tensor], weight: float, out: Tensor
) -> bool:
    """out = weight * sum of the decoded payloads, in the order given; whether that is surely finite."""
    if not layout.numel:
        return True
    size = codec.nbytes(layout, level)
    return codec.decode_sum([data[:size] for data in datas], layout, level, out, weight)


def relay(mean: Mean, part: Bucket, datas: Sequence[Tensor], out: Tensor) -> None:
    """The middle of a two-shot Mean, on the worker that owns `part`: decode and add all, encode the mean again.

    What the second encoding loses goes into the owner's `lost`, times the number of workers: its residual counts
    1/workers in the next mean, so nothing is lost for good.
    """
    workers = part.workers
    total = part.room("relay")
    add_payloads(mean.codec, part.layout, mean.level, datas, 1.0 / workers, total)
    again = None
    if part.lost is not None:
        again = part.room("relay-lost")
    relayed = replace(part, flat=total, worker=randomness.RELAY, lost=again, out=None, owed=None)
    mean.codec.encode_padded(relayed, mean.level, out)
    if part.lost is not None and again is not None:
        part.lost.add_(again, alpha=workers)


def add_integers(datas: Sequence[Tensor], width: int, saturate: bool, out: Tensor) -> None:
    """out = the running sum of packed integers, in the order given, clipped at every step if asked."""
    out.zero_()
    size = kernels.packed_int_bytes(out.numel(), width)
    add = kernels.add_packed_saturating if saturate else kernels.add_packed
    for data in datas:
        add(data[:size], width, out=out)


def integer_parts(numel: int, workers: int) -> list[tuple[int, int]]:
    """Where a two-shot integer Sum is cut: multiples of 8 integers, so that packed parts are whole bytes."""
    cuts = [min(numel, -(-(part * numel // workers) // 8) * 8) for part in range(workers)] + [numel]
    return [(cuts[part], cuts[part + 1]) for part in range(workers)]


def packed_size(count: int, width: int) -> int:
    return aligned(kernels.packed_int_bytes(count, width))


def pack_padded(integers: Tensor, width: int, out: Tensor) -> None:
    """Integers as they travel, `width` bits each, with zeros up to the end of `out`."""
    size = kernels.packed_int_bytes(integers.numel(), width)
    kernels.pack_ints(integers, width, out=out[:size])
    out[size:].zero_()
