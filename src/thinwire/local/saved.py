"""What a saved state of local steps must hold."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from thinwire.local.anchor import Anchor

# What a state says of rounds, beside the anchor.
KINDS: dict[str, type] = {
    "attempts": int, "round": int, "at": int, "made": list, "under_way": int, "left": int, "mean": Tensor,
    "void_rounds": int, "told": list,
}  # fmt: skip


def check(local: object, anchor: Anchor) -> None:
    """Raise ValueError unless this is what `LocalSteps.state_dict` makes for the parts of this anchor."""
    if not isinstance(local, Mapping):
        raise ValueError(f"the state's part 'local' cannot be {type(local).__name__}")
    for key, kind in KINDS.items():
        if not isinstance(local.get(key), kind):
            raise ValueError(f"the state of local steps has no {kind.__name__} {key!r}")
    if not isinstance(local.get("length", 1), int):
        raise ValueError(f"the state of local steps has a round of {local['length']!r} steps")
    anchor.check(local)
    parts, room = len(anchor.parts), anchor.room.numel()
    under_way = local["under_way"] >= 0
    if len(local["made"]) != parts or local["under_way"] >= parts or (under_way and local["mean"].numel() != room):
        raise ValueError(
            f"the state is of {len(local['made'])} parts, here are {parts}: parts= and delay= must be equal"
        )
