"""Sparse messages: how many entries are kept, and how their values and places travel. Not a scheme itself."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core.bucket import Bucket
from thinwire.core.layout import Layout
from thinwire.core.memory import Memory
from thinwire.core.request import Sum
from thinwire.core.scheme import Codec, Conversation, Knob
from thinwire.schemes import parse

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
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
    """The message of a worker that chose its own entries: their values, then their places, both ascending.

    The size follows from the number of entries, kept and in all.
    """

    dtype: torch.dtype | None
    codec: Codec | None

    @classmethod
    @lru_cache
    def of(cls, scheme: str, values: str) -> Message:
        """`values` is "bf16", "fp16", "fp32", "fp64" or the spec of a codec such as "qsgd(bits=4)"."""
        if values in DTYPES:
            return cls(DTYPES[values], None)
        codec = parse(values)
        if not isinstance(codec, Codec) or codec.grain is None:
            raise ValueError(f"{scheme}: values must be {', '.join(DTYPES)} or a quantiser's spec, got {values!r}")
        return cls(None, codec)

    def nbytes(self, layout: Layout, count: int) -> int:
        return self._value_bytes(layout, count) + kernels.index_bytes(count, layout.numel)

    def encode(self, bucket: Bucket, places: Tensor, out: Tensor) -> None:
        """`places`: int32, ascending. All else is lost, and so is what the values' rounding takes away."""
        flat, lost, count = bucket.flat, bucket.lost, places.numel()
        values = bucket.scratch.take("sparse-values", count, flat.dtype, flat.device)
        if lost is None:
            kernels.gather(flat, places, out=values)
        else:
            kernels.take_(lost.copy_(flat), places, out=values)
        size = self._value_bytes(bucket.layout, count)
        rounding = self._encode_values(bucket, values, out[:size])
        if rounding is not None:
            assert lost is not None
            kernels.scatter_add(rounding, places, 1.0, lost)
        kernels.encode_indices(places, flat.numel(), out=out[size:])

    def decode_add(self, data: Tensor, layout: Layout, count: int, out: Tensor, weight: float) -> None:
        expected = self.nbytes(layout, count)
        if data.numel() != expected:
            raise ValueError(f"a message of {count} of {layout.numel} entries has {expected} bytes, got {data.numel()}")
        size = self._value_bytes(layout, count)
        places = kernels.decode_indices(data[size:], count, layout.numel)
        if self.dtype is not None:
            values = data[:size].view(self.dtype).to(out.dtype)
        else:
            assert self.codec is not None
            values = torch.zeros(count, dtype=out.dtype, device=out.device)
            self.codec.decode_add(data[:size], kept_layout(layout, count), self.codec.level, values, 1.0)
        kernels.scatter_add(values, places, weight, out)

    def _value_bytes(self, layout: Layout, count: int) -> int:
        if self.dtype is not None:
            return count * self.dtype.itemsize
        assert self.codec is not None
        return self.codec.nbytes(kept_layout(layout, count), self.codec.level)

    def _encode_values(self, bucket: Bucket, values: Tensor, out: Tensor) -> Tensor | None:
        """Write the values; what their rounding lost, where that is asked for and can be other than 0."""
        rounding = None
        if bucket.lost is not None and self.dtype is not values.dtype:
            rounding = bucket.scratch.take("sparse-rounding", values.numel(), values.dtype, values.device)
        if self.codec is not None:
            layout = kept_layout(bucket.layout, values.numel())
            self.codec.encode(replace(bucket, flat=values, layout=layout, lost=rounding), self.codec.level, out)
            return rounding
        assert self.dtype is not None
        wire = out.view(self.dtype)
        kernels.scale_cast(values, 1.0, wire)
        return None if rounding is None else torch.sub(values, wire, out=rounding)


def converse_about(
    bucket: Bucket, places: Tensor, few: Layout, values: str, *, chunk: int = 1, scale: float = 1.0
) -> Conversation:
    """The mean of chunks that all workers chose alike, `few` entries, and 0 elsewhere. No place travels.

    What is not chosen is lost, and so is what the values' rounding takes away. Values travel multiplied by
    `scale`, a power of two that all workers know.
    """
    flat, lost, count = bucket.flat, bucket.lost, few.numel
    own = bucket.scratch.take("kept", count, flat.dtype, flat.device)
    rounding = None
    if lost is None:
        kernels.gather(flat, places, chunk=chunk, out=own)
    else:
        kernels.take_(lost.copy_(flat), places, chunk=chunk, out=own)
        rounding = bucket.scratch.take("kept-rounding", count, flat.dtype, flat.device)
    mean = yield from _mean_of(replace(bucket, flat=own.mul_(scale), layout=few, lost=rounding), values)
    if lost is not None and rounding is not None:
        kernels.scatter_add(rounding, places, 1.0 / scale, lost, chunk=chunk)
    kernels.scatter_add(mean, places, 1.0 / scale, flat.zero_(), chunk=chunk)
    return flat


def _mean_of(bucket: Bucket, values: str) -> Conversation:
    if values == "fp64":  # casts never widen: this is the working dtype, as it is
        if bucket.lost is not None:
            bucket.lost.zero_()
        return (yield Sum(bucket.flat.mul_(1.0 / bucket.workers)))
    scheme = parse(values)
    return (yield from scheme.converse(bucket, Memory(), scheme.level))


def check_shared_values(scheme: str, values: str) -> None:
    """`values` may be any scheme that remembers nothing: which entries are kept changes from step to step."""
    if values != "fp64" and parse(values).init("", torch.zeros(1024, 1024), 0):
        raise ValueError(f"{scheme}: values must be {', '.join(DTYPES)} or a scheme without memory, got {values!r}")


def kept_layout(layout: Layout, count: int) -> Layout:
    """The kept entries end to end; the name tells buckets apart, so that they round independently."""
    return layout.once(("kept", count), lambda: Layout.of([(f"{layout.names[0]} and on, kept", (count,))]))
