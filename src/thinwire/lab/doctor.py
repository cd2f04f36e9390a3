"""What `thinwire doctor` looks at: versions, kernels, and what this machine allows."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import version

import torch
import torch.distributed as dist

from thinwire.kernels import native
from thinwire.lab.network import shaped

SLOW = (
    "right, but many times slower: install a C++20 compiler (Debian: apt-get install g++), then thinwire again "
    "(pip install --force-reinstall --no-deps; in a checkout: make clean, and what you made before)"
)


@dataclass(frozen=True)
class Finding:
    what: str
    found: str
    fine: bool
    follows: str = ""


def examine() -> list[Finding]:
    return [
        Finding("thinwire", version("thinwire"), True),
        Finding("Python", platform.python_version(), True),
        Finding("PyTorch", torch.__version__, True),
        _kernels(),
        _backends(),
        _threads(),
        _accelerator(),
        _network(),
    ]


def _kernels() -> Finding:
    if native.module():
        return Finding("kernels", native.status(), True)
    return Finding("kernels", native.status(), False, SLOW)


def _backends() -> Finding:
    names = [n for n, there in (("gloo", dist.is_gloo_available()), ("nccl", dist.is_nccl_available())) if there]
    return Finding("torch.distributed", ", ".join(names) or "no backend", bool(names))


def _threads() -> Finding:
    cores, threads = len(os.sched_getaffinity(0)), torch.get_num_threads()
    follows = "several workers on this machine want OMP_NUM_THREADS=1 each" if threads > 1 else ""
    return Finding("cores / threads", f"{cores} / {threads}", True, follows)


def _accelerator() -> Finding:
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name(0)
        return Finding("CUDA", name, True, "CUDA tensors run on the PyTorch references")
    return Finding("CUDA", "none", True, "training runs on the CPU")


def _network() -> Finding:
    why_not = shaped.why_not()
    follows = "" if why_not is None else "the lab paces instead of shaping"
    return Finding("shaped networks", f"not usable: {why_not}" if why_not else "usable", why_not is None, follows)
