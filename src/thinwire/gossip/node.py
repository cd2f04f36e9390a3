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
from thinwire.exchange.lane import Landings
from thinwire.gossip.mixer import Mixer, Mixing

Replica: TypeAlias = "nn.Module | Mapping[str, Tensor]"


class Node:
    """The weights in one flat buffer, and what it remembers of each edge.

    It does not know the graph beyond its own edges, nor the network, nor the optimizer.
    """

    def __init__(self, parameters: Mapping[str, Tensor], *, number: int, mixer: Mixer, seed: int):
        """Mixed in the widest of the parameters' dtypes, and in float32 where all are narrower."""
        dtype = reduce(torch.promote_types, (p.dtype for p in parameters.values()), torch.float32)
        self.mixer: Mixer = mixer
        self.number: int = number
        self.seed: int = seed
        self.layout: Layout = Layout.of([(name, tuple(p.shape)) for name, p in parameters.items()])
        self._landings = Landings({p.device for p in parameters.values()})
        # Pinned, so that a GPU copies from and to it by itself.
        pinned = any(p.is_cuda for p in parameters.values())
        self.flat: Tensor = torch.zeros(self.layout.numel, dtype=dtype, device="cpu", pin_memory=pinned)
        self.views: dict[str, Tensor] = {
            s.name: self.flat[s.start : s.stop].view(s.shape) for s in self.layout.segments
        }
        self.step: int = 0
        self.equal: bool = False  # all replicas are known to be equal, so that the next step has nothing to do
        self.scratch: Scratch = Scratch()
        self.rounds: dict[int, int] = {}  # rounds of messages had with each neighbour
        self._edges: dict[int, Memory] = {}
        self.own: Memory = _memory(mixer.init(self))

    def edge(self, neighbour: int) -> Memory:
        """What this node remembers of the edge, by parameter name."""
        if neighbour not in self._edges:
            self._edges[neighbour] = _memory(self.mixer.meet(self, neighbour))
            self.rounds.setdefault(neighbour, 0)
        return self._edges[neighbour]

    def load(self, parameters: Mapping[str, Tensor]) -> None:
        """Copy the weights into `flat`. Those of a GPU are waited for once, when all are on their way."""
        for name, view in self.views.items():
            view.copy_(parameters[name].detach(), non_blocking=True)
        self._landings.wait(self._landings.mark())

    @torch.no_grad()
    def store(self, parameters: Mapping[str, Tensor]) -> None:
        """Copy `flat` back into the weights. Whoever writes to it next loads them first, and so waits for this."""
        for name, view in self.views.items():
            parameters[name].copy_(view, non_blocking=True)

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
        """Take a saved state, or raise ValueError and change nothing."""
        if not isinstance(state, Mapping) or state.get("mixer") != self.mixer.spec:
            saved = state.get("mixer") if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(f"the saved state is of {saved}, this mixer is {self.mixer.spec}")
        step, seed, equal = (_field(state, name, kind) for name, kind in _PLAIN.items())
        rounds, edges = _field(state, "rounds", dict), _field(state, "edges", dict)
        odd = [key for key in (*rounds, *edges) if not _is_count(key)] + [
            n for n in rounds.values() if not _is_count(n)
        ]
        if odd or rounds.keys() != edges.keys() or step < 0:
            raise ValueError(f"the saved state counts what there is not: step {step}, rounds {rounds}, {odd[:3]}")
        own = _filled(_memory(self.mixer.init(self)), _field(state, "own", dict))
        met = {j: _filled(_memory(self.mixer.meet(self, j)), saved) for j, saved in edges.items()}
        self.own, self._edges, self.rounds = own, met, dict(rounds)
        self.step, self.seed, self.equal = step, seed, equal


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


def _filled(memory: Memory, saved: Any) -> Memory:
    """The memory with what was saved of it."""
    entries = saved.items() if isinstance(saved, Mapping) else [("all of it", saved)]
    for name, entry in entries:
        whole = isinstance(entry, Mapping) and all(_is_plain(tensor) for tensor in entry.values())
        if not whole or not all(isinstance(key, str) for key in (name, *entry)):
            raise ValueError(f"saved {name!r} is not a dict of tensors of floating point, by name")
    memory.load_state_dict(saved)
    return memory


def _is_plain(tensor: Any) -> bool:
    dense = isinstance(tensor, Tensor) and tensor.layout is torch.strided and not tensor.is_meta
    return dense and tensor.is_floating_point()


def _is_count(number: Any) -> bool:
    return type(number) is int and number >= 0


_PLAIN = {"step": int, "seed": int, "equal": bool}


def _field(state: Mapping[str, Any], name: str, kind: type) -> Any:
    if type(state.get(name)) is not kind:
        raise ValueError(f"the saved state has {name}={state.get(name)!r}, where {kind.__name__} is expected")
    return state[name]
