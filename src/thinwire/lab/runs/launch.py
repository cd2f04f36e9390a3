"""The one place that starts processes: `ranks` of them carry out a function together, and nothing outlives the call.

Every process computes on one thread, leaves Ctrl-C to its parent and dies with it. Its messages, and how it ended, come
through a pipe; whoever failed first is the reason, for one process's end makes the others fail.
"""

from __future__ import annotations

import ctypes
import datetime
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from thinwire.lab.network import shaped

# A process that dies is noticed at once, by its closed connections; a slow link is no reason to give up.
PATIENCE_SECONDS = 2 * 3600.0
GRACE_SECONDS = 2.0  # after the first failure that is seen: so long we look for one that came before it
CONTEXT = multiprocessing.get_context("forkserver")
# Imported once, by the server that processes are forked from. DDP imports _dynamo on first use, which takes a second.
PRELOAD = ("torch._dynamo", "thinwire.lab.runs.worker")
_PR_SET_PDEATHSIG = 1
_ASKING = threading.Lock()  # starting a process asks after all others; of two threads that do, one would learn nothing


@dataclass(frozen=True)
class Place:
    """A process's place in its group: what it knows before it has joined the others."""

    rank: int
    ranks: int
    folder: Path  # that all of the group share
    namespace: str | None  # of its link, where links are shaped
    pipe: Connection

    def send(self, message: Any) -> None:
        """To the parent, while the function goes on."""
        self._put("message", message)

    @contextmanager
    def joined(self, timeout_seconds: float = PATIENCE_SECONDS) -> Iterator[None]:
        """In the namespace, if any, and in a group, which a file brings together: no port to find, no traffic."""
        if self.namespace is not None:
            shaped.enter(self.namespace)
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        os.environ["GLOO_SOCKET_IFNAME"] = shaped.INTERFACE if self.namespace else loopback
        dist.init_process_group(
            "gloo",
            init_method=f"file://{self.folder}/rendezvous",
            rank=self.rank,
            world_size=self.ranks,
            timeout=datetime.timedelta(seconds=timeout_seconds),
        )
        yield
        dist.destroy_process_group()

    def _put(self, kind: str, content: Any) -> None:
        self.pipe.send_bytes(pickle.dumps((kind, content)))  # by value: the sender may be gone when it is read


@dataclass(frozen=True)
class Failure:
    """Why a process gave up, and when."""

    rank: int
    at: float  # seconds, on the clock that all processes of a machine share
    reason: str  # one line
    details: str = ""  # its traceback


@dataclass
class Member:
    """A started process, as its parent sees it. It has ended when it has sent its result, or never will."""

    rank: int
    process: BaseProcess
    pipe: Connection
    ended: bool = False
    result: Any = None
    failure: Failure | None = None

    def exit_code(self, seconds: float | None = None) -> int | None:
        """Waits for the process to end; None: it had not, within so many seconds."""
        wait([self.process.sentinel], seconds)
        with _ASKING:
            return self.process.exitcode

    def receive(self, on_message: Callable[[Any], object]) -> None:
        """Take the next message; the end of the pipe is the end of the process."""
        try:
            kind, content = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, ConnectionError):
            # Before any failure that it caused.
            kind, content = "failure", Failure(self.rank, 0.0, _how_it_ended(self.exit_code()))
        if kind == "message":
            on_message(content)
        elif kind == "result":
            self.ended, self.result = True, content
        else:
            self.ended, self.failure = True, content


@contextmanager
def started(
    function: Callable[..., Any], ranks: int, *arguments: Any, namespaces: Sequence[str] | None = None
) -> Iterator[list[Member]]:
    """`function(place, *arguments)` in a process for every rank; all of them are gone when the block ends.

    namespaces: of every rank's link, where links are shaped.
    """
    CONTEXT.set_forkserver_preload(list(PRELOAD))
    members: list[Member] = []
    with tempfile.TemporaryDirectory(prefix="thinwire-") as folder:
        try:
            for rank in range(ranks):
                ours, theirs = CONTEXT.Pipe(duplex=False)
                place = Place(rank, ranks, Path(folder), namespaces[rank] if namespaces else None, theirs)
                process = CONTEXT.Process(target=_main, args=(place, function, arguments), daemon=True)
                with _ASKING:
                    process.start()
                theirs.close()
                members.append(Member(rank, process, ours))
            yield members
        finally:
            for member in members:
                member.process.kill()
                member.exit_code()
                member.pipe.close()


def listen(
    members: Sequence[Member],
    *,
    on_message: Callable[[Any], object] = lambda message: None,
    seconds: float | None = None,
    grace_seconds: float | None = GRACE_SECONDS,
) -> Failure | None:
    """Take in what members send until all have ended; the first failure, if any.

    seconds: raise TimeoutError after so many.
    grace_seconds: after a failure, how much longer to listen to the others; None: to their end.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    while waiting := [member for member in members if not member.ended]:
        failing = grace_seconds is not None and any(member.failure for member in members)
        left = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait([member.pipe for member in waiting], grace_seconds if failing else left)
        if not ready:
            if failing:
                break
            raise TimeoutError(f"ranks {[member.rank for member in waiting]} did not end in {seconds:g} s")
        for member in waiting:
            if member.pipe in ready:
                member.receive(on_message)
    return min((member.failure for member in members if member.failure), key=lambda failure: failure.at, default=None)


def on_ranks(
    function: Callable[..., Any],
    ranks: int,
    *arguments: Any,
    namespaces: Sequence[str] | None = None,
    seconds: float | None = None,
    on_message: Callable[[Any], object] = lambda message: None,
) -> list[Any]:
    """[function(place, *arguments) on rank 0, on rank 1, ...]. RuntimeError with the first traceback, if one failed."""
    with started(function, ranks, *arguments, namespaces=namespaces) as members:
        failure = listen(members, on_message=on_message, seconds=seconds)
        if failure is not None:
            raise RuntimeError(f"rank {failure.rank} {failure.reason}\n{failure.details}".rstrip())
        return [member.result for member in members]


def share_out(
    function: Callable[..., Any],
    jobs: Sequence[tuple[Any, ...]],
    on_result: Callable[[int, Any], object],
    *,
    processes: int | None = None,
) -> None:
    """function(*job) of every job, several at once; on_result(number of the job, result) of each as it ends.

    processes: None: one for each core. 1: this one, on as many threads as it has.
    """
    count = min(len(jobs), os.cpu_count() or 1 if processes is None else processes)
    if processes == 1:
        for number, job in enumerate(jobs):
            on_result(number, function(*job))
    elif jobs:
        packed = pickle.dumps((function, jobs))  # by value: data sets are larger than some machines' shared memory
        on_ranks(_take_turns, count, packed, on_message=lambda found: on_result(*found))


def _take_turns(place: Place, packed: bytes) -> None:
    function, jobs = pickle.loads(packed)
    for number in range(place.rank, len(jobs), place.ranks):
        place.send((number, function(*jobs[number])))


def _main(place: Place, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    try:
        place._put("result", function(place, *arguments))
    except BaseException as error:
        reason = " ".join(f"{type(error).__name__}: {error}".split())[:500]
        place._put("failure", Failure(place.rank, time.monotonic(), f"failed: {reason}", traceback.format_exc()))
        raise SystemExit(1) from None


def _how_it_ended(exitcode: int | None) -> str:
    if exitcode is not None and exitcode < 0:
        return f"was killed by {signal.Signals(-exitcode).name}"
    return f"ended with exit code {exitcode} and no result"
