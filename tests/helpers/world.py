"""run_world: a function on n gloo ranks, each its own process; the first traceback wins, nothing outlives the call."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from thinwire.lab.runs import launch
from thinwire.lab.runs.launch import Place


def run_world(
    function: Callable[..., Any], workers: int, *args: Any, timeout: float = 120, group_timeout: float = 60
) -> list[Any]:
    """[function(*args) on rank 0, on rank 1, ...]. Raises with the traceback of the first rank that failed."""
    return launch.on_ranks(_rank, workers, function, args, group_timeout, seconds=timeout)


def _rank(place: Place, function: Callable[..., Any], args: tuple[Any, ...], group_timeout: float) -> Any:
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.ranks))
    with place.joined(group_timeout):
        value = function(*args)
        dist.barrier()
        return value
