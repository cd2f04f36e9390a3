"""A parameter server and its workers in one process, each on a thread: for what they say to each other."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.core.bucket import Scratch
from thinwire.core.request import Max, Mean, Sum
from thinwire.exchange.server.channel import Channel
from thinwire.exchange.server.client import ParameterServer
from thinwire.exchange.server.frames import Push
from thinwire.exchange.server.loop import Server
from thinwire.exchange.server.weights import SharedWeights

# Works that nobody waits for: were the group's own thread the last to hold one, it would abort.
_held: list[Any] = []


class Served:
    """`workers` clients of one server, which runs until all have left; `ended` is what its run() came to."""

    def __init__(
        self, workers: int, *, timeout: float = 10.0, stops: bool = False, shared: SharedWeights | None = None,
        memory_bytes: int = 1 << 26, down: str = "same",
    ) -> None:  # fmt: skip
        store = dist.HashStore()
        self.threads = ThreadPoolExecutor(2 * workers + 1)
        ends = [
            self.threads.submit(Channel, store, str(w), f"worker {w}", serves=True, timeout=timeout)
            for w in range(workers)
        ]
        self.channels = [
            Channel(store, str(w), "server 0", serves=False, timeout=2 * timeout + 5) for w in range(workers)
        ]
        self.server = Server(
            {w: end.result() for w, end in enumerate(ends)},
            shared=shared, stops=stops, timeout=timeout, memory_bytes=memory_bytes,
        )  # fmt: skip
        self.clients = [
            ParameterServer([channel], range(workers), w, down=down) for w, channel in enumerate(self.channels)
        ]
        self.ended: Future[dict[str, float]] = Future()
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        try:
            self.ended.set_result(self.server.run())
        except BaseException as error:
            self.ended.set_exception(error)

    def ask(self, worker: int, request: Sum | Max | Mean) -> Future[Tensor]:
        client = self.clients[worker]
        return self.on_thread(lambda: client._drive(client.answer(request, client.workers, Scratch())))

    def on_thread(self, function: Callable[..., Any], *arguments: Any) -> Future[Any]:
        return self.threads.submit(function, *arguments)

    def push(self, worker: int, push: Push, *parts: bytes | Tensor) -> None:
        """Whatever a worker may say, by hand. What the server does not receive is left on its way."""
        self.send(worker, push.pack(), *parts)

    def send(self, worker: int, *parts: bytes | Tensor) -> None:
        for part in parts:
            tensor = torch.frombuffer(bytearray(part), dtype=torch.uint8) if isinstance(part, bytes) else part
            _held.append(self.channels[worker].send(tensor))

    def leave(self, *workers: int) -> None:
        for worker in workers:
            self.clients[worker].close()
