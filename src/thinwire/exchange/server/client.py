"""ParameterServer, the workers' side: answers requests by pushing them to servers and pulling what comes back.

| request | up | down |
|---|---|---|
| Sum, Max | the numbers, an equal segment to each server | the same dtype |
| Sum of narrow integers | packed | packed, the same width |
| Mean | each server's tensors, encoded | the mean through the codec `down` |

Mean, step by step: 1. encode each server's tensors; 2. push; 3. the server decodes and adds in rank order, adds what
it owes from the last answer, encodes the mean again; 4. pull and decode.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from multiprocessing import util
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import schemes
from thinwire.core import parts
from thinwire.core.bucket import Bucket, Scratch
from thinwire.core.layout import Layout
from thinwire.core.request import Max, Mean, Sum
from thinwire.core.scheme import Codec, Conversation, Scheme, innermost
from thinwire.exchange import arithmetic, objects
from thinwire.exchange.collectives import Collective, Started
from thinwire.exchange.exchange import CPU, drive
from thinwire.exchange.lane import Lane, Rounds, Threaded
from thinwire.exchange.server import frames, limits, operations, sharding, snapshots
from thinwire.exchange.server.channel import Channel, Received, Sent
from thinwire.exchange.server.frames import Kind, Push, Reply, Verdict
from thinwire.exchange.transport import Transport
from thinwire.schemes.cast import FP32


class ParameterServer:
    """This worker's connection to all servers. Made by `thinwire.join`; give it to `attach`.

    down: how means come back: "same" (the codec and level of the way up), or a spec of one message: "fp32" (exact),
        "fp16", "bf16", "qsgd(bits=8)". Sums and maxima come back in the dtype they went up in.
    goes_on: whether the others are to go on where a worker is lost.
    """

    def __init__(
        self, channels: Sequence[Channel], ranks: Sequence[int], worker: int, *, down: str = "same",
        goes_on: bool = False, transport: Transport | None = None,
    ) -> None:  # fmt: skip
        self.down = down
        self.goes_on = goes_on
        self._down = None if down == "same" else schemes.codec(down)
        self.transport: Transport = transport or Transport()
        self.lane: Lane | None = None
        self.workers: int = len(ranks)
        self.worker = worker
        self.place: int = worker  # among those that are left
        self._channels = list(channels)
        self._ranks = list(ranks)  # of the workers, in the whole job
        self._sequences = [0] * len(channels)
        self._described = [operations.Catalogue() for _ in channels]
        self.owners: sharding.Owners = sharding.Owners(len(channels))
        self._turn = 0
        self._works: list[Started] = []  # the last; were gloo's own thread the last to hold one, it would abort
        self._left = False
        self._at_exit = util.Finalize(None, _end, (weakref.ref(self),), exitpriority=0)

    @property
    def route(self) -> str:
        return f"{len(self._channels)} servers, down {self.down}"

    def open(self, group: dist.ProcessGroup | None, scheme: Scheme, device: torch.device = CPU) -> None:
        if self.lane is not None or self._left:
            raise ValueError("this ParameterServer has been used by another attach(); join() gives a new one")
        assert group is not None
        ranks = dist.get_process_group_ranks(group)
        if ranks != self._ranks:
            raise ValueError(
                f"the model is among ranks {ranks}, the workers are ranks {self._ranks}: "
                "make it with DistributedDataParallel(net, process_group=role.workers)"
            )
        inner = innermost(scheme)
        if isinstance(inner, Codec):
            operations.check_known(inner)
        self._group = group
        self.lane = Threaded(self.transport, f"thinwire-lane-{dist.get_rank()}")

    def direct(self, scheme: Scheme) -> None:
        """Plain sums go to the servers like all else."""

    def relays(self, scheme: Scheme) -> bool:
        return self.down == "same" and isinstance(innermost(scheme), Codec)

    @property
    def device(self) -> torch.device:
        """Sockets have CPU memory, so gradients of a GPU are brought there, and compressed there."""
        return CPU

    def agree(self, given: Mapping[str, str] | None) -> None:
        objects.agree(given, self._group)

    def close(self) -> None:
        """Join the lane and tell the servers that this worker has finished; they end when all have.

        While an exception is being handled, as when a `with` block ends by one, this worker has not: it is lost.
        """
        self._close(finished=not _fails(sys.exc_info()[1]))

    def _close(self, *, finished: bool) -> None:
        if self.lane is not None:
            self.lane.close()
            self.lane = None
        self._leave(finished=finished)

    # -- conversations -------------------------------------------------------------------------------------------------

    def deal(self, tensors: Mapping[str, Tensor], exact: Collection[str], scheme: Scheme) -> Sequence[parts.Piece]:
        return parts.undivided(tensors)

    def hold(self, bucket: Bucket, converse: Callable[[Bucket], Conversation]) -> Rounds:
        return drive(converse(bucket), self, bucket.scratch)

    def answer(self, request: Sum | Max | Mean, workers: int, scratch: Scratch) -> Rounds:
        if isinstance(request, Mean):
            return (yield from self._mean(request, workers))
        if isinstance(request, Max):
            return (yield from self._numbers("max", request.tensor, workers))
        if request.width is None:
            return (yield from self._numbers("sum", request.tensor, workers))
        return (yield from self._integers(request, workers, scratch))

    def _numbers(self, reduction: str, tensor: Tensor, expected: int) -> Rounds:
        """Plain numbers: sent from the tensor's own memory, and the answer is received there.

        No answer can come before the whole segment has left, so the two never meet.
        """
        flat = tensor.view(-1)
        self._turn += 1
        asks = []
        for server, start, stop in sharding.ranges(flat.numel(), flat.element_size(), len(self._channels), self._turn):
            operation = operations.PlainSum(reduction, operations.dtype_name(flat), stop - start)
            data = frames.as_bytes(flat[start:stop])
            asks.append(_Ask(server, operation, data, data))
        yield from self._ask(asks, expected)
        return tensor

    def _integers(self, request: Sum, expected: int, scratch: Scratch) -> Rounds:
        tensor, width = request.tensor.view(-1), request.width
        assert width is not None
        self._turn += 1
        asks, places = [], []
        for server, start, stop in sharding.ranges(tensor.numel(), 4, len(self._channels), self._turn):
            operation = operations.PackedSum(width, request.saturate, stop - start)
            data = scratch.take(f"integers-{server}", operation.up_bytes(0), torch.uint8)
            arithmetic.pack_padded(tensor[start:stop], width, data)
            asks.append(_Ask(server, operation, data, data))
            places.append((start, stop))
        yield from self._ask(asks, expected)
        for ask, (start, stop) in zip(asks, places, strict=True):
            arithmetic.add_integers([ask.answer], width, False, tensor[start:stop])
        return request.tensor

    def _mean(self, mean: Mean, expected: int) -> Rounds:
        codec, bucket, level = mean.codec, mean.bucket, mean.level
        pieces = self._pieces(bucket, codec, self._way_back(mean)[0])
        asks = []
        for piece in pieces:
            operation = self._operation(mean, piece.bucket.layout.closed)
            name, server = f"server-{piece.shard.server}", piece.shard.server
            data = bucket.scratch.take(f"{name}-up", operation.up_bytes(level), torch.uint8)
            answer = bucket.scratch.take(f"{name}-down", operation.down_bytes(level), torch.uint8)
            codec.encode_padded(piece.bucket, level, data, mean.encode)
            asks.append(_Ask(server, operation, data, answer))
        yield from self._ask(asks, expected, bucket.step, level)
        for piece, ask in zip(pieces, asks, strict=True):
            assert isinstance(ask.operation, operations.DecodedMean)
            arithmetic.add_payloads(
                ask.operation.down, piece.bucket.layout, ask.operation.level_down(level),
                [ask.answer], 1.0, piece.bucket.target,
            )  # fmt: skip
            piece.put_back(bucket)
        return bucket.target

    def _pieces(self, bucket: Bucket, codec: Codec, down: Codec) -> list[_Piece]:
        found = self.owners.shards(bucket.layout, codec.grain)
        if len(found) == 1 and (down.gaps or not bucket.layout.has_gaps):
            return [_Piece(found[0], bucket)]
        bucket = bucket.settle(in_place=codec.in_place)
        pieces = []
        for shard in found:
            take = (shard.tensors.numel, bucket.flat.dtype, bucket.flat.device)
            flat = shard.tensors.gather(bucket.flat, bucket.scratch.take(f"piece-{shard.server}", *take))
            lost = None if bucket.lost is None else bucket.scratch.take(f"piece-lost-{shard.server}", *take)
            pieces.append(_Piece(shard, replace(bucket, flat=flat, layout=shard.tensors.layout, lost=lost, out=None)))
        return pieces

    def _operation(self, mean: Mean, layout: Layout) -> operations.DecodedMean:
        operations.check_known(mean.codec)
        dtype, seed = operations.dtype_name(mean.bucket.flat), mean.bucket.seed
        return operations.DecodedMean(mean.codec, layout, dtype, seed, *self._way_back(mean))

    def _way_back(self, mean: Mean) -> tuple[Codec, float | None]:
        """The answer's codec and its level; None: the level of the way there."""
        codec, bucket = mean.codec, mean.bucket
        if self._down is not None:
            return self._down, self._down.level
        # What the way back loses of a choice of elements nobody could remember, so it loses nothing that matters.
        exact = mean.exact or (bucket.layout.chosen and codec.wants_memory(bucket.flat.dtype))
        return (FP32(), 0.0) if exact else (codec, None)

    # -- frames --------------------------------------------------------------------------------------------------------

    def trade(
        self, kind: Kind, asks: Sequence[tuple[int, operations.Operation, Tensor, Tensor]], step: int, level: float
    ) -> None:
        """(server, operation, data, answer), pushed and pulled at once, in the calling thread: for asynchronous use."""
        self._drive(self._ask([_Ask(*ask) for ask in asks], self.workers, step, level, kind))

    def _ask(
        self, asks: Sequence[_Ask], expected: int, step: int = 0, level: float = 0.0, kind: Kind = Kind.ASK
    ) -> Rounds:
        """Push every ask and pull its answer; raise where a server refuses."""
        operations: list[Collective] = []
        replies = []
        for ask in asks:
            reply = torch.empty(frames.REPLY_BYTES, dtype=torch.uint8)
            replies.append((self._sequences[ask.server] + 1, reply))
            operations += self._frames(
                kind, ask.server, ask.operation, ask.data, ask.answer, reply, expected, step, level
            )
        yield operations
        for ask, (sequence, frame) in zip(asks, replies, strict=True):
            reply = self._read(frame, ask.server, sequence)
            if reply.checksum != frames.checksum(ask.answer):
                raise RuntimeError(f"the answer of server {ask.server} was damaged on the way")
            if reply.alive < self.workers:
                self.workers, self.place = reply.alive, reply.place
        return torch.empty(0)

    def _frames(
        self, kind: Kind, server: int, operation: operations.Operation | None, data: Tensor, answer: Tensor,
        reply: Tensor, expected: int = 0, step: int = 0, level: float = 0.0,
    ) -> list[Collective]:  # fmt: skip
        channel = self._channels[server]
        self._sequences[server] += 1
        text, number = b"", 0
        if operation is not None:
            number = operation.number
            if self._described[server].use(number) is None:
                self._described[server].add(operation)
                text = operation.text.encode()
        push = Push(
            kind, self._sequences[server], number, step, float(level), expected, len(text), data.numel(),
            answer.numel(), frames.checksum(data),
        )  # fmt: skip
        # The reply is waited for first: after a refusal nothing else is received or sent.
        messages: list[Collective] = [Received(channel, reply, lambda: self._heed(reply, server))]
        messages.append(Sent(channel, push.pack()))
        if text:
            messages.append(Sent(channel, torch.frombuffer(bytearray(text), dtype=torch.uint8)))
        if data.numel():
            messages.append(Sent(channel, data))
        if answer.numel():
            messages.append(Received(channel, answer))
        return messages

    def _heed(self, frame: Tensor, server: int) -> None:
        """Leave, and say why, if the reply is a refusal."""
        reply = Reply.unpack(frame)
        if reply.verdict is Verdict.REFUSED:
            self._leave(finished=False)
            raise RuntimeError(f"server {server} refused this worker's push: {reply.reason}")

    def _read(self, frame: Tensor, server: int, sequence: int) -> Reply:
        reply = Reply.unpack(frame)
        if reply.sequence != sequence:
            raise RuntimeError(f"server {server} answered request {reply.sequence} where {sequence} was asked")
        return reply

    def _leave(self, *, finished: bool) -> None:
        """Tell the servers that this worker has finished; one that has not just cuts the connection."""
        if self._left:
            return
        self._left = True
        self._at_exit.cancel()
        for channel in self._channels:
            if finished:
                with suppress(RuntimeError):  # a server that is gone needs no farewell
                    channel.send(Push(Kind.BYE).pack()).wait()
            else:
                channel.cut()

    # -- checkpoint ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """What the servers hold, fetched by the first worker only: it is the same for all."""
        if self.worker != 0:
            return {}
        return {f"server{server:04d}": self.fetch(server) for server in range(len(self._channels))}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.worker != 0:
            return
        names = [f"server{server:04d}" for server in range(len(self._channels))]
        if sorted(state) != names:
            raise ValueError(
                f"the state has the servers {', '.join(sorted(state)) or 'none'}, expected {', '.join(names)}"
            )
        for server, name in enumerate(names):
            self._run(self._transfer(Kind.LOAD, server, snapshots.pack(state[name]), 0))

    def fetch(self, server: int) -> dict[str, Any]:
        """A server's snapshot, between two steps of this worker."""
        nothing = torch.empty(0, dtype=torch.uint8)
        size = int(self._run(self._transfer(Kind.STATE, server, nothing, 0))[0])
        if size > limits.memory_bytes():
            raise RuntimeError(f"server {server} has a snapshot of {size} bytes, more than this machine has memory")
        return snapshots.unpack(self._run(self._transfer(Kind.FETCH, server, nothing, size)))

    def _transfer(self, kind: Kind, server: int, data: Tensor, size: int) -> Rounds:
        """One request of this worker alone. Returns the answer, or the size of one to be fetched."""
        answer = torch.empty(size, dtype=torch.uint8)
        reply = torch.empty(frames.REPLY_BYTES, dtype=torch.uint8)
        yield self._frames(kind, server, None, data, answer, reply)
        read = self._read(reply, server, self._sequences[server])
        return answer if size else torch.tensor([read.nbytes])

    def _run(self, rounds: Rounds) -> Any:
        """Rounds on the lane, after everything that was queued before it; without a lane, here and now."""
        if self._left:
            raise ValueError("this exchange is closed")
        if self.lane is None:
            return self._drive(rounds)
        job = self.lane.submit(lambda scratch: rounds, last=True, done=lambda error: None)
        job.wait()
        if job.error is not None:
            raise RuntimeError(f"the servers did not answer: {job.error}") from job.error
        assert job.result is not None
        return job.result

    def _drive(self, rounds: Rounds) -> Any:
        while True:
            try:
                wanted = next(rounds)
            except StopIteration as stop:
                return stop.value
            works = self._works = [self.transport.start(each) for each in wanted]
            with self.transport.ledger.timed("wire_seconds"):
                for work in works:
                    work.wait()


@dataclass(frozen=True)
class _Ask:
    server: int
    operation: operations.Operation
    data: Tensor  # uint8: what is pushed
    answer: Tensor  # uint8: where the answer is received


@dataclass(frozen=True)
class _Piece:
    """A server's segments of a bucket, as a bucket: the same memory where one server has all, else a copy."""

    shard: sharding.Shard
    bucket: Bucket

    def put_back(self, whole: Bucket) -> None:
        if self.bucket is whole:
            return
        self.shard.tensors.scatter(self.bucket.flat, whole.target)
        if whole.lost is not None and self.bucket.lost is not None:
            self.shard.tensors.scatter(self.bucket.lost, whole.lost)


def _fails(error: BaseException | None) -> bool:
    """Whether a process that ends by `error` has failed."""
    return error is not None and not (isinstance(error, SystemExit) and error.code in (None, 0))


def _end(reference: weakref.ref[ParameterServer]) -> None:
    """At exit. A process that ends by itself has finished, though it never said so; one that nobody caught has not.

    `sys.last_value` is what ended the main program; in a child of `multiprocessing` it is still on its way.
    """
    exchange = reference()
    if exchange is not None:
        exchange._close(finished=not _fails(sys.exc_info()[1] or getattr(sys, "last_value", None)))
