"""What a wire saves, and how it loads at the same or another number of workers.

    state = {
        "format": 1, "scheme": spec, "workers": n, "step": ..., "seed": ...,
        "shared": {parameter: {key: tensor}},          equal on all workers
        "worker0003": {parameter: {key: tensor}},      this worker's own
        "ledger": {...},
        "steering": {...},                             level, losses and the controller
        "exchange": {server: ...},                     what servers hold; in the first worker's state only
    }

Each worker's part has its own name, so torch.distributed.checkpoint, which keeps one copy of equally named tensors,
keeps them all. At another number of workers, m instead of n, worker j takes the residuals of the old workers
i = j, j + m, j + 2m ... together, times m/n: the residuals' part in the next mean, sum(e_i)/n, is kept and nothing
is lost. Shared state is taken as it is; other per-worker state starts anew. That needs the parts of all old workers:
`merge` puts them together, and `wire.state_dict(workers=n)` makes an empty state for a distributed checkpoint to fill.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    from thinwire.reducer import Reducer

FORMAT = 1
State = dict[str, dict[str, Tensor]]


def part(worker: int) -> str:
    return f"worker{worker:04d}"


def save(wire: Reducer, workers: int | None = None) -> dict[str, Any]:
    """This worker's state; with `workers`, an empty one with the parts of so many workers, to be filled by a loader."""
    shared, own = _divide(wire)
    parts = {part(wire.exchange.worker): own}
    if workers is not None:
        parts = {part(worker): _map(own, torch.zeros_like) for worker in range(workers)}
    return {
        "format": FORMAT,
        "scheme": wire.scheme.spec,
        "workers": wire.exchange.workers if workers is None else workers,
        "step": wire.step,
        "seed": wire.seed,
        "shared": shared,
        "ledger": wire.exchange.transport.ledger.totals(),
        "steering": wire.steering.state_dict() if wire.steering else {},
        "exchange": wire.exchange.state_dict(),
        **parts,
    }


def merge(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of all workers of one run as one, for loading at another number of workers."""
    if not states:
        raise ValueError("nothing to merge: give the states of all workers")
    merged = dict(states[0])
    for state in states:
        for key in ("format", "scheme", "workers", "step", "seed"):
            if state[key] != merged[key]:
                raise ValueError(f"these states are not of one run: {key} is {merged[key]!r} and {state[key]!r}")
        merged |= {key: value for key, value in state.items() if _is_part(key)}
    return merged


def load(wire: Reducer, state: Mapping[str, Any]) -> None:
    """Take a saved state, or raise ValueError and change nothing."""
    if not isinstance(state, Mapping) or state.get("format") != FORMAT:
        raise ValueError(f"not a thinwire state of format {FORMAT}: {_describe(state)}")
    if state["scheme"] != wire.scheme.spec:
        raise ValueError(f"the state was saved under {state['scheme']!r}, this wire has {wire.scheme.spec!r}")
    if state["seed"] != wire.seed:
        raise ValueError(f"the state was saved under seed {state['seed']}, this wire has {wire.seed}")
    shared, own = _divide(wire)
    workers, worker = wire.exchange.workers, wire.exchange.worker
    if state["workers"] == workers:
        if part(worker) not in state:
            has = ", ".join(key for key in state if _is_part(key))
            raise ValueError(f"rank {worker} needs its own part, {part(worker)}; this state has {has}")
        taken = state[part(worker)]
    else:
        taken = _at_other_size(own, state, workers, worker)
    together: State = {name: {**state["shared"].get(name, {}), **taken.get(name, {})} for name in {**shared, **own}}
    wire.memory.load_state_dict({name: entry for name, entry in together.items() if entry})
    wire.step = int(state["step"])
    if wire.steering is not None and state.get("steering"):
        wire.steering.load_state_dict(state["steering"])
    wire.exchange.load_state_dict(dict(state.get("exchange", {})))
    wire.exchange.transport.ledger.load({key: float(value) for key, value in state["ledger"].items()})


def _at_other_size(own: State, state: Mapping[str, Any], workers: int, worker: int) -> State:
    old = int(state["workers"])
    missing = [part(i) for i in range(old) if part(i) not in state]
    if missing:
        raise ValueError(
            f"the state was saved by {old} workers and is loaded by {workers}, so the parts of all {old} are needed; "
            f"missing {', '.join(missing[:4])}: thinwire.checkpoint.merge puts them together"
        )
    taken = _map(own, torch.clone)
    for name, entry in taken.items():
        if "residual" in entry:
            entry["residual"].zero_()
            for i in range(worker, old, workers):
                entry["residual"].add_(state[part(i)][name]["residual"], alpha=workers / old)
    return taken


def _divide(wire: Reducer) -> tuple[State, State]:
    shared: State = {}
    own: State = {}
    for (name, key), tensor in wire.memory.items():
        (shared if key in wire.scheme.shared_state else own).setdefault(name, {})[key] = tensor
    return shared, own


def _map(state: State, function) -> State:
    return {name: {key: function(tensor) for key, tensor in entry.items()} for name, entry in state.items()}


def _is_part(key: str) -> bool:
    return key.startswith("worker") and key[6:].isdigit()


def _describe(state: object) -> str:
    return f"format {state.get('format')!r}" if isinstance(state, Mapping) else type(state).__name__
