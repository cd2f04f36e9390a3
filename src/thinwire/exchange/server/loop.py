"""The servers' side: every worker is a peer, with a thread that reads and one that writes; one loop decides.

    readers -> inbox -> the loop: when all workers that are left have asked the same, answer -> writers

A worker is dropped when its connection breaks, when it says something that cannot be true, or when it keeps the others
waiting longer than the timeout. The answer is then the mean over those who answered, and every reply says how many
are left. Nothing a worker sends can stop the loop.
"""

from __future__ import annotations

import io
import queue
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.core.bucket import Scratch
from thinwire.core.ledger import Ledger
from thinwire.core.memory import Memory
from thinwire.exchange.server import frames, operations
from thinwire.exchange.server.channel import Channel
from thinwire.exchange.server.frames import Kind, Push, Reply, Verdict
from thinwire.exchange.server.operations import BadPayload, Operation, Round
from thinwire.exchange.server.peers import FINISHED, Incoming, Peer, Pool
from thinwire.exchange.server.weights import SharedWeights

FORMAT = 1
FAREWELL_SECONDS = 5.0


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
    ) -> None:
        self.ledger = Ledger()
        self.memory = Memory()
        self._shared = shared
        self._stops = stops  # a lost worker ends the job for all
        self._timeout = timeout
        self._operations: dict[int, Operation] = {}
        self._scratch = Scratch()
        self._pool = Pool()
        self._snapshot: Tensor | None = None
        self._inbox: queue.SimpleQueue[Incoming] = queue.SimpleQueue()
        self._peers = {
            worker: Peer(worker, channel, self._inbox, self._pool, self.ledger) for worker, channel in channels.items()
        }

    def run(self) -> dict[str, float]:
        """Serve to the end; the totals of the ledger. Raises if every worker was lost before it had finished."""
        try:
            while self._present:
                self._take(self._next())
                while self._round_is_complete():
                    self._answer_round()
            self._see_off()
        finally:
            for peer in self._peers.values():
                peer.close()
        lost = {worker: peer.gone for worker, peer in self._peers.items() if peer.gone != FINISHED}
        if len(lost) == len(self._peers) or (self._stops and lost):
            told = "; ".join(f"worker {worker}: {reason}" for worker, reason in lost.items())
            raise RuntimeError(f"workers were lost before they had finished: {told}")
        totals = self.ledger.totals() | {"workers": float(len(self._peers) - len(lost))}
        if self._shared is not None:
            totals |= self._shared.totals()
        return totals

    def _see_off(self) -> None:
        """Those that were refused may have asked more meanwhile: they hear why until they have left, for a while."""
        deadline = time.monotonic() + FAREWELL_SECONDS
        while any(peer.refused and not peer.left for peer in self._peers.values()):
            try:
                self._take(self._inbox.get(timeout=max(0.0, deadline - time.monotonic())))
            except queue.Empty:
                return

    # -- the loop ------------------------------------------------------------------------------------------------------

    @property
    def _present(self) -> list[int]:
        return [worker for worker, peer in self._peers.items() if not peer.gone]

    def _next(self) -> Incoming | None:
        """The next arrival; None when someone has waited for the others for too long."""
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
                self._drop(worker, f"it kept the others waiting for more than {self._timeout:g} seconds")

    def _take(self, arrival: Incoming | None) -> None:
        if arrival is None:
            self._drop_the_late()
            return
        peer = self._peers[arrival.worker]
        peer.left = arrival.push is None or arrival.push.kind is Kind.BYE
        if peer.gone:
            if peer.refused and arrival.push is not None and arrival.push.kind is not Kind.BYE:
                self._say_no(arrival, peer.gone)
            return
        peer.heard = arrival.since
        if arrival.push is None:
            self._drop(arrival.worker, arrival.gone)
        elif arrival.push.kind is Kind.BYE:
            peer.gone = FINISHED
            self._changed()
        elif (reason := self._objection(arrival)) is not None:
            self._refuse(arrival, reason)
        else:
            self._serve(arrival, peer)

    def _serve(self, arrival: Incoming, peer: Peer) -> None:
        push = arrival.push
        assert push is not None
        if push.kind is Kind.ASK:
            peer.asked.append(arrival)
        elif push.kind in (Kind.GRADIENT, Kind.WEIGHTS):
            self._trade(arrival)
        elif push.kind is Kind.STATE:
            raw = io.BytesIO()
            torch.save(self.state_dict(), raw)
            self._snapshot = torch.frombuffer(raw.getbuffer(), dtype=torch.uint8)
            self._reply(arrival, nbytes=self._snapshot.numel())
        elif push.kind is Kind.FETCH:
            snapshot = self._snapshot if self._snapshot is not None else torch.empty(0, dtype=torch.uint8)
            self._reply(arrival, snapshot)
        else:
            try:
                assert arrival.payload is not None
                raw = io.BytesIO(arrival.payload.numpy().tobytes())
                self.load_state_dict(torch.load(raw, weights_only=True))
                self._reply(arrival)
            except Exception as error:  # whatever a bad snapshot raises is that worker's to hear
                self._refuse(arrival, f"the snapshot cannot be loaded: {error}")

    def _objection(self, arrival: Incoming) -> str | None:
        """Why a push cannot be used, if so."""
        push = arrival.push
        assert push is not None
        if arrival.payload is not None and frames.checksum(arrival.payload) != push.checksum:
            return "the payload was damaged on the way: its checksum is another"
        if push.kind not in (Kind.ASK, Kind.GRADIENT, Kind.WEIGHTS):
            return None
        try:
            if arrival.text:
                operation = operations.parse(arrival.text)
                if operation.number != push.operation or operations.number(arrival.text) != push.operation:
                    return "an operation's description does not fit its number"
                self._operations[push.operation] = operation
            if push.operation not in self._operations:
                return f"operation {push.operation:x} was never described"
            operation = self._operations[push.operation]
            sizes = operation.up_bytes(push.level), operation.down_bytes(push.level)
        except Exception as error:  # sizes of a nonsensical level raise whatever a codec raises
            return str(error)
        if (push.kind is Kind.ASK) is not isinstance(operation, operations.QUESTIONS):
            return f"{type(operation).__name__} cannot be pushed as {push.kind.name.lower()}"
        if push.kind is Kind.ASK and (push.nbytes, push.answer_bytes) != sizes:
            pushed = f"{push.nbytes} bytes for {push.answer_bytes}"
            return f"a push of {pushed} does not fit its operation: {sizes[0]} for {sizes[1]}"
        return None

    def _round_is_complete(self) -> bool:
        present = self._present
        return bool(present) and all(self._peers[worker].asked for worker in present)

    def _answer_round(self) -> None:
        arrivals = {worker: self._peers[worker].asked.popleft() for worker in self._present}
        topics = {worker: _topic(arrival.push) for worker, arrival in arrivals.items() if arrival.push}
        topic, _ = Counter(topics.values()).most_common(1)[0]
        odd = [worker for worker in topics if topics[worker] != topic]
        for worker in odd:
            self._refuse(
                arrivals.pop(worker),
                f"it asked {topics[worker]} where the others asked {topic} (operation, step, level)",
            )
        while arrivals:
            first = next(iter(arrivals.values()))
            assert first.push is not None
            answer = self._pool.take(first.push.answer_bytes)
            try:
                self._compute(arrivals, first.push, answer)
            except BadPayload as bad:
                self._pool.give(answer)
                self._refuse(arrivals.pop(bad.worker), str(bad))
                continue
            self._send_all(arrivals, answer)
            return

    def _compute(self, arrivals: Mapping[int, Incoming], push: Push, answer: Tensor) -> None:
        operation = self._operations[push.operation]
        payloads = {worker: a.payload for worker, a in arrivals.items() if a.payload is not None}
        assert isinstance(operation, operations.QUESTIONS)
        operation.answer(Round(payloads, push.workers, push.step, push.level), answer, self.memory, self._scratch)

    def _trade(self, arrival: Incoming) -> None:
        assert arrival.push is not None
        if self._shared is None:
            self._refuse(arrival, "this server has no optimizer; serve(optimizer=...) makes it asynchronous")
            return
        try:
            self._shared.take(arrival.worker, arrival, self._operations[arrival.push.operation])
        except ValueError as error:
            self._refuse(arrival, str(error))
        else:
            self._send_weights()

    def _send_weights(self) -> None:
        """To those who may go on."""
        assert self._shared is not None
        for arrival in self._shared.released(self._present):
            assert arrival.push is not None
            answer = self._pool.take(arrival.push.answer_bytes)
            self._shared.write_weights(self._operations[arrival.push.operation], answer)
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

        alive, check = len(self._present), frames.checksum(answer)
        for worker, arrival in arrivals.items():
            assert arrival.push is not None
            reply = Reply(Verdict.FINE, arrival.push.sequence, len(arrivals), alive, answer.numel(), check)
            self._clear(arrival)
            self._peers[worker].say(reply, answer, release)

    def _reply(self, arrival: Incoming, answer: Tensor | None = None, *, nbytes: int = 0, kept: bool = False) -> None:
        assert arrival.push is not None
        size, check = (nbytes, 0) if answer is None else (answer.numel(), frames.checksum(answer))
        alive = len(self._present)
        reply = Reply(Verdict.FINE, arrival.push.sequence, 1, alive, size, check)

        def release() -> None:
            if kept and answer is not None:
                self._pool.give(answer)

        self._clear(arrival)
        self._peers[arrival.worker].say(reply, answer, release)

    def _refuse(self, arrival: Incoming, reason: str) -> None:
        """Tell a worker why it is out, also in answer to what else it has asked, and go on without it."""
        peer = self._peers[arrival.worker]
        peer.refused = True
        for each in (arrival, *peer.asked):
            self._say_no(each, reason)
        self._drop(arrival.worker, reason, cut=False)

    def _refuse_all(self, reason: str) -> None:
        for worker in self._present:
            peer = self._peers[worker]
            peer.refused, peer.gone = True, reason
            for each in peer.asked:
                self._say_no(each, reason)

    def _say_no(self, arrival: Incoming, reason: str) -> None:
        """The worker waits for an answer of a certain length, so it gets one."""
        assert arrival.push is not None
        nothing = torch.zeros(arrival.push.answer_bytes, dtype=torch.uint8)
        reply = Reply(Verdict.REFUSED, arrival.push.sequence, reason=reason)
        self._peers[arrival.worker].say(reply, nothing)

    def _clear(self, arrival: Incoming) -> None:
        if arrival.payload is not None:
            self._pool.give(arrival.payload)
            arrival.payload = None

    def _drop(self, worker: int, reason: str, *, cut: bool = True) -> None:
        peer = self._peers[worker]
        peer.gone = reason
        peer.asked.clear()
        if cut:
            peer.channel.cut()
        self._changed()
        if self._stops and self._present:
            self._refuse_all(f"worker {worker} is lost, and the job stops: {reason}")

    def _changed(self) -> None:
        """Fewer workers are left: those that waited for the one that went may be due."""
        if self._shared is not None:
            self._send_weights()

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


def _topic(push: Push) -> tuple[str, int, float]:
    return f"{push.operation:x}", push.step, push.level
