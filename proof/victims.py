"""A rank of a chaos case: it trains, tells when the moment has come, and waits to be hit if it was quicker."""

from __future__ import annotations

import datetime
import faulthandler
import hashlib
import os
import signal
import threading
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch.distributed as dist

from proof import doors
from thinwire.lab.runs.launch import Place

if TYPE_CHECKING:
    from proof.chaos import Case

STEPS = 60
SETUP, CLOSING = -1, STEPS
STUCK_SECONDS = 60.0  # then a rank shows where its threads are, on standard error
AHEAD = 8  # steps beyond the moment, at most: then the teller waits for the blow


class Teller:
    """Says, on one of the ranks, that the moment has come."""

    def __init__(self, place: Place, case: Case) -> None:
        self._place, self._moment = place, case.moment
        self._tells = place.rank == case.teller
        self._waits = place.rank in (case.teller, case.victim)
        self._dealt = False
        if self._waits:
            signal.signal(signal.SIGCONT, self._go_on)

    def at(self, moment: int) -> None:
        if self._tells and moment == self._moment:
            self._place.send(("moment", self._place.rank, []))
        if self._tells and moment == self._moment + AHEAD:
            self._wait()

    def leaves(self) -> None:
        """Nobody has gone who is yet to be hit."""
        if self._waits:
            self._wait()

    def _go_on(self, *_: object) -> None:
        self._dealt = True

    def _wait(self) -> None:
        """No Event: a handler that comes while the same thread holds its lock would wait for ever."""
        while not self._dealt:
            time.sleep(0.01)


def rank(place: Place, case: Case) -> tuple[float, bytes]:
    """When it had ended, and a digest of its weights."""
    warnings.simplefilter("ignore")  # that a rank was lost is what this is about
    faulthandler.dump_traceback_later(STUCK_SECONDS)
    teller = Teller(place, case)
    weights = b""
    try:
        with _joined(place, case.setting.timeout_seconds):
            teller.at(SETUP)
            with doors.opened(place, case.setting) as trainer:
                for step in range(STEPS if trainer else 0):
                    teller.at(step)
                    trainer.step()  # type: ignore[union-attr]
                if trainer:
                    weights = hashlib.blake2b(trainer.weights().numpy().tobytes()).digest()
                    teller.at(CLOSING)
        ended = time.monotonic()
        teller.leaves()
        return ended, weights
    finally:
        faulthandler.cancel_dump_traceback_later()
        ours = [thread.name for thread in threading.enumerate() if thread.name.startswith("thinwire")]
        place.send(("threads", place.rank, ours))


@contextmanager
def _joined(place: Place, timeout_seconds: float) -> Iterator[None]:
    """As a launcher that leaves survivors alone would: the first rank hosts the store, and takes it along."""
    if place.namespace is not None:
        with place.joined(timeout_seconds):
            yield
        return
    timeout = datetime.timedelta(seconds=timeout_seconds)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    number = place.folder / "port"
    if place.rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, place.ranks, is_master=True, timeout=timeout, wait_for_workers=False)
        (place.folder / "new").write_text(str(store.port))
        (place.folder / "new").rename(number)
    else:
        while not number.exists():
            time.sleep(0.005)
        store = dist.TCPStore("127.0.0.1", int(number.read_text()), place.ranks, timeout=timeout)
    dist.init_process_group("gloo", store=store, rank=place.rank, world_size=place.ranks, timeout=timeout)
    yield
    dist.destroy_process_group()
