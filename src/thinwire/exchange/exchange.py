"""What a front door needs of an exchange, whichever it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch.distributed as dist
from torch import Tensor

from thinwire.control.controller import Controller
from thinwire.core.bucket import Scratch
from thinwire.core.ledger import Ledger
from thinwire.core.scheme import Conversation, Scheme
from thinwire.exchange.collectives import Collective
from thinwire.exchange.direct import Direct
from thinwire.exchange.lane import Lane, Rounds


class Exchange(Protocol):
    """Answers requests. `workers` may shrink where an exchange goes on without the dead; `worker` is for life."""

    ledger: Ledger
    lane: Lane | None
    workers: int
    worker: int

    @property
    def route(self) -> str:
        """How requests travel, in words; all workers must have the same."""
        ...

    def open(self, group: dist.ProcessGroup, scheme: Scheme) -> None:
        """Make the lane. Every worker of the group calls this, in the same order of calls."""
        ...

    def direct(self, scheme: Scheme) -> Direct | None:
        """A short way for buckets that are merely summed; None where they take the lane like all others."""
        ...

    def agree(self, what: str) -> None:
        """Raise on every worker, naming the ranks, unless all say the same."""
        ...

    def answer_all(self, conversation: Conversation, scratch: Scratch) -> Rounds:
        """A scheme's conversation as collectives."""
        ...

    def consult(self, controller: Controller, menu: Sequence[float], numbers: Tensor, scratch: Scratch) -> Rounds:
        """Let the one controller of the group see the mean of all workers' numbers; its level, the same everywhere."""
        ...

    def controller_state(self, controller: Controller) -> dict[str, Any]:
        """What the group's controller has learnt, wherever it runs. Every worker calls this."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What lasts in the exchange beyond this worker: nothing where workers are all there is."""
        ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...

    def close(self) -> None:
        """End the lane. Safe to call twice, and after the process groups are destroyed."""
        ...


def in_parallel(*talks: Rounds) -> Rounds:
    """Several talks at once: what each asks for next goes out together, in the order given. The first's result."""
    results: dict[int, Tensor] = {}
    while len(results) < len(talks):
        wanted: list[Collective] = []
        for number, talk in enumerate(talks):
            if number not in results:
                try:
                    wanted += next(talk)
                except StopIteration as stop:
                    results[number] = stop.value
        if wanted:
            yield wanted
    return results[0]
