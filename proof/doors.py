"""The ways to train that chaos and soak put under load, each on a network of a few thousand weights."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from thinwire.core.scheme import Codec
from thinwire.lab.runs.launch import Place

SCHEMES = ("fp32", "fp16", "qsgd(bits=4)", "topk(density=0.01)", "powersgd", "tnq")
MIXERS = ("powergossip", "choco(codec='qsgd(bits=4)', step=0.5)", "dpsgd")
CODECS = tuple(spec for spec in SCHEMES if isinstance(tw.scheme(spec), Codec))
DOORS = {"all-reduce": SCHEMES, "server": SCHEMES, "asynchronous server": CODECS, "gossip": MIXERS}


@dataclass(frozen=True)
class Setting:
    """What all ranks of a job are given."""

    door: str
    scheme: str  # or mixer
    on_failure: str = "stop"  # all-reduce knows no other
    servers: int = 1  # of the doors that have any
    timeout_seconds: float = 60.0


class Trainer:
    """A rank that trains: one step at a time. `handle` is the wire, the optimizer or the gossip."""

    def __init__(self, model: nn.Module, worker: int, handle: Any, optimizer: Any) -> None:
        self.model, self.handle, self.optimizer = model, handle, optimizer
        self._generator = torch.Generator().manual_seed(worker)

    def step(self) -> None:
        x = torch.randn(16, 20, generator=self._generator)
        self.optimizer.zero_grad()
        nn.functional.mse_loss(self.model(x), x[:, :7].tanh()).backward()
        if isinstance(self.handle, tw.Gossip):
            self.handle.mix()
        self.optimizer.step()

    def weights(self) -> Tensor:
        """Where it is promised that they are equal on all ranks: over gossip, their mean."""
        if isinstance(self.handle, tw.Gossip):
            self.handle.consensus()
            with self.handle.average():
                return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()
        return nn.utils.parameters_to_vector(self.model.parameters()).detach().clone()


@contextmanager
def opened(place: Place, setting: Setting) -> Iterator[Trainer | None]:
    """This rank's trainer; None on a rank that serves, which it then has done to the end."""
    open_ = {"all-reduce": _all_reduce, "server": _server, "asynchronous server": _asynchronous, "gossip": _gossip}
    with open_[setting.door](place, setting) as trainer:
        yield trainer


@contextmanager
def _all_reduce(place: Place, setting: Setting) -> Iterator[Trainer]:
    model = _ddp(None)
    with tw.attach(model, setting.scheme) as wire:
        yield Trainer(model, place.rank, wire, _sgd(model))


@contextmanager
def _server(place: Place, setting: Setting) -> Iterator[Trainer | None]:
    role = _join(setting)
    if role.exchange is None:
        role.serve()
        yield None
        return
    model = _ddp(role.workers)
    with tw.attach(model, setting.scheme, exchange=role.exchange) as wire:
        yield Trainer(model, place.rank, wire, _sgd(model))


@contextmanager
def _asynchronous(place: Place, setting: Setting) -> Iterator[Trainer | None]:
    role = _join(setting)
    if role.exchange is None:
        role.serve(optimizer=lambda weights: torch.optim.SGD(weights, lr=0.05, momentum=0.9), staleness=4)
        yield None
        return
    model = net()
    optimizer = tw.ServerOptimizer(model, setting.scheme, role=role)
    try:
        yield Trainer(model, place.rank, optimizer, optimizer)
    finally:
        optimizer.close()


@contextmanager
def _gossip(place: Place, setting: Setting) -> Iterator[Trainer]:
    model, graph = net(), tw.graphs.ring(place.ranks)
    options = {"on_failure": setting.on_failure, "timeout_seconds": setting.timeout_seconds}
    with tw.Gossip(model, graph, setting.scheme, **options) as gossip:
        yield Trainer(model, place.rank, gossip, _sgd(model))


def net() -> nn.Module:
    """6,000 weights, in tensors that are exempt and tensors that are not."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 60), nn.Tanh(), nn.Linear(60, 7))


def _ddp(group: Any) -> DistributedDataParallel:
    """Several buckets; no collectives of its own, for the lost take part in none. Renamed in PyTorch 2.13."""
    new = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
    no_broadcasts: dict[str, Any] = {"forward_sync_buffers" if new else "broadcast_buffers": False}
    return DistributedDataParallel(net(), process_group=group, bucket_cap_mb=0.01, **no_broadcasts)


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def _join(setting: Setting) -> tw.Role:
    return tw.join(servers=setting.servers, on_failure=setting.on_failure, timeout_seconds=setting.timeout_seconds)
