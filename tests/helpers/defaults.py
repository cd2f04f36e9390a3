"""What PyTorch's defaults must not touch: digests of every scheme's and mixer's means, one line for each way to ask.

`python -m helpers.defaults` prints, for each default, the digests under it and then under PyTorch's own, each in a
process with cold caches: what is made under one default and kept must be right under another.
"""

import hashlib
import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from helpers.specs import by_scheme, every_spec
from thinwire import Simulation
from thinwire.gossip import graphs, mixers
from thinwire.gossip.simulation import GossipSimulation
from thinwire.kernels import backends

DEFAULTS = ("none", "float64", "bfloat16", "meta")


def digests(references: bool = True) -> dict[str, str]:
    """{what was asked: the digest of the answer}"""
    asked = {spec: _digest(_means(spec, steps=2)) for spec in every_spec()}
    if references:
        with _references():
            asked |= {f"{name}, by the references": _digest(_means(name, steps=1)) for name in by_scheme()}
    return asked | {f"gossip by {name}": _digest(_mixed(name)) for name in mixers.registry()}


@contextmanager
def _references() -> Iterator[None]:
    fast, backends.FAST = backends.FAST, {}
    backends._found.cache_clear()
    yield
    backends.FAST = fast
    backends._found.cache_clear()


def _means(spec: str, steps: int) -> list[torch.Tensor]:
    group = Simulation(spec, workers=3, seed=1, feedback=True)
    return [group.reduce([{"w": _noise((40, 60), 10 * step + n)} for n in range(3)])["w"] for step in range(steps)]


def _mixed(mixer: str) -> list[torch.Tensor]:
    replicas = [{"w": _noise((40, 60), n), "b": _noise((60,), n)} for n in range(3)]
    simulation = GossipSimulation(replicas, graphs.ring(3), mixer)
    for _ in range(2):
        simulation.mix()
    return [tensor for replica in replicas for tensor in replica.values()]


def _noise(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu")


def _digest(tensors: list[torch.Tensor]) -> str:
    assert all(t.dtype is torch.float32 and t.device.type == "cpu" for t in tensors)
    return hashlib.sha256(b"".join(t.numpy().tobytes() for t in tensors)).hexdigest()[:16]


def _under(default: str) -> list[dict[str, str]]:
    if default == "none":
        return [digests()]
    if default == "meta":
        with torch.device("meta"):
            found = digests()
    else:
        torch.set_default_dtype(getattr(torch, default))
        found = digests()
        torch.set_default_dtype(torch.float32)
    return [found, digests(references=False)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    for default in DEFAULTS:
        if (child := os.fork()) == 0:
            try:
                print(json.dumps({default: _under(default)}), flush=True)
                os._exit(0)
            except BaseException:
                sys.excepthook(*sys.exc_info())
                os._exit(1)
        _, status = os.waitpid(child, 0)
        if status:
            sys.exit(f"failed under the default {default}")
