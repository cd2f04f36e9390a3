"""Decentralised training on virtual workers: one small network, shards alike or skewed by label."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn import functional

from thinwire.gossip import GossipSimulation, graphs
from thinwire.lab.repro.powergossip.equal_bytes import stepped
from thinwire.lab.tasks import models
from thinwire.lab.tasks.datasets import Dataset, Examples

Watch = Callable[[int, Sequence[dict[str, Tensor]]], None]  # gets a step and all replicas


def graph_of(graph: graphs.Graph, mixer: str) -> graphs.Graph:
    """The weights that a mixer works with: exact gossip has the graph's best step in them."""
    return stepped(graph, graph.best_step) if mixer == "dpsgd" else graph


@dataclass(frozen=True)
class GossipRun:
    accuracy: float  # of the mean of all replicas, in percent
    bytes_per_step: float  # sent by one worker to all its neighbours, mean over workers and steps
    seconds: float  # wall time of the whole run, all workers together on this machine
    diverged: bool = False  # the mean of all replicas was not finite any more; the run ended there


@dataclass(frozen=True)
class Training:
    """Everything about a run but its mixer and its seed. Momentum SGD, the rate falling linearly to zero."""

    title: ClassVar[str] = "a CNN of 27,000 weights"
    rates: ClassVar[tuple[float, ...]] = (1.0,)  # times `rate`: what D-PSGD's is chosen from

    dataset: Dataset
    graph: graphs.Graph
    steps: int
    skew: float = 0.0  # higher => shards differ more; 0: alike, 1: each worker its own labels
    batch: int = 16  # per worker
    rate: float = 0.05
    momentum: float = 0.9

    def run(self, mixer: str | None, seed: int, rate: float = 1.0, watch: Watch | None = None) -> GossipRun:
        """Train one replica per node with `mixer`; None: all-reduce, where all workers share one model.

        rate: times the training's own. watch: is shown the replicas after every step.
        """
        if rate != 1:
            return replace(self, rate=self.rate * rate).run(mixer, seed, watch=watch)
        began = time.perf_counter()
        workers = self.graph.nodes
        shards = [self.dataset.train.shard(worker, workers, seed=seed, skew=self.skew) for worker in range(workers)]
        feeds = [shard.batches(self.batch, seed=seed * workers + worker) for worker, shard in enumerate(shards)]
        trained, sent = self._all_reduce(feeds, seed) if mixer is None else self._gossip(feeds, mixer, seed, watch)
        percent, diverged = accuracy(trained, self.dataset.test), not _finite(trained.state_dict())
        return GossipRun(percent, sent, time.perf_counter() - began, diverged)

    def _gossip(
        self, feeds: list[Iterator[Examples]], mixer: str, seed: int, watch: Watch | None
    ) -> tuple[nn.Module, float]:
        """All replicas lie in one tensor per parameter: one vectorised call makes all their gradients."""
        model = self.model(seed)
        workers = len(feeds)
        stacked = {name: torch.stack([p.detach()] * workers) for name, p in model.named_parameters()}
        moments = {name: torch.zeros_like(p) for name, p in stacked.items()}
        replicas = [{name: p[worker] for name, p in stacked.items()} for worker in range(workers)]
        gossip = GossipSimulation(replicas, graph_of(self.graph, mixer), mixer, seed=seed, equal=True)

        def loss(parameters: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
            return functional.cross_entropy(functional_call(model, parameters, (inputs,)), targets)

        gradients_of = vmap(grad(loss))
        for step in range(self.steps):
            batches = [next(feed) for feed in feeds]
            inputs = floats(torch.stack([b.inputs for b in batches]))
            gradients = gradients_of(stacked, inputs, torch.stack([b.targets for b in batches]))
            gossip.mix()
            for name, p in stacked.items():
                p.sub_(moments[name].mul_(self.momentum).add_(gradients[name]), alpha=self._rate_at(step))
            if watch is not None:
                watch(step + 1, replicas)
            # Not every step, for the look costs time; a mean that is not finite never is again.
            if (step + 1) % 50 == 0 and not _finite(stacked):
                break
        model.load_state_dict(gossip.mean())
        return model, gossip.bytes_sent / workers / gossip.nodes[0].step

    def _all_reduce(self, feeds: list[Iterator[Examples]], seed: int) -> tuple[nn.Module, float]:
        """The mean gradient of equal batches is the gradient of all of them together."""
        model = self.model(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=self.rate, momentum=self.momentum)
        for step in range(self.steps):
            batches = [next(feed) for feed in feeds]
            inputs = floats(torch.cat([b.inputs for b in batches]))
            optimizer.param_groups[0]["lr"] = self._rate_at(step)
            optimizer.zero_grad()
            functional.cross_entropy(model(inputs), torch.cat([b.targets for b in batches])).backward()
            optimizer.step()
        dense = sum(4 * p.numel() for p in model.parameters())
        return model, 2 * dense * (len(feeds) - 1) / len(feeds)  # a ring all-reduce

    def _rate_at(self, step: int) -> float:
        return self.rate * (1 - step / self.steps)

    def model(self, seed: int) -> nn.Module:
        torch.manual_seed(seed)
        channels, size = self.dataset.train.inputs.shape[1:3]
        return models.small_cnn(channels, size, widths=(8, 16), kernel=5, hidden=32)


def floats(images: Tensor) -> Tensor:
    return images.float() * (1 / 64) - 1.5


def _finite(tensors: dict[str, Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors.values())


@torch.no_grad()
def accuracy(model: nn.Module, test: Examples) -> float:
    right = sum(
        int((model(floats(test[rows].inputs)).argmax(1) == test[rows].targets).sum())
        for rows in (slice(start, start + 1000) for start in range(0, len(test), 1000))
    )
    return 100 * right / len(test)
