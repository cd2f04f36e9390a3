"""What a worker's pipeline needs of an exchange, whichever it is; and how a conversation is held over one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.core.bucket import Bucket, Scratch
from thinwire.core.parts import Piece
from thinwire.core.request import Max, Mean, Request, Sum
from thinwire.core.scheme import Conversation, Scheme
from thinwire.exchange.collectives import Collective
from thinwire.exchange.direct import Direct
from thinwire.exchange.lane import Lane, Rounds
from thinwire.exchange.transport import Transport

CPU = torch.device("cpu")


class Exchange(Protocol):
    """Answers requests. `workers` may shrink where an exchange goes on without the dead; `worker` is for life."""

    transport: Transport
    lane: Lane | None
    workers: int
    worker: int

    @property
    def place(self) -> int:
        """This worker's, among those that are left: `worker`, where nobody was lost."""
        ...

    @property
    def route(self) -> str:
        """How requests travel, in words; all workers must have the same."""
        ...

    @property
    def device(self) -> torch.device:
        """Where conversations are held: what is remembered lives there, and buckets are brought there."""
        ...

    def open(self, group: dist.ProcessGroup | None, scheme: Scheme, device: torch.device = CPU) -> None:
        """Make the lane. Every worker of the group calls this, in the same order of calls.

        None: there is no group, where an exchange needs none. device: where this worker's tensors are.
        """
        ...

    def direct(self, scheme: Scheme) -> Direct | None:
        """A short way for buckets that are merely summed; None where they take the lane like all others."""
        ...

    def relays(self, scheme: Scheme) -> bool:
        """Whether a mean of the scheme's messages is encoded by it once more, on its way back."""
        ...

    def agree(self, given: Mapping[str, str] | None) -> None:
        """Raise on every worker, naming the field and the ranks, unless all were given the same.

        A worker that refused its arguments takes part with None, so that the others hear of it instead of waiting.
        """
        ...

    def deal(self, tensors: Mapping[str, Tensor], exact: Collection[str], scheme: Scheme) -> Sequence[Piece]:
        """What of these tensors, of which some are `exact`, this worker will hold the scheme's conversations about."""
        ...

    def hold(self, bucket: Bucket, converse: Callable[[Bucket], Conversation]) -> Rounds:
        """Turn a bucket into the group's mean, in place, by the conversation that `converse` makes about this worker's
        own part of it: all of it, where workers divide nothing among them.
        """
        ...

    def answer(self, request: Sum | Max | Mean, workers: int, scratch: Scratch) -> Rounds:
        """One request as rounds of collectives, in a conversation that counts on so many workers."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What lasts in the exchange beyond this worker: nothing where workers are all there is."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None:
        """End the lane. Safe to call twice, and after the process groups are destroyed."""
        ...


def drive(conversation: Conversation, exchange: Exchange, scratch: Scratch) -> Rounds:
    """A conversation as rounds of collectives; its result."""
    workers = exchange.workers  # that this conversation counts on, though some may be lost on the way
    answer = None
    while True:
        try:
            request = conversation.send(answer)
        except StopIteration as stop:
            return stop.value
        answer = yield from _answer(request, exchange, workers, scratch)


def _answer(request: Request, exchange: Exchange, workers: int, scratch: Scratch) -> Rounds:
    if not isinstance(request, tuple):
        return (yield from exchange.answer(request, workers, scratch))
    parts = (_answer(each, exchange, workers, scratch.part(number)) for number, each in enumerate(request))
    return (yield from in_parallel(*parts))


def in_parallel(*several: Rounds) -> Rounds:
    """Several at once: what each asks for next goes out together, in the order given. The tuple of their results."""
    results: dict[int, Any] = {}
    while len(results) < len(several):
        wanted: list[Collective] = []
        for number, rounds in enumerate(several):
            if number not in results:
                try:
                    wanted += next(rounds)
                except StopIteration as stop:
                    results[number] = stop.value
        if wanted:
            yield wanted
    return tuple(results[number] for number in range(len(several)))
