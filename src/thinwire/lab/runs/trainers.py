"""What surrounds forward and backward in a step of a run, for every topology.

    trainer.begin(); loss = ... trainer.model(inputs) ...; loss.backward(); trainer.end(loss)

`evaluating` makes the model ready to be evaluated.
"""

from __future__ import annotations

import copy
import inspect
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire import gossip, schemes
from thinwire.exchange.allreduce import AllReduce
from thinwire.exchange.exchange import Exchange
from thinwire.exchange.hierarchical import Hierarchical
from thinwire.exchange.transport import Transport
from thinwire.front import attach
from thinwire.lab.network import links
from thinwire.lab.network.network import parse_network
from thinwire.lab.runs.launch import PATIENCE_SECONDS
from thinwire.lab.runs.probe import Probe, Replicas, Shards, statistics
from thinwire.lab.runs.record import RunPlan
from thinwire.lab.runs.topology import GossipTopology, HierarchicalTopology, ServerTopology, parse_topology
from thinwire.lab.tasks.tasks import Task
from thinwire.local import LocalSteps
from thinwire.server import Role, ServerOptimizer


class Trainer(ABC):
    """`probe` is None where no common mean gradient is applied, so that there is nothing to measure vNMSE on.

    `in_step`: workers go on together after an evaluation, so that nobody's evaluation is somebody else's waiting.
    """

    model: nn.Module  # to train
    bare: nn.Module  # to evaluate
    probe: Probe | None = None
    in_step: ClassVar[bool] = True

    @abstractmethod
    def begin(self) -> None: ...

    @abstractmethod
    def end(self, loss: Tensor) -> None: ...

    def evaluating(self) -> AbstractContextManager[None]:
        return nullcontext()

    @abstractmethod
    def stats(self) -> dict[str, float]:
        """Totals: bytes_sent, bytes_dense, messages, sends, encode_seconds, wire_seconds, exposed_seconds, level."""

    @abstractmethod
    def close(self) -> None: ...


@dataclass(frozen=True)
class RunContext:
    """What a worker has, whatever the exchange: its place in the run and a folder that all workers share."""

    plan: RunPlan
    task: Task
    worker: int
    folder: Path
    wait_for_all: Callable[[], object]  # off the network

    @property
    def steps(self) -> int:
        return self.plan.steps_of(self.task)

    def transport(self, servers: int = 0) -> Transport:
        worker = max(0, self.worker)  # a rank that serves sends by no transport
        return links.transport(parse_network(self.plan.network), worker, self.plan.workers, servers)

    def optimizer(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """The task's own, at the plan's learning rate."""
        optimizer = self.task.optimizer(parameters)
        for group in optimizer.param_groups:
            group["lr"] *= self.plan.rate
        return optimizer

    def replicas(self, tensors: Sequence[Tensor]) -> Replicas:
        """Of these tensors, which every worker has."""
        file = self.folder / "replicas"
        return Replicas(tensors, file, self.worker, self.plan.workers, self.wait_for_all)

    def falling(self, optimizer: torch.optim.Optimizer) -> Callable[[], None]:
        """Call it after every step: the learning rate falls linearly to zero."""
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, 1 - step / self.steps)).step


def make_trainer(context: RunContext, role: Role | None) -> Trainer:
    """The trainer of the plan's topology. `role`: what `thinwire.join` gave a worker of servers."""
    topology = parse_topology(context.plan.exchange)
    torch.manual_seed(context.plan.seed)
    if context.plan.parallel == "fsdp":
        return FSDPTrainer(context)
    if isinstance(topology, GossipTopology):
        return GossipTrainer(context, topology)
    if isinstance(topology, ServerTopology):
        assert role is not None and role.exchange is not None
        if topology.staleness is not None:
            assert topology.down is not None
            return AsyncTrainer(context, role, topology.down)
        exchange, group = role.exchange, role.workers
    elif isinstance(topology, HierarchicalTopology):
        local, transport = context.plan.local, context.transport()
        exchange, group = Hierarchical.of_nodes(local, inside=topology.inside, transport=transport), None
    else:
        exchange, group = AllReduce(transport=context.transport()), None
    make = DDPTrainer if context.plan.every == 1 else LocalTrainer
    return make(context, exchange, group)


def serve(context: RunContext, role: Role) -> dict[str, float]:
    """A server's whole work; its totals."""
    topology = parse_topology(context.plan.exchange)
    assert isinstance(topology, ServerTopology)
    if topology.staleness is None:
        return role.serve()

    def make(weights: list[nn.Parameter]) -> torch.optim.Optimizer:
        optimizer = context.optimizer(weights)
        fall = context.falling(optimizer)
        optimizer.register_step_post_hook(lambda *_: fall())
        return optimizer

    return role.serve(optimizer=make, staleness=topology.staleness)


def _averaged_statistics(model: nn.Module, context: RunContext) -> Callable[[], AbstractContextManager[None]]:
    found = statistics(model)
    return context.replicas(found).averaged if found else nullcontext


# What DDP calls it (PyTorch 2.13 has a new name) to send the first worker's buffers to all in every step. Off: it is
# traffic that no scheme has a say in. Every worker keeps its own, and their mean is evaluated.
_NEW, _OLD = "forward_sync_buffers", "broadcast_buffers"
_OWN_BUFFERS: dict[str, Any] = {_NEW if _NEW in inspect.signature(DistributedDataParallel).parameters else _OLD: False}


class DDPTrainer(Trainer):
    """DistributedDataParallel with a wire: over all-reduce, or a parameter server with all workers in step."""

    def __init__(self, context: RunContext, exchange: Exchange, group: dist.ProcessGroup | None):
        plan = context.plan
        self.bare = context.task.model()
        self.model = model = DistributedDataParallel(self.bare, process_group=group, **_OWN_BUFFERS)
        self._statistics = _averaged_statistics(self.bare, context)
        self.wire = attach(model, plan.scheme, exchange=exchange, controller=plan.controller, seed=plan.seed)
        self._optimizer = context.optimizer(self.model.parameters())
        self._fall = context.falling(self._optimizer)
        self.probe = Probe(self.bare, context.folder / "gradients", context.worker, plan.workers)
        self._level = self.wire.level

    def begin(self) -> None:
        self._level = self.wire.level  # the step's own: a controller may turn the knob as soon as it has ended
        self._optimizer.zero_grad()

    def end(self, loss: Tensor) -> None:
        self.wire.observe(loss)
        self._optimizer.step()
        self._fall()

    def evaluating(self) -> AbstractContextManager[None]:
        return self._statistics()

    def stats(self) -> dict[str, float]:
        return self.wire.stats() | {"level": self._level}

    def close(self) -> None:
        self.wire.close()


class LocalTrainer(Trainer):
    """Replicas that train on their own and exchange weight changes now and then; what they share is evaluated."""

    def __init__(self, context: RunContext, exchange: Exchange, group: dist.ProcessGroup | None):
        plan = context.plan
        self.model = self.bare = context.task.model()
        self._optimizer = context.optimizer(self.model.parameters())
        self._fall = context.falling(self._optimizer)
        self._local = LocalSteps(
            self.model, self._optimizer, every=plan.every, scheme=plan.scheme, outer=plan.outer, exchange=exchange,
            group=group, controller=plan.controller, seed=plan.seed, **plan.options,
        )  # fmt: skip
        self._left = context.steps

    def begin(self) -> None:
        self._optimizer.zero_grad()

    def end(self, loss: Tensor) -> None:
        self._local.observe(loss)
        self._optimizer.step()
        self._fall()
        self._left -= 1
        if not self._left and self._local.schedule.at:
            self._local.sync()  # the last round may be a short one

    def evaluating(self) -> AbstractContextManager[None]:
        return self._local.synchronised()

    def stats(self) -> dict[str, float]:
        return self._local.stats()

    def close(self) -> None:
        self._local.close()


class FSDPTrainer(Trainer):
    """A model sharded by FSDP2 per transformer block: over a machine's workers, the scheme between machines; or, where
    every worker has a machine of its own, over all, the scheme between shards.
    """

    def __init__(self, context: RunContext):
        # Which takes as long to import as the rest of PyTorch, and few runs need it.
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        plan = context.plan
        shards = plan.local if plan.local > 1 else plan.workers
        self.bare = context.task.model()
        self.model = copy.deepcopy(self.bare)
        mesh = init_device_mesh("cpu", (plan.workers // shards, shards), mesh_dim_names=("replicate", "shard"))
        for module in [m for m in self.model.modules() if isinstance(m, nn.TransformerEncoderLayer)]:
            fully_shard(module, mesh=mesh["shard"])
        sharded = fully_shard(self.model, mesh=mesh["shard"])
        # Of in-place operations on what it returns; a task's loss has none.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module")
        replicas = mesh["replicate"].get_group() if plan.workers > shards else None
        exchange = AllReduce(transport=context.transport())
        self._wire = attach(sharded, plan.scheme, replicas=replicas, exchange=exchange, seed=plan.seed)
        self._optimizer = context.optimizer(self.model.parameters())
        self._fall = context.falling(self._optimizer)
        # Statistics are not sharded: the model that is evaluated has those of the one that is trained.
        for name, buffer in self.model.named_buffers():
            owner, _, attribute = name.rpartition(".")
            setattr(self.bare.get_submodule(owner), attribute, buffer)
        self._statistics = _averaged_statistics(self.bare, context)
        replica, place = divmod(context.worker, shards)
        file = context.folder / f"weights-{replica}"
        self._shards = Shards(self.model, self.bare, file, place, shards, context.wait_for_all)

    def begin(self) -> None:
        self._optimizer.zero_grad()

    def end(self, loss: Tensor) -> None:
        self._optimizer.step()
        self._fall()

    @contextmanager
    def evaluating(self) -> Iterator[None]:
        with self._shards.gathered(), self._statistics():
            yield

    def stats(self) -> dict[str, float]:
        return self._wire.stats()

    def close(self) -> None:
        self._wire.close()


class AsyncTrainer(Trainer):
    """An asynchronous server: a gradient up, weights down, and no waiting but what staleness asks for."""

    in_step = False  # workers that wait for each other would not be asynchronous, and could wait for ever

    def __init__(self, context: RunContext, role: Role, down: str):
        self.model = self.bare = context.task.model()
        self._optimizer = ServerOptimizer(self.model, context.plan.scheme, role=role, down=down, seed=context.plan.seed)
        self._level = schemes.parse(context.plan.scheme).level
        self._seconds = 0.0
        self._dense = sum(4 * p.numel() for p in self.model.parameters() if p.requires_grad)

    def begin(self) -> None:
        self._optimizer.zero_grad()

    def end(self, loss: Tensor) -> None:
        began = time.perf_counter()
        self._optimizer.step()
        self._seconds += time.perf_counter() - began

    def stats(self) -> dict[str, float]:
        stats = self._optimizer.stats()
        encode = self._seconds - stats["wire_seconds"]
        dense = self._dense * stats["steps"]
        return stats | {
            "exposed_seconds": self._seconds, "encode_seconds": encode, "bytes_dense": dense,
            "level": self._level,
        }  # fmt: skip

    def close(self) -> None:
        self._optimizer.close()


class GossipTrainer(Trainer):
    """Neighbours mix their weights while the gradient is computed; the mean of all replicas is evaluated."""

    def __init__(self, context: RunContext, topology: GossipTopology):
        plan = context.plan
        self.model = self.bare = context.task.model()
        self._gossip = gossip.Gossip(
            self.model, topology.among(plan.workers), plan.scheme, on_failure="stop", timeout_seconds=PATIENCE_SECONDS,
            seed=plan.seed, transport=context.transport(),
        )  # fmt: skip
        self._optimizer = context.optimizer(self.model.parameters())
        self._fall = context.falling(self._optimizer)
        weights = [p.data for p in self.model.parameters() if p.requires_grad]
        self._replicas = context.replicas([*weights, *statistics(self.model)])

    def begin(self) -> None:
        self._optimizer.zero_grad()
        self._gossip.mix_begin()

    def end(self, loss: Tensor) -> None:
        self._gossip.mix_end()
        self._optimizer.step()
        self._fall()

    def evaluating(self) -> AbstractContextManager[None]:
        return self._replicas.averaged()

    def stats(self) -> dict[str, float]:
        stats = self._gossip.stats()
        return stats | {"encode_seconds": stats["mix_seconds"], "level": 0.0}

    def close(self) -> None:
        self._gossip.close()
