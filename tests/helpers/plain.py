"""run_plain: a function on plainly launched env:// ranks, of which some may die; nobody kills the survivors."""

from __future__ import annotations

import datetime
import os
import pickle
import signal
import socket
import time
import traceback
from dataclasses import dataclass
from typing import Any

from helpers.world import _context


@dataclass(frozen=True)
class End:
    """How a rank ended: its exit code, and its result or its traceback."""

    code: int | None
    value: Any = None
    error: str = ""


def run_plain(function, ranks: int, *args: Any, stuck: tuple[int, ...] = (), limit: float = 90) -> list[End]:
    """`function(*args)` on every rank. The `stuck` are not waited for; whoever is left at the end is killed."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    started = []
    for rank in range(ranks):
        ours, theirs = _context.Pipe(duplex=False)
        process = _context.Process(target=_rank, args=(function, args, rank, ranks, port, theirs))
        process.start()
        theirs.close()
        started.append((process, ours))
    ends, deadline = [], time.monotonic() + limit
    try:
        for rank, (process, connection) in enumerate(started):
            if rank in stuck:
                ends.append(End(None))
                continue
            fine, value = False, "died without a word, or did not end in time"
            try:
                if connection.poll(max(0.0, deadline - time.monotonic())):
                    fine, value = pickle.loads(connection.recv_bytes())
            except EOFError:
                pass
            process.join(max(0.1, deadline - time.monotonic()))
            ends.append(End(process.exitcode, value) if fine else End(process.exitcode, error=value))
    finally:
        for process, _ in started:
            if process.is_alive():
                process.kill()
            process.join()
    return ends


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _rank(function, args, rank, ranks, port, connection) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    try:
        dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
        connection.send_bytes(pickle.dumps((True, function(*args))))
    except BaseException:
        connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
        raise SystemExit(1) from None
