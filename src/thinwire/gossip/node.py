"""Node: one replica in the graph, as its mixer sees it."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from thinwire.core.bucket import Scratch
from thinwire.core.layout import Layout
from thinwire.core.memory import Memory
from thinwire.gossip.mixer import Mixer, Mixing

Replica: TypeAlias = "nn.Module | Mapping[str, Tensor]"


class Node:
    """The weights in one flat buffer, and what it remembers of each edge.

    It does not know the graph beyond its own edges, nor the network, nor the optimizer.
    """

    def __init__(self, parameters: Mapping[str, Tensor], *, number: int, mixer: Mixer, seed: int):
        """Mixed in the widest of the parameters' dtypes, and in float32 where all are narrower."""
        dtype = reduce(torch.promote_types, (p.dtype for p in parameters.values()), torch.float32)
        self.mixer, self.number, self.seed = mixer, number, seed
        self.layout = Layout.of([(name, tuple(p.shape)) for name, p in parameters.items()])
        self.flat = torch.zeros(self.layout.numel, dtype=dtype, device="cpu")
        self.views = {s.name: self.flat[s.start : s.stop].view(s.shape) for s in self.layout.segments}
        self.step = 0
        self.equal = False  # all replicas are known to be equal, so that the next step has nothing to do
        self.scratch = Scratch()
        self.rounds: dict[int, int] = {}  # rounds of messages had with each neighbour
        self._edges: dict[int, Memory] = {}
        self.own = _memory(mixer.init(self))

    def edge(self, neighbour: int) -> Memory:
        """What this node remembers of the edge, by parameter name."""
        if neighbour not in self._edges:
            self._edges[neighbour] = _memory(self.mixer.meet(self, neighbour))
            self.rounds.setdefault(neighbour, 0)
        return self._edges[neighbour]

    def load(self, parameters: Mapping[str, Tensor]) -> None:
        """Copy the weights into `flat`."""
        for name, view in self.views.items():
            view.copy_(parameters[name].detach())

    @torch.no_grad()
    def store(self, parameters: Mapping[str, Tensor]) -> None:
        """Copy `flat` back into the weights."""
        for name, view in self.views.items():
            parameters[name].copy_(view)

    def start_equal(self, parameters: Mapping[str, Tensor]) -> None:
        """Hear that every replica has these weights now."""
        self.load(parameters)
        self.mixer.start_equal(self)
        self.equal = True

    def mixing(self, weights: Mapping[int, float]) -> Mixing:
        """One step's conversation; `weights` in the neighbours' order. None where replicas are equal."""
        if not self.equal:
            for neighbour in weights:
                self.edge(neighbour)
            yield from self.mixer.mix(self, weights)
        self.equal = False
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain types only."""
        return {
            "mixer": self.mixer.spec,
            "step": self.step,
            "seed": self.seed,
            "equal": self.equal,
            "rounds": dict(self.rounds),
            "own": self.own.state_dict(),
            "edges": {neighbour: memory.state_dict() for neighbour, memory in self._edges.items()},
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        if state["mixer"] != self.mixer.spec:
            raise ValueError(f"the saved state is of {state['mixer']}, this mixer is {self.mixer.spec}")
        self.own.load_state_dict(state["own"])
        self._edges.clear()
        for neighbour, saved in state["edges"].items():
            self.edge(neighbour).load_state_dict(saved)
        self.step, self.seed, self.equal = state["step"], state["seed"], state["equal"]
        self.rounds = dict(state["rounds"])


def parameters_of(replica: Replica) -> dict[str, Tensor]:
    """What gossip mixes: the trainable parameters. Frozen ones are equal everywhere and stay so."""
    named = replica.named_parameters() if isinstance(replica, nn.Module) else replica.items()
    chosen = {name: p for name, p in named if p.requires_grad or not isinstance(replica, nn.Module)}
    odd = [name for name, p in chosen.items() if not p.is_floating_point()]
    if odd:
        raise ValueError(f"gossip mixes floating-point weights; {odd[0]!r} is {chosen[odd[0]].dtype}")
    if not chosen:
        raise ValueError("the model has no trainable parameters to mix")
    return chosen


def _memory(state: Mapping[str, Mapping[str, Tensor]]) -> Memory:
    memory = Memory()
    for name, entry in state.items():
        memory.add(name, entry)
    return memory
