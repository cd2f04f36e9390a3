"""A group of processes on this machine that carry out one function together, over a network of the lab.

Nothing outlives `gather`: workers are killed when it ends, and die with their parent.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import tempfile
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch.distributed as dist

from thinwire.exchange.allreduce import AllReduce
from thinwire.lab.network import network as networks
from thinwire.lab.network import shaped
from thinwire.lab.network.network import Network
from thinwire.lab.network.paced import Pace, Paced
from thinwire.lab.runs import process


def gather(function: Callable[..., Any], arguments: tuple[Any, ...], *, workers: int, network: Network) -> list[Any]:
    """[function(exchange, *arguments) on worker 0, on worker 1, ...], where `exchange()` makes one over the network.

    Raises RuntimeError with the reason of the first worker that failed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(
        ["thinwire.lab.runs.launch", "torch._dynamo"]
    )  # DDP imports _dynamo, which takes a second
    with (
        shaped.Shaped(network, workers) if network.mode == "shaped" else contextlib.nullcontext() as links,
        tempfile.TemporaryDirectory(prefix="thinwire-") as folder,
    ):
        members = []
        try:
            for worker in range(workers):
                ours, theirs = context.Pipe(duplex=False)
                namespace = links.namespaces[worker] if links else None
                member = context.Process(
                    target=_main,
                    args=(function, arguments, worker, workers, network, namespace, Path(folder), theirs),
                    daemon=True,
                )
                member.start()
                theirs.close()
                members.append((member, ours))
            return _listen([pipe for _, pipe in members])
        finally:
            for member, pipe in members:
                member.kill()
                member.join()
                pipe.close()


def _listen(pipes: list[Connection]) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(pipes):
        waiting = [pipe for worker, pipe in enumerate(pipes) if worker not in results]
        for pipe in wait(waiting):
            worker = pipes.index(pipe)  # type: ignore[arg-type]
            try:
                fine, result = pipe.recv()  # type: ignore[union-attr]
            except (EOFError, ConnectionError):
                fine, result = False, "ended without a result"
            if not fine:
                raise RuntimeError(f"worker {worker} {result}")
            results[worker] = result
    return [results[worker] for worker in range(len(pipes))]


def _main(
    function: Callable[..., Any], arguments: tuple[Any, ...], worker: int, workers: int,
    network: Network, namespace: str | None, folder: Path, report: Connection,
) -> None:  # fmt: skip
    process.prepare()
    try:
        process.join(worker, workers, namespace, folder)
        result = function(lambda: _exchange(network, worker), *arguments)
        dist.barrier()
        dist.destroy_process_group()
        report.send((True, result))
    except Exception as error:
        report.send((False, "failed: " + " ".join(f"{type(error).__name__}: {error}".split())[:500]))
        raise SystemExit(1) from None


def _exchange(network: Network, worker: int) -> AllReduce:
    if network.mode != "paced":
        return AllReduce()
    return AllReduce(transport=Paced(Pace(network.rate_of(worker).up, network.latency_seconds)))


def resolved(text: str, workers: int) -> Network:
    """The network that `text` describes, as this machine can have it."""
    network = networks.parse(text)
    network.check(workers)
    return networks.resolve(network, shaped.why_not() if network.mode in ("shaped", "auto") else None)
