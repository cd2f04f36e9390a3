"""Traffic of schemes on a loopback interface that nobody else uses: `python -m helpers.loopback SPEC...`, in tests/."""

import ctypes
import fcntl
import json
import os
import socket
import struct
import sys

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from helpers.world import run_world

ENTRIES = 1_500_000
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1


def move_to_own_network() -> None:
    """A network namespace of this process and its children, with loopback up."""
    flags = CLONE_NEWNET if os.geteuid() == 0 else CLONE_NEWNET | CLONE_NEWUSER
    if ctypes.CDLL(None, use_errno=True).unshare(flags):
        raise OSError(ctypes.get_errno(), "cannot make a network namespace")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", IFF_UP))


def seen() -> int:
    """The bytes that loopback has sent."""
    with open("/proc/net/dev") as file:
        line = next(line for line in file if line.strip().startswith("lo:"))
    return int(line.split()[9])


def steps(spec: str) -> tuple[int, float]:
    """(bytes that loopback saw, bytes that this rank says it sent) in five steps of one large tensor."""
    model = DDP(torch.nn.Linear(1500, ENTRIES // 1500, bias=False), bucket_cap_mb=25)
    with tw.attach(model, spec) as wire:
        model(torch.randn(4, 1500)).sum().backward()  # makes connections, rebuilds buckets
        dist.barrier()
        before, sent = seen(), wire.stats()["bytes_sent"]
        dist.barrier()
        for _ in range(5):
            model(torch.randn(4, 1500)).sum().backward()
        dist.barrier()
        return seen() - before, wire.stats()["bytes_sent"] - sent


if __name__ == "__main__":
    move_to_own_network()
    print(json.dumps({f"{spec} {n}": run_world(steps, n, spec) for spec in sys.argv[1:] for n in (2, 4)}))
