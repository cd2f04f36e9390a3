"""A ResNet-20 of half the width, with batch norm, trained on virtual workers in the way of the authors' scripts."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire.gossip import GossipSimulation, graphs
from thinwire.lab.repro.powergossip.training import GossipRun, accuracy, floats, graph_of
from thinwire.lab.tasks.datasets import Dataset, Examples
from thinwire.lab.tasks.resnets import resnet20

CHANNELS = (8, 16, 32)  # the authors': 16, 32, 64


@dataclass(frozen=True)
class ResNetTraining:
    """Everything about a run but its mixer and its seed. Nesterov momentum; the rate warms up, and falls twice."""

    title: ClassVar[str] = "ResNet-20 of half width, batch norm"
    rates: ClassVar[tuple[float, ...]] = (0.5, 1.0, 2.0)  # times `rate`: what D-PSGD's is chosen from

    dataset: Dataset
    graph: graphs.Graph
    steps: int
    skew: float = 0.0
    batch: int = 16  # per worker
    rate: float = 0.1
    momentum: float = 0.9
    decay: float = 1e-4
    warm: float = 0.05  # of all steps

    def run(self, mixer: str | None, seed: int, rate: float = 1.0) -> GossipRun:
        """Train one replica per node with `mixer`; None: all-reduce, every worker with batch norm of its own."""
        began = time.perf_counter()
        feeds = self._feeds(seed)
        torch.manual_seed(seed)
        replicas = [resnet20(CHANNELS) for _ in feeds]
        for replica in replicas[1:]:
            replica.load_state_dict(replicas[0].state_dict())
        optimizers = [
            torch.optim.SGD(
                replica.parameters(), lr=0.0, momentum=self.momentum, nesterov=True, weight_decay=self.decay
            )
            for replica in replicas
        ]
        gossip = None
        if mixer is not None:
            gossip = GossipSimulation(replicas, graph_of(self.graph, mixer), mixer, seed=seed, equal=True)
        for step in range(self.steps):
            losses = [_backward(replica, next(feed)) for replica, feed in zip(replicas, feeds, strict=True)]
            if not all(map(torch.isfinite, losses)):
                return GossipRun(10.0, _sent(gossip, replicas), time.perf_counter() - began, diverged=True)
            gossip.mix() if gossip is not None else _all_reduce(replicas)
            for optimizer in optimizers:
                optimizer.param_groups[0]["lr"] = rate * self.rate_at(step)
                optimizer.step()
                optimizer.zero_grad()
        evaluated = averaged(replicas)
        return GossipRun(
            accuracy(evaluated.eval(), self.dataset.test), _sent(gossip, replicas), time.perf_counter() - began
        )

    def rate_at(self, step: int) -> float:
        warmed = min(1.0, (step + 1) / max(1.0, self.warm * self.steps))
        return self.rate * warmed * 0.1 ** ((step >= self.steps / 2) + (step >= 3 * self.steps / 4))

    def _feeds(self, seed: int) -> list[Iterator[Examples]]:
        workers = self.graph.nodes
        shards = [self.dataset.train.shard(worker, workers, seed=seed, skew=self.skew) for worker in range(workers)]
        return [shard.batches(self.batch, seed=seed * workers + worker) for worker, shard in enumerate(shards)]


def averaged(replicas: Sequence[nn.Module], channels: Sequence[int] = CHANNELS) -> nn.Module:
    """The mean of all, batch norm's statistics too."""
    states = [replica.state_dict() for replica in replicas]
    model = resnet20(channels)
    means = {name: torch.stack([state[name].double() for state in states]).mean(0) for name in states[0]}
    model.load_state_dict(means)
    return model


def _backward(replica: nn.Module, batch: Examples) -> Tensor:
    loss = functional.cross_entropy(replica(floats(batch.inputs)), batch.targets)
    loss.backward()
    return loss.detach()


@torch.no_grad()
def _all_reduce(replicas: Sequence[nn.Module]) -> None:
    for parameters in zip(*(replica.parameters() for replica in replicas), strict=True):
        mean = torch.stack([parameter.grad for parameter in parameters]).mean(0)
        for parameter in parameters:
            parameter.grad.copy_(mean)


def _sent(gossip: GossipSimulation | None, replicas: Sequence[nn.Module]) -> float:
    """By one worker in a step; of all-reduce, what a ring of them sends."""
    workers = len(replicas)
    if gossip is not None:
        return gossip.bytes_sent / workers / max(1, gossip.nodes[0].step)
    return 2 * sum(4 * p.numel() for p in replicas[0].parameters()) * (workers - 1) / workers
