"""Transport: the one seam to the wire. What leaves a worker is started, and counted, here."""

from __future__ import annotations

from thinwire.core.ledger import Ledger
from thinwire.exchange.collectives import Collective, Started


class Transport:
    """Starts collectives and counts them.

    Another wire is another transport: the lab's are as slow as asked for, or made up. They override `launch`.
    """

    def __init__(self, ledger: Ledger | None = None) -> None:
        self.ledger: Ledger = ledger or Ledger()

    def start(self, collective: Collective) -> Started:
        """Start and count it; what to wait for."""
        started = self.launch(collective)
        self.ledger.add(messages=1, **collective.amounts())
        return started

    def launch(self, collective: Collective) -> Started:
        """Start it; who calls this counts by itself."""
        return collective.start()
