"""How every process of the lab begins: one thread, on its side of the network, in a group, gone with its parent."""

from __future__ import annotations

import ctypes
import datetime
import os
import signal
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from thinwire.lab.network import shaped

# A process that dies is noticed at once, by its closed connections; a slow link is no reason to give up.
PATIENCE_SECONDS = 2 * 3600.0
_PR_SET_PDEATHSIG = 1


def prepare() -> None:
    """Die with the parent, leave Ctrl-C to it, and compute on one thread: several processes share the machine."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)


def join(rank: int, ranks: int, namespace: str | None, folder: Path) -> None:
    """Enter the namespace, if any, and join the others. They meet by a file: no port to find free, no traffic."""
    if namespace is not None:
        shaped.enter(namespace)
    loopback = "lo0" if sys.platform == "darwin" else "lo"
    os.environ["GLOO_SOCKET_IFNAME"] = shaped.INTERFACE if namespace else loopback
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=datetime.timedelta(seconds=PATIENCE_SECONDS),
    )
