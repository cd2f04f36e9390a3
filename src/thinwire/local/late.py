"""Arrivals: what local steps do where workers may come late, or again.

The first worker tells a newcomer, between two exchanges, all that the workers have in common: the anchor, the outer
optimizer's state, the schedule, what the scheme and the controller share. The newcomer owes nothing and goes on from
the anchor; its own optimizer is as its script made it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from thinwire import checkpoint
from thinwire.exchange.server.late.client import OpenParameterServer
from thinwire.local.anchor import shard

if TYPE_CHECKING:
    from thinwire.local.local import LocalSteps


class Arrivals:
    """One worker's part in letting others in; before that, its own way in."""

    def __init__(self, local: LocalSteps, module: nn.Module, exchange: OpenParameterServer) -> None:
        self._local, self._exchange = local, exchange
        tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        self._fixed: dict[str, Tensor] = {n: shard(t) for n, t in tensors.items() if n not in local.anchor.tensors}

    def enter(self) -> None:
        """Take the job's state; or begin it, and tell those who begin with this worker."""
        state = self._exchange.enter()
        if state is not None:
            self._adopt(state)
            return
        self.call()
        self._exchange.heard()
        if self._exchange.newcomers:
            self._exchange.workers = self._exchange.give(self._lend())

    def call(self) -> None:
        """Before an exchange: who takes part, and who is at the door?"""
        self._exchange.roll(self._local.step)

    def let_in(self) -> None:
        """After an exchange has landed, and before the next: tell those at the door whom this worker is to let in."""
        self._exchange.heard()
        if self._exchange.newcomers:
            self._exchange.give(self._lend())

    def _lend(self) -> dict[str, Any]:
        local = self._local
        return {
            "local": local.anchor.state_dict() | local.schedule.state_dict() | {"void_rounds": local.void_rounds},
            "fixed": self._fixed,
            "wire": checkpoint.lend(local),
        }

    def _adopt(self, state: Mapping[str, Any]) -> None:
        local = self._local
        told = dict(state["local"])
        checkpoint.adopt(local, state["wire"])
        local.anchor.load_state_dict(told)
        local.anchor.put_local()
        for name, tensor in self._fixed.items():
            tensor.copy_(state["fixed"][name])
        # Of steps in all it counts the others', so that rounds are the same; of those since each part left, its own.
        local.schedule.load_state_dict(told | {"made": [0] * local.schedule.parts})
        local.void_rounds = told["void_rounds"]
