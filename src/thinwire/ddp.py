"""The front door for DistributedDataParallel: buckets in by its hook, futures back."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.control import Controller
from thinwire.core.layout import Layout
from thinwire.core.partition import Exempt
from thinwire.core.scheme import Scheme
from thinwire.exchange.collectives import amounts, nbytes_of
from thinwire.exchange.exchange import Exchange
from thinwire.exchange.server.client import ParameterServer
from thinwire.plug import Plug, exchanged, first_of, group_of, plain_mean, real
from thinwire.reducer import Reducer
from thinwire.server import warn_of_collectives


def attach(
    model: DistributedDataParallel,
    scheme: str | Scheme,
    *,
    exchange: Exchange | None,
    controller: str | Controller | None,
    feedback: str | bool,
    decay: float,
    residual: str,
    exempt: Exempt,
    warmup_steps: int,
    warmup_level: float | None,
    seed: int,
) -> Wire:
    """As `thinwire.attach`, which calls this."""
    plug = Plug.of(model)
    if plug.wire is not None:
        raise ValueError("this model is attached already; close() the other wire first")
    wire = Wire(
        {name: real(p) for name, p in exchanged(model).items()}, scheme, group_of(model), exchange=exchange,
        controller=controller, feedback=feedback, decay=decay, residual=residual, exempt=exempt,
        warmup_steps=warmup_steps, warmup_level=warmup_level, seed=seed,
    )  # fmt: skip
    wire.connect(plug, model)
    if isinstance(exchange, ParameterServer) and exchange.goes_on:
        warn_of_collectives(model)
    return wire


class Wire(Reducer):
    """A model's connection to its group: gradients go in by DDP's buckets and come back as the group's mean.

    Made by `attach`. Knows the model's parameter names, and how DDP wants its answers.
    """

    def connect(self, plug: Plug, model: DistributedDataParallel) -> None:
        """From now on the plug's buckets, made of this model's parameters, come here."""
        self._parameters = exchanged(model)
        self._names = {id(p): name for name, p in self._parameters.items()}
        self._buckets: dict[tuple[int, ...], Layout] = {}
        self._passed: list[dist.Work] = []  # sparse buckets of the step under way
        self._model = weakref.ref(model)
        self._plug = plug
        plug.wire = self
        self._may_be_unused = (model.find_unused_parameters or model.static_graph) and self.memory.nbytes > 0
        self._views = model.gradient_as_bucket_view
        self.may_undo: bool = self._may_be_unused

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
        self.submit(buffer, self._layout(grads) if self.needs_layout else None, last=last, done=done, here=last)
        return future

    def _pass(self, buffer: Tensor, *, last: bool) -> torch.futures.Future[Tensor]:
        """A sparse bucket, as plain DDP would: there is little in it to compress."""
        nbytes = nbytes_of(buffer._indices()) + nbytes_of(buffer._values())
        counted = amounts(nbytes, nbytes * (self.exchange.workers - 1), 1)
        self.exchange.transport.ledger.add(messages=1, bytes_dense=nbytes, **counted)
        work = plain_mean(buffer, self._plug.group)
        self._passed.append(work)
        if last:
            self.submit_nothing()
        return first_of(work)

    def end_step(self, *, silent: bool = False) -> None:
        for work in self._passed:
            work.wait()
            self.memory.judge(work.result()[0]._values())
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
            self._buckets[identity] = Layout.of([(self._names[id(p)], tuple(real(p).shape)) for p in parameters])
        return self._buckets[identity]


def _version(grad: Tensor | None) -> object:
    """Differs once anything was written."""
    return None if grad is None else (id(grad), grad._version)


def _fulfil(future: torch.futures.Future[Tensor], buffer: Tensor, error: BaseException | None) -> None:
    future.set_result(buffer)
