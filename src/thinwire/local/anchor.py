"""Anchor: the weights that a group has in common while each worker trains on its own.

    change:  D = start - local           what training did to the local weights, with its sign turned
    answer:  the group's mean of D
    step:    anchor <- outer(anchor, D)  the same on every worker
    take:    local <- mix * local + (1 - mix) * anchor

`start` is the anchor as the local weights can hold it: under bfloat16 weights that is not the anchor itself, and what
rounding took is nobody's change. Buffers of floating point (batch norm's statistics) are averaged as they are.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from thinwire.core.layout import Layout
from thinwire.core.memory import dense
from thinwire.local.outer import MakeOuter, Outer

BUCKET_BYTES = 25 << 20  # as DDP's: while one is on the wire the next is encoded


@dataclass(frozen=True)
class Part:
    """Some tensors, synchronised together."""

    number: int
    layout: Layout
    buckets: tuple[tuple[int, Layout], ...]  # (where it begins, what lies in it)
    anchor: Tensor  # flat


class Anchor:
    """What the group has in common, in parts, beside the tensors that a worker trains.

    It knows nothing of steps, schemes or the network. `tensors`: by name, those that training changes and, marked by
    `averaged`, buffers. All of the anchor, and the outer optimizer's state, is float32 (float64 where any tensor is).
    """

    def __init__(
        self, tensors: Mapping[str, Tensor], averaged: frozenset[str], *, parts: int, outer: Outer | MakeOuter
    ) -> None:
        self.tensors: dict[str, Tensor] = dict(tensors)
        self.averaged = averaged
        wide = any(tensor.dtype is torch.float64 for tensor in tensors.values())
        self.dtype: torch.dtype = torch.float64 if wide else torch.float32
        device = next(iter(tensors.values())).device
        self.parts: list[Part] = [
            self._part(number, names, device) for number, names in enumerate(divide(tensors, parts))
        ]
        # One for all parts: while a part is under way, no other is.
        room = max(part.layout.numel for part in self.parts)
        self.room: Tensor = torch.zeros(room, dtype=self.dtype, device=device)
        self._views: dict[str, Tensor] = {}
        for part in self.parts:
            for segment in part.layout.segments:
                self._views[segment.name] = part.anchor[segment.start : segment.stop].view(segment.shape)
        self.weights: dict[str, nn.Parameter] = {
            name: nn.Parameter(view, requires_grad=False) for name, view in self._views.items() if name not in averaged
        }
        self.outer = outer
        self.optimizer: torch.optim.Optimizer = outer(self.weights.values())
        if isinstance(outer, Outer):
            self._make_state()
        self.take_local()

    def _part(self, number: int, names: Sequence[str], device: torch.device) -> Part:
        shapes = [(name, tuple(self.own(name).shape)) for name in names]
        layout = Layout.of(shapes)
        buckets, begin, most = [], 0, BUCKET_BYTES // self.dtype.itemsize
        for place, segment in enumerate(layout.segments):
            if segment.stop - layout.segments[begin].start > most and place > begin:
                buckets.append((layout.segments[begin].start, Layout.of(shapes[begin:place])))
                begin = place
        buckets.append((layout.segments[begin].start, Layout.of(shapes[begin:])))
        flat = torch.empty(layout.numel, dtype=self.dtype, device=device)
        return Part(number, layout, tuple(buckets), flat)

    def own(self, name: str) -> Tensor:
        """This worker's tensor as it is now; of one that is sharded, its shard."""
        return shard(self.tensors[name])

    @property
    def sharded(self) -> bool:
        """Whether this worker has only some rows of the tensors."""
        return any(hasattr(tensor, "to_local") for tensor in self.tensors.values())

    def like(self) -> dict[str, Tensor]:
        """Shapes, device and dtype of what is exchanged, by name, in no memory."""
        nothing = torch.empty((), dtype=self.dtype, device=self.room.device)
        return {name: nothing.expand(self.own(name).shape) for name in self.tensors}

    def _make_state(self) -> None:
        """All of the outer state from the start, so that a checkpoint's loader finds it: a step of nothing."""
        for part in self.parts:
            part.anchor.zero_()
            self.step(part, self.room[: part.layout.numel], alone=False)

    @property
    def nbytes(self) -> dict[str, float]:
        """What it keeps."""
        outer = (t for state in self.optimizer.state.values() for t in state.values() if isinstance(t, Tensor))
        return {
            "anchor_bytes": float(sum(part.anchor.nbytes for part in self.parts)),
            "change_bytes": float(self.room.nbytes),
            "outer_bytes": float(sum(t.nbytes for t in outer)),
        }

    def take_local(self) -> None:
        """The anchor is where this worker's tensors are now."""
        for name, view in self._views.items():
            view.copy_(self.own(name))

    def put_local(self) -> None:
        """This worker's tensors are where the anchor is."""
        for name, view in self._views.items():
            self.own(name).copy_(view)

    def change(self, part: Part) -> Tensor:
        """What this worker brings to the group: its weights' change, and its buffers as they are."""
        flat = self.room[: part.layout.numel]
        for segment in part.layout.segments:
            own, out = self.own(segment.name), flat[segment.start : segment.stop].view(segment.shape)
            if segment.name in self.averaged:
                out.copy_(own)
            elif own.dtype is self.dtype:
                torch.sub(self._views[segment.name], own, out=out)
            else:
                out.copy_(self._views[segment.name].to(own.dtype)).sub_(own)
        return flat

    def step(self, part: Part, mean: Tensor, *, alone: bool) -> None:
        """Move the part's anchor by the group's mean change.

        alone: there is no other worker and nothing was lost, so a mean of weights is this worker's, to the bit.
        """
        averages = isinstance(self.outer, Outer) and self.outer.averages
        for segment in part.layout.segments:
            name, value = segment.name, mean[segment.start : segment.stop].view(segment.shape)
            if name in self.averaged:
                self._views[name].copy_(value)
            elif alone and averages:
                self._views[name].copy_(self.own(name))
            else:
                self.weights[name].grad = value
        self.optimizer.step()
        for weight in self.weights.values():
            weight.grad = None

    def take(self, part: Part, mix: float) -> None:
        """Go on from the part's anchor, with so much of what was done locally since."""
        for name in part.layout.names:
            own, view = self.own(name), self._views[name]
            own.copy_(view if mix == 0 else torch.lerp(view, own.to(self.dtype), mix))

    @contextmanager
    def shown(self) -> Iterator[None]:
        """Inside, the tensors hold the anchor; afterwards their own values again."""
        kept = {name: self.own(name).clone() for name in self.tensors}
        self.put_local()
        try:
            yield
        finally:
            for name, tensor in kept.items():
                self.own(name).copy_(tensor)

    # -- checkpoints ---------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        by_number = dict(enumerate(self.weights))
        state = self.optimizer.state_dict()
        return {
            "anchor": dict(self._views),
            "outer": {by_number[number]: kept for number, kept in state["state"].items()},
            "outer_options": [
                {key: value for key, value in group.items() if key != "params"} for group in state["param_groups"]
            ],
        }

    def check(self, state: Mapping[str, Any]) -> None:
        """Raise ValueError unless the state is of tensors with these names and shapes."""
        kinds = {"anchor": Mapping, "outer": Mapping, "outer_options": list}
        missing = [key for key, kind in kinds.items() if not isinstance(state.get(key), kind)]
        if missing or not all(map(dense, state["anchor"].values())):
            raise ValueError(f"the state of local steps lacks {', '.join(missing) or 'dense tensors in its anchor'}")
        given = {name: tuple(tensor.shape) for name, tensor in state["anchor"].items()}
        known = {name: tuple(view.shape) for name, view in self._views.items()}
        odd = sorted(name for name in given | known if given.get(name) != known.get(name))
        if odd:
            raise ValueError(
                f"the saved anchor does not fit: {odd[:3]} ({len(odd)} in all) are missing, unknown or of another shape"
            )
        strange = sorted(set(state["outer"]) - set(self.weights))
        if strange or len(state["outer_options"]) != len(self.optimizer.param_groups):
            raise ValueError(f"the saved outer optimizer does not fit: {strange[:3] or 'other parameter groups'}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check(state)
        for name, view in self._views.items():
            view.copy_(state["anchor"][name])
        numbers = {name: number for number, name in enumerate(self.weights)}
        groups = self.optimizer.state_dict()["param_groups"]
        self.optimizer.load_state_dict({
            "state": {numbers[name]: kept for name, kept in state["outer"].items()},
            "param_groups": [
                {**options, "params": group["params"]}
                for options, group in zip(state["outer_options"], groups, strict=True)
            ],
        })  # fmt: skip


def shard(tensor: Tensor) -> Tensor:
    """What of a tensor is here: all of it, or of a DTensor the local shard. Shares its memory."""
    return (tensor.to_local() if hasattr(tensor, "to_local") else tensor).detach()  # type: ignore[attr-defined]


def divide(tensors: Mapping[str, Tensor], parts: int) -> list[list[str]]:
    """The names in so many parts of about equal sizes: the largest first, each to the part that has least."""
    if not isinstance(parts, int) or not 1 <= parts <= len(tensors):
        raise ValueError(f"parts must be 1 to {len(tensors)}, the number of tensors, got {parts!r}")
    chosen: list[list[str]] = [[] for _ in range(parts)]
    sizes = [0] * parts
    for name in sorted(tensors, key=lambda name: -tensors[name].numel()):
        least = min(range(parts), key=lambda part: (sizes[part], len(chosen[part])))
        chosen[least].append(name)
        sizes[least] += tensors[name].numel()
    order = {name: place for place, name in enumerate(tensors)}
    return [sorted(names, key=order.__getitem__) for names in chosen]
