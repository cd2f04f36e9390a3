"""PowerSGD: each matrix as two thin factors, found by one power iteration a step (Vogels et al., 2019)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core import randomness
from thinwire.core.bucket import Bucket
from thinwire.core.layout import Layout, Segment, Selection
from thinwire.core.memory import Memory
from thinwire.core.request import Sum
from thinwire.core.scheme import Conversation, Knob, Scheme
from thinwire.schemes import _products

_RANKS = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class PowerSGD(Scheme):
    """Low rank. A tensor of two or more dimensions is a matrix M, (shape[0], the rest); r = `factor_rank`.

    sided="two", the paper; Q is what the last step found:
      1. P = sum of M_i Q; orthonormalise P.
      2. Q = mean of M_i^T P.
      3. out = P Q^T; lost_i = M_i - out.
    sided="one", the authors' package; one product and one round a step, left and right in turn:
      1. Orthonormalise the factor Q of the last step.
      2. P_i = M_i Q; lost_i = M_i - P_i Q^T, the worker's own projection.
      3. P = mean of P_i; out = P Q^T. In odd steps the same with M^T.

    All else travels exact, in the message of the first factor: vectors, and matrices that the factors of a
    step would not make `min_gain` times smaller.

    Factors are kept wide, (r, columns): every product then reads M row by row.

    Differs from the paper: Q is orthonormalised before it is used. That is the same span, and leaves no scale
    that could underflow over the steps. Householder reflections give an orthonormal basis whatever the
    columns are; and a column that comes out as zero does not replace the warm start.
    """

    factor_rank: int = 4  # lower => fewer bytes, more error
    sided: str = "two"  # "one" => half the bytes and half the products, and a factor that is one step older
    min_gain: float = 2.0  # higher => more matrices travel exact

    unbiased: ClassVar[bool] = False
    in_place: ClassVar[bool] = True
    settles: ClassVar[bool] = True
    shared_state: ClassVar[frozenset[str]] = frozenset({"p", "q"})
    matrices: ClassVar[bool] = True
    gaps: ClassVar[bool] = True
    family: ClassVar[str] = "low rank"
    summary: ClassVar[str] = "low rank with a warm start; summable, few bytes on models made of matrices"

    def __post_init__(self) -> None:
        if not isinstance(self.factor_rank, int) or self.factor_rank < 1:
            raise ValueError(f"powersgd: factor_rank must be a positive integer, got {self.factor_rank!r}")
        if self.sided not in ("one", "two"):
            raise ValueError(f"powersgd: sided must be 'one' or 'two', got {self.sided!r}")
        if not self.min_gain >= 1:
            raise ValueError(f"powersgd: min_gain must be at least 1, got {self.min_gain!r}")

    @property
    def wide(self) -> bool:
        return True  # matrix products are PyTorch's own, fast in any dtype

    @property
    def knob(self) -> Knob:
        return Knob("factor_rank", tuple(sorted({*_RANKS, self.factor_rank})), self.factor_rank)

    def init(self, name: str, like: Tensor, seed: int) -> dict[str, Tensor]:
        """N(0, 1) factors, the same on all workers, with room for the knob's highest rank."""
        rows, cols = _as_matrix(like.shape)
        if not self._pays(rows, cols, 1):
            return {}
        most = min(int(self.knob.menu[-1]), rows, cols)
        generator = torch.Generator("cpu").manual_seed(randomness.key(seed, 0, name) >> 1)
        q, p = (
            torch.randn(most, size, dtype=torch.float32, device="cpu", generator=generator).to(like)
            for size in (cols, rows)
        )
        return {"q": q} if self.sided == "two" else {"q": q, "p": p}

    def converse(self, bucket: Bucket, memory: Memory, level: float) -> Conversation:
        plan = bucket.layout.once((self, int(level)), lambda: _plan(bucket.layout, self, int(level)))
        if self.sided == "two":
            return (yield from self._two_sided(bucket, memory, plan))
        return (yield from self._one_sided(bucket, memory, plan))

    def _two_sided(self, bucket: Bucket, memory: Memory, plan: _Plan) -> Conversation:
        out = bucket.target
        message = plan.message(bucket, "p", with_rest=True)
        for batch, p in plan.factors(message, "p"):
            batch.multiply(_products.times_rows, bucket, batch.recall(memory, "q", bucket), p)
        bucket = bucket.settled()
        flat, lost = bucket.flat, bucket.lost
        first = yield Sum(message)
        if kernels.seen_nonfinite(first):
            return out.fill_(torch.nan)
        left = [orthonormal(p, _room(bucket, f"left-{n}", p)) for n, (_, p) in enumerate(plan.factors(first, "p"))]

        message = plan.message(bucket, "q", with_rest=False)
        for p, (batch, q) in zip(left, plan.factors(message, "q"), strict=True):
            _products.times_columns(batch.of(flat), p, q)
        second = (yield Sum(message.mul_(1.0 / bucket.workers))) if plan.batches else message
        if kernels.seen_nonfinite(second):
            return out.fill_(torch.nan)
        for p, (batch, q) in zip(left, plan.factors(second, "q"), strict=True):
            _products.outer(p, q, batch.of(out), batch.of(flat), None if lost is None else batch.of(lost))
            batch.keep(memory, "q", q, second)
        plan.put_rest(first, out, lost)
        return out if kernels.at_hand(first) else kernels.spoil_(kernels.spoil_(out, first), second)

    def _one_sided(self, bucket: Bucket, memory: Memory, plan: _Plan) -> Conversation:
        settled, out = bucket.settled(), bucket.target
        flat, lost = settled.flat, settled.lost
        old, new = ("q", "p") if bucket.step % 2 == 0 else ("p", "q")
        bases = [batch.recall(memory, old, bucket) for batch in plan.batches]
        message = plan.message(bucket, new, with_rest=True)
        for basis, (batch, factor) in zip(bases, plan.factors(message, new), strict=True):
            times = _products.times_rows if new == "p" else _products.times_columns
            batch.multiply(times, bucket, basis, factor)
            if lost is not None:
                p, q = (factor, basis) if new == "p" else (basis, factor)
                # `out` is nobody's yet, or the matrix itself, which is not needed any more.
                _products.outer(p, q, batch.of(out), batch.of(flat), batch.of(lost))
            factor.mul_(1.0 / bucket.workers)
        mean = yield Sum(message)
        if kernels.seen_nonfinite(mean):
            return out.fill_(torch.nan)
        for basis, (batch, factor) in zip(bases, plan.factors(mean, new), strict=True):
            p, q = (factor, basis) if new == "p" else (basis, factor)
            _products.outer(p, q, batch.of(out))
            batch.keep(memory, new, factor, mean)
        plan.put_rest(mean, out, lost)
        return out if kernels.at_hand(mean) else kernels.spoil_(out, mean)

    def _pays(self, rows: int, cols: int, factor_rank: int) -> bool:
        """The authors' rule: whether the factors of a step are `min_gain` times smaller than the matrix."""
        share = 1.0 if self.sided == "two" else 0.5
        return rows * cols > self.min_gain * share * factor_rank * (rows + cols)


def orthonormal(wide: Tensor, out: Tensor | None = None) -> Tensor:
    """Orthonormal rows with the span of `wide`'s rows, as many; zero and dependent rows get some other direction.

    Equal input gives equal bits, so workers that hold the same sum hold the same basis.
    """
    if not kernels.at_hand(wide):
        return _products.gram_schmidt(wide, torch.empty_like(wide) if out is None else out)
    if out is None:
        return torch.linalg.qr(wide.mT)[0].mT.contiguous()
    rank = wide.shape[-2]
    torch.linalg.qr(wide.mT, out=(out.mT, wide.new_empty((*wide.shape[:-2], rank, rank)).mT))
    return out


class _Batch(NamedTuple):
    """Matrices of one shape, equally spaced in the flat buffer: one strided view, no copy."""

    names: tuple[str, ...]
    start: int
    spacing: int
    rows: int
    cols: int
    factor_rank: int

    def numel(self, side: str) -> int:
        """The elements of this side's factors."""
        return len(self.names) * self.factor_rank * (self.rows if side == "p" else self.cols)

    def of(self, flat: Tensor) -> Tensor:
        """(batch, rows, cols), in `flat`'s own memory."""
        shape, strides = (len(self.names), self.rows, self.cols), (self.spacing, self.cols, 1)
        return flat.as_strided(shape, strides, flat.storage_offset() + self.start)

    def multiply(self, times: Callable[..., None], bucket: Bucket, basis: Tensor, out: Tensor) -> None:
        """A product of the bucket; what is owed is added on the way, into `lost`."""
        owed = bucket.owed, bucket.lost
        times(self.of(bucket.flat), basis, out, *(None if each is None else self.of(each) for each in owed))

    def recall(self, memory: Memory, key: str, bucket: Bucket) -> Tensor:
        """(batch, rank, size): an orthonormal basis of the factors found last, kept until the conversation ends."""
        found = [memory[name, key][: self.factor_rank] for name in self.names]
        like = found[0].unsqueeze(0).expand(len(found), -1, -1)
        stacked = torch.stack(found, out=_room(bucket, "factors", like))
        return orthonormal(stacked, _room(bucket, f"basis-{self.names[0]}", like))

    def keep(self, memory: Memory, key: str, factors: Tensor, message: Tensor) -> None:
        """Remember the factors; a direction that came out as zero leaves the old one, and so do messages that are not
        finite, where nobody looked at them before."""
        found = torch.linalg.vector_norm(factors, math.inf, dim=2, keepdim=True) > 0
        if not kernels.at_hand(message):
            found &= kernels.doubt(message) == 0
        for name, factor, nonzero in zip(self.names, factors, found, strict=True):
            kept = memory[name, key][: self.factor_rank]
            torch.where(nonzero, factor, kept, out=kept)


def _room(bucket: Bucket, name: str, like: Tensor) -> Tensor:
    return bucket.scratch.take(f"powersgd-{name}", like.numel(), like.dtype, like.device).view(like.shape)


@dataclass(frozen=True)
class _Plan:
    """What of a layout is factored, and the stretches that travel exact."""

    batches: tuple[_Batch, ...]
    rest: Selection

    def message(self, bucket: Bucket, side: str, *, with_rest: bool) -> Tensor:
        """Kept memory for one side's factors, and behind them the rest: this worker's share of its mean."""
        factors = sum(batch.numel(side) for batch in self.batches)
        rest = self.rest.numel if with_rest else 0
        flat = bucket.flat
        message = bucket.scratch.take(f"powersgd-{side}", factors + rest, flat.dtype, flat.device)
        if rest:
            share = self.rest.gather(flat, message[factors:])
            if bucket.owed is not None:  # nothing, unless the rank was higher before
                for start, stop, at in self.rest.places:
                    share[at : at + stop - start].add_(bucket.owed[start:stop])
            share.mul_(1.0 / bucket.workers)
        return message

    def factors(self, message: Tensor, side: str) -> Iterator[tuple[_Batch, Tensor]]:
        """Each batch with its (batch, rank, size) factors, views of the message."""
        begin = 0
        for batch in self.batches:
            end = begin + batch.numel(side)
            yield batch, message[begin:end].view(len(batch.names), batch.factor_rank, -1)
            begin = end

    def put_rest(self, message: Tensor, flat: Tensor, lost: Tensor | None) -> None:
        """Write the rest's mean where it belongs. Nothing of it was lost."""
        self.rest.scatter(message[message.numel() - self.rest.numel :], flat)
        if lost is not None:
            for start, stop in self.rest.runs:
                lost[start:stop] = 0


def _plan(layout: Layout, scheme: PowerSGD, factor_rank: int) -> _Plan:
    alike: dict[tuple[int, int], list[Segment]] = {}
    rest: list[str] = []
    for segment in layout.segments:
        rows, cols = _as_matrix(segment.shape)
        if scheme._pays(rows, cols, min(factor_rank, rows, cols)):
            alike.setdefault((rows, cols), []).append(segment)
        else:
            rest.append(segment.name)
    batches = [
        _Batch(tuple(s.name for s in run), run[0].start, spacing, *shape, min(factor_rank, *shape))
        for shape, segments in alike.items()
        for run, spacing in _equally_spaced(segments)
    ]
    return _Plan(tuple(batches), layout.select(rest))


def _equally_spaced(segments: Sequence[Segment]) -> Iterator[tuple[list[Segment], int]]:
    """The segments in runs of one spacing: the same layer of every block of a network is one run."""
    run: list[Segment] = []
    for segment in segments:
        if len(run) > 1 and segment.start - run[-1].start != run[1].start - run[0].start:
            yield run, run[1].start - run[0].start
            run = []
        run.append(segment)
    if run:
        yield run, run[1].start - run[0].start if len(run) > 1 else run[0].numel


def _as_matrix(shape: Sequence[int]) -> tuple[int, int]:
    """(rows, columns); a vector is one row, which never pays."""
    if len(shape) < 2 or 0 in shape:
        return 1, max(1, math.prod(shape))
    return shape[0], math.prod(shape[1:])
