"""run_world: a function on n gloo ranks, each its own process; the first traceback wins, nothing outlives the call."""

from __future__ import annotations

import datetime
import multiprocessing
import os
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from typing import Any

# Forked from a server that has imported torch once: a rank starts in tens of milliseconds instead of seconds.
_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["torch._dynamo", "torch.distributed.checkpoint", "thinwire"])  # DDP imports _dynamo


def run_world(
    function: Callable[..., Any], workers: int, *args: Any, timeout: float = 120, group_timeout: float = 60
) -> list[Any]:
    """[function(*args) on rank 0, on rank 1, ...]. Raises with the traceback of the first rank that failed."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = []
        for rank in range(workers):
            ours, theirs = _context.Pipe(duplex=False)
            process = _context.Process(
                target=_rank, args=(function, args, rank, workers, f"{folder}/store", theirs, group_timeout)
            )
            process.start()
            theirs.close()
            ranks.append((process, ours))
        try:
            return _collect([connection for _, connection in ranks], time.monotonic() + timeout)
        finally:
            for process, _ in ranks:
                process.join(5)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(connections: list[Connection], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(connections):
        waiting = [c for rank, c in enumerate(connections) if rank not in results]
        ready = wait(waiting, timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {[connections.index(c) for c in waiting]} did not end in time")
        for connection in ready:
            rank = connections.index(connection)  # type: ignore[arg-type]
            try:
                fine, value = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                fine, value = False, "the process died without a word"
            if not fine:
                raise RuntimeError(f"rank {rank} failed:\n{value}")
            results[rank] = value
    return [results[rank] for rank in range(len(connections))]


def _rank(function, args, rank, workers, store, connection, group_timeout) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(workers))
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{store}",
            rank=rank,
            world_size=workers,
            timeout=datetime.timedelta(seconds=group_timeout),
        )
        value = function(*args)
        dist.barrier()
        dist.destroy_process_group()
        connection.send_bytes(pickle.dumps((True, value)))  # by value: the sender may be gone when it is read
    except BaseException:
        connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
