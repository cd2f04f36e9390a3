"""What a lane's thread leaves behind. How it drives conversations is shown by every test that trains."""

import threading
import time
import weakref
from functools import partial

import torch

from thinwire.exchange.lane import Threaded
from thinwire.exchange.transport import Transport


class Buffer:
    """Stands for memory of DDP's that a conversation works on."""


def _talk(buffer, go_on, scratch):
    go_on.wait(60)
    return torch.zeros(1)
    yield  # a conversation that asks for nothing


def test_an_idle_lane_holds_no_buffer():
    """DDP makes its buckets anew after the first step: were the old ones held, there would be two of each."""
    lane, buffer, go_on = Threaded(Transport(), "test"), Buffer(), threading.Event()
    alive = weakref.ref(buffer)
    job = lane.submit(partial(_talk, buffer, go_on), last=True, done=lambda error: None)
    assert not job.wait(0.01) and not job.ended
    go_on.set()
    assert job.wait(60) and job.ended and job.error is None
    del buffer, job
    deadline = time.monotonic() + 60
    while alive() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert alive() is None
    lane.close()
