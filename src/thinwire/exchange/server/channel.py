"""Channels: the connection of one worker and one server, a gloo process group of two.

A group of its own for every pair, because gloo closes every connection of a group when one wait in it times out: a
dead or stuck worker must cost nobody else the connection.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.exchange.collectives import amounts, nbytes_of

SERVER, WORKER = 0, 1
_TAG, _CLOSING_TAG = 0, 1
FOREVER = datetime.timedelta(days=3650)


class Channel:
    """One end of a connection. Messages arrive in the order in which they were sent.

    key: what both ends call the connection. name: what this end calls the other, for errors.
    timeout: seconds to wait for a message; connecting: for the other to come at all, the same unless given.
    """

    def __init__(
        self, store: dist.Store, key: str, name: str, *, serves: bool, timeout: float, connecting: float | None = None
    ) -> None:
        self.name = name
        self.peer = WORKER if serves else SERVER
        self.timeout: datetime.timedelta = datetime.timedelta(seconds=timeout)
        with self.named_errors():
            self._pair = dist.ProcessGroupGloo(
                dist.PrefixStore(key, store),
                SERVER if serves else WORKER,
                2,
                datetime.timedelta(seconds=connecting or timeout),
            )

    def send(self, tensor: Tensor) -> Pending:
        with self.named_errors():
            return Pending(self._pair.send([tensor], self.peer, _TAG), self)  # type: ignore[attr-defined]

    def receive(self, tensor: Tensor) -> Pending:
        with self.named_errors():
            return Pending(self._pair.recv([tensor], self.peer, _TAG), self)  # type: ignore[attr-defined]

    @contextmanager
    def named_errors(self) -> Iterator[None]:
        """gloo knows addresses; people know who it was."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(f"{self.name} is gone: {str(error).splitlines()[0]}") from error

    def wait_until_closed(self) -> None:
        """Returns when either end has closed the connection: nobody sends on this tag."""
        with suppress(RuntimeError):
            nothing = torch.empty(1, dtype=torch.uint8)
            self._pair.recv([nothing], self.peer, _CLOSING_TAG).wait(FOREVER)  # type: ignore[attr-defined]

    def cut(self) -> None:
        """Close the connection, which ends every wait on it. In gloo only a wait that times out does that."""
        with suppress(RuntimeError):
            nothing = torch.empty(1, dtype=torch.uint8)
            self._pair.recv([nothing], self.peer, _CLOSING_TAG).wait(datetime.timedelta(milliseconds=1))  # type: ignore[attr-defined]


@dataclass(frozen=True)
class Pending:
    """A message under way."""

    work: dist.Work
    channel: Channel
    check: Callable[[], object] = lambda: None  # when it is there; may raise

    def wait(self, timeout: datetime.timedelta | None = None) -> None:
        with self.channel.named_errors():
            self.work.wait(timeout or self.channel.timeout)
        self.check()


@dataclass(frozen=True)
class Sent:
    """A message to a server, shaped like a collective so that a lane can start it."""

    channel: Channel
    tensor: Tensor

    def amounts(self) -> dict[str, float]:
        return amounts(nbytes_of(self.tensor), nbytes_of(self.tensor), 1)

    def start(self) -> Pending:
        return self.channel.send(self.tensor)


@dataclass(frozen=True)
class Received:
    """A message from a server. Posted before it is sent, it needs no handshake."""

    channel: Channel
    tensor: Tensor
    check: Callable[[], object] = lambda: None  # called when it is there; what it raises, the wait raises

    def amounts(self) -> dict[str, float]:
        return {"bytes_received": nbytes_of(self.tensor)}

    def start(self) -> Pending:
        return replace(self.channel.receive(self.tensor), check=self.check)
