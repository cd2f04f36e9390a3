"""attach(): the front door for DistributedDataParallel."""

from __future__ import annotations

import fnmatch
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire import checkpoint
from thinwire.control import Controller
from thinwire.core.bucket import Bucket, Scratch
from thinwire.core.feedback import Feedback, wrap
from thinwire.core.layout import Layout, Segment
from thinwire.core.memory import Memory
from thinwire.core.request import Sum
from thinwire.core.scheme import Conversation, Scheme
from thinwire.core.warmup import warm_up
from thinwire.exchange.allreduce import AllReduce
from thinwire.exchange.collectives import nbytes_of
from thinwire.exchange.exchange import Exchange, in_parallel
from thinwire.exchange.lane import Job, Rounds
from thinwire.schemes import parse
from thinwire.steering import Steering

Exempt: TypeAlias = str | Sequence[str] | Callable[[str, Tensor], bool]

SMALL = 1024  # tensors with fewer elements travel exact by default: scales would eat what the codes save


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

    scheme: spec text such as "qsgd(bits=4)", or a Scheme.
    exchange: how workers talk; AllReduce over the model's process group unless given.
    controller: who turns the scheme's knob while training, such as "mqgrad" or tw.MQGrad(); call `wire.observe(loss)`.
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
    chosen = wrap(warm_up(parse(scheme), warmup_steps, warmup_level), feedback)
    steering = Steering(controller, chosen) if controller is not None else None
    wire = Wire(model, chosen, exchange or AllReduce(), exempt, seed, steering)
    plug.wire = wire
    return wire


class Wire:
    """A model's connection to its group: gradients go in by DDP's buckets and come back as the group's mean.

    Made by `attach`. Knows the model's parameter names and whose turn it is; knows nothing of how a scheme works.
    """

    def __init__(
        self, model: DistributedDataParallel, scheme: Scheme, exchange: Exchange, exempt: Exempt, seed: int,
        steering: Steering | None = None,
    ) -> None:  # fmt: skip
        self.scheme = scheme
        self.exchange = exchange
        self.steering = steering
        self.seed = seed
        self.step = 0
        self._names = {id(p): name for name, p in model.module.named_parameters() if p.requires_grad}
        self._exempt = {
            name
            for name, p in model.module.named_parameters()
            if p.requires_grad and _exempted(exempt, scheme, name, p)
        }
        self.memory = Memory()
        for name, parameter in model.module.named_parameters():
            if parameter.requires_grad and name not in self._exempt:
                self.memory.add(name, scheme.init(name, _like(parameter), seed))
        self._plans: dict[tuple[int, ...], _Plan] = {}
        self._jobs: list[Job] = []
        self._failed: BaseException | None = None  # what the step under way met first
        self._plug = _Plug.of(model)
        exchange.open(_group(model), scheme)
        try:
            exchange.agree(
                f"{scheme.spec}, feedback {'on' if isinstance(scheme, Feedback) else 'off'}, seed {seed}, "
                f"{len(self._names)} parameters, {len(self._exempt)} exempt, route {exchange.route}, "
                f"controller {steering.controller.spec if steering else 'none'}"
            )
        except BaseException:
            exchange.close()
            raise
        self.plain = all(self._merely_summed(name, p) for name, p in model.module.named_parameters() if p.requires_grad)
        self._direct = exchange.direct(scheme) if self.plain else None

    # -- what a user calls ---------------------------------------------------------------------------------------------

    def observe(self, loss: float | Tensor) -> None:
        """Tell the controller how training goes; without a controller there is nobody to tell."""
        if self.steering is not None:
            self.steering.observe(loss)

    @property
    def level(self) -> float:
        """The knob's level in use."""
        return self.scheme.level if self.steering is None else self.steering.level

    def stats(self) -> dict[str, float]:
        """Totals since attach (or since the run a checkpoint resumed): bytes, messages, seconds, steps."""
        totals = {
            "bytes_sent": 0.0,  # left this worker
            "bytes_given": 0.0,  # handed to collectives
            "bytes_dense": 0.0,  # what plain DDP would have handed to its all-reduce
            "messages": 0.0,
            "encode_seconds": 0.0,  # computing, on the lane or the direct way
            "wire_seconds": 0.0,  # waiting for answers there
            "exposed_seconds": 0.0,  # training not getting on meanwhile
        }
        totals |= self.exchange.ledger.totals()
        lane = self.exchange.lane
        totals |= {
            "steps": float(self.step),
            "level": float(self.level),
            "workers": float(self.exchange.workers),
            "memory_bytes": float(self.memory.nbytes),
            "scratch_bytes": float(lane.scratch_bytes if lane else 0),
        }
        return totals | self.scheme.report(self.memory)

    def state_dict(self, *, workers: int | None = None) -> dict[str, Any]:
        """All that a resumed run needs, as tensors and plain types. See `thinwire.checkpoint` for other world sizes."""
        return checkpoint.save(self, workers)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        checkpoint.load(self, state)

    def save_controller(self, path: str | Path) -> None:
        """Write what the controller has learnt, for `MQGrad(policy=path)` in another run. Every worker calls it."""
        if self.steering is None:
            raise ValueError("this wire has no controller to save")
        self.steering.settle()
        learnt = self.exchange.controller_state(self.steering.controller)
        if self.exchange.worker == 0:
            torch.save(learnt, path)

    def close(self) -> None:
        """Give the model back to plain DDP and end the lane. Every rank calls it; twice is fine."""
        if self._plug.wire is self:
            self._plug.wire = None
        self.exchange.close()

    def __enter__(self) -> Wire:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # -- what DDP calls ------------------------------------------------------------------------------------------------

    def on_bucket(self, grads: dist.GradBucket) -> torch.futures.Future[Tensor]:
        """Send a bucket on its way. Its future is always fulfilled; errors surface in `_end_step`."""
        last = grads.is_last()
        in_backward = torch._C._current_graph_task_id() != -1
        if grads.index() == 0:
            self._jobs, self._failed = [], None
        if last and in_backward:
            # Not with the first: a checkpointed part of the model is a backward of its own, which ends before others.
            torch.autograd.Variable._execution_engine.queue_callback(self._end_step)

        buffer = grads.buffer()
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[buffer.device] if buffer.is_cuda else None)

        def done(error: BaseException | None) -> None:
            # DDP cannot raise a Python error out of a hook's future, so it gets the buffer as it is, and the error
            # is raised at the end of backward. Outside of backward (DDP's join) there is no such end.
            if self._failed is None:
                self._failed = error
            if error is not None and not in_backward:
                future.set_exception(_as_exception(error))  # type: ignore[arg-type]
            else:
                future.set_result(buffer)

        if self._direct is not None:
            self._direct.mean(buffer, last=last, done=done)
        else:
            self.exchange.ledger.add(bytes_dense=nbytes_of(buffer))
            lane, begin = self.exchange.lane, partial(self._converse, buffer, self._plan(grads), self.step)
            assert lane is not None
            self._jobs.append(lane.submit(begin, last=last, done=done))
        if last and not in_backward:
            self.step += 1
        return future

    def _end_step(self) -> None:
        """The last thing in backward: wait for the lane, and raise what went wrong."""
        if self._jobs:
            with self.exchange.ledger.timed("exposed_seconds"):
                for job in self._jobs:
                    job.wait()
            self._jobs = []
        failed = self._failed
        if failed is not None:
            raise RuntimeError(f"the gradients of step {self.step} could not be exchanged: {failed}") from failed
        self.step += 1
        if self.steering is not None:
            self.steering.end_step(self.step, self.exchange)

    def _merely_summed(self, name: str, parameter: Tensor) -> bool:
        """Where that holds for all parameters, nobody needs to know what lies where in a bucket."""
        dtype = self.scheme.summed_as(parameter.dtype)
        return dtype is parameter.dtype or (dtype is not None and name not in self._exempt)

    def _plan(self, grads: dist.GradBucket) -> _Plan:
        parameters = grads.parameters()
        identity = tuple(map(id, parameters))
        if identity not in self._plans:
            shapes = [(self._names[id(p)], tuple(p.shape)) for p in parameters]
            self._plans[identity] = _Plan.of(Layout.of(shapes), self._exempt)
        return self._plans[identity]

    def _converse(self, buffer: Tensor, plan: _Plan, step: int, scratch: Scratch) -> Rounds:
        """One bucket, on the lane: exempt tensors by an exact sum, the others by the scheme, both at once."""
        workers = self.exchange.workers
        exact, talks = None, []
        if plan.exempt.numel:
            exact = scratch.take("exact", plan.exempt.numel, buffer.dtype, buffer.device)
            plan.exempt.gather(buffer, exact)
            talks = [self.exchange.answer_all(_summed(exact.mul_(1.0 / workers)), scratch)]

        if plan.compressed.numel:
            flat, lost = self._working_copy(buffer, plan, scratch)
            bucket = Bucket(flat, plan.compressed.layout, workers, self.exchange.worker, step, self.seed, lost, scratch)
            if self.steering is None:
                conversation = self.scheme.converse(bucket, self.memory, self.scheme.level)
            else:
                conversation = self.steering.converse(self.scheme, bucket, self.memory)
            answered = self.exchange.answer_all(conversation, scratch)
            mean = yield from (in_parallel(answered, *talks) if talks else answered)
            if mean.data_ptr() != buffer.data_ptr() or mean.dtype != buffer.dtype:
                plan.compressed.scatter(mean, buffer)
        elif talks:
            yield from in_parallel(*talks)
        if exact is not None:
            plan.exempt.scatter(exact, buffer)
        return buffer

    def _working_copy(self, buffer: Tensor, plan: _Plan, scratch: Scratch) -> tuple[Tensor, Tensor | None]:
        """The compressed tensors end to end in the dtype that the scheme works in, and memory for `lost`.

        One piece of scratch does for both. Where they lie so already, the bucket's own memory serves, and the scratch
        is for `lost`. Where they must be copied there, the bucket's memory is free for `lost` until the mean is back.
        """
        dtype = buffer.dtype if self.scheme.any_float else torch.promote_types(buffer.dtype, torch.float32)
        places = plan.compressed.places
        remembers = isinstance(self.scheme, Feedback)
        if len(places) == 1 and dtype is buffer.dtype:
            (start, stop), _ = places[0]
            flat = buffer if stop - start == buffer.numel() else buffer[start:stop]
            return flat, scratch.take("working", stop - start, dtype, buffer.device) if remembers else None
        flat = scratch.take("working", plan.compressed.numel, dtype, buffer.device)
        plan.compressed.gather(buffer, flat)
        return flat, buffer[: flat.numel()] if dtype is buffer.dtype and remembers else None


def _summed(tensor: Tensor) -> Conversation:
    return (yield Sum(tensor))


@dataclass(frozen=True)
class _Share:
    """Some tensors of a buffer: their layout end to end, and the runs of memory to copy between the two."""

    layout: Layout
    places: tuple[tuple[tuple[int, int], tuple[int, int]], ...]  # ((start, stop) in the buffer, in the layout)

    @property
    def numel(self) -> int:
        return self.layout.numel

    @classmethod
    def of(cls, whole: Layout, chosen: set[str]) -> _Share:
        segments, places, at = [], [], 0
        for segment in whole.segments:
            if segment.name in chosen:
                stop = at + segment.numel
                segments.append(Segment(segment.name, at, stop, segment.shape))
                if places and places[-1][0][1] == segment.start:
                    (a, _), (c, _) = places.pop()
                    places.append(((a, segment.stop), (c, stop)))
                else:
                    places.append(((segment.start, segment.stop), (at, stop)))
                at = stop
        return cls(Layout(segments), tuple(places))

    def gather(self, buffer: Tensor, out: Tensor) -> None:
        for (a, b), (c, d) in self.places:
            out[c:d].copy_(buffer[a:b])

    def scatter(self, values: Tensor, buffer: Tensor) -> None:
        for (a, b), (c, d) in self.places:
            buffer[a:b].copy_(values[c:d])


@dataclass(frozen=True)
class _Plan:
    """How a DDP bucket divides into what is compressed and what travels exact."""

    compressed: _Share
    exempt: _Share

    @classmethod
    def of(cls, whole: Layout, exempt: set[str]) -> _Plan:
        return cls(_Share.of(whole, set(whole.names) - exempt), _Share.of(whole, exempt))


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


def _exempted(exempt: Exempt, scheme: Scheme, name: str, parameter: Tensor) -> bool:
    if callable(exempt):
        return bool(exempt(name, parameter))
    if exempt == "auto":
        return not scheme.exact and (parameter.ndim <= 1 or parameter.numel() < SMALL)
    if isinstance(exempt, str):
        raise ValueError(f"exempt must be 'auto', a sequence of name patterns or a function, got {exempt!r}")
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in exempt)


def _like(parameter: Tensor) -> Tensor:
    """Shape, device and working dtype of a parameter's gradient, in no memory."""
    dtype = torch.promote_types(parameter.dtype, torch.float32)
    return torch.empty((), dtype=dtype, device=parameter.device).expand(parameter.shape)


def _group(model: DistributedDataParallel) -> dist.ProcessGroup:
    group = model.process_group
    assert isinstance(group, dist.ProcessGroup)
    return group


def _as_exception(error: BaseException) -> Exception:
    return error if isinstance(error, Exception) else RuntimeError(repr(error))
