"""The front door for FSDP2: between the replicas of a sharded model, or between its shards.

replicas=group    every rank converses about its own shard with those that have the same shard of another replica;
                  inside a replica PyTorch reduces as ever
else              a codec in PyTorch's place between shards: the reduce-scatter is the first half of a two-shot
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from thinwire.control import Controller
from thinwire.core.bucket import Bucket, Scratch
from thinwire.core.feedback import compensated
from thinwire.core.layout import Layout
from thinwire.core.partition import Exempt
from thinwire.core.parts import placed
from thinwire.core.scheme import Codec, Scheme, innermost
from thinwire.exchange.allreduce import AllReduce
from thinwire.exchange.exchange import Exchange
from thinwire.exchange.lane import Rounds
from thinwire.exchange.scatter import Part, Sockets, scatter
from thinwire.reducer import Reducer, Scaler
from thinwire.schemes import codec, parse
from thinwire.units import Pass, Unit, tensors_of, units_of


def attach(
    model: FSDPModule,
    scheme: str | Scheme,
    *,
    replicas: dist.ProcessGroup | None,
    exchange: Exchange | None,
    controller: str | Controller | None,
    feedback: str | bool,
    decay: float,
    residual: str,
    exempt: Exempt,
    warmup_steps: int,
    warmup_level: float | None,
    seed: int,
) -> Replicas | Shards:
    """As `thinwire.attach`, which calls this."""
    units = units_of(model)
    if any(unit.watched for unit in units):
        raise ValueError("this model is attached already; close() the other wire first")
    scheme = parse(scheme)
    if replicas is not None:
        tensors, exact = tensors_of(units, scheme, exempt, every=False)
        wire = Replicas(
            tensors, scheme, replicas, exchange=exchange, controller=controller, feedback=feedback, decay=decay,
            residual=residual, exempt=exact, warmup_steps=warmup_steps, warmup_level=warmup_level, seed=seed,
        )  # fmt: skip
        wire.connect(units, replicas)
    else:
        _check_shards(scheme, exchange, controller, feedback, warmup_steps, decay)
        tensors, exact = tensors_of(units, scheme, exempt, every=True)
        group = units[0].process_group
        wire = Shards(
            tensors, scheme, group, exchange=exchange, feedback=feedback is True, residual=residual, exempt=exact,
            seed=seed,
        )  # fmt: skip
        wire.connect(units)
    return wire


class Replicas(Reducer):
    """A shard's connection to the same shard of the other replicas. Made by `attach(model, scheme, replicas=group)`.

    A step is a backward pass; gradients that are only accumulated (`set_requires_gradient_sync(False)`) are none.
    """

    def connect(self, units: Sequence[Unit], group: dist.ProcessGroup) -> None:
        self._units, self._pass, self._plain_group = units, Pass(self), group
        self._shard, self._shards_group = units[0].shard, units[0].process_group
        for unit in units:
            unit.watch()
            unit.after_reduction(partial(self._on_shard, unit))

    @property
    def groups(self) -> Sequence[dist.ProcessGroup]:
        return [*super().groups, self._shards_group]

    @property
    def seat(self) -> str:
        return f"{super().seat}.{self._shard}"

    def _on_shard(self, unit: Unit, buffer: Tensor) -> None:
        """The mean over replicas of what the reduce-scatter left, in place, and complete: PyTorch goes on at once."""
        own = unit.once("own", lambda: placed(unit.pieces(unit.shard, unit.present)))
        if not own.numel:
            return
        self._pass.enter()
        padded = len(own.runs) > 1
        flat = own.gather(buffer, buffer.new_empty(own.numel)) if padded else own.view(buffer)
        self.submit(flat, own.layout, last=True, done=lambda error: None, here=True)
        self.settle()
        if padded:
            own.scatter(flat, buffer)

    def scale(self, scaler: Scaler | float) -> None:
        raise ValueError(_NO_SCALE)

    def close(self) -> None:
        """End the lane; replicas are averaged by a plain all-reduce from now on. Every rank calls it; twice is fine."""
        for unit in self._units:
            unit.leave()
            unit.after_reduction(partial(_plain_mean, self._plain_group))
        self._units = []
        super().close()


class Shards(Reducer):
    """A codec between the shards of a model. Made by `attach(model, codec)`.

    Each rank encodes every other's rows of its own gradient, and adds what came for its own rows. With `feedback=True`
    a rank remembers what its messages lost, of all rows: as much memory as the whole model takes.
    """

    def connect(self, units: Sequence[Unit]) -> None:
        inner = innermost(self.scheme)
        assert isinstance(inner, Codec) and isinstance(self.exchange, AllReduce)
        self._codec, self._units, self._pass = inner, units, Pass(self)
        self._direct = None  # there is more to it than a sum
        self._call: tuple[list[Part], Tensor, Part] | None = None
        for unit in units:
            unit.watch()
            unit.instead_of_reduction(partial(self._on_gradients, unit))

    def _on_gradients(self, unit: Unit, output: Tensor, given: Tensor) -> None:
        """output = the sum of everybody's rows of this shard, complete."""
        self._pass.enter()
        parts, own, layout = unit.once("parts", lambda: self._parts(unit, given.dtype))
        self._call = (parts, output.zero_(), own)
        self.submit(given, layout, last=True, done=lambda error: None, here=True)
        self.settle()

    def _parts(self, unit: Unit, dtype: torch.dtype) -> tuple[list[Part], Part, Layout]:
        """Every shard's part of the buffer, where its own lies in the output, and a name for all of it."""
        length = unit.numel(unit.present)
        all_exact = self._codec.lossless(dtype)

        def part(shard: int, begin: int) -> Part:
            pieces = [(piece, begin + at) for piece, at in unit.pieces(shard, unit.present)]
            exact = [each for each in pieces if all_exact or each[0].name in self._exact]
            return Part(placed(exact), placed(each for each in pieces if each not in exact))

        parts = [part(shard, shard * length) for shard in range(unit.shards)]
        return parts, part(unit.shard, 0), Layout.of([("gradients", (length * unit.shards,))])

    def _rounds(self, buffer: Tensor, scratch: Scratch, layout: Layout, step: int, scale: float | None) -> Rounds:
        assert self._call is not None and isinstance(self.exchange, AllReduce)
        parts, output, own = self._call
        who = (self.exchange.workers, self.exchange.worker)
        bucket = Bucket(buffer, layout, *who, step, self.seed, None, scratch)
        total = scratch.take("own-part", own.layout.numel, buffer.dtype, buffer.device)
        yield from scatter(bucket, parts, self._codec, Sockets(self.exchange.group), self._say, 1.0, total)
        own.exact.scatter(total, output)
        own.coded.scatter(total[own.exact.numel :], output)

    def _say(self, part: Bucket, out: Tensor) -> None:
        if self.scheme.remembers:
            compensated(self._codec, part, self.memory.flat("residual", part.layout), self.level, out)
        else:
            self._codec.encode_padded(part, self.level, out)

    def scale(self, scaler: Scaler | float) -> None:
        raise ValueError(_NO_SCALE)

    def close(self) -> None:
        """Give the model back to FSDP2 and end the lane. Every rank calls it; twice is fine."""
        for unit in self._units:
            unit.leave()
        self._units = []
        super().close()


_NO_SCALE = (
    "a loss scale is not supported under FSDP2: a step is skipped where any shard is not finite, and shards do not "
    "hear of each other. Train in bfloat16, which needs none"
)


def _check_shards(
    scheme: Scheme, exchange: Exchange | None, controller: object, feedback: str | bool, warmup_steps: int, decay: float
) -> None:
    """Raise ValueError for what only conversations can have. For those, `replicas=` is the way."""
    asked = codec(scheme, linear=True)
    if not asked.unbiased and feedback is not True:
        raise ValueError(
            f"{asked.name} errs the same way every time, so between shards it needs feedback=True: a residual of the "
            "whole model on every rank"
        )
    if exchange is not None and (type(exchange) is not AllReduce or exchange.route != "auto"):
        raise ValueError(f"between shards, exchange must be AllReduce() or None, got {type(exchange).__name__}")
    if controller is not None or warmup_steps or decay != 1:
        raise ValueError("between shards there is no controller=, warmup_steps= or decay=; between replicas= there is")


def _plain_mean(group: dist.ProcessGroup, buffer: Tensor) -> None:
    dist.all_reduce(buffer.mul_(1.0 / dist.get_world_size(group)), group=group)
