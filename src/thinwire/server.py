"""join(): the front door of the parameter server. Some ranks of the job serve, the others train."""

from __future__ import annotations

import datetime
import uuid
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.nn.parallel import DistributedDataParallel

from thinwire.core.scheme import Scheme
from thinwire.exchange.objects import all_gather_objects
from thinwire.exchange.server import limits
from thinwire.exchange.server.channel import Channel
from thinwire.exchange.server.client import ParameterServer
from thinwire.exchange.server.late.client import OpenParameterServer
from thinwire.exchange.server.late.door import Door
from thinwire.exchange.server.late.notices import Job, Notices
from thinwire.exchange.server.loop import Server
from thinwire.exchange.server.pushpull import PushPull
from thinwire.exchange.server.weights import MakeOptimizer, MakeSchedule, SharedWeights
from thinwire.exchange.transport import Transport
from thinwire.schemes import codec


def join(
    *,
    servers: int = 1,
    down: str = "same",
    on_failure: str = "continue",
    timeout_seconds: float = 300.0,
    memory_bytes: int | None = None,
    transport: Transport | None = None,
    late: bool = False,
    room: int | None = None,
) -> Role:
    """Divide the ranks of a job: the first `servers` serve, the others train. Every rank calls it alike.

    down: how means come back to the workers; see `ParameterServer`.
    on_failure: what a dead worker means: "continue" (the others go on without it) or "stop" (an error for all: under
        torchrun, which restarts the whole group, so that nobody runs past the checkpoint that the others resume from).
    timeout_seconds: a worker that keeps the others waiting for longer counts as dead. More than the longest pause that
        one worker makes alone, such as saving a checkpoint.
    memory_bytes: of a server, that all workers' messages together may take; each has an equal share, and one that asks
        for more is refused. The machine's unless given.
    transport: starts and counts what a worker sends; one of its own unless given.
    late: workers may come late, or again, to `LocalSteps`. It takes the place of init_process_group, which no rank can
        join later: RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT say who this is, and rank 0 must serve.
    room: with `late`, for how many workers there is room in all; for as many as begin, unless given.
    """
    if not timeout_seconds > 0:
        raise ValueError(f"timeout_seconds must be positive, got {timeout_seconds!r}")
    if on_failure not in ("continue", "stop"):
        raise ValueError(f"on_failure must be 'continue' or 'stop', got {on_failure!r}")
    if memory_bytes is not None and not memory_bytes > 0:
        raise ValueError(f"memory_bytes must be positive, got {memory_bytes!r}")
    if late:
        if on_failure != "continue":
            raise ValueError('late=True is for a job that goes on without the lost: on_failure="continue"')
        return _open_role(servers, down, timeout_seconds, memory_bytes, transport, room)
    if room is not None:
        raise ValueError("room= is for workers that come late: join(late=True)")
    if not dist.is_initialized():
        raise ValueError("join() divides the ranks of a job: call torch.distributed.init_process_group first")
    ranks = list(range(dist.get_world_size()))
    _check_servers(servers, len(ranks))
    everyone = dist.group.WORLD
    assert everyone is not None
    session = all_gather_objects(f"thinwire/{uuid.uuid4().hex}", everyone)[0]
    # By itself a new group would wait for half an hour, whatever the job's own time-out.
    workers = dist.new_group(ranks[servers:], timeout=datetime.timedelta(seconds=timeout_seconds))
    rank, store = dist.get_rank(), _get_default_store()
    if rank < servers:
        channels = {
            worker: Channel(
                store, f"{session}/{rank}/{worker}", f"worker {worker}", serves=True, timeout=timeout_seconds
            )
            for worker in range(len(ranks) - servers)
        }
        return Role(None, None, channels, on_failure, timeout_seconds, memory_bytes or limits.memory_bytes())
    worker = rank - servers
    # A worker waits for its servers while they wait, up to the timeout, for another worker.
    patience = 2 * timeout_seconds + 30
    own = [
        Channel(
            store, f"{session}/{server}/{worker}", f"server {server}",
            serves=False, timeout=patience, connecting=timeout_seconds,
        ) for server in range(servers)
    ]  # fmt: skip
    assert workers is None or isinstance(workers, dist.ProcessGroup)
    goes_on = on_failure == "continue"
    exchange = ParameterServer(own, ranks[servers:], worker, down=down, goes_on=goes_on, transport=transport)
    return Role(workers, exchange, {}, on_failure, timeout_seconds, 0)


def _check_servers(servers: int, ranks: int) -> None:
    if not isinstance(servers, int) or not 1 <= servers < ranks:
        raise ValueError(f"servers must leave a worker: 1..{ranks - 1} of {ranks} ranks, got {servers!r}")


def _open_role(
    servers: int, down: str, timeout: float, memory_bytes: int | None, transport: Transport | None, room: int | None
) -> Role:
    """In a job that workers may join late, by its store alone."""
    if dist.is_initialized():
        raise ValueError(
            "join(late=True) takes the place of init_process_group: a worker that comes late cannot call it"
        )
    store, rank, world_size = next(dist.rendezvous("env://", timeout=datetime.timedelta(seconds=timeout)))
    _check_servers(servers, world_size)
    first = world_size - servers
    if room is not None and (not isinstance(room, int) or room < first):
        raise ValueError(f"room must be at least {first}, the workers that the job begins with, got {room!r}")
    notices, job = Notices(store, timeout), Job(servers, first, room or first)
    if rank == 0:
        notices.announce(job)
    elif notices.job() != job:
        raise ValueError(f"the job has {notices.job()}, this rank was given {job}")
    if rank < servers:
        door = Door(notices, job, rank, timeout)
        return Role(None, None, {}, "continue", timeout, memory_bytes or limits.memory_bytes(), door)
    if rank - servers >= job.room:
        raise ValueError(f"there is room for {job.room} workers, up to rank {servers + job.room - 1}: see join(room=)")
    exchange = OpenParameterServer(notices, job, rank - servers, timeout=timeout, down=down, transport=transport)
    return Role(None, exchange, {}, "continue", timeout, 0)


@dataclass(frozen=True)
class Role:
    """What this rank does: it serves, or it trains with `exchange` among the process group `workers`."""

    workers: dist.ProcessGroup | None
    exchange: ParameterServer | None
    channels: dict[int, Channel]
    on_failure: str
    timeout_seconds: float
    memory_bytes: int
    door: Door | None = None

    @property
    def serves(self) -> bool:
        return self.exchange is None

    def serve(
        self, *, optimizer: MakeOptimizer | None = None, schedule: MakeSchedule | None = None, staleness: int = 0
    ) -> dict[str, float]:
        """Serve until every worker has closed its wire; the server's totals of bytes and messages.

        Raises if all workers died. With `optimizer` it is asynchronous and owns the weights: see `ServerOptimizer`.
        schedule: makes a learning-rate scheduler of that optimizer, which takes a step after each of its steps.
        """
        if not self.serves:
            raise ValueError("this rank trains: role.serves is False")
        if schedule is not None and optimizer is None:
            raise ValueError("a schedule is of the servers' optimizer; without one, schedule on the workers")
        if optimizer is not None and self.door is not None:
            raise ValueError("late=True is for LocalSteps, whose weights the workers own: serve() without an optimizer")
        shared = SharedWeights(optimizer, staleness, schedule) if optimizer is not None else None
        stops = self.on_failure == "stop"
        server = Server(
            self.channels, shared=shared, stops=stops, timeout=self.timeout_seconds, memory_bytes=self.memory_bytes,
            door=self.door,
        )  # fmt: skip
        return server.run()


class ServerOptimizer:
    """Asynchronous training: stands where an optimizer stands; the servers own the weights and the real optimizer.

        role = tw.join(servers=1)
        if role.serves:
            role.serve(optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9), staleness=4)
        else:
            optimizer = tw.ServerOptimizer(net, "qsgd(bits=4)", role=role)
            ...
            optimizer.zero_grad(); loss.backward(); optimizer.step()      # pushes the gradient, pulls weights
            optimizer.close()

    The model is the bare module: DistributedDataParallel would make workers wait for each other. The servers'
    optimizer sees each server's weights as one flat parameter, so it must treat every element alike (SGD, Adam, AdamW);
    a parameter without a gradient is to it one whose gradient is zero, so momentum and weight decay still move it.
    Weights are float32 there. The learning rate is the servers', too: `role.serve(schedule=...)` changes it.

    scheme: spec of one message ("fp32", "qsgd(bits=4)"); a biased one gets error feedback.
    down: how weights come back: "fp32", "fp16" or "bf16".
    """

    def __init__(
        self, model: nn.Module, scheme: str | Scheme, *, role: Role, down: str = "fp32", seed: int = 0
    ) -> None:
        if role.exchange is None:
            raise ValueError("this rank serves; only workers have a ServerOptimizer")
        if isinstance(role.exchange, OpenParameterServer):
            raise ValueError("late=True is for LocalSteps: a ServerOptimizer needs all workers from the start")
        casts = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}
        if down not in casts:
            raise ValueError(f"weights come back as one of {', '.join(casts)}, got {down!r}")
        parameters = list(_trained(model))
        for name, parameter in parameters:
            if parameter.dtype not in (torch.float32, torch.float16, torch.bfloat16):
                raise ValueError(f"servers keep weights in float32, so {name!r} cannot be {parameter.dtype}")
        self._pushpull = PushPull(role.exchange, parameters, codec(scheme, linear=True), casts[down], seed)
        self.exchange: ParameterServer = role.exchange
        self._pushpull.pull(first=True)

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        raise TypeError(
            "a ServerOptimizer has no parameter groups: learning rate and momentum are the servers', see "
            "role.serve(optimizer=, schedule=); a GradScaler has no place here, for servers leave out gradients that "
            "are not finite"
        )

    def zero_grad(self) -> None:
        for _, parameter in self._pushpull.parameters:
            parameter.grad = None

    def step(self) -> None:
        """Push this worker's gradient and pull the weights, waiting for others only where staleness asks for it."""
        self._pushpull.trade()

    def pull(self) -> None:
        """The servers' weights as they are now, such as after loading a checkpoint."""
        self._pushpull.pull()

    def stats(self) -> dict[str, float]:
        """Totals: bytes, messages, seconds, steps."""
        return self.exchange.transport.ledger.totals() | {
            "steps": float(self._pushpull.step), "workers": float(self.exchange.workers),
        }  # fmt: skip

    def state_dict(self) -> dict[str, Any]:
        """What error feedback owes on this worker and, on the first worker, the servers' weights and optimizer."""
        return {
            "step": self._pushpull.step,
            "memory": self._pushpull.memory.state_dict(),
            "exchange": self.exchange.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._pushpull.memory.load_state_dict(state["memory"])
        self._pushpull.step = int(state["step"])
        self.exchange.load_state_dict(state["exchange"])
        self.pull()

    def close(self) -> None:
        self.exchange.close()


def warn_of_collectives(model: DistributedDataParallel) -> None:
    """For a model whose workers are to go on without the lost: DDP's own collectives would not."""
    own = {
        "broadcasts buffers in every step (forward_sync_buffers=False)": model.will_sync_module_buffers(),
        "looks for unused parameters (find_unused_parameters=False)": model.find_unused_parameters,
    }
    if any(own.values()):
        does = " and ".join(what for what, so in own.items() if so)
        warnings.warn(f'join(on_failure="continue"), but DDP {does}: a lost worker will end the job', stacklevel=3)


def _trained(model: nn.Module) -> Iterable[tuple[str, nn.Parameter]]:
    return ((name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad)
