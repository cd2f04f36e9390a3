"""LocalSteps: the front door for training that talks every so many steps, instead of in every one.

After DiLoCo (Douillard et al., 2023), Streaming DiLoCo (Douillard et al., 2025) and SparseLoCo (Sarfi et al., 2025).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from thinwire import checkpoint, kernels
from thinwire.control import Controller
from thinwire.core.bucket import Bucket
from thinwire.core.partition import Exempt, exempted
from thinwire.core.request import Max
from thinwire.core.scheme import Conversation, Scheme
from thinwire.exchange.exchange import Exchange
from thinwire.exchange.server.late.client import OpenParameterServer
from thinwire.local import saved
from thinwire.local.anchor import Anchor, Part, shard
from thinwire.local.attempts import on_attempts
from thinwire.local.late import Arrivals
from thinwire.local.outer import MakeOuter, Outer, describe, parse_outer
from thinwire.local.schedule import Choice, Schedule
from thinwire.reducer import Reducer
from thinwire.schemes import parse
from thinwire.steering import Turned


@dataclass
class _Flight:
    """A part on its way: the group's mean of its changes is taken `left` attempts from now."""

    part: Part
    change: Tensor  # this worker's until it has arrived, then the mean
    left: int
    arrived: bool = False


class LocalSteps(Reducer):
    """Every worker trains a replica of its own; now and then the group's mean of their changes moves a common anchor.

    1. Every `every` steps, a worker's change is D = anchor - weights.
    2. The group's mean of D is taken as that of gradients is: by any scheme, with error feedback, over any exchange.
    3. The outer optimizer moves the anchor by it, alike on every worker, and training goes on from there.

    >>> model = torch.nn.Linear(1024, 10)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> with tw.LocalSteps(model, optimizer, every=8, scheme="qsgd(bits=4)") as local:
    ...     for x in torch.randn(16, 32, 1024):
    ...         optimizer.zero_grad()
    ...         model(x).square().mean().backward()
    ...         optimizer.step()
    >>> int(local.stats()["rounds"])
    2

    model: a bare module; or DDP or FSDP2 over the ranks of one site, and then `group` or `exchange` between sites.
    optimizer: this worker's own, with state of its own.
    every: steps between two rounds, or a function of the round's number; or several numbers, of which `controller`
        chooses, instead of the scheme's level. Attempts count: with `scaler`, also steps that a GradScaler skips.
    outer: "nesterov(lr=0.7, momentum=0.9)", "sgd(lr=1)", "average", or a function of parameters: an optimizer.
    parts: the tensors go in so many parts of about equal size, in turn, each every `every` steps.
    delay: steps that training goes on while a part travels; at most every / parts.
    mix: how much of what was done locally is kept where the anchor arrives; 0 goes on from the anchor.
    weighted: workers that made more steps count for more; else all must have made equally many.
    group: whose ranks take part; all unless given.
    scheme, exchange, controller, feedback, decay, residual, exempt, warmup_steps, warmup_level, seed: as in `attach`.

    At the start all take the first worker's weights and buffers. The anchor and the outer state are float32, also under
    bfloat16 weights. Buffers of floating point are averaged with the weights. A worker whose weights are not finite
    makes the round void for all: nobody's anchor or residual takes it in, and that worker goes on from the anchor.
    """

    subject: ClassVar[str] = "weight changes of round"
    waits: ClassVar[bool] = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        every: int | Sequence[int] | Callable[[int], int] = 30,
        scheme: str | Scheme = "fp16",
        outer: str | Outer | MakeOuter = "nesterov(lr=0.7, momentum=0.9)",
        decay: float = 1.0,
        parts: int = 1,
        delay: int = 0,
        mix: float = 0.0,
        exchange: Exchange | None = None,
        group: dist.ProcessGroup | None = None,
        feedback: str | bool = "auto",
        residual: str = "fp32",
        exempt: Exempt = "auto",
        controller: str | Controller | None = None,
        scaler: torch.amp.GradScaler | None = None,  # type: ignore[reportPrivateImportUsage]
        weighted: bool = False,
        warmup_steps: int = 0,
        warmup_level: float | None = None,
        seed: int = 0,
    ) -> None:
        if not 0 <= mix < 1:
            raise ValueError(f"mix must be 0 (go on from the anchor) or more, below 1, got {mix!r}")
        module, group = _between_sites(model, group, exchange)
        trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
        averaged = {name: b for name, b in module.named_buffers() if b.is_floating_point()}
        made, plain = parse_outer(outer), parse(scheme)
        self.anchor: Anchor = Anchor(trained | averaged, frozenset(averaged), parts=parts, outer=made)
        self._choice = Choice(tuple(every)) if isinstance(every, Sequence) else None
        if self._choice is not None and (controller is None or not every):
            raise ValueError(f"every={every!r} is for a controller to choose from: give one, controller=")
        for length in self._choice.lengths if self._choice else ():
            Schedule(length, parts, delay)  # each must be possible
        self.schedule: Schedule = Schedule(self._chosen if isinstance(every, Sequence) else every, parts, delay)
        self.mix: float = mix
        self.weighted: bool = weighted
        super().__init__(
            self.anchor.like(), plain, group, exchange=exchange, controller=controller, feedback=feedback, decay=decay,
            residual=residual, exempt=lambda name, t: name in averaged or exempted(exempt, plain, name, t),
            warmup_steps=warmup_steps, warmup_level=warmup_level, seed=seed,
        )  # fmt: skip
        self.schedule.begin(0)  # as the controller begins
        if weighted and self.divided:
            super().close()
            raise ValueError("weighted=True is not for an exchange that takes means inside a machine first")
        self._dense = sum(shard(p).nbytes for p in trained.values())
        self._optimizer = optimizer
        self._told = (0, False)  # by this worker for the round under way: its attempts, and whether it is not finite
        self.void_rounds: int = 0
        self._flight: _Flight | None = None
        self._arrivals: Arrivals | None = None
        self._begin_together(module, group)
        self._let_go = on_attempts(optimizer, scaler, self._attempted)

    @torch.no_grad()
    def _begin_together(self, module: nn.Module, group: dist.ProcessGroup | None) -> None:
        """From what the first worker has; where workers may come late, from what the job has."""
        if not isinstance(self.exchange, OpenParameterServer):
            assert group is not None
            for tensor in [*module.parameters(), *module.buffers()]:
                dist.broadcast(shard(tensor), dist.get_global_rank(group, 0), group=group)
            self.anchor.take_local()
            self._crew = self.exchange.workers  # to begin with
            return
        self._crew = self.exchange.room
        self._arrivals = Arrivals(self, module, self.exchange)
        try:
            self._arrivals.enter()
        except BaseException:
            super().close()
            raise

    def settings(self) -> dict[str, str]:
        every = "" if self._choice is None else f" of {self._choice.lengths}"
        plan = f"{self.schedule.spec}{every}, {describe(self.anchor.outer)}, mix {self.mix}, weighted {self.weighted}"
        return super().settings() | {"plan of local steps": plan}

    @property
    def turned(self) -> Turned:
        return self._choice or super().turned

    @property
    def level(self) -> float:
        return super().level if self._choice is None else self.scheme.level

    def _chosen(self, round: int) -> int:
        """What the controller has decided by the exchanges that have landed, which are the same on every worker."""
        steering = getattr(self, "steering", None)
        if steering is None:
            assert self._choice is not None
            return self._choice.lengths[0]
        steering.settle()
        return int(steering.level)

    # -- rounds --------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _attempted(self) -> None:
        """After every step of the worker's own."""
        if self._flight is not None:
            self._flight.left -= 1
            if self._flight.left <= 0:
                self._land(self.mix)
                self._let_in()
        for number in self.schedule.attempt():
            self._depart(self.anchor.parts[number])
            if not self.schedule.delay:
                self._land(self.mix)
                self._let_in()

    @torch.no_grad()
    def sync(self) -> None:
        """All parts, here and now: all workers then have the anchor's weights. Every worker calls it at the same place,
        and a new round begins.
        """
        self._land(self.mix)
        for part in self.anchor.parts:
            self._depart(part)
            self._land(0.0)
        self.schedule.begin(self.schedule.round + 1)
        self._let_in()

    def _let_in(self) -> None:
        """Between two exchanges, those who have come."""
        if self._arrivals is not None:
            self._arrivals.let_in()

    def _depart(self, part: Part) -> None:
        change = self.anchor.change(part)
        made = self.schedule.leave(part.number)
        self._told = (made if self.weighted else self.schedule.attempts, not kernels.all_finite(change))
        self.begin_step()
        if self._arrivals is not None:
            self._arrivals.call()
        for start, layout in part.buckets:
            last = start + layout.numel == part.layout.numel
            self.submit(change[start : start + layout.numel], layout, last=last, done=lambda error: None)
        self._flight = _Flight(part, change, self.schedule.delay)

    def _converse(self, part: Bucket) -> Conversation:
        """First everybody hears of everybody; where all is well, the change is a bucket like any other."""
        crew, worker = self._crew, self.exchange.worker
        words = torch.zeros(2, crew, dtype=torch.float64, device=self.exchange.device)
        words[0, worker], words[1, worker] = 1 + self._told[0], self._told[1]
        counts, ill = (yield Max(words.view(-1))).view(2, crew).tolist()
        made = {number: int(count) - 1 for number, count in enumerate(counts) if count}
        if not self.weighted and len(set(made.values())) > 1:
            raise ValueError(
                f"workers have made different numbers of steps, {made}: give a GradScaler as scaler=, so that steps it "
                "skips count too; where they are to differ, weighted=True"
            )
        if any(ill):
            return part.flat.fill_(torch.nan)  # so that all see it, those too who were asked about other parts
        if self.weighted:
            total = sum(made.values())  # 0: nobody has made a step, and buffers still have a mean
            part.flat.mul_(made[worker] * len(made) / total if total else 1.0)
        return (yield from super()._converse(part))

    def _arrive(self, flight: _Flight) -> None:
        if not flight.arrived:
            self.end_step()
            flight.arrived = True

    def _land(self, mix: float) -> None:
        """Take what comes back of the part under way, if one is."""
        flight, self._flight = self._flight, None
        if flight is None:
            return
        self._arrive(flight)
        if not kernels.all_finite(flight.change):
            self._begin_anew(flight.part)
            return
        alone = self.exchange.workers == 1 and self.scheme.exact and not self.schedule.delay
        self.anchor.step(flight.part, flight.change, alone=alone)
        self.anchor.take(flight.part, mix)

    def _begin_anew(self, part: Part) -> None:
        self.void_rounds += 1
        self.anchor.take(part, 0.0)
        if self._told[1]:
            warnings.warn("weights of this worker are not finite: it goes on from the anchor", stacklevel=2)
            self.anchor.put_local()
            for state in self._optimizer.state.values():
                for kept in state.values():
                    if isinstance(kept, Tensor) and not torch.isfinite(shard(kept)).all():
                        kept.zero_()

    # -- what a user calls ---------------------------------------------------------------------------------------------

    @contextmanager
    def synchronised(self) -> Iterator[None]:
        """Inside, the model has the anchor's weights and buffers, to evaluate or save; afterwards its own again."""
        with torch.no_grad(), self.anchor.shown(), torch.enable_grad():
            yield

    @property
    def steps(self) -> int:
        """That the job has made: where the training loop of a worker begins that came late, or resumes."""
        return self.schedule.attempts

    def stats(self) -> dict[str, float]:
        """As of any wire; `steps` are the worker's own, and `bytes_dense` what exchanging in all of them would take."""
        return super().stats() | self.anchor.nbytes | {
            "rounds": float(self.schedule.round),
            "every": float(self.schedule.length),
            "void_rounds": float(self.void_rounds),
            "bytes_dense": float(self.schedule.attempts * self._dense),
        }  # fmt: skip

    def state_dict(
        self, *, workers: int | None = None, gather: bool | Literal["first"] = False
    ) -> dict[str, Any]:  # fmt: skip
        """All that a resumed run needs beside the model's and the optimizer's own states, also within a round.

        workers, gather: as of any wire. Models and optimizers are every worker's own, too, and not in it.
        """
        if gather and self.anchor.sharded:
            raise ValueError("a sharded model's local steps cannot be gathered: save every rank's own state_dict()")
        return super().state_dict(workers=workers, gather=gather)

    def _state(self, workers: int | None) -> dict[str, Any]:
        flight = self._flight
        if flight is not None:
            self._arrive(flight)
        return super()._state(workers) | {
            "local": self.anchor.state_dict() | self.schedule.state_dict() | {
                "under_way": -1 if flight is None else flight.part.number,
                "left": 0 if flight is None else flight.left,
                "mean": self.anchor.room if self.schedule.delay else self.anchor.room[:0],
                "void_rounds": self.void_rounds,
                "told": list(self._told),
            },
        }  # fmt: skip

    def apart(self, state: Mapping[str, Any]) -> dict[str, Any]:
        shared = {"anchor", "outer", "outer_options", "mean"}
        return super().apart(state) | {"local": {k: v for k, v in state["local"].items() if k not in shared}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take a saved state. Load the model and the optimizer first; at another number of workers, in the middle of
        a round, the model goes on from the anchor instead, since there are no weights for all.
        """
        state = checkpoint.own(self, state)
        if "local" not in state:
            raise ValueError("the state is not one of LocalSteps: it has no part 'local'")
        local, resumes = state["local"], state.get("workers") == self.exchange.workers
        saved.check(local, self.anchor)
        super().load_state_dict(state)
        self._load(local, resumes=resumes)

    @torch.no_grad()
    def _load(self, local: dict[str, Any], *, resumes: bool) -> None:
        self.anchor.load_state_dict(local)
        self.schedule.load_state_dict(local)
        self.void_rounds, self._told = local["void_rounds"], tuple(local["told"])
        self._flight = None
        if local["under_way"] >= 0:
            part = self.anchor.parts[local["under_way"]]
            self.anchor.room.copy_(local["mean"])
            self._flight = _Flight(part, self.anchor.room[: part.layout.numel], local["left"], arrived=True)
        if not resumes:
            self._land(0.0)
            self.anchor.put_local()
            self.schedule.begin(self.schedule.round)

    def close(self) -> None:
        """Let the optimizer go and end the lane; the replica stays as it is. Every worker calls it; twice is fine."""
        self._let_go()
        super().close()

    def finish(self) -> None:
        """A last round, unless one has just ended, so that all leave with the same weights. Every worker calls it."""
        at_anchor = self.schedule.at == 0 and self._flight is None and self.schedule.parts == 1 and self.mix == 0
        if not at_anchor:
            self.sync()

    def __exit__(self, *exception: object) -> None:
        """At the end of a `with` block all have the same weights, unless it ends by an exception."""
        if exception[0] is None:
            self.finish()
        self.close()


def _between_sites(
    model: nn.Module, group: dist.ProcessGroup | None, exchange: Exchange | None
) -> tuple[nn.Module, dist.ProcessGroup | None]:
    """The module whose weights change, and the group that takes their mean; None where they are in none."""
    if isinstance(exchange, OpenParameterServer):
        if not isinstance(model, nn.Module) or isinstance(model, DistributedDataParallel):
            raise ValueError(f"where workers may come late LocalSteps takes a bare module, got {type(model).__name__}")
        return model, None
    if not dist.is_initialized():
        raise ValueError("LocalSteps needs torch.distributed: call init_process_group first")
    if not isinstance(model, nn.Module):
        raise ValueError(f"LocalSteps takes a module, got {type(model).__name__}")
    everyone = dist.group.WORLD
    assert everyone is not None
    model = getattr(model, "_orig_mod", model)  # of a compiled module: the same parameters, by their own names
    parallel = isinstance(model, DistributedDataParallel)
    if (parallel or any(hasattr(p, "to_local") for p in model.parameters())) and group is None and exchange is None:
        raise ValueError(
            "this model exchanges gradients among the ranks of one site: say who goes between sites, by group= or "
            "exchange=; or give the bare module"
        )
    return model.module if parallel else model, group or everyone
