"""join(): the front door of the parameter server. Some ranks of the job serve, the others train."""

from __future__ import annotations

import uuid
from dataclasses import dataclass

import torch.distributed as dist
from torch.distributed.distributed_c10d import _get_default_store

from thinwire.exchange.asynchronous import MakeOptimizer, Shared
from thinwire.exchange.links import Link
from thinwire.exchange.server import ParameterServer
from thinwire.exchange.serving import Server


def join(*, servers: int = 1, down: str = "same", timeout: float = 300.0) -> Role:
    """Divide the ranks of a job: the first `servers` serve, the others train. Every rank calls it, with the same arguments.

    down: how means come back to the workers; see `ParameterServer`.
    timeout: a worker that keeps the others waiting for so many seconds is dropped. It must be longer than the longest
        pause that one worker makes alone, such as saving a checkpoint.
    """
    if not dist.is_initialized():
        raise ValueError("join() divides the ranks of a job: call torch.distributed.init_process_group first")
    ranks = list(range(dist.get_world_size()))
    if not isinstance(servers, int) or not 1 <= servers < len(ranks):
        raise ValueError(
            f"servers must leave a worker: 1..{len(ranks) - 1} of {len(ranks)} ranks, got {servers!r}"
        )
    if not timeout > 0:
        raise ValueError(f"timeout must be a positive number of seconds, got {timeout!r}")
    session = [uuid.uuid4().hex if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(session, src=0)
    workers = dist.new_group(ranks[servers:])
    rank, store = dist.get_rank(), _get_default_store()
    if rank < servers:
        names = {worker: f"thinwire/{session[0]}/{rank}/{worker}" for worker in range(len(ranks) - servers)}
        links = {worker: Link(store, name, serves=True, timeout=timeout) for worker, name in names.items()}
        return Role(None, None, links, timeout)
    worker = rank - servers
    # A worker waits for its servers while they wait, up to the timeout, for another worker.
    own = [
        Link(store, f"thinwire/{session[0]}/{server}/{worker}", serves=False, timeout=2 * timeout + 30)
        for server in range(servers)
    ]
    return Role(workers, ParameterServer(own, ranks[servers:], worker, down=down), {}, timeout)


@dataclass(frozen=True)
class Role:
    """What this rank does: it serves, or it trains with `exchange` among the process group `workers`."""

    workers: dist.ProcessGroup | None
    exchange: ParameterServer | None
    links: dict[int, Link]
    timeout: float

    @property
    def serves(self) -> bool:
        return self.exchange is None

    def serve(self, *, optimizer: MakeOptimizer | None = None, staleness: int = 0) -> dict[str, float]:
        """Serve until every worker has closed its wire; the server's totals of bytes and messages.

        Raises if all workers were lost. With `optimizer` the server is asynchronous: it owns the weights, see
        `ServerOptimizer`.
        """
        if not self.serves:
            raise ValueError("this rank trains: role.serves is False")
        shared = Shared(optimizer, staleness) if optimizer is not None else None
        return Server(self.links, shared=shared, timeout=self.timeout).run()
