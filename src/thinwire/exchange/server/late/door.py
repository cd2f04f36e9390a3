"""Door: where a server meets workers that come late, or again. See the package for what is said there."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from enum import IntEnum

import torch
from torch import Tensor

from thinwire.exchange.server.channel import Channel
from thinwire.exchange.server.frames import Kind, Push, Reply, Verdict
from thinwire.exchange.server.late.notices import Job, Notices
from thinwire.exchange.server.peers import Incoming, Peer

LOOKING_SECONDS = 0.1  # between two looks into the store, and between two knocks
CONNECTING_SECONDS = 10.0  # for a newcomer that knocked to connect; gloo tries five times


class Word(IntEnum):
    """What one is told who knocks, in the place of how many answered."""

    WAIT = 0
    IN = 1  # the state is there to be taken
    FIRST = 2  # nobody was here before: come in
    ANEW = 3  # whoever was to tell the state is gone: connect again


class Door:
    """Who is outside, and what those take along who were let in.

    Threads look for notices and connect; all else is the loop's. `timeout`: for the first workers to come.
    """

    def __init__(self, notices: Notices, job: Job, server: int, timeout: float) -> None:
        self.job = job
        self._notices, self._server, self._timeout = notices, server, timeout
        self._outside: dict[int, Peer] = {}  # knocked
        self._stranded: list[Peer] = []  # of those outside, whom the giver may have let in elsewhere
        self._connected: list[Peer] = []
        self._first: int | None = None  # who was told to begin
        self._promised: list[int] = []  # to be told the state, by `_giver`
        self._giver: int | None = None
        self._state: Tensor | None = None
        self._gifts: dict[int, Tensor] = {}  # for those who were let in
        self._due = time.monotonic() + timeout
        self._begun, self._abandoned = False, False
        self._closing = threading.Event()
        self._threads: list[threading.Thread] = []

    def open(self, make_peer: Callable[[int, Channel], Peer]) -> None:
        self._start("thinwire-door", self._look, make_peer)

    def close(self, deadline: float) -> None:
        """Send those away who are still outside."""
        self._closing.set()
        for peer in self._outside.values():
            peer.refuse("the job has ended" if self._begun else self.absence)
        for thread in self._threads.copy():  # one that connects to the dead cannot be stopped, and ends by itself
            thread.join(max(0.0, deadline - time.monotonic()))
        for peer in self._connected:
            peer.close(deadline)

    def _look(self, make_peer: Callable[[int, Channel], Peer]) -> None:
        seen = 0
        while not self._closing.wait(LOOKING_SECONDS):
            try:
                knocks = self._notices.knocks(seen)
                self._abandoned = not self._begun and self._notices.abandoned
            except RuntimeError:  # the store is gone, and the job with it
                return
            seen += len(knocks)
            for worker, name in knocks:
                if 0 <= worker < self.job.room:
                    self._start(f"thinwire-door-{worker}", self._meet, worker, name, make_peer)

    def _meet(self, worker: int, name: str, make_peer: Callable[[int, Channel], Peer]) -> None:
        """Connect. In a thread of its own: a newcomer that died at once must not hold up the next."""
        with suppress(RuntimeError):
            channel = Channel(
                self._notices.another_connection(), f"{name}/{self._server}", f"worker {worker}",
                serves=True, timeout=self._timeout, connecting=min(self._timeout, CONNECTING_SECONDS),
            )  # fmt: skip
            self._connected.append(make_peer(worker, channel))

    def _start(self, name: str, do: Callable[..., None], *arguments: object) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        self._threads.append(threading.Thread(target=do, args=arguments, name=name, daemon=True))
        self._threads[-1].start()

    # -- those outside -------------------------------------------------------------------------------------------------

    def awaits(self) -> bool:
        """Whether those may still come that the job begins with."""
        return not (self._begun or self._abandoned or time.monotonic() > self._due)

    def first_arrival(self, inbox: queue.SimpleQueue[Incoming]) -> Incoming | None:
        try:
            return inbox.get(timeout=LOOKING_SECONDS)
        except queue.Empty:
            return None

    @property
    def absence(self) -> str:
        came = f"{len(self._outside)} of {self.job.first} workers came within {self._timeout:g} seconds"
        return f"the job did not begin: {'its workers refused; see their errors' if self._abandoned else came}"

    def hear(self, arrival: Incoming, alive: int) -> None:
        """What one says who is not in."""
        peer, push = arrival.peer, arrival.push
        assert peer is not None
        if push is None or push.kind is Kind.BYE:
            self._part_with(peer)
        elif arrival.objection or push.kind is not Kind.KNOCK:
            self._forget(peer)
            peer.refuse(arrival.objection or f"a worker at the door knocks, it does not {push.kind.name.lower()}")
        elif not peer.gone:
            other = self._outside.get(peer.worker)
            if other is not None and other is not peer:
                other.refuse(f"another process has come as worker {peer.worker}")
            self._outside[peer.worker] = peer
            word = self._word(peer)
            peer.say(Reply(Verdict.FINE, push.sequence, word, alive), None, lambda: peer.settle(push))

    def _word(self, peer: Peer) -> Word:
        if peer in self._stranded:
            self._stranded.remove(peer)
            del self._outside[peer.worker]
            return Word.ANEW
        if not self._begun and self._server == 0 and len(self._outside) >= self.job.first:
            if self._first not in self._outside:
                self._first = min(self._outside)
            if peer.worker == self._first:
                return Word.FIRST
        return Word.WAIT

    def _forget(self, peer: Peer) -> None:
        peer.gone = peer.gone or "it went away again"
        if self._outside.get(peer.worker) is peer:
            del self._outside[peer.worker]

    def _part_with(self, peer: Peer) -> None:
        """End the threads of one who is gone."""
        self._forget(peer)
        peer.close(time.monotonic())
        with suppress(ValueError):
            self._connected.remove(peer)

    # -- their way in --------------------------------------------------------------------------------------------------

    def call(self, giver: int, present: Collection[int], out: Tensor) -> None:
        """Say who is to be let in after this exchange, by a mark at their numbers; `giver` will tell them the state."""
        self._giver, self._promised = giver, [
            worker for worker, peer in self._outside.items() if worker not in present and peer not in self._stranded
        ]  # fmt: skip
        out.zero_()
        out[torch.tensor(self._promised, dtype=torch.int64)] = 1

    def check_roll(self, push: Push) -> None:
        if push.answer_bytes != self.job.room:
            raise ValueError(f"the roll has {self.job.room} places, not {push.answer_bytes}")

    def serve(self, arrival: Incoming, push: Push) -> tuple[Tensor | None, int]:
        """What one who is inside asks of the door: an answer, or the size of one to be asked for."""
        worker = arrival.worker
        gift = self._gifts.get(worker)
        if push.kind is Kind.KNOCK:
            return None, 0 if gift is None else gift.numel()
        if push.kind is Kind.TAKE:
            if gift is None or gift.numel() != push.answer_bytes:
                raise ValueError(f"there is no state of {push.answer_bytes} bytes for worker {worker}")
            return self._gifts.pop(worker), 0
        if worker != self._giver or not self._promised:
            raise ValueError("nobody is at the door to whom this worker was to tell the state")
        self._state, arrival.payload = arrival.payload, None
        return None, 0

    def let_in(self, arrival: Incoming, inside: Mapping[int, Peer]) -> dict[int, Peer]:
        """All who are inside from now on, by their numbers: also those who are marked, if they are still there."""
        if arrival.payload is None or arrival.payload.numel() != self.job.room:
            raise ValueError(f"who is to come in is said by {self.job.room} marks")
        if inside and self._server == 0 and (arrival.worker != self._giver or self._state is None):
            raise ValueError("nobody comes in to whom the state was not told")
        self._begun = True
        marked = arrival.payload.nonzero().view(-1).tolist()
        new = {worker: self._outside.pop(worker) for worker in marked if worker in self._outside}
        for worker, peer in new.items():
            peer.heard = time.monotonic()
            if self._state is not None:
                self._gifts[worker] = self._state
            if worker in inside:
                inside[worker].gone = inside[worker].gone or "it started again"
                self._part_with(inside[worker])
        self._giver, self._promised, self._state = None, [], None
        return dict(sorted({**inside, **new}.items()))

    def lost(self, worker: int) -> None:
        """One of those inside is gone. Those it was to let in may be in at other servers: they come anew."""
        self._gifts.pop(worker, None)
        if worker == self._giver:
            self._stranded += [self._outside[each] for each in self._promised if each in self._outside]
            self._giver, self._promised, self._state = None, [], None
