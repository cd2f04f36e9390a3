"""OpenParameterServer, the workers' side of a job that others may join late. No process group among workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.core.scheme import Codec, Scheme, innermost
from thinwire.exchange import lane, objects
from thinwire.exchange.exchange import CPU
from thinwire.exchange.lane import Rounds, Threaded
from thinwire.exchange.server import frames, limits, operations, sharding, snapshots
from thinwire.exchange.server.channel import Channel
from thinwire.exchange.server.client import ParameterServer
from thinwire.exchange.server.frames import Kind, Reply
from thinwire.exchange.server.late.door import LOOKING_SECONDS, Word
from thinwire.exchange.server.late.notices import Job, Notices
from thinwire.exchange.transport import Transport

_NOTHING = torch.empty(0, dtype=torch.uint8)


class OpenParameterServer(ParameterServer):
    """A worker's connection to all servers of a job whose workers may come late, or again. Made by `thinwire.join`.

    It connects in `enter`, not before: until then the job has not heard of this worker.
    """

    def __init__(
        self, notices: Notices, job: Job, worker: int, *, timeout: float, down: str = "same",
        transport: Transport | None = None,
    ) -> None:  # fmt: skip
        super().__init__([], range(job.first), worker, down=down, goes_on=True, transport=transport)
        self.owners: sharding.Owners = sharding.Owners(job.servers)
        self.room: int = job.room
        self.newcomers: list[int] = []  # at the door, whom this worker is to let in
        self._notices, self._job = notices, job
        self._called: lane.Job | None = None
        self._patience = 2 * timeout + 30  # with servers, which wait for another worker up to the timeout

    @property
    def route(self) -> str:
        return f"{self._job.servers} servers, down {self.down}"

    def open(self, group: dist.ProcessGroup | None, scheme: Scheme, device: torch.device = CPU) -> None:
        if group is not None:
            raise ValueError("workers that may come late have no process group: join(late=True) is for LocalSteps")
        if self.lane is not None or self._left:
            raise ValueError("this ParameterServer has been used already; join() gives a new one")
        inner = innermost(scheme)
        if isinstance(inner, Codec):
            operations.check_known(inner)
        self.lane: lane.Lane | None = Threaded(self.transport, f"thinwire-lane-{self.worker}")

    def agree(self, given: Mapping[str, str] | None) -> None:
        """Those who begin hear of each other; one who is late asks what the job has, and disturbs nobody."""
        if self._notices.begun:
            for field, there in (self._notices.told(0) or {}).items():
                here = there if given is None else given.get(field, "nothing")
                if here != there:
                    raise ValueError(f"the {field} differs from the job's: {here[:60]} here, {there[:60]} there")
            return
        if self.worker < self._job.first:
            self._notices.tell(self.worker, given)
        try:
            objects.compare([self._notices.told(worker) for worker in range(self._job.first)])
        except ValueError:
            self._notices.abandon()
            raise

    # -- at the door ---------------------------------------------------------------------------------------------------

    def enter(self) -> dict[str, Any] | None:
        """Wait until the job lets this worker in; the state it goes on from, or None: it is the first.

        That takes until the end of an exchange of the others, however long they train before it.
        """
        while True:
            self._connect()
            for server in reversed(range(1, self._job.servers)):  # the first server tells of it, so it comes last
                self._say(Kind.KNOCK, server)
            while (heard := self._say(Kind.KNOCK, 0)[0]).answered == Word.WAIT:
                time.sleep(LOOKING_SECONDS)
            if heard.answered == Word.IN:
                return self._take(heard.nbytes)
            if heard.answered == Word.FIRST:
                self._notices.begin()
                self.workers, self.place = self._admit([self.worker], self._say), 0
                return None
            for channel in self._channels:
                channel.cut()

    def _connect(self) -> None:
        name = self._notices.knock(self.worker)
        servers = range(self._job.servers)
        self._channels = []
        self._sequences = [0 for _ in servers]
        self._described = [operations.Catalogue() for _ in servers]
        for server in servers:
            self._channels.append(Channel(
                self._notices.store, f"{name}/{server}", f"server {server}", serves=False, timeout=self._patience,
            ))  # fmt: skip

    def _take(self, nbytes: int) -> dict[str, Any]:
        if nbytes > limits.memory_bytes():
            raise RuntimeError(f"the job's state has {nbytes} bytes, more than this machine has memory")
        heard, data = self._say(Kind.TAKE, 0, size=nbytes)
        self.workers, self.place = heard.alive, heard.place
        told = snapshots.unpack(data)
        self._turn = told["turn"]
        self.owners.load_state_dict(told["owners"])
        return told["state"]

    # -- inside --------------------------------------------------------------------------------------------------------

    def roll(self, step: int) -> None:
        """Before an exchange, together with all others: who takes part, and who is at the door. On the lane."""
        assert self.lane is not None
        self._called = self.lane.submit(lambda scratch: self._roll(step), last=True, done=lambda error: None)

    def heard(self) -> None:
        """Wait for the answer to the last roll; raise what went wrong."""
        if self._called is not None:
            job, self._called = self._called, None
            job.wait()
            if job.error is not None:
                raise RuntimeError(f"the servers did not call the roll: {job.error}") from job.error

    def _roll(self, step: int) -> Rounds:
        heard, marks = yield from self._saying(Kind.ROLL, 0, size=self.room, step=step)
        self.workers: int = heard.alive
        self.place: int = heard.place
        # Whoever was first then lets them in, or nobody: a first that dies meanwhile may have let them in elsewhere.
        self.newcomers = marks.nonzero().view(-1).tolist() if heard.place == 0 else []

    def give(self, state: dict[str, Any]) -> int:
        """Let those in who were at the door, with this state; how many workers there are then. The first worker does,
        between two exchanges.
        """

        def say(*message: Any) -> tuple[Reply, Tensor]:
            return self._run(self._saying(*message))

        told = {"state": state, "turn": self._turn, "owners": self.owners.state_dict()}
        say(Kind.GIVE, 0, snapshots.pack(told))
        newcomers, self.newcomers = self.newcomers, []
        return self._admit(newcomers, say)

    def _admit(self, workers: list[int], say: Callable[..., tuple[Reply, Tensor]]) -> int:
        """The first server last: it is there that a newcomer asks for the state."""
        marks = torch.zeros(self.room, dtype=torch.uint8)
        marks[torch.tensor(workers, dtype=torch.int64)] = 1
        return [say(Kind.ADMIT, server, marks)[0].alive for server in reversed(range(self._job.servers))][-1]

    def _say(self, kind: Kind, server: int, data: Tensor = _NOTHING, size: int = 0) -> tuple[Reply, Tensor]:
        """In the calling thread."""
        return self._drive(self._saying(kind, server, data, size))

    def _saying(self, kind: Kind, server: int, data: Tensor = _NOTHING, size: int = 0, step: int = 0) -> Rounds:
        """One message of this worker; the reply, and an answer of `size` bytes."""
        answer = torch.empty(size, dtype=torch.uint8)
        reply = torch.empty(frames.REPLY_BYTES, dtype=torch.uint8)
        messages = self._frames(kind, server, None, data, answer, reply, step=step)
        sequence = self._sequences[server]
        yield messages
        heard = self._read(reply, server, sequence)
        if size and heard.checksum != frames.checksum(answer):
            raise RuntimeError(f"the answer of server {server} was damaged on the way")
        return heard, answer
