"""DDP from the inside: its one hook for life, which a wire is put into and taken out of, and what its buckets hold."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import ClassVar, Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn
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

    def __reduce__(self) -> tuple[type[Plug], tuple[()]]:
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


def exchanged(model: DistributedDataParallel) -> dict[str, Tensor]:
    """The parameters whose gradients come in dense buckets; those of sparse embeddings travel as in plain DDP."""
    sparse = {
        id(module.weight)
        for module in model.module.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
    return {
        name.replace("_orig_mod.", ""): p  # torch.compile's, which is no part of the model
        for name, p in model.module.named_parameters()
        # DDP calls the root's own parameters ".name".
        if p.requires_grad
        and id(p) not in sparse
        and (name if "." in name else f".{name}") not in model.parameters_to_ignore
    }


def real(parameter: Tensor) -> Tensor:
    """Shape, dtype and device of what DDP puts into buckets: of a complex number, two reals one after the other."""
    if not parameter.is_complex():
        return parameter
    shape = (*parameter.shape[:-1], 2 * parameter.shape[-1]) if parameter.dim() else (2,)
    return torch.empty((), dtype=parameter.dtype.to_real(), device=parameter.device).expand(shape)
