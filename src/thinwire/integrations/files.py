"""One file per rank in a checkpoint's folder, since every rank has a residual of its own.

    thinwire.rank0003.pt = {"ranks": how many there are, "wire": the rank's state_dict()}

At another number of ranks all files are read, and `thinwire.checkpoint.merge` divides what is owed.
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire import checkpoint
from thinwire.exchange import objects
from thinwire.reducer import Reducer


def save(wire: Reducer, folder: str | Path, name: str = "thinwire") -> None:
    """Every rank calls it. A file is there whole or not at all."""
    path = _path(folder, name, dist.get_rank())
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_suffix(".unfinished")
    torch.save({"ranks": dist.get_world_size(), "wire": wire.state_dict()}, unfinished)
    os.replace(unfinished, path)


def load(wire: Reducer, folder: str | Path, name: str = "thinwire") -> None:
    """Every rank calls it, and all raise alike if one cannot. Where no rank finds anything, all begin anew."""
    own, first = (_path(folder, name, rank) for rank in (dist.get_rank(), 0))
    said = objects.all_gather_objects(own.exists() or first.exists(), _everyone())
    if not any(said):
        warnings.warn(
            f"{folder} was saved without thinwire: what is owed begins at zero, and random rounding at step 0",
            stacklevel=2,
        )
        return
    problem = ""
    try:
        wire.load_state_dict(_state(folder, name, own if own.exists() else first))
    except Exception as error:
        problem = str(error) or type(error).__name__
    said = objects.all_gather_objects([problem, wire.step], _everyone())
    for rank, (theirs, _) in enumerate(said):
        if theirs:
            raise ValueError(f"rank {rank} cannot resume from {folder}: {theirs}")
    steps = [step for _, step in said]
    if len(set(steps)) > 1:  # somebody was killed while the folder was written anew
        raise ValueError(f"the files in {folder} are of different steps, by rank: {steps[:8]}")


def _state(folder: str | Path, name: str, path: Path) -> Any:
    saved = _read(path)
    ranks, here = saved["ranks"], dist.get_world_size()
    if ranks == here:
        return saved["wire"]
    missing = [rank for rank in range(ranks) if not _path(folder, name, rank).exists()]
    if missing:
        raise ValueError(f"saved by {ranks} ranks, resumed by {here}: the files of ranks {missing[:4]} are missing")
    return checkpoint.merge([_read(_path(folder, name, rank))["wire"] for rank in range(ranks)])


def _read(path: Path) -> dict[str, Any]:
    saved = torch.load(path, weights_only=True, map_location="cpu")
    if not isinstance(saved, dict) or not {"ranks", "wire"} <= set(saved) or not isinstance(saved["ranks"], int):
        raise ValueError(f"{path.name} is not one of thinwire's")
    return saved


def _path(folder: str | Path, name: str, rank: int) -> Path:
    return Path(folder) / f"{name}.rank{rank:04d}.pt"


def _everyone() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group
