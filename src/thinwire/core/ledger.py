"""Ledger: counts bytes, messages and seconds where they happen."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager


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

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Add the seconds spent inside to `name`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self.add(**{name: time.perf_counter() - began})

    def totals(self) -> dict[str, float]:
        with self._lock:
            return dict(self._totals)

    def load(self, totals: dict[str, float]) -> None:
        with self._lock:
            self._totals.clear()
            self._totals.update(totals)
