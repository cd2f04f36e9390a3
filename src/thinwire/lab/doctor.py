"""What `thinwire doctor` looks at: versions, kernels, and what this machine allows."""

from __future__ import annotations

import os
import platform
from dataclasses import dataclass
from importlib.metadata import version

import torch
import torch.distributed as dist

from thinwire.kernels import native, reference
from thinwire.kernels.backends import fast, implementation
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
        _operations("cpu"),
        _operations("cuda"),
        _backends(),
        _threads(),
        _accelerator(),
        _network(),
    ]


def _kernels() -> Finding:
    if native.module():
        return Finding("kernels", native.status(), True)
    return Finding("kernels", native.status(), False, SLOW)


HALVES = (torch.float32, torch.float16)
DTYPES = {"narrow": HALVES, "scale_cast": HALVES, "widen": HALVES[::-1], "cast_add": HALVES[::-1]}


def backends_of(device: str) -> dict[str, str]:
    """{operation: what does it on such a device}: for float32, and for casts between that and float16."""
    names = sorted(set(reference.__all__) - {"index_bytes"})
    found = {}
    for name in names:
        dtypes = DTYPES.get(name, (torch.float32,))
        chosen = implementation(getattr(reference, name), torch.device(device), *dtypes)
        found[name] = chosen.__module__.removeprefix("thinwire.kernels.backends.").split(".")[0]
    return found


def _operations(device: str) -> Finding:
    """Also where there is no such device: what would do its work."""
    found = backends_of(device)
    by_backend = {
        backend: [name for name in found if found[name] == backend] for backend in dict.fromkeys(found.values())
    }
    counts = [f"{len(names)} {backend}" for backend, names in sorted(by_backend.items())]
    slow, why = by_backend.get("reference", []), fast(device)[1]
    would = "" if device == "cpu" or torch.cuda.is_available() else "would take "
    if len(slow) == len(found):
        hint = "pip install thinwire[gpu]" if device == "cuda" else "see kernels"
        return Finding(f"operations on {device}", would + "all reference", device == "cuda", why and f"{why}: {hint}")
    return Finding(
        f"operations on {device}", would + ", ".join(counts), True, f"reference: {', '.join(slow)}" if slow else ""
    )


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
        return Finding("CUDA", name, True)
    return Finding("CUDA", "none", True, "training runs on the CPU")


def _network() -> Finding:
    why_not = shaped.why_not()
    follows = "" if why_not is None else "the lab paces instead of shaping"
    return Finding("shaped networks", f"not usable: {why_not}" if why_not else "usable", why_not is None, follows)
