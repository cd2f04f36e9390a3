"""Crew: the processes of one job, which a test starts, watches die, and starts again."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from helpers.ranks import free_port
from thinwire.lab.runs import launch
from thinwire.lab.runs.launch import Member, Place


class Crew:
    """A job of `ranks` processes to begin with. All are gone when the block ends."""

    def __init__(self, ranks: int) -> None:
        self._ranks, self._port = ranks, free_port()
        self._stack = ExitStack()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def start(self, rank: int, function: Callable[..., Any], *args: Any) -> Member:
        """`function(*args)` in a process that calls itself `rank`."""
        started = launch.started(_main, 1, rank, self._ranks, self._port, function, args)
        return self._stack.enter_context(started)[0]

    @staticmethod
    def end(*members: Member, seconds: float = 90) -> list[Any]:
        """What each came to: its result, or the traceback or the reason for which it has none."""
        launch.listen(members, seconds=seconds, grace_seconds=None)
        for member in members:
            assert member.exit_code(seconds) is not None
        return [
            each.result if each.failure is None else each.failure.details or each.failure.reason for each in members
        ]


def _main(place: Place, rank: int, ranks: int, port: int, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    return function(*args)
