"""Operations: what one request of a conversation looks like to a server, and how the server answers it.

A worker describes an operation once, as JSON; from then on its pushes name it by number. Both ends compute sizes from
the operation, so neither has to believe the other. The arithmetic is the one AllReduce and Simulation use: payloads are
decoded and added in rank order. What a peer describes is checked field by field, and names nothing but codecs.
"""

from __future__ import annotations

import hashlib
import json
import math
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from thinwire import schemes
from thinwire.core import randomness
from thinwire.core.bucket import Bucket, Scratch
from thinwire.core.feedback import compensated
from thinwire.core.layout import Layout, Segment
from thinwire.core.memory import Memory
from thinwire.core.scheme import Codec
from thinwire.exchange import arithmetic
from thinwire.exchange.server import limits

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int8, torch.uint8,
)}  # fmt: skip


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
    """The shape of one request. `up_bytes` and `down_bytes` are the exact sizes at a level.

    A QUESTION, which all workers ask together, can also `answer`: write the answer into `out`, or raise `BadPayload`
    where one worker's bytes cannot be used.
    """

    def literal(self) -> dict[str, Any]:
        """What JSON can hold of it."""
        return {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]

    @classmethod
    def of(cls, literal: dict[str, Any]) -> Operation:
        """The operation whose `literal` this is; any exception where it is none."""
        return cls(**literal)

    @abstractmethod
    def dense_bytes(self) -> int:
        """Of the numbers themselves, before any encoding."""

    @abstractmethod
    def up_bytes(self, level: float) -> int: ...

    @abstractmethod
    def down_bytes(self, level: float) -> int: ...

    @cached_property
    def text(self) -> str:
        return json.dumps({"kind": type(self).__name__, **self.literal()}, separators=(",", ":"))

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

    def __post_init__(self) -> None:
        if self.reduction not in ("sum", "max") or self.dtype not in DTYPES:
            raise ValueError(f"no server can take the {self.reduction!r} of {self.dtype!r}")
        check_count(self.numel)

    def dense_bytes(self) -> int:
        return self.numel * self._dtype.itemsize

    def up_bytes(self, level: float) -> int:
        return self.dense_bytes()

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
        return DTYPES[self.dtype]


@dataclass(frozen=True)
class PackedSum(Operation):
    """The running sum of integers that travel in `width` bits."""

    width: int
    saturate: bool
    numel: int

    def __post_init__(self) -> None:
        if type(self.width) is not int or not 1 <= self.width <= 32 or type(self.saturate) is not bool:
            raise ValueError(f"integers travel in 1 to 32 bits, not {self.width!r}, and saturate or not")
        check_count(self.numel)

    def dense_bytes(self) -> int:
        return 4 * self.numel

    def up_bytes(self, level: float) -> int:
        return arithmetic.packed_size(self.numel, self.width)

    down_bytes = up_bytes

    def answer(self, asked: Round, out: Tensor, memory: Memory, scratch: Scratch) -> None:
        total = scratch.take("integers", self.numel, torch.int32)
        arithmetic.add_integers(list(asked.payloads.values()), self.width, self.saturate, total)
        arithmetic.pack_padded(total, self.width, out)


@dataclass(frozen=True, eq=False)
class DecodedMean(Operation):
    """The mean of decoded payloads, sent back through the codec `down` at `down_level` (None: the level of the way up).

    The server's own error feedback: what the way back loses is added to the next mean, unless that averages out, or the
    layout is a choice of elements: the next mean's are others.
    """

    codec: Codec
    layout: Layout
    dtype: str
    seed: int
    down: Codec
    down_level: float | None

    def literal(self) -> dict[str, Any]:
        plain = {"codec": self.codec.spec, "layout": self.layout.segments, "down": self.down.spec}
        chosen = {"chosen": True} if self.layout.chosen else {}
        return super().literal() | plain | chosen

    @classmethod
    def of(cls, literal: dict[str, Any]) -> DecodedMean:
        codec, down = codec_of(literal.pop("codec")), codec_of(literal.pop("down"))
        layout = layout_of(literal.pop("layout"), chosen=literal.pop("chosen", False) is True)
        return cls(codec=codec, layout=layout, down=down, **literal)

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES or type(self.seed) is not int:
            raise ValueError(f"no server can take the mean of {self.dtype!r} with the seed {self.seed!r}")
        if self.down_level is not None and not math.isfinite(self.down_level):
            raise ValueError(f"{self.down_level!r} is no level")

    def dense_bytes(self) -> int:
        return self.layout.numel * DTYPES[self.dtype].itemsize

    def up_bytes(self, level: float) -> int:
        return arithmetic.aligned(self.codec.nbytes(self.layout, level))

    def down_bytes(self, level: float) -> int:
        return arithmetic.aligned(self.down.nbytes(self.layout, self.level_down(level)))

    def level_down(self, level: float) -> float:
        return level if self.down_level is None else self.down_level

    def answer(self, asked: Round, out: Tensor, memory: Memory, scratch: Scratch) -> None:
        dtype = DTYPES[self.dtype]
        mean = scratch.take("mean", self.layout.numel, dtype)
        self.add(asked, 1.0 / len(asked.payloads), mean.zero_())
        level = self.level_down(asked.level)
        bucket = Bucket(mean, self.layout, len(asked.payloads), randomness.RELAY, asked.step, self.seed, None, scratch)
        if self.down.wants_memory(dtype) and not self.layout.chosen:
            # A non-finite mean reaches the optimizers, but no memory absorbs it.
            compensated(self.down, bucket, self._residual(memory, dtype), level, out)
        else:
            self.down.encode_padded(bucket, level, out)

    def add(self, asked: Round, weight: float, out: Tensor) -> None:
        """out += weight * everybody's decoded payload, in rank order."""
        size = self.codec.nbytes(self.layout, asked.level)
        for worker, data in asked.payloads.items():
            try:
                self.codec.decode_add(data[:size], self.layout, asked.level, out, weight)
            except ValueError as error:
                raise BadPayload(worker, str(error)) from error
        if not self.codec.linear:  # now that each is known to be good
            datas = [data[:size] for data in asked.payloads.values()]
            self.codec.decode_sum(datas, self.layout, asked.level, out, weight)

    def _residual(self, memory: Memory, dtype: torch.dtype) -> Tensor:
        for segment in self.layout.segments:
            known = (segment.name, "residual") in memory
            if not known or memory[segment.name, "residual"].numel() != segment.numel:
                memory.add(segment.name, {"residual": torch.zeros(segment.numel, dtype=dtype)})
        return memory.flat("residual", self.layout)


QUESTIONS = (PlainSum, PackedSum, DecodedMean)


class Catalogue:
    """The operations that the two ends of a connection remember.

    Both see the same pushes in the same order, so both forget the same: those that were not used for longest.
    """

    def __init__(self) -> None:
        self._kept: OrderedDict[int, Operation] = OrderedDict()
        self._text_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def use(self, number: int) -> Operation | None:
        """The operation, if it is remembered; from now on it was used last."""
        if number in self._kept:
            self._kept.move_to_end(number)
        return self._kept.get(number)

    def add(self, operation: Operation) -> None:
        self._kept[operation.number] = operation
        self._text_bytes += len(operation.text)
        while len(self._kept) > limits.KNOWN_OPERATIONS or self._text_bytes > limits.KNOWN_TEXT_BYTES:
            _, forgotten = self._kept.popitem(last=False)
            self._text_bytes -= len(forgotten.text)


def parse(text: str) -> Operation:
    """The operation that `text` describes; ValueError where it does not."""
    kinds = {kind.__name__: kind for kind in Operation.__subclasses__()}
    try:
        literal = json.loads(text)
        return kinds[literal.pop("kind")].of(literal)
    except ValueError:
        raise
    except Exception as error:  # whatever else a description that is none meets
        raise ValueError(f"not an operation: {text[:60]!r}: {error}") from error


def check_count(number: Any) -> None:
    if type(number) is not int or not 0 <= number < 1 << 62:
        raise ValueError(f"{str(number)[:60]} is no number of elements")


def check_known(codec: Codec) -> None:
    """Raise ValueError unless a server can make this codec from its spec text."""
    if schemes.registry().get(codec.name) is not type(codec):
        kind = type(codec).__name__
        raise ValueError(
            f"servers get codecs as spec text, and {kind} is not known by name: tw.register({kind}), on every rank"
        )


def codec_of(spec: str) -> Codec:
    """The codec that a peer named."""
    if len(spec) > limits.SPEC_CHARACTERS:
        raise ValueError(f"a codec's spec has {limits.SPEC_CHARACTERS} characters at most, this has {len(spec)}")
    name = str(spec).partition("(")[0]
    if name not in schemes.registry():
        raise ValueError(f"the codec {name!r} is not known here: tw.register() it on the ranks that serve, too")
    return schemes.codec(spec)


def layout_of(segments: Any, *, chosen: bool = False) -> Layout:
    """The layout that a peer described."""
    at, found = 0, []
    for name, start, stop, shape, offset in segments:
        if len(shape) > limits.DIMENSIONS:
            raise ValueError(f"a tensor has {limits.DIMENSIONS} dimensions at most, not {len(shape)}")
        for number in (start, stop, offset, *shape):
            check_count(number)
        segment = Segment(str(name), start, stop, tuple(shape), offset)
        if start != at or stop < at or math.prod(shape) != segment.numel:
            raise ValueError(f"the segments of a layout follow each other and fill their shapes; {segment} does not")
        at = stop
        found.append(segment)
    if len({segment.name for segment in found}) < len(found):
        raise ValueError("the segments of a layout have names of their own")
    return Layout(found, chosen=chosen)


def dtype_name(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
