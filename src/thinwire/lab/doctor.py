"""What `thinwire doctor` looks at: versions, kernels, and what this machine allows."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from dataclasses import dataclass
from importlib.metadata import version

import torch
import torch.distributed as dist

from thinwire.kernels import native


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
        *_network(),
    ]


def _kernels() -> Finding:
    follows = "" if native.module() else "right, and many times slower; reinstall with a C++20 compiler at hand"
    return Finding("kernels", native.status(), bool(native.module()), follows)


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


def _network() -> list[Finding]:
    root = os.geteuid() == 0
    ip, tc = shutil.which("ip"), shutil.which("tc")
    tools = Finding("iproute2 (ip, tc)", "found" if ip and tc else "missing", bool(ip and tc),
                    "" if ip and tc else "Debian: apt-get install iproute2")  # fmt: skip
    if not root or not ip or not tc:
        why = "not root" if not root else "iproute2 is missing"
        return [
            tools,
            Finding("network namespaces", f"not usable: {why}", False, "the lab paces instead of shaping"),
        ]
    name = f"tw-doctor-{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return [
            tools,
            Finding("network namespaces", made.stderr.strip(), False, "the lab paces instead of shaping"),
        ]
    try:
        shape = [
            "tc",
            "qdisc",
            "add",
            "dev",
            "lo",
            "root",
            "tbf",
            "rate",
            "100mbit",
            "burst",
            "64kb",
            "latency",
            "50ms",
        ]
        tbf = subprocess.run(["ip", "netns", "exec", name, *shape], capture_output=True, text=True)
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)
    shaped = tbf.returncode == 0
    return [
        tools,
        Finding("network namespaces", "usable", True),
        Finding("shaping (tc tbf)", "usable" if shaped else tbf.stderr.strip(), shaped,
                "" if shaped else "the lab paces instead of shaping"),
    ]  # fmt: skip
