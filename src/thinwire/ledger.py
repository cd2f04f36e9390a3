"""Ledger: counts bytes, messages and seconds where they happen."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from typing import Protocol


class Started(Protocol):
    """What can be waited for."""

    def wait(self) -> object: ...


class Ledger:
    """A running account of one worker. Written by the lane, read by anyone.

    bytes_given: the bytes of the tensors given to collectives.
    bytes_sent: the bytes of them that leave this worker, by the way each collective travels (see exchange/collectives).
    messages: the number of collectives.
    sends: the messages between two workers that they are made of, as gloo cuts them; each has headers of its own.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[str, float] = defaultdict(float)

    def add(self, **amounts: float) -> None:
        with self._lock:
            for name, amount in amounts.items():
                self._totals[name] += amount

    def started(self, work: Started, **amounts: float) -> Started:
        """Book what was just started; what to wait for until it has arrived."""
        self.add(**amounts)
        return work

    def timed(self, name: str) -> _Timer:
        """Add the seconds spent inside to `name`."""
        return _Timer(self, name)

    def totals(self) -> dict[str, float]:
        with self._lock:
            return dict(self._totals)

    def load(self, totals: dict[str, float]) -> None:
        with self._lock:
            self._totals.clear()
            self._totals.update(totals)


class _Timer:
    """A context manager. Not made by contextlib: every bucket enters several, and those cost five times as much."""

    __slots__ = ("_began", "_ledger", "_name")

    def __init__(self, ledger: Ledger, name: str):
        self._ledger = ledger
        self._name = name

    def __enter__(self) -> None:
        self._began = time.perf_counter()

    def __exit__(self, *exception: object) -> None:
        self._ledger.add(**{self._name: time.perf_counter() - self._began})
