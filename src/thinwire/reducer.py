"""Reducer: the pipeline of one worker. Named tensors or flat buckets go in, the group's mean comes out.

    submit or reduce -> Partition -> Feedback -> Scheme <-> Exchange, on a lane
                            level <- Steering <- ledger, norms, losses

It does not know who brings it work: front doors (`ddp`) feed it, and what must be said once for all of them is here.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire import checkpoint
from thinwire.control import Controller
from thinwire.core.bucket import Bucket, Scratch
from thinwire.core.feedback import wrap
from thinwire.core.layout import Layout
from thinwire.core.memory import Memory
from thinwire.core.partition import Exempt, Partition, exempted, like
from thinwire.core.scheme import Conversation, Scheme
from thinwire.core.warmup import warm_up
from thinwire.exchange import objects
from thinwire.exchange.allreduce import AllReduce
from thinwire.exchange.collectives import nbytes_of
from thinwire.exchange.exchange import Exchange
from thinwire.exchange.lane import CudaStage, Done, Job, Rounds, Stage, staged
from thinwire.exchange.rehearsal import rehearse
from thinwire.schemes import parse
from thinwire.steering import Measured, Steering, Turned

if TYPE_CHECKING:
    from typing_extensions import Self


@runtime_checkable
class Scaler(Protocol):
    """What a torch.amp.GradScaler is here."""

    def get_scale(self) -> float: ...


class Reducer:
    """One worker's connection to its group.

    Every worker makes one, with the same arguments, over tensors of the same names and shapes. It knows names, levels
    and whose turn it is; it knows nothing of how a scheme works, nor of models and gradients. Arguments as in `attach`;
    `tensors` by name (no values are read), `group` the process group of the workers, if they are in one.
    """

    subject: ClassVar[str] = "gradients of step"  # what it exchanges, for errors
    waits: ClassVar[bool] = True  # whoever brings a step's last bucket has nothing else to do until the mean is there

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        scheme: str | Scheme,
        group: dist.ProcessGroup | None,
        *,
        exchange: Exchange | None = None,
        controller: str | Controller | None = None,
        feedback: str | bool = "auto",
        decay: float = 1.0,
        residual: str = "fp32",
        exempt: Exempt = "auto",
        warmup_steps: int = 0,
        warmup_level: float | None = None,
        seed: int = 0,
    ) -> None:
        self.scheme: Scheme = wrap(warm_up(parse(scheme), warmup_steps, warmup_level), feedback, decay, residual)
        self.exchange: Exchange = exchange or AllReduce()
        self.device: torch.device = device_of(tensors)
        self.steering: Steering | None = self._steering(controller, group) if controller is not None else None
        self.group = group
        self.seed = seed
        self.step: int = 0
        self.after_step: list[Callable[[], object]] = []  # called at the end of every step, in this order
        self.memory: Memory = Memory()
        self.memory_scale: float | None = None  # of the loss, in what is remembered; None: unknown, or no matter
        self.prepared_for: int | None = None  # how many workers' state was to be filled and loaded
        exact = frozenset(name for name, tensor in tensors.items() if exempted(exempt, self.scheme, name, tensor))
        self._exact = exact
        self._own: dict[str, list[str]] = {}  # by tensor: the names of what this worker has of it
        own = self.exchange.deal(tensors, exact, self.scheme)
        if tensors and len(exact) == len(tensors) and not self.scheme.exact:
            warnings.warn(f"all tensors are exempt, so {self.scheme.name} has nothing to compress", stacklevel=3)
        self.divided: bool = [piece.name for piece in own] != list(tensors)  # workers have different parts of the model
        measured = Measured(self.scheme, self.steering) if self.steering else self.scheme
        self._whole = Partition(measured, frozenset(piece.name for piece in own if piece.whole in exact))
        self._layouts: dict[tuple[tuple[str, tuple[int, ...]], ...], Layout] = {}
        self._jobs: list[Job] = []
        self._failed: BaseException | None = None  # what the step under way met first
        self._scale: Scaler | float | None = None
        self.may_undo: bool = False  # what a step remembers may have to be forgotten at its end
        self._open(group, tensors)
        elsewhere = self.device.type == "cuda" and self.exchange.device.type == "cpu"
        self._stage: Stage | None = CudaStage(self.device) if elsewhere else None
        for piece in own:
            self._own.setdefault(piece.whole, []).append(piece.name)
            if piece.whole not in exact:
                kind = like(piece.like(tensors[piece.whole]), self.scheme, self.exchange.device)
                self.memory.add(piece.name, self.scheme.init(piece.name, kind, seed))
        if self.exchange.device.type != "cpu":
            levels = self.steering.controller.levels if self.steering and self.turned is self.scheme else [self.level]
            rehearse(self.exchange, self.scheme, tensors, own, exact, levels, warmup_steps=warmup_steps, seed=seed)
        # Where all tensors are merely summed, nobody needs to know what lies where in a bucket.
        self.plain: bool = all(self._merely_summed(name, tensor) for name, tensor in tensors.items())
        self._direct = self.exchange.direct(self.scheme) if self.plain and self.waits else None

    def _steering(self, controller: str | Controller, group: dist.ProcessGroup | None) -> Steering:
        """What a controller starts from may be on some ranks only: the others hear of it, too."""
        try:
            return Steering(controller, self.turned)
        except ValueError:
            self.exchange.open(group, self.scheme, self.device)
            with suppress(ValueError):
                self.exchange.agree(None)
            self.exchange.close()
            raise

    @property
    def turned(self) -> Turned:
        """What a controller turns here."""
        return self.scheme

    def _open(self, group: dist.ProcessGroup | None, tensors: Mapping[str, Tensor]) -> None:
        """Make the lane, and hold what this worker was given against what the others were."""
        self.exchange.open(group, self.scheme, self.device)
        shapes = [(name, tuple(tensor.shape), str(tensor.dtype)) for name, tensor in tensors.items()]
        try:
            self.exchange.agree(self.settings() | {"model": objects.digest(shapes)})
        except BaseException:
            self.exchange.close()
            raise

    def settings(self) -> dict[str, str]:
        """What all workers must have been given alike, in words."""
        learnt = self.steering.controller.state_dict() if self.steering else None
        return {
            "version of thinwire": metadata.version("thinwire"),
            "scheme": self.scheme.spec,
            "feedback and warm-up": repr(self.scheme),
            "seed": str(self.seed),
            "route": self.exchange.route,
            "controller": self.steering.controller.spec if self.steering else "none",
            "state of the controller": objects.digest(learnt),
            "set of exempt tensors": objects.digest(sorted(self._exact)),
        }

    def _merely_summed(self, name: str, tensor: Tensor) -> bool:
        dtype = self.scheme.summed_as(tensor.dtype, self.exchange.workers)
        return dtype is tensor.dtype or (dtype is not None and name not in self._exact)

    @property
    def needs_layout(self) -> bool:
        return self._direct is None

    # -- work ----------------------------------------------------------------------------------------------------------

    def begin_step(self) -> None:
        """Forget what is left of a step that somebody broke off."""
        self._jobs, self._failed = [], None
        self.memory.forget_stash()

    def submit(self, buffer: Tensor, layout: Layout | None, *, last: bool, done: Done, here: bool = False) -> None:
        """Turn a bucket into the group's mean, in place. `done` is called once: with None, or with what went wrong.

        Every worker submits the same buckets in the same order, says of the `last` of a step that it is, and then calls
        `end_step`. Until `done`, the buffer is not the caller's. here: the caller waits for it next: see `Lane.submit`.
        """

        def ended(error: BaseException | None) -> None:
            if self._failed is None:
                self._failed = error
            done(error)

        if self._direct is not None:
            self._direct.mean(buffer, last=last, done=ended)
            return
        assert layout is not None and self.exchange.lane is not None
        if layout.numel != buffer.numel():
            names, numel = layout.names[:3], buffer.numel()
            raise ValueError(f"a bucket of {numel} elements is said to hold {layout.numel}: {names}")
        self.exchange.transport.ledger.add(bytes_dense=nbytes_of(buffer))
        about = partial(self._rounds, layout=layout, step=self.step, scale=self._current_scale())
        begin = partial(about, buffer) if self._stage is None else staged(self._stage, buffer, about)
        timed = here and not self.exchange.lane.keeps_time
        with self.exchange.transport.ledger.timed("exposed_seconds") if timed else nullcontext():
            self._jobs.append(self.exchange.lane.submit(begin, last=last, done=ended, here=here))

    def submit_nothing(self) -> None:
        """Say after the fact that the bucket before was the last of the step."""
        if self._direct is not None:
            self._direct.finish()
        elif self.exchange.lane is not None:
            self._jobs.append(self.exchange.lane.submit(_nothing, last=True, done=lambda error: None))

    def _rounds(self, buffer: Tensor, scratch: Scratch, layout: Layout, step: int, scale: float | None) -> Rounds:
        exchange = self.exchange
        self._follow(scale)
        who = (exchange.workers, exchange.worker)
        bucket = Bucket(buffer, layout, *who, step, self.seed, None, scratch, seat=exchange.place)
        mean = yield from exchange.hold(bucket, self._converse)
        if scale is not None:
            self.memory.judge(buffer)
        return mean

    def _converse(self, part: Bucket) -> Conversation:
        if self.may_undo:
            self.memory.stash(part.layout.names)
        return self._whole.converse(part, self.memory, self.level)

    def restore(self, names: Iterable[str]) -> None:
        """What is remembered of these tensors, as before the step under way."""
        self.memory.restore(own for name in names for own in self._own.get(name, ()))

    def _current_scale(self) -> float | None:
        if self._scale is None or isinstance(self._scale, int | float):  # a protocol is not asked cheaply
            return self._scale
        return self._scale.get_scale()

    def _follow(self, scale: float | None) -> None:
        """Have what is remembered in the units that gradients come in now."""
        if scale is None or scale == self.memory_scale:
            return
        if self.memory_scale is not None:
            self.scheme.rescale(self.memory, scale / self.memory_scale)
        self.memory_scale = scale
        if self.steering is not None:
            self.steering.scale = scale

    def settle(self) -> None:
        """Wait for all buckets that were submitted; raise what went wrong."""
        if not all(job.ended for job in self._jobs):
            with self.exchange.transport.ledger.timed("exposed_seconds"):
                for job in self._jobs:
                    job.wait()
        self._jobs = []
        if failed := self._failed:
            raise RuntimeError(f"the {self.subject} {self.step} could not be exchanged: {failed}") from failed

    def end_step(self, *, silent: bool = False) -> None:
        """Wait for all buckets of the step; raise what went wrong.

        silent: this worker had no data of its own any more, so that it observed no loss.
        """
        self.settle()
        self.memory.undo_nonfinite()  # nobody will apply such a step
        self.step += 1
        if self.steering is not None:
            self.steering.end_step(self.step, self.exchange, silent=silent)
        for call in self.after_step:
            call()

    def reduce(self, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """One step, here and now: the mean of everybody's tensors, by name. All have one dtype."""
        shapes = tuple((name, tuple(tensor.shape)) for name, tensor in named.items())
        layout = self._layouts.get(shapes) or self._layouts.setdefault(shapes, Layout.of(shapes))
        buffer = torch.cat([tensor.detach().reshape(-1) for tensor in named.values()])
        self.begin_step()
        self.submit(buffer, layout, last=True, done=lambda error: None, here=True)
        self.end_step()
        return {s.name: buffer[s.start : s.stop].view(s.shape) for s in layout.segments}

    # -- what a user calls, at every front door ------------------------------------------------------------------------

    def scale(self, scaler: Scaler | float) -> None:
        """Tell of the scale of the loss, and so of the gradients: a GradScaler, or a number. Every worker, alike.

        What is remembered of gradients then follows the scale, and a step in which anything is not finite, which the
        scaler will skip, leaves no trace in it. That costs a copy of what is remembered.

        >>> model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(1024, 10))
        >>> scaler = torch.amp.GradScaler("cpu")
        >>> wire = tw.attach(model, "topk(density=0.01)")
        >>> wire.scale(scaler)
        >>> wire.close()
        """
        if not isinstance(scaler, Scaler) and not (isinstance(scaler, int | float) and scaler > 0):
            raise ValueError(f"scale() takes a GradScaler or a number above 0, got {scaler!r}")
        self._scale = scaler
        self.may_undo = True
        if self.memory_scale is None:
            self.memory_scale = self._current_scale()

    def observe(self, loss: float | Tensor) -> None:
        """Tell the controller how training goes; without a controller there is nobody to tell."""
        if self.steering is not None:
            self.steering.observe(loss)

    @property
    def level(self) -> float:
        """The knob's level in use."""
        return self.scheme.level if self.steering is None else self.steering.level

    @property
    def steps(self) -> int:
        """Of the training loop, since the start."""
        return self.step

    def stats(self) -> dict[str, float]:
        """Totals since the start (or since that of the run a checkpoint resumed). No device is waited for."""
        totals = {
            "bytes_sent": 0.0,  # left this worker
            "bytes_given": 0.0,  # handed to collectives
            "bytes_dense": 0.0,  # what plain DDP would have handed to its all-reduce
            "messages": 0.0,
            "encode_seconds": 0.0,  # computing, on the lane or the direct way
            "wire_seconds": 0.0,  # waiting for answers there
            "exposed_seconds": 0.0,  # training not getting on meanwhile
        }
        lane = self.exchange.lane
        if lane is not None:
            lane.catch_up()
        totals |= self.exchange.transport.ledger.totals()
        totals |= {
            "steps": float(self.steps),
            "level": float(self.level),
            "workers": float(self.exchange.workers),
            "memory_bytes": float(self.memory.nbytes),
            "scratch_bytes": float(lane.scratch_bytes if lane else 0),
        }
        return totals | self.scheme.report(self.memory)

    def state_dict(
        self, *, workers: int | None = None, gather: bool | Literal["first"] = False
    ) -> dict[str, Any]:  # fmt: skip
        """All that a resumed run needs, as tensors and plain types. See `thinwire.checkpoint` for other world sizes.

        workers: an empty state as so many workers left it, for a distributed checkpoint to fill.
        gather: everybody's in one, for a checkpoint that is one file; every rank calls it. True: on every rank, each of
            which then holds all workers' residuals; "first": on the first alone, which writes it.
        """
        if gather not in (False, True, "first"):
            raise ValueError(f"gather must be False, True (on every rank) or 'first' (on the first), got {gather!r}")
        if gather and workers is not None:
            raise ValueError("gather= is of what there is, workers= of what is to be filled: give one of them")
        state = self._state(workers)
        return checkpoint.gather(self, state, to_all=gather is True) if gather else state

    def _state(self, workers: int | None) -> dict[str, Any]:
        return checkpoint.save(self, workers)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        checkpoint.load(self, checkpoint.own(self, state))

    def apart(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """What differs from worker to worker in a state, beside what each remembers."""
        return {key: state[key] for key in ("ledger", "steering")}

    @property
    def groups(self) -> Sequence[dist.ProcessGroup]:
        """Over which, one after the other, the states of all ranks come together."""
        return [] if self.group is None else [self.group]

    @property
    def seat(self) -> str:
        """Whose state this is, among all ranks'."""
        return checkpoint.part(self.exchange.worker)

    def save_controller(self, path: str | Path) -> None:
        """Write what the controller has learnt, for `MQGrad(policy=path)` in another run. The first worker writes."""
        if self.steering is None:
            raise ValueError("this wire has no controller to save")
        self.steering.settle()
        if self.exchange.worker == 0:
            torch.save(self.steering.controller.state_dict(), path)

    def close(self) -> None:
        """End the lane. Every worker calls it; twice is fine."""
        self.exchange.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def device_of(tensors: Mapping[str, Tensor]) -> torch.device:
    """The one device of all tensors."""
    devices = {tensor.device for tensor in tensors.values()} or {torch.device("cpu")}
    if len(devices) > 1:
        found = ", ".join(sorted(map(str, devices)))
        raise ValueError(f"all tensors of a wire must be on one device, these are on {found}")
    return devices.pop()


def _nothing(scratch: Scratch) -> Rounds:
    return
    yield  # makes it a generator: a conversation that asks for nothing
