"""Peers: what a server has for each worker: a thread that reads, one that writes, and what the worker has asked.

A reader knows the operations that its worker has described, so it holds every size against what it knows before it
receives the bytes: a push's own sizes against its operation, and all that is under way against the worker's share of
the server's memory. A push that does not fit is refused with the reason, and nothing more of that worker is read.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.core.ledger import Ledger
from thinwire.exchange.server import frames, limits, operations
from thinwire.exchange.server.channel import FOREVER, Channel
from thinwire.exchange.server.frames import Kind, Push, Reply, Verdict
from thinwire.exchange.server.operations import Operation
from thinwire.exchange.server.weights import Gradient

_WITH_PAYLOAD, _WITH_ANSWER = (Kind.LOAD, Kind.GIVE, Kind.ADMIT), (Kind.FETCH, Kind.ROLL, Kind.TAKE)
FINISHED = "finished"  # why a worker is gone that said goodbye


class Pool:
    """Message buffers by size, used again: fresh pages cost more than the copy into them."""

    def __init__(self, limit: int) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[Tensor]] = {}
        self._kept, self._limit = 0, limit  # bytes

    def take(self, size: int) -> Tensor:
        with self._lock:
            free = self._free.get(size)
            if not free:
                return torch.empty(size, dtype=torch.uint8)
            self._kept -= size
            return free.pop()

    def give(self, buffer: Tensor) -> None:
        with self._lock:
            if self._kept + buffer.numel() > self._limit:  # of sizes that are no longer asked for
                self._free.clear()
                self._kept = 0
            self._free.setdefault(buffer.numel(), []).append(buffer)
            self._kept += buffer.numel()


@dataclass
class Incoming:
    """What a reader puts into the inbox: a push with its payload, or the news that the worker is gone."""

    worker: int
    push: Push | None = None
    payload: Tensor | None = None
    operation: Operation | None = None
    gone: str = ""
    objection: str = ""  # why the push cannot be used
    peer: Peer | None = None  # whose it is: a worker that started again has its number, and is another peer
    since: float = field(default_factory=time.monotonic)


class Peer:
    """One worker as the server sees it. Its threads touch the channel, the inbox and the pool, and nothing else.

    share: the bytes that its pushes and their answers may take; memory: those that all workers' may.
    """

    def __init__(
        self, worker: int, channel: Channel, inbox: queue.SimpleQueue[Incoming], pool: Pool, ledger: Ledger,
        *, share: int, memory: int,
    ) -> None:  # fmt: skip
        self.worker = worker
        self.channel = channel
        self.asked: deque[Incoming] = deque()  # and not answered yet, oldest first
        self.gone: str | None = ""  # why it is no longer counted on
        self.heard: float = time.monotonic()
        self._inbox, self._pool, self._ledger = inbox, pool, ledger
        self._share, self._memory = share, memory
        self._owed = 0  # bytes of pushes whose answers have not left
        self._lock = threading.Lock()
        self._known = operations.Catalogue()
        self._outbox: queue.SimpleQueue[tuple[Reply, Tensor | None, Callable[[], None]] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=f"thinwire-reader-{worker}", daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"thinwire-writer-{worker}", daemon=True)
        self._reader.start()
        self._writer.start()

    @property
    def first(self) -> Incoming | None:
        return self.asked[0] if self.asked else None

    def _report(self, arrival: Incoming) -> None:
        arrival.peer = self
        self._inbox.put(arrival)

    def say(self, reply: Reply, answer: Tensor | None, release: Callable[[], None] = lambda: None) -> None:
        """Queue a reply; `release` is called when `answer` has left, or never will."""
        self._outbox.put((reply, answer, release))

    def refuse(self, reason: str) -> None:
        """Tell the worker why it is out: now, if it waits for an answer, else when it asks next."""
        self.gone = reason
        self.asked.clear()
        self.say(Reply(Verdict.REFUSED, reason=reason), None)

    def settle(self, push: Push) -> None:
        """Its answer has left."""
        with self._lock:
            self._owed -= _cost(push)

    def close(self, deadline: float) -> None:
        """Join the threads: what is to be said may be heard until the deadline, then the connection is cut."""
        self._outbox.put(None)
        for thread in (self._writer, self._reader):
            thread.join(max(0.0, deadline - time.monotonic()))
        self.channel.cut()
        self._writer.join()
        self._reader.join()

    # -- reading -------------------------------------------------------------------------------------------------------

    def _read(self) -> None:
        frame = torch.empty(frames.PUSH_BYTES, dtype=torch.uint8)
        try:
            while True:
                self.channel.receive(frame.zero_()).wait(FOREVER)  # a shorter message is gloo's to take, too
                push = Push.unpack(frame)
                arrival = self._arrival(push)
                self._report(arrival)
                if push.kind is Kind.BYE:
                    return
                if arrival.objection:
                    self.channel.wait_until_closed()  # what else it may have sent is not for us to receive
                    return
        except Exception as error:  # of gloo, or a header that is none
            self._report(Incoming(self.worker, gone=(str(error).splitlines() or [repr(error)])[0]))

    def _arrival(self, push: Push) -> Incoming:
        try:
            operation = self._operation(push)
            self._check(push, operation)
        except ValueError as error:
            return Incoming(self.worker, push, objection=str(error))
        payload = self._pool.take(push.nbytes)
        if push.nbytes:
            self.channel.receive(payload).wait()
        self._ledger.add(bytes_received=frames.PUSH_BYTES + push.text_bytes + push.nbytes, messages=1)
        return Incoming(self.worker, push, payload, operation)

    def _operation(self, push: Push) -> Operation | None:
        """What the push is about; its description is received first, if it comes along."""
        if push.kind not in (Kind.ASK, Kind.GRADIENT, Kind.WEIGHTS):
            if push.text_bytes:
                raise ValueError(f"a push of kind {push.kind.name} describes nothing")
            return None
        if push.text_bytes > limits.TEXT_BYTES:
            raise ValueError(f"a description has {limits.TEXT_BYTES} bytes at most, not {push.text_bytes}")
        if not push.text_bytes:
            known = self._known.use(push.operation)
            if known is None:
                raise ValueError(f"operation {push.operation:x} was never described")
            return known
        described = torch.empty(push.text_bytes, dtype=torch.uint8)
        self.channel.receive(described).wait()
        text = described.numpy().tobytes().decode()
        operation = operations.parse(text)
        if operation.number != push.operation or operations.number(text) != push.operation:
            raise ValueError("an operation's description does not fit its number")
        if operation.dense_bytes() > self._memory:
            raise ValueError(f"{operation.dense_bytes()} bytes of numbers do not fit into {self._memory} of memory")
        self._known.add(operation)
        return operation

    def _check(self, push: Push, operation: Operation | None) -> None:
        """ValueError unless the push has the sizes that it should have, and there is room for it."""
        if operation is None:
            fits = push.kind in _WITH_PAYLOAD or push.nbytes == 0
            fits = fits and (push.kind in _WITH_ANSWER or push.answer_bytes == 0)
            room = self._memory
        else:
            fits = (push.nbytes, push.answer_bytes) in _sizes(push, operation)
            room = self._share
        if not fits:
            what = "nothing" if operation is None else type(operation).__name__
            pushed = f"{push.nbytes} bytes for {push.answer_bytes}"
            raise ValueError(f"a push of {pushed} does not fit its operation: {push.kind.name} of {what}")
        with self._lock:
            if self._owed + _cost(push) > room:
                raise ValueError(f"what it asks does not fit into {room} bytes of memory; see join(memory_bytes=)")
            self._owed += _cost(push)

    # -- writing -------------------------------------------------------------------------------------------------------

    def _write(self) -> None:
        """After a failure, only let go of the buffers."""
        broken = False
        while (message := self._outbox.get()) is not None:
            reply, answer, release = message
            try:
                if not broken:
                    self._send(reply, answer)
            except RuntimeError as error:
                broken = True
                self._report(Incoming(self.worker, gone=str(error).splitlines()[0]))
            finally:
                release()

    def _send(self, reply: Reply, answer: Tensor | None) -> None:
        sending = [self.channel.send(reply.pack())]
        if answer is not None and answer.numel():
            sending.append(self.channel.send(answer))
        for each in sending:
            each.wait()
        answered = 0 if answer is None else answer.numel()
        self._ledger.add(bytes_sent=frames.REPLY_BYTES + answered, sends=len(sending))


def _sizes(push: Push, operation: Operation) -> list[tuple[int, int]]:
    """(payload, answer), as the push may have them."""
    if (push.kind is Kind.ASK) is isinstance(operation, Gradient):
        raise ValueError(f"{type(operation).__name__} cannot be pushed as {push.kind.name.lower()}")
    try:
        up, down = operation.up_bytes(push.level), operation.down_bytes(push.level)
    except Exception as error:  # sizes at a nonsensical level raise whatever a codec raises
        raise ValueError(f"level {push.level:g} fits no payload: {error}") from error
    if push.kind is Kind.WEIGHTS:
        return [(0, down), (operation.dense_bytes(), down)]
    return [(up, down)]


def _cost(push: Push) -> int:
    return push.nbytes + push.answer_bytes + limits.BOOKKEEPING_BYTES
