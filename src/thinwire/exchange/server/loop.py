"""The servers' side: every worker is a peer, with a thread that reads and one that writes; one loop decides.

    readers -> inbox -> the loop: when all workers that are left have asked the same, answer -> writers

A worker is dropped when its connection breaks, when it says something that cannot be true, or when it keeps the others
waiting longer than the timeout. The answer is then the mean over those who answered, and every reply says how many
are left. Nothing a worker sends can stop the loop: what goes wrong in a round is told to those who asked for it.
Where there is a door, workers may come late, or again: see `late`.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor

from thinwire.core.bucket import Scratch
from thinwire.core.ledger import Ledger
from thinwire.core.memory import Memory
from thinwire.exchange.server import frames, operations, snapshots
from thinwire.exchange.server.channel import Channel
from thinwire.exchange.server.frames import Kind, Push, Reply, Verdict
from thinwire.exchange.server.late.door import Door
from thinwire.exchange.server.operations import BadPayload, Round
from thinwire.exchange.server.peers import FINISHED, Incoming, Peer, Pool
from thinwire.exchange.server.weights import SharedWeights

FORMAT = 1
LATE = (Kind.KNOCK, Kind.ROLL, Kind.GIVE, Kind.ADMIT, Kind.TAKE)
FAREWELL_SECONDS = 5.0  # for those that were refused to hear why


class Server:
    """Answers the workers' requests until all have finished.

    It knows operations, not schemes: whatever a conversation asks arrives as sums, maxima and means.
    """

    def __init__(
        self,
        channels: Mapping[int, Channel],
        *,
        shared: SharedWeights | None = None,
        stops: bool = False,
        timeout: float,
        memory_bytes: int,
        door: Door | None = None,
    ) -> None:
        self.ledger: Ledger = Ledger()
        self.memory: Memory = Memory()
        self._shared = shared
        self._stops = stops  # a lost worker ends the job for all
        self._timeout = timeout
        self._scratch = Scratch()
        self._pool = Pool(memory_bytes)
        self._snapshot: Tensor | None = None
        self._inbox: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
        self._door = door
        self._memory_bytes, self._share = memory_bytes, memory_bytes // (door.job.room if door else len(channels))
        self._peers = {worker: self._peer(worker, channel) for worker, channel in channels.items()}

    def _peer(self, worker: int, channel: Channel) -> Peer:
        return Peer(worker, channel, self._inbox, self._pool, self.ledger, share=self._share, memory=self._memory_bytes)

    def run(self) -> dict[str, float]:
        """Serve to the end; the totals of the ledger. Raises if every worker was lost before it had finished."""
        if self._door is not None:
            self._door.open(self._peer)
        try:
            while self._goes_on():
                self._take(self._next())
                while self._round_is_complete():
                    self._answer_round()
        finally:
            deadline = time.monotonic() + FAREWELL_SECONDS
            for peer in self._peers.values():
                peer.close(deadline)
            if self._door is not None:
                self._door.close(deadline)
        if self._door is not None and not self._peers:
            raise RuntimeError(self._door.absence)
        lost = {worker: peer.gone for worker, peer in self._peers.items() if peer.gone != FINISHED}
        if len(lost) == len(self._peers) or (self._stops and lost):
            told = "; ".join(f"worker {worker}: {reason}" for worker, reason in lost.items())
            raise RuntimeError(f"workers were lost before they had finished: {told}")
        totals = self.ledger.totals() | {"workers": float(len(self._peers) - len(lost))}
        if self._shared is not None:
            totals |= self._shared.totals()
        return totals

    # -- the loop ------------------------------------------------------------------------------------------------------

    @property
    def _present(self) -> list[int]:
        return [worker for worker, peer in self._peers.items() if not peer.gone]

    def _goes_on(self) -> bool:
        """Whether a worker is here, or the first are still to come."""
        return bool(self._present) or (self._door is not None and self._door.awaits())

    def _next(self) -> Incoming | None:
        """The next arrival; None when someone has waited for the others for too long."""
        if self._door is not None and not self._peers:
            return self._door.first_arrival(self._inbox)
        waiting = self._waiting()
        busy = [self._peers[worker] for worker in self._present if worker not in waiting]
        if not waiting or not busy:
            return self._inbox.get()
        try:
            return self._inbox.get(timeout=max(0.0, self._due(waiting, busy) - time.monotonic()))
        except queue.Empty:
            return None

    def _waiting(self) -> dict[int, Incoming]:
        """Who waits for others."""
        held = self._shared.held if self._shared is not None else {}
        return {
            worker: arrival for worker in self._present if (arrival := self._peers[worker].first or held.get(worker))
        }

    def _due(self, waiting: Mapping[int, Incoming], busy: Sequence[Peer]) -> float:
        """When the first of the busy is late. Time counts only while somebody waits: all may rest together."""
        begun = min(arrival.since for arrival in waiting.values())
        return min(max(peer.heard, begun) for peer in busy) + self._timeout

    def _drop_the_late(self) -> None:
        waiting = self._waiting()
        for worker in [worker for worker in self._present if worker not in waiting]:
            if waiting and self._due(waiting, [self._peers[worker]]) <= time.monotonic():
                self._refuse(worker, f"it kept the others waiting for more than {self._timeout:g} seconds")

    def _take(self, arrival: Incoming | None) -> None:
        if arrival is None:
            self._drop_the_late()
            return
        peer, push = arrival.peer, arrival.push
        assert peer is not None
        if peer is not self._peers.get(arrival.worker) and self._door is not None:
            self._hear_outside(arrival, self._door)
            return
        if peer.gone:
            self._clear(arrival)
            return
        peer.heard = arrival.since
        if push is None:
            self._lose(arrival.worker, arrival.gone)
        elif arrival.objection:
            self._refuse(arrival.worker, arrival.objection)
        elif push.kind is Kind.BYE:
            peer.gone = FINISHED
            self._changed()
        elif arrival.payload is not None and frames.checksum(arrival.payload) != push.checksum:
            self._refuse(arrival.worker, "the payload was damaged on the way: its checksum is another")
        else:
            try:
                self._serve(arrival, push)
            except Exception as error:  # whatever a push meets is its worker's to hear
                self._refuse(arrival.worker, str(error) or repr(error))

    def _serve(self, arrival: Incoming, push: Push) -> None:
        if push.kind is Kind.ASK:
            if self._shared is not None:
                raise ValueError("asynchronous servers take gradients and give weights, nothing else")
            self._peers[arrival.worker].asked.append(arrival)
        elif push.kind in (Kind.GRADIENT, Kind.WEIGHTS):
            self._trade(arrival)
        elif push.kind in LATE:
            self._serve_late(arrival, push)
        elif arrival.worker != 0:
            raise ValueError("the first worker saves and loads what servers hold, and nobody else")
        elif push.kind is Kind.STATE:
            self._snapshot = snapshots.pack(self.state_dict())
            self._reply(arrival, nbytes=self._snapshot.numel())
        elif push.kind is Kind.FETCH:
            snapshot, self._snapshot = self._snapshot, None
            if snapshot is None or snapshot.numel() != push.answer_bytes:
                raise ValueError(f"there is no snapshot of {push.answer_bytes} bytes to be fetched")
            self._reply(arrival, snapshot)
        else:
            assert arrival.payload is not None
            try:
                self.load_state_dict(snapshots.unpack(arrival.payload))
            except Exception as error:  # whatever a bad snapshot raises
                raise ValueError(f"the snapshot cannot be loaded: {error}") from error
            self._reply(arrival)

    def _round_is_complete(self) -> bool:
        present = self._present
        return bool(present) and all(self._peers[worker].asked for worker in present)

    def _answer_round(self) -> None:
        arrivals = {worker: self._peers[worker].asked.popleft() for worker in self._present}
        self._refuse_the_odd(arrivals)
        while arrivals := {worker: arrival for worker, arrival in arrivals.items() if not self._peers[worker].gone}:
            push = next(iter(arrivals.values())).push
            assert push is not None
            answer = self._pool.take(push.answer_bytes)
            try:
                self._compute(arrivals, push, answer)
            except BadPayload as bad:
                self._pool.give(answer)
                self._refuse(bad.worker, str(bad))
            except Exception as error:  # ours, not any one worker's
                for worker in arrivals:
                    self._refuse(worker, f"the server could not answer: {str(error) or repr(error)}")
            else:
                self._send_all(arrivals, answer)
                return

    def _refuse_the_odd(self, arrivals: Mapping[int, Incoming]) -> None:
        """Those who did not ask what most did; where there is no majority, nobody knows who is right."""
        topics = {worker: _topic(arrival.push) for worker, arrival in arrivals.items() if arrival.push}
        (common, count), *others = Counter(topics.values()).most_common()
        what = "(operation, step, level, workers)"
        if 2 * count <= len(topics) and others:
            told = ", ".join(f"worker {worker} {topic}" for worker, topic in topics.items())
            for worker in topics:
                self._refuse(worker, f"the workers ask different things {what}: {told}")
            return
        for worker, topic in topics.items():
            if topic != common:
                self._refuse(worker, f"it asked {topic} where the others asked {common} {what}")

    def _compute(self, arrivals: Mapping[int, Incoming], push: Push, answer: Tensor) -> None:
        if push.kind is Kind.ROLL:
            assert self._door is not None
            self._door.call(min(arrivals), self._present, answer)
            return
        payloads = {worker: a.payload for worker, a in arrivals.items() if a.payload is not None}
        operation = next(iter(arrivals.values())).operation
        assert isinstance(operation, operations.QUESTIONS)
        operation.answer(Round(payloads, push.workers, push.step, push.level), answer, self.memory, self._scratch)

    def _trade(self, arrival: Incoming) -> None:
        if self._shared is None:
            raise ValueError("this server has no optimizer; serve(optimizer=...) makes it asynchronous")
        assert arrival.operation is not None
        self._shared.take(arrival.worker, arrival, arrival.operation)
        self._send_weights()

    def _send_weights(self) -> None:
        """To those who may go on."""
        assert self._shared is not None
        try:
            released = self._shared.released(self._present)
        except Exception as error:  # no weights to go on from, or an optimizer that fails: nobody can go on
            self._refuse_all(str(error) or repr(error))
            return
        for arrival in released:
            if self._peers[arrival.worker].gone:
                continue
            assert arrival.push is not None and arrival.operation is not None
            answer = self._pool.take(arrival.push.answer_bytes)
            try:
                self._shared.write_weights(arrival.operation, answer)
            except Exception as error:  # other weights than these were asked for
                self._refuse(arrival.worker, str(error) or repr(error))
            else:
                self._reply(arrival, answer, kept=True)

    # -- replies -------------------------------------------------------------------------------------------------------

    def _send_all(self, arrivals: Mapping[int, Incoming], answer: Tensor) -> None:
        """The same bytes to everybody; the buffer is free when the last has them."""
        left = len(arrivals)
        lock = threading.Lock()

        def release() -> None:
            nonlocal left
            with lock:
                left -= 1
                if left == 0:
                    self._pool.give(answer)

        check = frames.checksum(answer)
        for arrival in arrivals.values():
            self._say(arrival, answer, len(arrivals), answer.numel(), check, release)

    def _reply(self, arrival: Incoming, answer: Tensor | None = None, *, nbytes: int = 0, kept: bool = False) -> None:
        size, check = (nbytes, 0) if answer is None else (answer.numel(), frames.checksum(answer))

        def release() -> None:
            if kept and answer is not None:
                self._pool.give(answer)

        self._say(arrival, answer, 1, size, check, release)

    def _say(
        self, arrival: Incoming, answer: Tensor | None, answered: int, size: int, check: int,
        release: Callable[[], None],
    ) -> None:  # fmt: skip
        push, peer, present = arrival.push, self._peers[arrival.worker], self._present
        assert push is not None
        self._clear(arrival)
        place = present.index(arrival.worker)
        reply = Reply(Verdict.FINE, push.sequence, answered, len(present), place, size, check)

        def sent() -> None:
            release()
            peer.settle(push)

        peer.say(reply, answer, sent)

    def _clear(self, arrival: Incoming) -> None:
        if arrival.payload is not None:
            self._pool.give(arrival.payload)
            arrival.payload = None

    # -- those who are lost --------------------------------------------------------------------------------------------

    def _refuse(self, worker: int, reason: str) -> None:
        """Tell a worker why it is out, and go on without it."""
        if not self._peers[worker].gone:
            self._peers[worker].refuse(reason)
            self._stop_or_go_on(worker, reason)

    def _lose(self, worker: int, reason: str) -> None:
        peer = self._peers[worker]
        peer.gone = reason
        peer.asked.clear()
        peer.channel.cut()
        self._stop_or_go_on(worker, reason)

    def _stop_or_go_on(self, worker: int, reason: str) -> None:
        if self._door is not None:
            self._door.lost(worker)
        if self._stops:
            self._refuse_all(f"worker {worker} is lost, and the job stops: {reason}")
        self._changed()

    def _refuse_all(self, reason: str) -> None:
        for worker in self._present:
            self._peers[worker].refuse(reason)

    def _changed(self) -> None:
        """Fewer workers are left: those that waited for the one that went may be due."""
        if self._shared is not None and self._present:
            self._send_weights()

    # -- those who come late, or again ---------------------------------------------------------------------------------

    def _serve_late(self, arrival: Incoming, push: Push) -> None:
        if self._door is None:
            raise ValueError("nobody can come late to this job: see join(late=True)")
        if push.kind is Kind.ROLL:
            self._door.check_roll(push)
            self._peers[arrival.worker].asked.append(arrival)
            return
        answer, nbytes = None, 0
        if push.kind is Kind.ADMIT:
            self._peers = self._door.let_in(arrival, self._peers)
        else:
            answer, nbytes = self._door.serve(arrival, push)
        self._reply(arrival, answer, nbytes=nbytes)

    def _hear_outside(self, arrival: Incoming, door: Door) -> None:
        push = arrival.push
        if push is not None and push.kind is Kind.ADMIT and not self._peers:  # the first of all
            self._peers = door.let_in(arrival, {})
            self._reply(arrival)
        else:
            door.hear(arrival, len(self._present))
            self._clear(arrival)

    # -- checkpoint ----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "memory": self.memory.state_dict(),
            "shared": self._shared.state_dict() if self._shared else None,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state.get("format") != FORMAT:
            raise ValueError(f"not a server's state of format {FORMAT}: {state.get('format')!r}")
        self.memory = Memory()
        for name, entry in state["memory"].items():
            self.memory.add(name, {key: tensor.clone() for key, tensor in entry.items()})
        if self._shared is not None and state["shared"] is not None:
            self._shared.load_state_dict(state["shared"])


def _topic(push: Push) -> tuple[str, int, float, int]:
    return f"{push.operation:x}", push.step, push.level, push.workers
