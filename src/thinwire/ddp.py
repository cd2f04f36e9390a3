"""attach(): the front door for DistributedDataParallel, and for what `fsdp` does."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, ClassVar, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire import kernels
from thinwire.control import Controller
from thinwire.core.layout import Layout
from thinwire.core.partition import Exempt
from thinwire.core.scheme import Scheme
from thinwire.exchange.collectives import amounts, nbytes_of
from thinwire.exchange.exchange import Exchange
from thinwire.exchange.server.client import ParameterServer
from thinwire.reducer import Reducer
from thinwire.server import warn_of_collectives

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
    exempt: Exempt = "auto",
    warmup_steps: int = 0,
    warmup_level: float | None = None,
    seed: int = 0,
) -> Wire | fsdp.Replicas | fsdp.Shards:
    """Send `model`'s gradients through `scheme` from now on. Call it on every rank, with the same arguments.

    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1024, 10))
    >>> wire = tw.attach(model, "qsgd(bits=4)")
    >>> model(torch.randn(8, 1024)).sum().backward()  # every gradient is now the group's mean
    >>> stats = wire.stats()
    >>> f"{stats['bytes_given'] / stats['bytes_dense']:.0%} of the bytes"
    '13% of the bytes'
    >>> wire.close()

    model: a DistributedDataParallel model, or the root of one that `fully_shard` sharded (FSDP2).
    scheme: spec text such as "qsgd(bits=4)", or a Scheme.
    replicas: of a sharded model, the group of the ranks that have the same shard; without it, the scheme, a codec, is
        for what the shards themselves reduce.
    exchange: how workers talk; AllReduce over the model's process group unless given.
    controller: who turns the scheme's knob while training, such as "mqgrad"; it is told by `wire.observe(loss)`.
    feedback: "auto" (on for biased schemes), True or False.
    exempt: which parameters travel exact: "auto" (1-d ones and those under 1,024 elements), a sequence of glob patterns
        of parameter names (empty: none), or a function of (name, parameter).
    warmup_steps: how many first steps travel exact, or at `warmup_level` of the scheme's knob.
    seed: of all random rounding; the same on every rank.
    """
    if _sharded(model):
        return _fsdp().attach(
            model, scheme, replicas=replicas, exchange=exchange, controller=controller, feedback=feedback,
            exempt=exempt, warmup_steps=warmup_steps, warmup_level=warmup_level, seed=seed,
        )  # fmt: skip
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(
            f"attach() takes a DistributedDataParallel model or one that fully_shard() sharded, got {_kind(model)}"
        )
    if replicas is not None:
        raise ValueError("replicas= is for sharded models; DistributedDataParallel knows its own group")
    plug = _Plug.of(model)
    if plug.wire is not None:
        raise ValueError("this model is attached already; close() the other wire first")
    wire = Wire(
        {name: _real(p) for name, p in _exchanged(model).items()}, scheme, _group(model), exchange=exchange,
        controller=controller, feedback=feedback, exempt=exempt, warmup_steps=warmup_steps, warmup_level=warmup_level,
        seed=seed,
    )  # fmt: skip
    wire.connect(plug, model)
    if isinstance(exchange, ParameterServer) and exchange.goes_on:
        warn_of_collectives(model)
    return wire


class Wire(Reducer):
    """A model's connection to its group: gradients go in by DDP's buckets and come back as the group's mean.

    Made by `attach`. Knows the model's parameter names, and how DDP wants its answers.
    """

    def connect(self, plug: _Plug, model: DistributedDataParallel) -> None:
        """From now on the plug's buckets, made of this model's parameters, come here."""
        self._parameters = _exchanged(model)
        self._names = {id(p): name for name, p in self._parameters.items()}
        self._buckets: dict[tuple[int, ...], Layout] = {}
        self._passed: list[dist.Work] = []  # sparse buckets of the step under way
        self._model = weakref.ref(model)
        self._plug = plug
        plug.wire = self
        self._may_be_unused = (model.find_unused_parameters or model.static_graph) and self.memory.nbytes > 0
        self._views = model.gradient_as_bucket_view
        self.may_undo = self._may_be_unused

    def close(self) -> None:
        """Give the model back to plain DDP and end the lane. Every rank calls it; twice is fine."""
        if self._plug.wire is self:
            self._plug.wire = None
        super().close()

    def begin_step(self) -> None:
        super().begin_step()
        self._passed = []
        model = self._model()
        if model is not None and model._join_config.enable and not model._divide_by_initial_world_size:
            self._failed = ValueError(
                "join(divide_by_initial_world_size=False) is not for a model with a communication hook: PyTorch does "
                "not tell the hook who has left. Leave it out, and means are over all ranks"
            )

    def on_bucket(self, grads: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Send a bucket on its way. Its future is always fulfilled; errors surface in `end_step`."""
        last = grads.is_last()
        in_backward = torch._C._current_graph_task_id() != -1
        if grads.index() == 0:
            self.begin_step()
        if last and in_backward:
            # Not with the first: a checkpointed part of the model is a backward of its own, which ends before others.
            torch.autograd.Variable._execution_engine.queue_callback(self.end_step)
        buffer = grads.buffer()
        future = self._pass(buffer, last=last) if buffer.is_sparse else self._send(grads, buffer, last=last)
        if last and not in_backward:
            self.end_step(silent=True)  # DDP's join, after this rank's own data
        return future

    def _send(self, grads: dist.GradBucket, buffer: Tensor, *, last: bool) -> torch.futures.Future[Tensor]:
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)
        # DDP cannot raise a Python error out of a hook's future, so it gets the buffer as it is, whatever happened.
        done = partial(_fulfil, future, buffer)
        self.submit(buffer, self._layout(grads) if self.needs_layout else None, last=last, done=done)
        return future

    def _pass(self, buffer: Tensor, *, last: bool) -> torch.futures.Future[Tensor]:
        """A sparse bucket, as plain DDP would: there is little in it to compress."""
        nbytes = nbytes_of(buffer._indices()) + nbytes_of(buffer._values())
        counted = amounts(nbytes, nbytes * (self.exchange.workers - 1), 1)
        self.exchange.transport.ledger.add(messages=1, bytes_dense=nbytes, **counted)
        work = _plain(buffer, self._plug.group)
        self._passed.append(work)
        if last:
            self.submit_nothing()
        return _first_of(work)

    def end_step(self, *, silent: bool = False) -> None:
        for work in self._passed:
            work.wait()
            self._finite = self._finite and kernels.all_finite(work.result()[0]._values())
        super().end_step(silent=silent)
        if self._may_be_unused and not silent:
            before = {name: _version(p.grad) for name, p in self._parameters.items()}
            torch.autograd.Variable._execution_engine.queue_callback(partial(self._give_back, before))

    def _give_back(self, before: Mapping[str, object]) -> None:
        """After DDP has finished: where it threw a mean away, since no rank used the parameter, nothing was paid."""
        self.restore(
            name
            for name, p in self._parameters.items()
            # What is a view of the bucket has the mean already.
            if p.grad is None or (not self._views and _version(p.grad) == before[name])
        )

    def _layout(self, grads: dist.GradBucket) -> Layout:
        parameters = grads.parameters()
        identity = tuple(map(id, parameters))
        if identity not in self._buckets:
            self._buckets[identity] = Layout.of([(self._names[id(p)], tuple(_real(p).shape)) for p in parameters])
        return self._buckets[identity]


def _exchanged(model: DistributedDataParallel) -> dict[str, Tensor]:
    """The parameters whose gradients come in dense buckets; those of sparse embeddings travel as in plain DDP."""
    sparse = {
        id(module.weight)
        for module in model.module.modules()
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse
    }
    return {
        name: p
        for name, p in model.module.named_parameters()
        # DDP calls the root's own parameters ".name".
        if p.requires_grad
        and id(p) not in sparse
        and (name if "." in name else f".{name}") not in model.parameters_to_ignore
    }


def _real(parameter: Tensor) -> Tensor:
    """Shape, dtype and device of what DDP puts into buckets: of a complex number, two reals one after the other."""
    if not parameter.is_complex():
        return parameter
    shape = (*parameter.shape[:-1], 2 * parameter.shape[-1]) if parameter.dim() else (2,)
    return torch.empty((), dtype=parameter.dtype.to_real(), device=parameter.device).expand(shape)


def _version(grad: Tensor | None) -> object:
    """Differs once anything was written."""
    return None if grad is None else (id(grad), grad._version)


def _fulfil(future: torch.futures.Future[Tensor], buffer: Tensor, error: BaseException | None) -> None:
    future.set_result(buffer)


class _Plug:
    """DDP takes one hook for life; the plug is that hook, and a wire can be put in and taken out.

    Without a wire it does what plain DDP does. A copy of a model, or one from a file, has DDP's default group, another
    hook to come, and this plug only in its list of hooks: so copies of a plug are empty.
    """

    _plugs: ClassVar[weakref.WeakKeyDictionary[DistributedDataParallel, _Plug]] = weakref.WeakKeyDictionary()

    def __init__(self, group: dist.ProcessGroup | None = None):
        self.group = group
        self.wire: Wire | None = None

    def __reduce__(self):
        return _Plug, ()

    @classmethod
    def of(cls, model: DistributedDataParallel) -> _Plug:
        if model not in cls._plugs:
            plug = cls(_group(model))
            model.register_comm_hook(plug, _hook)
            cls._plugs[model] = plug
        return cls._plugs[model]


@contextmanager
def detached(model: DistributedDataParallel) -> Iterator[None]:
    """Inside, the model's wire, if it has one, is out, and another may be attached and closed."""
    plug = _Plug.of(model)
    wire, plug.wire = plug.wire, None
    try:
        yield
    finally:
        plug.wire = wire


def _hook(plug: _Plug, bucket):  # DDP checks annotations by identity, and cannot read postponed ones
    if plug.wire is not None:
        return plug.wire.on_bucket(bucket)
    return _first_of(_plain(bucket.buffer(), plug.group))


def _plain(buffer: Tensor, group: dist.ProcessGroup | None) -> dist.Work:
    """What plain DDP does with a bucket, bit by bit."""
    workers = dist.get_world_size(group)
    buffer.div_(workers) if buffer.is_sparse else buffer.mul_(1.0 / workers)
    work = dist.all_reduce(buffer, group=group, async_op=True)
    assert work is not None
    return work


def _first_of(work: dist.Work) -> torch.futures.Future[Tensor]:
    return work.get_future().then(lambda future: future.value()[0])


def _sharded(model: object) -> TypeGuard[FSDPModule]:
    """Whoever has such a model has imported what makes it; nobody else pays for that."""
    there = sys.modules.get("torch.distributed.fsdp")
    return isinstance(model, getattr(there, "FSDPModule", ()))


def _fsdp():
    try:
        from thinwire import fsdp
    except ImportError as error:
        raise ValueError(f"FSDP2 is taken as it is in PyTorch 2.13, this is {torch.__version__}: {error}") from error
    return fsdp


def _kind(model: object) -> str:
    kind = type(model)
    return f"{kind.__name__} (FSDP1: use fully_shard)" if kind.__name__ == "FullyShardedDataParallel" else kind.__name__


def _group(model: DistributedDataParallel) -> dist.ProcessGroup:
    group = model.process_group
    assert isinstance(group, dist.ProcessGroup)
    return group
