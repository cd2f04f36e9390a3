"""Paced links: a ledger that takes as long as a thin wire would. No privileges, one machine.

Every exchange is slowed to latency + bytes / bandwidth. A worker's link carries one byte after the other, so
bytes that are given while others are still on their way wait for those. What the real exchange takes anyway
(on the loopback: little) is not added on top.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from thinwire.ledger import Ledger


class Pace:
    """One worker's thin link: when would the bytes that it was given have arrived?"""

    def __init__(self, bits_per_second: float, latency_seconds: float = 0.0):
        self.bits_per_second = bits_per_second
        self.latency_seconds = latency_seconds
        self._free_at = 0.0

    def send(self, nbytes: float, now: float) -> float:
        """Take the bytes; the time of their arrival."""
        self._free_at = max(self._free_at, now) + nbytes * 8 / self.bits_per_second
        return self._free_at + self.latency_seconds


class PacedLedger(Ledger):
    """Counts like any ledger, and holds whoever waits for the wire until the counted bytes would have come.

    An exchange books bytes with `add(bytes_sent=...)` as it starts them and waits inside
    `timed("wire_seconds")`: that is all it has to do to be paced.
    """

    def __init__(self, pace: Pace):
        super().__init__()
        self._pace = pace
        self._arrival = 0.0

    def add(self, **amounts: float) -> None:
        super().add(**amounts)
        if "bytes_sent" in amounts:
            self._arrival = self._pace.send(amounts["bytes_sent"], time.perf_counter())

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        with super().timed(name):
            yield
            if name == "wire_seconds":
                time.sleep(max(0.0, self._arrival - time.perf_counter()))
