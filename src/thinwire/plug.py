"""Plug: DDP takes one hook for life; a wire can be put into it and taken out."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


class Plugged(Protocol):
    """What takes the buckets of a model."""

    def on_bucket(self, grads: dist.GradBucket) -> torch.futures.Future[Tensor]: ...


class Plug:
    """A model's hook. Without a wire it does what plain DDP does.

    A copy of a model, or one from a file, has DDP's default group, another hook to come, and this plug only in its list
    of hooks: so copies of a plug are empty.
    """

    _plugs: ClassVar[weakref.WeakKeyDictionary[DistributedDataParallel, Plug]] = weakref.WeakKeyDictionary()

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.wire: Plugged | None = None

    def __reduce__(self):
        return Plug, ()

    @classmethod
    def of(cls, model: DistributedDataParallel) -> Plug:
        if model not in cls._plugs:
            plug = cls(group_of(model))
            try:
                model.register_comm_hook(plug, _hook)
            except RuntimeError as error:
                model._comm_hooks.pop()  # it is in the list before PyTorch looks
                raise ValueError(
                    "this model has a communication hook already, from register_comm_hook() or DDP's mixed_precision=, "
                    "and DDP takes only one: attach() a model without"
                ) from error
            cls._plugs[model] = plug
        return cls._plugs[model]


@contextmanager
def detached(model: DistributedDataParallel) -> Iterator[None]:
    """Inside, the model's wire, if it has one, is out, and another may be attached and closed."""
    plug = Plug.of(model)
    wire, plug.wire = plug.wire, None
    try:
        yield
    finally:
        plug.wire = wire


def _hook(plug: Plug, bucket):  # DDP checks annotations by identity, and cannot read postponed ones
    if plug.wire is not None:
        return plug.wire.on_bucket(bucket)
    return first_of(plain_mean(bucket.buffer(), plug.group))


def plain_mean(buffer: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """What plain DDP does with a bucket, bit by bit."""
    workers = dist.get_world_size(group)
    buffer.div_(workers) if buffer.is_sparse else buffer.mul_(1.0 / workers)
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None
    return work


def first_of(work: dist.Work) -> torch.futures.Future[Tensor]:
    return work.get_future().then(lambda future: future.value()[0])


def group_of(model: DistributedDataParallel) -> dist.ProcessGroup:
    group = model.process_group
    assert isinstance(group, dist.ProcessGroup)
    return group
