"""Gossip: the front door to decentralised training. Replicas mix their weights with their neighbours'."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from thinwire.core.ledger import Ledger
from thinwire.exchange.objects import agree, digest
from thinwire.exchange.transport import Transport
from thinwire.gossip import graphs, mixers
from thinwire.gossip.mixer import Mixer
from thinwire.gossip.news import News
from thinwire.gossip.node import Node, parameters_of
from thinwire.gossip.transport import DeadRank, PointToPoint

FORMAT = 1
_STEPS_COMPARED = 16  # of a graph that is a function of the step


class Gossip:
    """One process's replica and its place in the graph: rank i is node i.

    >>> model = torch.nn.Linear(64, 10)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> gossip = tw.Gossip(model, graph=[[1.0]], mixer="powergossip")  # one rank; eight: tw.graphs.ring(8)
    >>> for x in torch.randn(5, 32, 64):
    ...     optimizer.zero_grad()
    ...     model(x).square().mean().backward()
    ...     gossip.mix()
    ...     optimizer.step()
    >>> gossip.step
    5
    >>> gossip.close()

    The trainable parameters are mixed. At the start all ranks take rank 0's, and rank 0's buffers. Buffers
    (batch norm's statistics) stay local in training; `average()` averages those of floating point, and never
    the others. Optimizer state, momentum included, is local.

    A replica whose weights are not finite infects nobody: its edges do nothing until they are finite again.
    """

    def __init__(
        self,
        model: nn.Module,
        graph: graphs.GraphLike | graphs.Varying,
        mixer: str | Mixer = "powergossip",
        *,
        on_failure: str = "continue",
        timeout_seconds: float = 300.0,
        seed: int = 0,
        group: dist.ProcessGroup | None = None,
        transport: Transport | None = None,
    ):
        """Call it on every rank of `group`, with the same arguments.

        graph: a Graph, a networkx graph, a weight matrix, or a function of the step that gives one of these.
        on_failure: what to do when a rank dies, or a connection between two that live breaks. "continue": go on
            without it, as long as the survivors are connected; "stop": raise DeadRank.
        timeout_seconds: how long to wait for a neighbour that neither speaks nor dies before TimeoutError;
            longer than the slowest rank's step.
        transport: starts and counts what is sent; one of its own unless given.
        """
        if not dist.is_initialized():
            raise ValueError("Gossip needs torch.distributed: call init_process_group first")
        if not timeout_seconds > 0:
            raise ValueError(f"timeout_seconds must be positive, got {timeout_seconds!r}")
        # Its own group: gossip's messages meet nobody else's, and its time-out is its own.
        own = dist.new_group(
            dist.get_process_group_ranks(group or dist.group.WORLD),
            backend="gloo",
            timeout=timedelta(seconds=timeout_seconds),
            use_local_synchronization=group is not None,
        )
        assert isinstance(own, dist.ProcessGroup)
        transport = transport or Transport()
        self.ledger: Ledger = transport.ledger
        self._wire: PointToPoint | None = PointToPoint(own, timeout_seconds=timeout_seconds, transport=transport)
        # Its thread starts when first used, and is joined in close() or, at the latest, at exit.
        self._lane = ThreadPoolExecutor(1, "thinwire-gossip")
        self._mixing: Future[None] | None = None
        self._versions: list[int] = []
        self._dead: set[int] = set()  # as last seen, to tell what is new
        self._broken: set[int] = set()
        self._judged: tuple[set[int], set[tuple[int, int]]] = (set(), set())
        self._model, self._on_failure = model, on_failure
        given, mistake = None, None
        try:
            given = self._take(graph, mixer, seed)
        except ValueError as error:
            mistake = error
        try:
            agree(given, own)
        except ValueError as error:
            self.close()
            raise mistake or error from None
        for tensor in [*self._parameters.values(), *model.buffers()]:
            dist.broadcast(tensor.detach(), dist.get_global_rank(own, 0), group=own)
        self._node.start_equal(self._parameters)

    def _take(self, graph: graphs.GraphLike | graphs.Varying, mixer: str | Mixer, seed: int) -> dict[str, str]:
        """Make sense of the arguments; what must be the same on all ranks."""
        if self._on_failure not in ("continue", "stop"):
            raise ValueError(f"on_failure must be 'continue' or 'stop', got {self._on_failure!r}")
        wire = self._connected()
        self.mixer: Mixer = mixers.parse(mixer)
        self.graph: graphs.Schedule = graphs.Schedule(graph, nodes=wire.ranks, mixer=self.mixer)
        self._parameters = parameters_of(self._model)
        self._node = Node(self._parameters, number=wire.rank, mixer=self.mixer, seed=seed)
        steps = range(_STEPS_COMPARED if self.graph.varying else 1)
        return {
            "graph": digest([self.graph.at(step).digest for step in steps]),
            "mixer": self.mixer.spec,
            "seed": str(seed),
            "on_failure": self._on_failure,
            "model": digest([(s.name, s.shape) for s in self._node.layout.segments]),
        }

    @property
    def step(self) -> int:
        return self._node.step

    @property
    def dead(self) -> list[int]:
        """The ranks known to be dead. Of a rank that lives and lost a connection, only the edge is lost."""
        return sorted(self._connected().news.dead)

    def mix(self) -> None:
        """Move the weights towards the neighbours'. Every rank calls it, before the optimizer's step."""
        self._begin()
        self._converse()
        self._end()

    def mix_begin(self) -> None:
        """Start mixing in the background, before backward, on a copy of the weights as they are now."""
        self._begin()
        self._mixing = self._lane.submit(self._converse)

    def mix_end(self) -> None:
        """Wait for what `mix_begin` started and write the mixed weights. Before the optimizer's step."""
        if self._mixing is None:
            raise RuntimeError("mix_end() without mix_begin()")
        mixing, self._mixing = self._mixing, None
        with self.ledger.timed("exposed_seconds"):
            mixing.result()
        self._end()

    def consensus(self) -> float:
        """The replicas' root mean square distance to their mean; all ranks call it, and get one number."""
        self._not_mixing("consensus()")
        self._node.load(self._parameters)
        mean = self._mean(self._node.flat)
        squares = (self._node.flat.double() - mean.double()).square().sum().reshape(1)
        return float(self._mean(squares).sqrt())

    def average(self) -> Averaged:
        """Make every replica the mean of all, buffers included; all ranks call it.

        `with gossip.average(): evaluate(model)` gives each replica its own weights back afterwards; without
        `with` (or `restore()`) the mean stays.
        """
        self._not_mixing("average()")
        named = self._parameters | {
            f"buffer {name}": b for name, b in self._model.named_buffers() if b.is_floating_point()
        }
        averaged = Averaged(named)
        whole = Node(named, number=self._node.number, mixer=mixers.parse("dpsgd"), seed=0)
        whole.load(named)
        whole.flat.copy_(self._mean(whole.flat))
        whole.store(named)
        return averaged

    def stats(self) -> dict[str, float]:
        """Totals of this rank since the start, or since the start of the run that was resumed."""
        totals = {
            "bytes_sent": 0.0,  # left this rank, the news of lost ranks and averaging included
            "bytes_given": 0.0,  # the same: point to point, what is given is sent once
            "bytes_dense": 0.0,  # what exact gossip would have sent
            "messages": 0.0,
            "mix_seconds": 0.0,  # computing
            "wire_seconds": 0.0,  # waiting for neighbours
            "exposed_seconds": 0.0,  # training waiting in mix_end()
        }
        return totals | self.ledger.totals() | {"steps": float(self.step), "ranks_dead": float(len(self.dead))}

    def state_dict(self) -> dict[str, Any]:
        """What this rank needs to go on, as tensors and plain types. Save it beside the rank's own model."""
        wire = self._connected()
        return {
            "format": FORMAT,
            "rank": wire.rank,
            "ranks": wire.ranks,
            "ledger": self.ledger.totals(),
            "node": self._node.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where the state was saved: on the same rank of as many, with that rank's model."""
        self._not_mixing("load_state_dict()")
        wire = self._connected()
        if not isinstance(state, Mapping) or state.get("format") != FORMAT:
            found = f"format {state.get('format')!r}" if isinstance(state, Mapping) else type(state).__name__
            raise ValueError(f"not a gossip state of format {FORMAT}: {found}")
        if (state.get("rank"), state.get("ranks")) != (wire.rank, wire.ranks):
            saved, here = f"{state.get('rank')} of {state.get('ranks')}", f"{wire.rank} of {wire.ranks}"
            raise ValueError(f"the state is of rank {saved}, this is rank {here}")
        totals = state.get("ledger")
        if not isinstance(totals, Mapping) or not all(isinstance(total, int | float) for total in totals.values()):
            raise ValueError(f"the state's ledger is not a dict of numbers: {totals!r:.100}")
        self._node.load_state_dict(state.get("node", {}))
        self.ledger.load({name: float(value) for name, value in totals.items()})

    def close(self) -> None:
        """End the background thread and the connections. Twice is fine."""
        self._lane.shutdown(wait=True)
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def __enter__(self) -> Gossip:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _begin(self) -> None:
        self._not_mixing("mixing again")
        self._versions = [p._version for p in self._parameters.values()]
        self._node.load(self._parameters)

    def _converse(self) -> None:
        """The mixer's conversation, answered by the network."""
        wire, graph = self._connected(), self.graph.at(self.step)
        weights = {j: w for j, w in graph.neighbours(wire.rank).items() if j not in wire.news.broken}
        conversation = self._node.mixing(weights)
        answers, dense = None, len(weights) * self._node.flat.nbytes
        while True:
            try:
                with self.ledger.timed("mix_seconds"):
                    messages = conversation.send(answers)  # type: ignore[arg-type]
            except StopIteration:
                return
            answers = wire.exchange(messages)
            self._go_on(graph, wire.news)
            self.ledger.add(bytes_dense=dense)
            dense = 0  # exact gossip needs one message per neighbour and step

    def _mean(self, values: Tensor) -> Tensor:
        wire = self._connected()
        mean = wire.mean(values)
        self._go_on(self.graph.at(self.step), wire.news)
        return mean

    def _go_on(self, graph: graphs.Graph, news: News) -> None:
        """Decide, when ranks or connections are newly lost, whether to go on without them."""
        if not news.links:
            return
        if self._on_failure == "stop":
            raise DeadRank(f"{_ranks(news.missed)} lost in step {self.step}; on_failure='continue' goes on without")
        dead, gone, cut = news.dead, news.dead - self._dead, news.broken - news.dead - self._broken
        self._dead, self._broken = dead, news.broken
        if news.silent == dead:  # who is silent, and not for long enough, may yet turn out to live
            self._check_connected(graph, dead, news.links)
        for what in [f"{_ranks(gone)} lost"] * bool(gone) + [f"the connection to {_ranks(cut)} broke"] * bool(cut):
            warnings.warn(f"{what} in step {self.step}: going on without", RuntimeWarning, stacklevel=2)

    def _check_connected(self, graph: graphs.Graph, dead: set[int], links: set[tuple[int, int]]) -> None:
        # One step of a varying graph says nothing about whether the survivors hang together over time.
        if self.graph.varying or (dead, links) == self._judged:
            return
        self._judged = (dead, links)
        if not graph.survivors_connected(dead, links):
            between = sorted(link for link in links if not dead.intersection(link))
            without = " and ".join([_ranks(dead)] * bool(dead) + [f"connections {between}"] * bool(between))
            raise DeadRank(f"{graph.name} falls apart without {without}, lost by step {self.step}")

    def _end(self) -> None:
        if self._versions != [p._version for p in self._parameters.values()]:
            raise RuntimeError("the weights changed before mix_end(): step the optimizer after it")
        self._node.store(self._parameters)

    def _not_mixing(self, what: str) -> None:
        if self._mixing is not None:
            raise RuntimeError(f"{what} before mix_end(): what mix_begin() started is not finished")

    def _connected(self) -> PointToPoint:
        if self._wire is None:
            raise RuntimeError("this Gossip is closed")
        return self._wire


class Averaged:
    """Replicas that were made their mean, and how to undo it: as a context, or by `restore()`."""

    def __init__(self, tensors: Mapping[str, Tensor]):
        self._tensors = tensors
        self._own: dict[str, Tensor] | None = {name: t.detach().clone() for name, t in tensors.items()}

    @torch.no_grad()
    def restore(self) -> None:
        """Give this replica its own weights back. Local; twice is fine."""
        for name, own in (self._own or {}).items():
            self._tensors[name].copy_(own)
        self._own = None

    def __enter__(self) -> Averaged:
        return self

    def __exit__(self, *exception: object) -> None:
        self.restore()


def _ranks(numbers: set[int]) -> str:
    return f"rank{'s' * (len(numbers) > 1)} {', '.join(map(str, sorted(numbers)))}"
