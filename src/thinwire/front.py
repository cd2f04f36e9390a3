"""attach(): the front door for models that others train in parallel. Tells DDP from FSDP2."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import TYPE_CHECKING, TypeGuard

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from thinwire import ddp
from thinwire.control import Controller
from thinwire.core.partition import Exempt
from thinwire.core.scheme import Scheme
from thinwire.exchange.exchange import Exchange

if TYPE_CHECKING:
    from torch.distributed.fsdp import FSDPModule

    from thinwire import fsdp


def attach(
    model: DistributedDataParallel | FSDPModule,
    scheme: str | Scheme,
    *,
    replicas: dist.ProcessGroup | None = None,
    exchange: Exchange | None = None,
    controller: str | Controller | None = None,
    feedback: str | bool = "auto",
    decay: float = 1.0,
    residual: str = "fp32",
    exempt: Exempt = "auto",
    warmup_steps: int = 0,
    warmup_level: float | None = None,
    seed: int = 0,
) -> ddp.Wire | fsdp.Replicas | fsdp.Shards:
    """Send `model`'s gradients through `scheme` from now on. Call it on every rank, with the same arguments.

    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1024, 10))
    >>> wire = tw.attach(model, "qsgd(bits=4)")
    >>> model(torch.randn(8, 1024)).sum().backward()  # every gradient is now the group's mean
    >>> stats = wire.stats()
    >>> f"{stats['bytes_given'] / stats['bytes_dense']:.0%} of the bytes"
    '13% of the bytes'
    >>> wire.close()

    model: a DistributedDataParallel model, compiled or not, or the root of one that `fully_shard` sharded (FSDP2).
    scheme: spec text such as "qsgd(bits=4)", or a Scheme.
    replicas: of a sharded model, the group of the ranks that have the same shard; without it, the scheme, a codec, is
        for what the shards themselves reduce.
    exchange: how workers talk; AllReduce over the model's process group unless given.
    controller: who turns the scheme's knob while training, such as "mqgrad"; it is told by `wire.observe(loss)`.
    feedback: "auto" (on for biased schemes), True or False.
    decay: of what is owed, from step to step; 1 forgets nothing.
    residual: what is owed is kept as "fp32", or as "bf16" in half the memory.
    exempt: which parameters travel exact: "auto" (1-d ones and those under 1,024 elements), a sequence of glob patterns
        of parameter names (empty: none), or a function of (name, parameter).
    warmup_steps: how many first steps travel exact, or at `warmup_level` of the scheme's knob.
    seed: of all random rounding; the same on every rank.
    """
    inner = getattr(model, "_orig_mod", None)
    if isinstance(inner, DistributedDataParallel):  # torch.compile around it: buckets are the inner one's
        model = inner
    if _sharded(model):
        return _fsdp().attach(
            model, scheme, replicas=replicas, exchange=exchange, controller=controller, feedback=feedback,
            decay=decay, residual=residual, exempt=exempt, warmup_steps=warmup_steps, warmup_level=warmup_level,
            seed=seed,
        )  # fmt: skip
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(
            f"attach() takes a DistributedDataParallel model or one that fully_shard() sharded, got {_kind(model)}"
        )
    if replicas is not None:
        raise ValueError("replicas= is for sharded models; DistributedDataParallel knows its own group")
    return ddp.attach(
        model, scheme, exchange=exchange, controller=controller, feedback=feedback, decay=decay, residual=residual,
        exempt=exempt, warmup_steps=warmup_steps, warmup_level=warmup_level, seed=seed,
    )  # fmt: skip


def _sharded(model: object) -> TypeGuard[FSDPModule]:
    """Whoever has such a model has imported what makes it; nobody else pays for that."""
    there = sys.modules.get("torch.distributed.fsdp")
    return isinstance(model, getattr(there, "FSDPModule", ()))


def _fsdp() -> ModuleType:
    try:
        from thinwire import fsdp
    except ImportError as error:
        raise ValueError(f"FSDP2 is taken as it is in PyTorch 2.13, this is {torch.__version__}: {error}") from error
    return fsdp


def _kind(model: object) -> str:
    kind = type(model)
    return f"{kind.__name__} (FSDP1: use fully_shard)" if kind.__name__ == "FullyShardedDataParallel" else kind.__name__
