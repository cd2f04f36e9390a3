"""Works that a wire had in its last step, held for a moment after it was closed.

A group's own thread lets go of a work a moment after the answer, later still where the machine is busy. Is nobody else
left by then to hold its tensors, that thread frees them, for which it needs the interpreter; and once that is on its
way out, whoever asks for it is ended, and the process aborts. So they are held until the thread has surely let go, and
a process that would be gone before waits for that.
"""

from __future__ import annotations

import atexit
import time
from collections import deque
from collections.abc import Sequence

from thinwire.exchange.collectives import Started

SECONDS = 0.25

_left: deque[tuple[float, Sequence[Started]]] = deque()  # oldest first
_never_answered: list[Started] = []


def add(answered: Sequence[Started], abandoned: Sequence[Started]) -> None:
    """`abandoned`: nobody waited for these, and when a thread will let go of them nobody knows."""
    now = time.monotonic()
    while _left and _left[0][0] < now - SECONDS:
        _left.popleft()
    if answered:
        _left.append((now, answered))
    _never_answered.extend(abandoned)


def let_go() -> None:
    """Wait until the threads have surely let go of all that was answered, and let go of it, too: for who counts what is
    left of a wire."""
    _outlive()
    _left.clear()


@atexit.register  # and so called after all that is registered by those who import this
def _outlive() -> None:
    if _left:
        time.sleep(max(0.0, _left[-1][0] + SECONDS - time.monotonic()))
