"""Scheme, Codec and Knob: what an algorithm is to the rest of thinwire."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor

from thinwire.core.request import Encode, Mean, Request
from thinwire.core.spec import Specced

if TYPE_CHECKING:
    from thinwire.core.bucket import Bucket, Layout
    from thinwire.core.memory import Memory

Conversation: TypeAlias = Generator[Request, Any, Tensor]


def side_by_side(*conversations: Conversation) -> Generator[Request, Any, tuple[Tensor, ...]]:
    """Several conversations as one: what they ask next is asked together. The tuple of their results."""
    results: dict[int, Tensor] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(conversations)))
    while answers:
        asked: dict[int, Request] = {}
        for number, answer in answers.items():
            try:
                asked[number] = conversations[number].send(answer)
            except StopIteration as stop:
                results[number] = stop.value
        if len(asked) == 1:
            ((number, request),) = asked.items()
            answers = {number: (yield request)}
        else:
            answers = dict(zip(asked, (yield tuple(asked.values())), strict=True)) if asked else {}
    return tuple(results[number] for number in range(len(conversations)))


@dataclass(frozen=True)
class Knob:
    """An ordered menu of levels, fewest bytes first, and the level used when nobody turns it."""

    name: str
    menu: tuple[float, ...]
    default: float


class Scheme(Specced, ABC):
    """A conversation that turns every worker's bucket into the group's mean.

    Subclasses are frozen dataclasses: their fields are the options of the spec text, and one instance serves any
    number of buckets, because all that lasts lives in `memory`. A scheme does not know how its requests travel.

    `unbiased`: the mean is right on average, so no error feedback is needed. Biased schemes get it ("auto").
    `exact`: nothing is lost beyond the dtype on the wire, so no tensor needs an exemption.
    `any_float`: takes buckets of any dtype as they are; others get them as float32, or as float64 where `wide`.
    `wide`: works in float64 where gradients are. Others get them as float32, rounded by 6e-8 of each element.
    `rank_order`: all sums run in rank order (payloads, integers), so that any number of workers gets the same bits
    whoever adds; float sums by an all-reduce have an order of their own.
    `in_place`: writes what is lost over the bucket, where `lost` is `flat` itself, and the mean into `bucket.out`.
    `settles`: adds `bucket.owed` by itself, in the pass that reads the bucket first: where `in_place` into `lost`, else
    into `flat`, which its `encode`, too, may then write over.
    `gaps`: takes buckets whose layout has gaps between tensors: `flat`, `lost` and `owed` are 0 there, and stay so, or
    NaN throughout. Others get their tensors end to end.
    `shared_state`: the keys of `init` whose tensors are equal on all workers.
    `matrices`: it looks at whole matrices, so the fewer pieces they are cut into the better.

    >>> @dataclass(frozen=True)
    ... class Plain(Scheme):
    ...     unbiased = True
    ...
    ...     def converse(self, bucket, memory, level):
    ...         total = yield Sum(bucket.flat)
    ...         return total / bucket.workers
    >>> tw.Simulation(Plain(), workers=2).reduce([torch.zeros(3), torch.ones(3)])
    tensor([0.5000, 0.5000, 0.5000])
    """

    unbiased: ClassVar[bool]
    exact: ClassVar[bool] = False
    any_float: ClassVar[bool] = False
    rank_order: ClassVar[bool] = False
    in_place: ClassVar[bool] = False
    settles: ClassVar[bool] = False
    gaps: ClassVar[bool] = False
    shared_state: ClassVar[frozenset[str]] = frozenset()
    matrices: ClassVar[bool] = False
    family: ClassVar[str] = "others"  # with which it is listed
    summary: ClassVar[str]  # one line: what it is for

    @property
    def wide(self) -> bool:
        return self.exact

    @property
    def sized_by_numbers(self) -> bool:
        """Whether the sizes of its messages follow from what is in the buckets, so that the host must look there."""
        return False

    @property
    def remembers(self) -> bool:
        """Whether what its messages lost is added to the next ones."""
        return False

    @property
    def knob(self) -> Knob | None:
        """What a controller may turn while training; None where there is nothing to turn."""
        return None

    @property
    def level(self) -> float:
        """The knob's value when no controller turns it."""
        return self.knob.default if self.knob else 0

    def summed_as(self, dtype: torch.dtype, workers: int) -> torch.dtype | None:
        """The dtype in which that many buckets of `dtype`, divided first, are merely summed, without any `converse`.

        No wider than `dtype`. None where there is more to say. Who overrides `converse` overrides this.
        """
        return None

    def init(self, name: str, like: Tensor, seed: int) -> dict[str, Tensor]:
        """What this scheme remembers of one parameter (its shape, dtype and device are `like`'s) before the first step.

        A tensor with the parameter's shape can be had for a whole bucket at once: `Memory.flat`.
        """
        return {}

    def rescale(self, memory: Memory, factor: float) -> None:
        """Gradients are `factor` times what they were, by a loss scale: so is whatever is remembered of them."""

    def report(self, memory: Memory) -> dict[str, float]:
        """Numbers of this scheme's own, for `stats()`."""
        return {}

    @abstractmethod
    def converse(self, bucket: Bucket, memory: Memory, level: float) -> Conversation:
        """Ask the group what it must know; return the mean, flat. With `bucket.lost`, fill it on the way.

        Non-finite input on any worker must make the mean non-finite on all; memory must not absorb it.
        """


class Codec(Scheme):
    """A scheme that is just encode and decode: one request, the mean of the decoded payloads.

    The size of a payload follows from layout and level alone, so all workers' payloads are equally long. A codec that
    meets a non-finite value makes a payload that decodes to something non-finite.

    >>> codec, bucket = tw.SignSGD(), Bucket.of(torch.tensor([1.0, -3.0, 2.0, -2.0]))
    >>> payload = codec.payload(bucket, codec.level)
    >>> payload.numel()  # a float32 and four signs
    5
    >>> decoded = torch.zeros(4)
    >>> codec.decode_add(payload, bucket.layout, codec.level, decoded, weight=1.0)
    >>> decoded
    tensor([ 2., -2.,  2., -2.])
    """

    rank_order: ClassVar[bool] = True
    grain: ClassVar[int | None] = None  # a bucket may be cut every so many elements of a tensor; None: never
    per_tensor: ClassVar[bool] = False  # scales are of whole tensors: where a bucket is cut, of each part by itself
    blockwise: ClassVar[bool] = False  # each field of a payload is those of the bucket's parts end to end, cut by grain

    @property
    def linear(self) -> bool:
        """Whether several payloads come to what each says by itself, added up; else `decode_sum` needs them all."""
        return True

    @abstractmethod
    def nbytes(self, layout: Layout, level: float) -> int:
        """The exact size of a payload."""

    @abstractmethod
    def encode(self, bucket: Bucket, level: float, out: Tensor) -> None:
        """Write the payload of `bucket` into `out` (uint8, `nbytes` long), and `bucket.lost` where it is asked for."""

    @abstractmethod
    def decode_add(self, data: Tensor, layout: Layout, level: float, out: Tensor, weight: float) -> None:
        """out += weight * the decoded payload. Bad bytes raise ValueError and touch nothing out of bounds."""

    def decode_sum(self, datas: Sequence[Tensor], layout: Layout, level: float, out: Tensor, weight: float) -> bool:
        """out = weight * the sum of decoded payloads, in the order given; what was there before does not matter.

        Whether that is surely finite: False where it is not, or where one would have to look. To override where one
        pass does it, with the bits that this has.
        """
        out.zero_()
        for data in datas:
            self.decode_add(data, layout, level, out, weight)
        return False

    def fields(self, data: Tensor, layout: Layout) -> tuple[Tensor, ...]:
        """Views of what a payload consists of: scales, codes and the like."""
        return (data,)

    def fields_of(self, datas: Sequence[Tensor], layout: Layout, level: float) -> list[tuple[Tensor, ...]]:
        """Each field of several payloads."""
        for data in datas:
            self.check_size(data, layout, level)
        return list(zip(*(self.fields(data, layout) for data in datas), strict=True))

    def check_size(self, data: Tensor, layout: Layout, level: float) -> None:
        """Raise ValueError unless `data` is as long as a payload of this layout: what every decoder asks first."""
        expected = self.nbytes(layout, level)
        if data.numel() != expected:
            raise ValueError(
                f"{self.name}: a payload of {layout.numel} elements has {expected} bytes, got {data.numel()}"
            )

    def lossless(self, dtype: torch.dtype) -> bool:
        """Whether messages about numbers of `dtype` lose nothing at all."""
        return False

    def wants_memory(self, dtype: torch.dtype) -> bool:
        """Whether one who sends messages outside of any conversation should remember what they lost: not where nothing
        is lost, nor where the losses average out.
        """
        return not self.lossless(dtype) and (self.exact or not self.unbiased)

    def payload(self, bucket: Bucket, level: float) -> Tensor:
        """`encode` into memory kept by the bucket's scratch."""
        data = bucket.scratch.take("payload", self.nbytes(bucket.layout, level), torch.uint8, bucket.flat.device)
        self.encode(bucket, level, data)
        return data

    def encode_padded(self, bucket: Bucket, level: float, out: Tensor, encode: Encode | None = None) -> None:
        """Encode into the front of `out`, by `encode` where it is given; what is left is padding and zero."""
        size = self.nbytes(bucket.layout, level)
        if bucket.layout.numel:
            (encode or self.encode)(bucket, level, out[:size])
        out[size:].zero_()

    def converse(self, bucket: Bucket, memory: Memory, level: float) -> Conversation:
        return (yield Mean(self, bucket, level))


def innermost(scheme: Scheme) -> Scheme:
    """The scheme inside all wrappers."""
    while isinstance(scheme, Wrapper):
        scheme = scheme.scheme
    return scheme


def _of_inner(name: str) -> Any:
    return property(lambda wrapper: getattr(wrapper.scheme, name))


@dataclass(frozen=True)
class Wrapper(Scheme):
    """A scheme around a scheme: it says of itself what the inner one says, and changes how the conversation goes."""

    scheme: Scheme

    if not TYPE_CHECKING:  # to a type checker they are what the base has
        unbiased, exact, any_float = _of_inner("unbiased"), _of_inner("exact"), _of_inner("any_float")
        rank_order, in_place = _of_inner("rank_order"), _of_inner("in_place")
        settles, gaps = _of_inner("settles"), _of_inner("gaps")
        shared_state, matrices = _of_inner("shared_state"), _of_inner("matrices")
        wide, remembers, name, spec, knob = (_of_inner(each) for each in ("wide", "remembers", "name", "spec", "knob"))
        sized_by_numbers = _of_inner("sized_by_numbers")

    def init(self, name: str, like: Tensor, seed: int) -> dict[str, Tensor]:
        return self.scheme.init(name, like, seed)

    def rescale(self, memory: Memory, factor: float) -> None:
        self.scheme.rescale(memory, factor)

    def report(self, memory: Memory) -> dict[str, float]:
        return self.scheme.report(memory)
