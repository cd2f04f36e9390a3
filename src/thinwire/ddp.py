"""attach(): the front door for DistributedDataParallel."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.control import Controller
from thinwire.core.layout import Layout
from thinwire.core.partition import Exempt
from thinwire.core.scheme import Scheme
from thinwire.exchange.exchange import Exchange
from thinwire.reducer import Reducer


def attach(
    model: DistributedDataParallel,
    scheme: str | Scheme,
    *,
    exchange: Exchange | None = None,
    controller: str | Controller | None = None,
    feedback: str | bool = "auto",
    exempt: Exempt = "auto",
    warmup_steps: int = 0,
    warmup_level: float | None = None,
    seed: int = 0,
) -> Wire:
    """Send `model`'s gradients through `scheme` from now on. Call it on every rank, with the same arguments.

    >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1024, 10))
    >>> wire = tw.attach(model, "qsgd(bits=4)")
    >>> model(torch.randn(8, 1024)).sum().backward()  # every gradient is now the group's mean
    >>> stats = wire.stats()
    >>> f"{stats['bytes_given'] / stats['bytes_dense']:.0%} of the bytes"
    '13% of the bytes'
    >>> wire.close()

    scheme: spec text such as "qsgd(bits=4)", or a Scheme.
    exchange: how workers talk; AllReduce over the model's process group unless given.
    controller: who turns the scheme's knob while training, such as "mqgrad"; it is told by `wire.observe(loss)`.
    feedback: "auto" (on for biased schemes), True or False.
    exempt: which parameters travel exact: "auto" (1-d ones and those under 1,024 elements), a sequence of glob patterns
        of parameter names (empty: none), or a function of (name, parameter).
    warmup_steps: how many first steps travel exact, or at `warmup_level` of the scheme's knob.
    seed: of all random rounding; the same on every rank.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(f"attach() takes a DistributedDataParallel model, got {type(model).__name__}")
    plug = _Plug.of(model)
    if plug.wire is not None:
        raise ValueError("this model is attached already; close() the other wire first")
    parameters = {name: p for name, p in model.module.named_parameters() if p.requires_grad}
    wire = Wire(
        parameters, scheme, plug.group, exchange=exchange, controller=controller, feedback=feedback, exempt=exempt,
        warmup_steps=warmup_steps, warmup_level=warmup_level, seed=seed,
    )  # fmt: skip
    wire.connect(plug, parameters)
    return wire


class Wire(Reducer):
    """A model's connection to its group: gradients go in by DDP's buckets and come back as the group's mean.

    Made by `attach`. Knows the model's parameter names, and how DDP wants its answers.
    """

    def connect(self, plug: _Plug, parameters: Mapping[str, Tensor]) -> None:
        """From now on the plug's buckets, made of these parameters, come here."""
        self._names = {id(p): name for name, p in parameters.items()}
        self._buckets: dict[tuple[int, ...], Layout] = {}
        self._plug = plug
        plug.wire = self

    def close(self) -> None:
        """Give the model back to plain DDP and end the lane. Every rank calls it; twice is fine."""
        if self._plug.wire is self:
            self._plug.wire = None
        super().close()

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
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)

        def done(error: BaseException | None) -> None:
            # DDP cannot raise a Python error out of a hook's future, so it gets the buffer as it is, and the error
            # is raised at the end of backward. Outside of backward (DDP's join) there is no such end.
            if error is not None and not in_backward:
                raised = error if isinstance(error, Exception) else RuntimeError(repr(error))
                future.set_exception(raised)  # type: ignore[arg-type]
            else:
                future.set_result(buffer)

        self.submit(buffer, self._layout(grads) if self.needs_layout else None, last=last, done=done)
        if last and not in_backward:
            self.step += 1
        return future

    def _layout(self, grads: dist.GradBucket) -> Layout:
        parameters = grads.parameters()
        identity = tuple(map(id, parameters))
        if identity not in self._buckets:
            self._buckets[identity] = Layout.of([(self._names[id(p)], tuple(p.shape)) for p in parameters])
        return self._buckets[identity]


class _Plug:
    """DDP takes one hook for life; the plug is that hook, and a wire can be put in and taken out.

    Without a wire it does what plain DDP does.
    """

    _plugs: ClassVar[weakref.WeakKeyDictionary[DistributedDataParallel, _Plug]] = weakref.WeakKeyDictionary()

    def __init__(self, group: dist.ProcessGroup):
        self.group = group
        self.wire: Wire | None = None

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
    buffer = bucket.buffer().mul_(1.0 / dist.get_world_size(plug.group))
    work = dist.all_reduce(buffer, group=plug.group, async_op=True)
    assert work is not None
    return work.get_future().then(lambda future: future.value()[0])


def _group(model: DistributedDataParallel) -> dist.ProcessGroup:
    group = model.process_group
    assert isinstance(group, dist.ProcessGroup)
    return group
