"""Sparse messages: how many elements are kept, and how their values and places travel. Not a scheme itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core.bucket import Bucket, workspace
from thinwire.core.layout import Layout
from thinwire.core.memory import Memory
from thinwire.core.scheme import Codec, Conversation, Knob, Scheme
from thinwire.schemes import parse

_DENSITIES = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3)


def check_density(scheme: str, density: float) -> None:
    if not isinstance(density, int | float) or not 0 < density <= 1:
        raise ValueError(f"{scheme}: density must be above 0 and at most 1, got {density!r}")


def density_knob(density: float) -> Knob:
    return Knob("density", tuple(sorted({*_DENSITIES, density})), density)


def kept(density: float, numel: int) -> int:
    """How many of `numel` a density keeps: to the nearest, at least one. Each bucket keeps its own share."""
    return min(numel, max(1, round(density * numel)))


@dataclass(frozen=True)
class Message:
    """The message of a worker that chose its own elements: their values, then their places, both ascending.

    The size follows from the number of elements, kept and in all.
    """

    values: Codec
    coded: bool = True  # the places; else each is an int32

    @classmethod
    @cache
    def of(cls, scheme: str, values: str, places: str = "coded") -> Message:
        """`values` is the spec of a codec: a cast such as "bf16", or a quantiser such as "qsgd(bits=4)"."""
        if places not in ("coded", "plain"):
            raise ValueError(f"{scheme}: places must be 'coded' or 'plain', got {places!r}")
        parsed = parse(values)
        if not isinstance(parsed, Codec) or parsed.grain is None:
            raise ValueError(f"{scheme}: values must be a cast or a quantiser's spec, got {values!r}")
        return cls(parsed, places == "coded")

    def nbytes(self, layout: Layout, count: int) -> int:
        places = kernels.index_bytes(count, layout.numel) if self.coded else 4 * count
        return self._value_bytes(layout, count) + places

    def encode(self, bucket: Bucket, places: Tensor, out: Tensor, share: float = 1.0) -> None:
        """`places`: int32, ascending. All else is lost, and so is what the values' rounding takes away.

        Values travel times `share`; what is lost is in the bucket's own units.
        """
        flat, lost, count = bucket.flat, bucket.lost, places.numel()
        values = kernels.gather(flat, places, out=bucket.scratch.take("sparse-values", count, flat.dtype, flat.device))
        if share != 1.0:
            values.mul_(share)
        rounding = None
        if lost is not None:
            rounding = bucket.scratch.take("sparse-rounding", count, flat.dtype, flat.device)
        size = self._value_bytes(bucket.layout, count)
        part = replace(bucket, flat=values, layout=kept_layout(bucket.layout, count), lost=rounding, out=None)
        self.values.encode(part, self.values.level, out[:size])
        if rounding is not None and lost is not None:
            if share != 1.0:
                rounding.div_(share)
            kernels.put_(lost if lost is flat else lost.copy_(flat), places, rounding)
        bucket.layout.close_(places)
        if self.coded:
            kernels.encode_indices(places, bucket.layout.numel, out=out[size:])
        else:
            out[size:].copy_(places.view(torch.uint8))
        bucket.layout.open_(places)

    def decode_add(
        self, data: Tensor, layout: Layout, count: int, out: Tensor, weight: float, senders: Tensor | None = None
    ) -> bool:
        """out += weight * the decoded message; whether all values are far from what float32 cannot hold.

        senders: where given, counts how many messages each element was in.
        """
        expected = self.nbytes(layout, count)
        if data.numel() != expected:
            raise ValueError(
                f"a message of {count} of {layout.numel} elements has {expected} bytes, got {data.numel()}"
            )
        size = self._value_bytes(layout, count)
        places = workspace().take("sparse-places", count, torch.int32, out.device)
        if self.coded:
            kernels.decode_indices(data[size:], count, layout.numel, out=places)
        else:
            places.view(torch.uint8).copy_(data[size:])
            _check_places(places, layout.numel)
        layout.open_(places)
        values = workspace().take("sparse-decoded", count, out.dtype, out.device)
        self.values.decode_sum([data[:size]], kept_layout(layout, count), self.values.level, values, 1.0)
        kernels.scatter_add(values, places, weight, out)
        finite = moderate(values)
        if senders is not None:
            kernels.scatter_add(values.fill_(1), places, 1.0, senders)
        return finite

    def _value_bytes(self, layout: Layout, count: int) -> int:
        return self.values.nbytes(kept_layout(layout, count), self.values.level)


def _check_places(places: Tensor, numel: int) -> None:
    """Raise ValueError for places that nobody can have sent: all ascend, and lie in the bucket.

    On a device nobody waits to know; what lies outside reads as NaN there.
    """
    if not places.numel() or not kernels.at_hand(places):
        return
    if int(places[0]) < 0 or int(places[-1]) >= numel or bool((places.diff() <= 0).any()):
        raise ValueError(f"places of a message must ascend from 0 to below {numel}")


def moderate(values: Tensor, scale: float | Tensor = 1.0) -> bool:
    """Whether no value over `scale` is a NaN, infinite, or so large that the mean of such could be."""
    if not values.numel():
        return True
    if not kernels.at_hand(values):
        return False  # nobody waits to know
    low, high = (float(end) for end in values.aminmax())
    return bool(max(-low, high) < scale * 2.0**126)


def converse_about(
    bucket: Bucket, places: Tensor, few: Layout, values: str, *, chunk: int = 1, scale: float | Tensor = 1.0
) -> Conversation:
    """The mean of chunks that all workers chose alike, `few` elements, and 0 elsewhere. No place travels.

    What is not chosen is lost, and so is what the values' rounding takes away. Values travel multiplied by
    `scale`, a power of two that all workers know; a tensor, where it is known on a device.
    """
    flat, lost, count = bucket.flat, bucket.lost, few.numel
    own = bucket.scratch.take("kept", count, flat.dtype, flat.device)
    kernels.gather(flat, places, chunk=chunk, out=own)
    rounding = None if lost is None else bucket.scratch.take("kept-rounding", count, flat.dtype, flat.device)
    scheme = _without_memory(values)
    assert scheme is not None
    part = replace(bucket, flat=own.mul_(scale), layout=few, lost=rounding, spare=None, out=None)
    mean = yield from scheme.converse(part, Memory(), scheme.level)
    if lost is not None and rounding is not None:
        lost = lost if lost is flat else lost.copy_(flat)
        kernels.put_(lost, places, rounding.div_(scale), chunk=chunk)
    bucket.verdict.finite = moderate(mean, scale)
    kernels.scatter_add(mean, places, _unscale(mean, scale), bucket.target.zero_(), chunk=chunk)
    return bucket.target


def _unscale(values: Tensor, scale: float | Tensor) -> float:
    """What to multiply values by to be rid of the scale; one on a device is taken away here and now."""
    if isinstance(scale, Tensor):
        values.div_(scale)
        return 1.0
    return 1.0 / scale


@cache
def _without_memory(values: str) -> Scheme | None:
    """The scheme, unless it remembers something: which elements are kept changes from step to step."""
    scheme = parse(values)
    return None if scheme.init("", torch.empty((1024, 1024), dtype=torch.float32, device="meta"), 0) else scheme


def check_shared_values(scheme: str, values: str) -> None:
    if _without_memory(values) is None:
        raise ValueError(f"{scheme}: values must be a cast or another scheme without memory, got {values!r}")


def kept_layout(layout: Layout, count: int) -> Layout:
    """The kept elements end to end; the name tells buckets apart, so that they round independently."""
    return layout.once(("kept", count), lambda: Layout.of([(f"{layout.names[0]} and on, kept", (count,))], chosen=True))
