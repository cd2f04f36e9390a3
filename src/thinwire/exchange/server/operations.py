"""Operations: what one request of a conversation looks like to a server, and how the server answers it.

A worker describes an operation once, as text; from then on its pushes name it by number. Both ends compute sizes from
the operation, so neither has to believe the other. The arithmetic is the one AllReduce and Simulation use: payloads are
decoded and added in rank order.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core import randomness
from thinwire.core.bucket import Bucket, Scratch
from thinwire.core.layout import Layout, Segment
from thinwire.core.memory import Memory
from thinwire.core.scheme import Codec
from thinwire.exchange import arithmetic, codecs


class BadPayload(Exception):
    """One worker's payload cannot be used."""

    def __init__(self, worker: int, reason: str):
        super().__init__(reason)
        self.worker = worker


@dataclass(frozen=True)
class Round:
    """One request, as pushed by the workers that answered: their payloads in rank order, and what they agree on."""

    payloads: Mapping[int, Tensor]
    expected: int  # how many workers the conversation counts on
    step: int
    level: float


class Operation(ABC):
    """The shape of one request. `up_bytes` and `down_bytes` are the exact sizes at a level."""

    @abstractmethod
    def literal(self) -> dict[str, Any]: ...

    @classmethod
    def of(cls, literal: dict[str, Any]) -> Operation:
        """The operation whose `literal` this is."""
        return cls(**literal)

    @abstractmethod
    def up_bytes(self, level: float) -> int: ...

    @abstractmethod
    def down_bytes(self, level: float) -> int: ...

    @abstractmethod
    def answer(self, asked: Round, out: Tensor, memory: Memory, scratch: Scratch) -> None:
        """Write the answer into `out`; `BadPayload` where one worker's bytes cannot be used."""

    @cached_property
    def text(self) -> str:
        return repr({"kind": type(self).__name__, **self.literal()})

    @cached_property
    def number(self) -> int:
        return number(self.text)


def number(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


@dataclass(frozen=True)
class PlainSum(Operation):
    """Sum or maximum of plain numbers, element by element, in the dtype they travel in.

    Where fewer workers answered than the conversation counts on, a float sum is scaled up to the expected number:
    schemes divide by that. Integers cannot be scaled; there the missing count as zero, for this one request.
    """

    reduction: str  # "sum" or "max"
    dtype: str
    numel: int

    def literal(self) -> dict[str, Any]:
        return {"reduction": self.reduction, "dtype": self.dtype, "numel": self.numel}

    def up_bytes(self, level: float) -> int:
        return self.numel * self._dtype.itemsize

    down_bytes = up_bytes

    def answer(self, asked: Round, out: Tensor, memory: Memory, scratch: Scratch) -> None:
        total = out.view(self._dtype)
        first, *others = asked.payloads.values()
        total.copy_(first.view(self._dtype))
        for data in others:
            values = data.view(self._dtype)
            torch.add(total, values, out=total) if self.reduction == "sum" else torch.maximum(total, values, out=total)
        answered = len(asked.payloads)
        if self.reduction == "sum" and answered != asked.expected and self._dtype.is_floating_point:
            total.mul_(asked.expected / answered)

    @property
    def _dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)


@dataclass(frozen=True)
class PackedSum(Operation):
    """The running sum of integers that travel in `width` bits."""

    width: int
    saturate: bool
    numel: int

    def literal(self) -> dict[str, Any]:
        return {"width": self.width, "saturate": self.saturate, "numel": self.numel}

    def up_bytes(self, level: float) -> int:
        return arithmetic.packed_size(self.numel, self.width)

    down_bytes = up_bytes

    def answer(self, asked: Round, out: Tensor, memory: Memory, scratch: Scratch) -> None:
        total = scratch.take("integers", self.numel, torch.int32)
        arithmetic.add_integers(list(asked.payloads.values()), self.width, self.saturate, total)
        self.pack(total, out)

    def pack(self, integers: Tensor, out: Tensor) -> None:
        """The integers as they travel, with zeros up to the aligned size."""
        size = -(-self.numel * self.width // 8)
        kernels.pack_ints(integers, self.width, out=out[:size])
        out[size:].zero_()


@dataclass(frozen=True, eq=False)
class DecodedMean(Operation):
    """The mean of decoded payloads, sent back through the codec `down` at `down_level` (None: the level of the way up).

    The server's own error memory: what the way back loses is added to the next mean, unless `down` is unbiased.
    """

    codec: Codec
    layout: Layout
    dtype: str
    seed: int
    down: Codec
    down_level: float | None

    def literal(self) -> dict[str, Any]:
        return {
            "codec": codecs.describe(self.codec),
            "layout": describe_layout(self.layout),
            "dtype": self.dtype,
            "seed": self.seed,
            "down": codecs.describe(self.down),
            "down_level": self.down_level,
        }

    @classmethod
    def of(cls, literal: dict[str, Any]) -> DecodedMean:
        literal["layout"] = rebuild_layout(literal["layout"])
        literal["codec"], literal["down"] = rebuild_codec(literal["codec"]), rebuild_codec(literal["down"])
        return cls(**literal)

    def up_bytes(self, level: float) -> int:
        return arithmetic.aligned(self.codec.nbytes(self.layout, level))

    def down_bytes(self, level: float) -> int:
        return arithmetic.aligned(self.down.nbytes(self.layout, self.level_down(level)))

    def level_down(self, level: float) -> float:
        return level if self.down_level is None else self.down_level

    def answer(self, asked: Round, out: Tensor, memory: Memory, scratch: Scratch) -> None:
        dtype = getattr(torch, self.dtype)
        mean = scratch.take("mean", self.layout.numel, dtype)
        self.add(asked, 1.0 / len(asked.payloads), mean.zero_())
        lost = residual = None
        exact = self.down == codecs.Floats(self.dtype)
        if not self.down.unbiased and not exact:
            residual = self._residual(memory, dtype)
            mean.add_(residual)
            lost = scratch.take("lost", self.layout.numel, dtype)
        bucket = Bucket(mean, self.layout, len(asked.payloads), randomness.RELAY, asked.step, self.seed, lost, scratch)
        arithmetic.encode_padded(self.down, bucket, self.level_down(asked.level), out)
        # A non-finite mean reaches the optimizers, but no memory absorbs it.
        if residual is not None and lost is not None and kernels.all_finite(lost):
            residual.copy_(lost)

    def add(self, asked: Round, weight: float, out: Tensor) -> None:
        """out += weight * everybody's decoded payload, in rank order."""
        size = self.codec.nbytes(self.layout, asked.level)
        for worker, data in asked.payloads.items():
            try:
                self.codec.decode_add(data[:size], self.layout, asked.level, out, weight)
            except ValueError as error:
                raise BadPayload(worker, str(error)) from error

    def _residual(self, memory: Memory, dtype: torch.dtype) -> Tensor:
        for segment in self.layout.segments:
            known = (segment.name, "residual") in memory
            if not known or memory[segment.name, "residual"].numel() != segment.numel:
                memory.add(segment.name, {"residual": torch.zeros(segment.numel, dtype=dtype)})
        return memory.flat("residual", self.layout)


@dataclass(frozen=True)
class Consulted(Operation):
    """The workers' observations up, the controller's level for the next steps down. See `thinwire.steering`."""

    controller: str
    menu: tuple[float, ...]
    numel: int

    def literal(self) -> dict[str, Any]:
        return {"controller": self.controller, "menu": self.menu, "numel": self.numel}

    def up_bytes(self, level: float) -> int:
        return 8 * self.numel

    def down_bytes(self, level: float) -> int:
        return 8

    def answer(self, asked: Round, out: Tensor, memory: Memory, scratch: Scratch) -> None:
        raise AssertionError("the server that holds the controller answers this itself")


def parse(text: str) -> Operation:
    """The operation that `text` describes; ValueError where it does not."""
    literal = codecs.literal(text)
    kinds = {kind.__name__: kind for kind in Operation.__subclasses__()}
    if not isinstance(literal, dict) or literal.get("kind") not in kinds:
        raise ValueError(f"not an operation: {text[:60]!r}; known: {', '.join(kinds)}")
    try:
        return kinds[literal.pop("kind")].of(literal)
    except (TypeError, KeyError, AttributeError) as error:
        raise ValueError(f"not an operation: {text[:60]!r}: {error}") from error


def rebuild_codec(literal: Any) -> Codec:
    codec = codecs.rebuild(literal)
    if not isinstance(codec, Codec):
        raise ValueError(f"not a codec: {literal!r}")
    return codec


def describe_layout(layout: Layout) -> tuple[tuple[Any, ...], ...]:
    return tuple(tuple(segment) for segment in layout.segments)


def rebuild_layout(segments: Any) -> Layout:
    layout, at = Layout([Segment(*segment) for segment in segments]), 0
    for segment in layout.segments:
        if segment.start != at or segment.stop < at:
            raise ValueError(f"the stretches of a layout follow each other; {segment.name!r} begins at {segment.start}")
        at = segment.stop
    return layout


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
