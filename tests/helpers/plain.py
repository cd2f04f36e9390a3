"""run_plain: a function on plainly launched env:// ranks, of which some may die; nobody kills the survivors."""

from __future__ import annotations

import contextlib
import datetime
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from helpers.ranks import free_port
from thinwire.lab.runs import launch
from thinwire.lab.runs.launch import Place


@dataclass(frozen=True)
class End:
    """How a rank ended: its exit code, and its result or its traceback."""

    code: int | None
    value: Any = None
    error: str = ""


def run_plain(
    function: Callable[..., Any], ranks: int, *args: Any, stuck: tuple[int, ...] = (), limit: float = 90
) -> list[End]:
    """`function(*args)` on every rank. The `stuck` are not waited for; whoever is left at the end is killed."""
    deadline = time.monotonic() + limit
    with launch.started(_rank, ranks, function, args, free_port()) as members:
        expected = [member for member in members if member.rank not in stuck]
        with contextlib.suppress(TimeoutError):
            launch.listen(expected, seconds=limit, grace_seconds=None)
        for member in expected:
            member.process.join(max(0.1, deadline - time.monotonic()))
        return [End(None) if member.rank in stuck else _end(member) for member in members]


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _end(member: launch.Member) -> End:
    code, failure = member.process.exitcode, member.failure
    if failure is not None:
        return End(code, error=failure.details or failure.reason)
    return End(code, member.result, error="" if member.ended else "did not end in time")


def _rank(place: Place, function: Callable[..., Any], args: tuple[Any, ...], port: int) -> Any:
    os.environ.update(RANK=str(place.rank), WORLD_SIZE=str(place.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
    return function(*args)
