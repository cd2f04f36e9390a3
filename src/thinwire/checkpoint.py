"""What a wire saves, and how it loads at the same or another number of workers.

    state = {
        "format": 1, "scheme": spec, "workers": n, "step": ..., "seed": ...,
        "shared": {parameter: {key: tensor}},          equal on all workers
        "worker0003": {parameter: {key: tensor}},      this worker's own
        "scale": ...,                                  of the loss, where there is one
        "ledger": {...},
        "steering": {...},                             level, losses and the controller
        "exchange": {server: ...},                     what servers hold; in the first worker's state only
        "apart": {worker: {...}},                      where all are gathered: each worker's own ledger, steering ...
    }

Each worker's part has its own name, so torch.distributed.checkpoint, which keeps one copy of equally named tensors,
keeps them all. At another number of workers, m instead of n, worker j takes the residuals of the old workers
i = j, j + m, j + 2m ... together, times m/n: the residuals' part in the next mean, sum(e_i)/n, is kept and nothing
is lost. Shared state is taken as it is; other per-worker state starts anew. That needs the parts of those old workers:
`merge` puts all together, and `wire.state_dict(workers=n)` makes an empty state, with the parts that this worker will
take, for a distributed checkpoint to fill. `wire.state_dict(gather=True)` is everybody's from the start, for a
checkpoint that is one file: it loads on every rank, at any number of workers.

Where ranks have only some rows of a tensor (FSDP2), names say which: "w[0:64]". `merge` the states of all ranks, and
any other sharding takes its rows from there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from thinwire.core.memory import dense
from thinwire.core.parts import recut
from thinwire.exchange import objects
from thinwire.schemes import parse

if TYPE_CHECKING:
    from thinwire.reducer import Reducer

FORMAT = 1
_HEAD = ("format", "scheme", "workers", "step", "seed")
# What a state holds beside the workers' parts, and of what kind. Older ones lack the optional.
_OPTIONAL = ("steering", "exchange", "scale", "apart")
_KINDS: dict[str, type | tuple[type, ...]] = {
    "scheme": str, "workers": int, "step": int, "seed": int, "shared": Mapping, "ledger": Mapping,
    "steering": Mapping, "exchange": Mapping, "scale": (int, float), "apart": Mapping,
}  # fmt: skip
State = dict[str, dict[str, Tensor]]


def part(worker: int) -> str:
    return f"worker{worker:04d}"


def save(wire: Reducer, workers: int | None = None) -> dict[str, Any]:
    """This worker's state; with `workers`, an empty one as so many workers left it, to be filled by a loader."""
    shared, own = _divide(wire)
    parts = {part(wire.exchange.worker): own}
    wire.prepared_for = workers
    if workers is not None:
        parts = {part(old): _map(own, torch.zeros_like) for old in _taken(wire, workers)}
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
        # Only where it is known: a distributed checkpoint of before must hold every key that it is asked for.
        **({} if wire.memory_scale is None else {"scale": wire.memory_scale}),
        **parts,
    }


def merge(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The states of all workers of one run as one, for loading at another number of workers."""
    if not states:
        raise ValueError("nothing to merge: give the states of all workers")
    merged = dict(states[0])
    for state in states:
        for key in _HEAD:
            if state[key] != merged[key]:
                raise ValueError(f"these states are not of one run: {key} is {merged[key]!r} and {state[key]!r}")
        # Ranks that have parts of a model, as shards of one replica, say of one worker what each remembers.
        merged |= {key: {**merged.get(key, {}), **value} for key, value in state.items() if _is_part(key)}
        merged["shared"] = {**merged["shared"], **state["shared"]}
    return merged


def gather(wire: Reducer, state: dict[str, Any], *, to_all: bool) -> dict[str, Any]:
    """The states of all ranks as one; a collective. Where only the first is to have it, the others get their own."""
    if wire.group is None:
        raise ValueError("workers that may come late have no group to gather over: save every rank's own state_dict()")
    lost = wire.group.size() - wire.exchange.workers
    if lost > 0:
        raise ValueError(f"{lost} workers are lost, so nothing can be gathered: save every rank's own state_dict()")
    first = wire.group.rank() == 0
    # What is equal on all comes from the first.
    sent = state if first else {key: state[key] for key in (*_HEAD, *filter(_is_part, state))} | {"shared": {}}
    said = [{"seat": wire.seat, "apart": wire.apart(state), "state": sent}]
    for group in wire.groups:
        said = [each for theirs in objects.gather_states(said, group, to_all=to_all) for each in theirs]
    if not first and not to_all:
        return state
    return merge([each["state"] for each in said]) | {"apart": {each["seat"]: each["apart"] for each in said}}


def own(wire: Reducer, state: Any) -> Any:
    """A state that was gathered, as it is for this worker; any other as it is."""
    workers, apart = (state.get("workers"), state.get("apart")) if isinstance(state, Mapping) else (None, None)
    if not isinstance(apart, Mapping) or type(workers) is not int or workers != wire.exchange.workers:
        return state
    mine = apart.get(wire.seat)
    if not isinstance(mine, Mapping):
        return state
    return {**state, **{key: _over(state.get(key), value) for key, value in mine.items()}, "apart": {}}


def _over(there: object, value: object) -> object:
    return {**there, **value} if isinstance(there, Mapping) and isinstance(value, Mapping) else value


def load(wire: Reducer, state: Mapping[str, Any]) -> None:
    """Take a saved state, or raise ValueError and change nothing."""
    step, scale, ledger = _head(wire, state)
    together = _memory(wire, state)
    wire.memory.check(together)
    take_steering = _steering(wire, state)
    wire.exchange.load_state_dict(dict(state.get("exchange") or {}))  # the servers check for themselves
    wire.memory.load_state_dict(together)
    wire.step, wire.memory_scale = step, scale
    take_steering()
    wire.exchange.transport.ledger.load(ledger)


def lend(wire: Reducer) -> dict[str, Any]:
    """What a worker that comes late must have of one that was here: all that is equal on all workers."""
    return {
        "step": wire.step,
        "shared": _divide(wire)[0],
        "steering": wire.steering.state_dict() | {"observed": []} if wire.steering else {},
        "scale": wire.memory_scale,
    }


def adopt(wire: Reducer, state: Mapping[str, Any]) -> None:
    """Take what another worker has lent. What this worker owes is nothing, as at the start."""
    _, own = _divide(wire)
    together = {name: {**state["shared"].get(name, {}), **own.get(name, {})} for name in {**state["shared"], **own}}
    wire.memory.check(together)
    take_steering = _steering(wire, state)
    wire.memory.load_state_dict(together)
    wire.step, wire.memory_scale = state["step"], state["scale"]
    take_steering()


def in_full(spec: str) -> str:
    """A scheme's spec with all of its options: one that was saved before some of them were there lacks those."""
    try:
        return parse(spec).spec
    except ValueError:
        return spec


def _head(wire: Reducer, state: Mapping[str, Any]) -> tuple[int, float | None, dict[str, float]]:
    """Step, scale and ledger of a state that was made for this wire."""
    number = state.get("format") if isinstance(state, Mapping) else None
    if not isinstance(number, int) or number != FORMAT:
        raise ValueError(f"not a thinwire state of format {FORMAT}: {_describe(state)}")
    missing = [key for key in _KINDS if key not in state and key not in _OPTIONAL]
    if missing:
        raise ValueError(f"the state lacks {', '.join(missing)}")
    for key in filter(state.__contains__, _KINDS):
        if not isinstance(state[key], _KINDS[key]):
            raise ValueError(f"the state's {key!r} cannot be {_describe(state[key])}")
    if in_full(state["scheme"]) != wire.scheme.spec:
        raise ValueError(
            f"the state was saved under {state['scheme']!r}, this wire has {wire.scheme.spec!r}, to which it means "
            "nothing: attach with the former, or load the model alone and begin anew"
        )
    if state["seed"] != wire.seed:
        raise ValueError(f"the state was saved under seed {state['seed']}, this wire has {wire.seed}: attach with that")
    scale = state.get("scale")
    try:
        ledger = {str(key): float(value) for key, value in state["ledger"].items()}
        return int(state["step"]), None if scale is None else float(scale), ledger
    except (TypeError, ValueError, AttributeError) as error:
        raise ValueError(f"the state's step, scale and ledger must be numbers: {error}") from error


def _memory(wire: Reducer, state: Mapping[str, Any]) -> State:
    """What this worker is to remember: its own, or its share of what the workers of another number had."""
    shared, own = _divide(wire)
    workers, worker, old = wire.exchange.workers, wire.exchange.worker, state["workers"]
    if not isinstance(old, int) or old < 1:
        raise ValueError(f"the state's number of workers must be 1 or more, got {old!r}")
    # Of an incomplete state, workers that lack nothing themselves must not go on without the others.
    needed = _taken(wire, old) if old in (workers, wire.prepared_for) else range(old)
    missing = list(islice((part(i) for i in needed if part(i) not in state), 4))  # of any number that a file may say
    if missing and old == workers:
        has = ", ".join(key for key in state if _is_part(key))
        raise ValueError(f"rank {worker} needs its own part, {missing[0]}; this state has {has or 'none'}")
    if missing:
        raise ValueError(
            f"the state was saved by {old} workers and is loaded by {workers}, so the parts of all {old} are needed; "
            f"missing {', '.join(missing)}. On every rank:\n"
            f"    states = [torch.load(path_of(worker)) for worker in range({old})]\n"
            "    wire.load_state_dict(thinwire.checkpoint.merge(states))"
        )
    for key in ("shared", *filter(_is_part, state)):
        _check_tensors(key, state[key])
    parts = {key: state[key] for key in filter(_is_part, state)}
    if wire.divided or old == workers:
        parts = {part(i): parts[part(i)] for i in _taken(wire, old)}
    if not wire.divided:
        parts = {key: recut(each, own) for key, each in parts.items()}
        state = {**state, "shared": recut(state["shared"], shared)}
    taken = parts[part(worker)] if old == workers else _at_other_size(own, parts, old, workers, worker)
    names = dict.fromkeys([*state["shared"], *taken])
    return {name: {**state["shared"].get(name, {}), **taken.get(name, {})} for name in names}


def _taken(wire: Reducer, old: int) -> range:
    """Whose residuals, of the workers of a state, this worker takes."""
    workers, worker = wire.exchange.workers, wire.exchange.worker
    return range(worker, worker + 1) if old == workers else range(worker, old, workers)


def _at_other_size(own: State, parts: Mapping[str, Any], old: int, workers: int, worker: int) -> State:
    """This worker's share of what `old` workers owe. All parts are checked, so that all workers refuse alike."""
    expected = _residuals(own)
    for key, saved in parts.items():
        found = _residuals(saved)
        odd = sorted((name for name in expected | found if expected.get(name) != found.get(name)), key=str)
        if odd:
            raise ValueError(
                f"the residuals saved in {key} do not fit: {odd[:3]} ({len(odd)} in all) are missing, unknown or of "
                "another shape; they must come from the same model and scheme, with the same feedback= and exempt="
            )
    taken = _map(own, torch.clone)
    for name in expected:
        residual = taken[name]["residual"].zero_()
        for i in range(worker, old, workers):
            residual.add_(parts[part(i)][name]["residual"].to(residual), alpha=workers / old)
    return taken


def _residuals(state: Mapping[str, Mapping[str, Tensor]]) -> dict[str, torch.Size]:
    return {name: entry["residual"].shape for name, entry in state.items() if "residual" in entry}


def _steering(wire: Reducer, state: Mapping[str, Any]) -> Callable[[], None]:
    """What to call, once all is checked, to take the controller's part."""
    saved = state.get("steering")
    if not saved:
        return lambda: None
    if wire.steering is None:
        raise ValueError(
            f"the state has a controller, {saved.get('controller')!r}, and this wire has none: attach with "
            "controller=, or leave it out: state['steering'] = {}"
        )
    return wire.steering.loaded(saved)


def _check_tensors(part: str, entries: object) -> None:
    if not isinstance(entries, Mapping) or not all(
        isinstance(name, str) and isinstance(entry, Mapping) and all(map(dense, entry.values()))
        for name, entry in entries.items()
    ):
        raise ValueError(f"the state's part {part!r} must hold dense tensors by parameter and key")


def _divide(wire: Reducer) -> tuple[State, State]:
    shared: State = {}
    own: State = {}
    for (name, key), tensor in wire.memory.items():
        # Where workers have different parts of the model, nothing is equal on all.
        (shared if key in wire.scheme.shared_state and not wire.divided else own).setdefault(name, {})[key] = tensor
    return shared, own


def _map(state: State, function) -> State:
    return {name: {key: function(tensor) for key, tensor in entry.items()} for name, entry in state.items()}


def _is_part(key: object) -> bool:
    return isinstance(key, str) and key.startswith("worker") and key[6:].isdigit()


def _describe(state: object) -> str:
    return f"format {state.get('format')!r}" if isinstance(state, Mapping) else type(state).__name__
