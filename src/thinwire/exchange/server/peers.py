"""Peers: what a server has for each worker: a thread that reads, one that writes, and what the worker has asked."""

from __future__ import annotations

import datetime
import queue
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from thinwire.core.ledger import Ledger
from thinwire.exchange.server import frames
from thinwire.exchange.server.channel import Channel
from thinwire.exchange.server.frames import Kind, Push, Reply

FINISHED = "finished"  # why a worker is gone that said goodbye
_FOREVER = datetime.timedelta(days=3650)  # a worker may compute for as long as no other waits for it


class Pool:
    """Message buffers by size, used again: fresh pages cost more than the copy into them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: dict[int, list[Tensor]] = {}

    def take(self, size: int) -> Tensor:
        with self._lock:
            free = self._free.get(size)
            return free.pop() if free else torch.empty(size, dtype=torch.uint8)

    def give(self, buffer: Tensor) -> None:
        with self._lock:
            self._free.setdefault(buffer.numel(), []).append(buffer)


@dataclass
class Incoming:
    """What a reader puts into the inbox: a push with its payload, or the news that the worker is gone."""

    worker: int
    push: Push | None = None
    payload: Tensor | None = None
    text: str = ""
    gone: str = ""
    since: float = field(default_factory=time.monotonic)


class Peer:
    """One worker as the server sees it. Its threads touch the channel, the inbox and the pool, and nothing else."""

    def __init__(
        self, worker: int, channel: Channel, inbox: queue.SimpleQueue[Incoming], pool: Pool, ledger: Ledger
    ) -> None:
        self.worker = worker
        self.channel = channel
        self.asked: deque[Incoming] = deque()  # and not answered yet, oldest first
        self.gone = ""  # why it is no longer counted on
        self.refused = False  # it is gone, but still there to hear why
        self.left = False  # it will say nothing more
        self.heard = time.monotonic()
        self._inbox, self._pool, self._ledger = inbox, pool, ledger
        self._outbox: queue.SimpleQueue[tuple[Reply, Tensor | None, Callable[[], None]] | None] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, name=f"thinwire-reader-{worker}", daemon=True)
        self._writer = threading.Thread(target=self._write, name=f"thinwire-writer-{worker}", daemon=True)
        self._reader.start()
        self._writer.start()

    @property
    def first(self) -> Incoming | None:
        return self.asked[0] if self.asked else None

    def say(self, reply: Reply, answer: Tensor | None, release: Callable[[], None] = lambda: None) -> None:
        """Queue a reply; `release` is called when `answer` has left, or never will."""
        self._outbox.put((reply, answer, release))

    def close(self) -> None:
        """Join the threads: the writer when all is said, the reader when there is nothing more to hear."""
        self._outbox.put(None)
        self._writer.join()
        if self.gone != FINISHED:
            self.channel.cut()
        self._reader.join()

    def _read(self) -> None:
        frame = torch.empty(frames.PUSH_BYTES, dtype=torch.uint8)
        try:
            while True:
                self.channel.receive(frame).wait(_FOREVER)
                push = Push.unpack(frame)
                text, payload = "", None
                if push.text_bytes:
                    described = torch.empty(push.text_bytes, dtype=torch.uint8)
                    self.channel.receive(described).wait()
                    text = described.numpy().tobytes().decode()
                if push.nbytes:
                    payload = self._pool.take(push.nbytes)
                    self.channel.receive(payload).wait()
                self._ledger.add(bytes_received=frames.PUSH_BYTES + push.text_bytes + push.nbytes, messages=1)
                self._inbox.put(Incoming(self.worker, push, payload, text))
                if push.kind is Kind.BYE:
                    return
        except (RuntimeError, ValueError) as error:
            self._lost(error)

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
                self._lost(error)
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

    def _lost(self, error: Exception) -> None:
        self._inbox.put(Incoming(self.worker, gone=str(error).splitlines()[0]))
