"""Paced links: a transport that takes as long as a thin wire would. No privileges, one machine.

Every exchange arrives after latency + bytes / bandwidth. A worker's link carries one byte after the other, so bytes
that are given while others are still on their way wait for those; latency is no occupation of the link, so what
follows may leave meanwhile. What the real exchange takes anyway (on the loopback: little) is not added on top.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

from thinwire.exchange.collectives import Collective, Started
from thinwire.exchange.transport import Transport


class Pace:
    """One direction of a thin link: when would the bytes that it was given have arrived?"""

    def __init__(self, bits_per_second: float, latency_seconds: float = 0.0):
        self.bits_per_second = bits_per_second
        self.latency_seconds = latency_seconds
        self._free_at = 0.0

    def send(self, nbytes: float, now: float) -> float:
        """Take the bytes; the time of their arrival."""
        self._free_at = max(self._free_at, now) + nbytes * 8 / self.bits_per_second
        return self._free_at + self.latency_seconds


class Paced(Transport):
    """Starts and counts like any transport, and whoever waits for something waits until it would have come.

    up: what this worker sends at. down: what a server's answers come at; None: as fast as they are there.
    """

    def __init__(self, up: Pace, down: Pace | None = None):
        super().__init__()
        self._up, self._down = up, down
        self._heard_at = 0.0  # when all that was sent so far has arrived: no answer begins before

    def launch(self, collective: Collective) -> Started:
        """Each is due when its own bytes are there, whatever is sent after them."""
        work, amounts = super().launch(collective), collective.amounts()
        now = due = time.perf_counter()
        if amounts.get("bytes_sent"):
            due = self._heard_at = self._up.send(amounts["bytes_sent"], now)
        elif self._down is not None and amounts.get("bytes_received"):
            due = self._down.send(amounts["bytes_received"], max(now, self._heard_at))
        return _Due(work, due)


@dataclass(frozen=True)
class _Due:
    """Work that has ended when it really has, and not before `at`."""

    work: Started
    at: float

    def wait(self) -> None:
        self.work.wait()
        time.sleep(max(0.0, self.at - time.perf_counter()))
