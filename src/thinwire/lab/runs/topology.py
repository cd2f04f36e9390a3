"""How a run's workers are connected, from text such as "allreduce", "server(servers=2)" or 'gossip(graph="ring")'."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from thinwire import schemes
from thinwire.core import spec as specs
from thinwire.core.scheme import Codec
from thinwire.gossip import graphs, mixers

SCHEMES = ("fp32", "fp16", "qsgd(bits=4)", "topkc(density=0.1)", "powersgd(factor_rank=4)")


CASTS = ("fp32", "fp16", "bf16")  # how weights may come back


@dataclass(frozen=True)
class Topology(ABC):
    """What a run has to know of an exchange before it starts; `trainers` make it.

    `defaults`: what is compared over it where nothing else is asked for.
    `steered`: a controller may turn a scheme's knob.
    `local_steps`: workers may exchange weight changes every so many steps.
    """

    defaults: ClassVar[tuple[str, ...]]

    @property
    def server_count(self) -> int:
        return 0

    @property
    def steered(self) -> bool:
        return True

    @property
    def local_steps(self) -> bool:
        return self.steered

    @abstractmethod
    def takes(self, scheme: str) -> bool:
        """Whether spec text names the kind of thing that travels here: a scheme, or a mixer."""

    @abstractmethod
    def check(self, scheme: str, workers: int) -> None:
        """Raise ValueError unless what `takes` took can be used, by so many workers."""


@dataclass(frozen=True)
class AllReduceTopology(Topology):
    """All workers are equal and exchange by collectives."""

    defaults: ClassVar[tuple[str, ...]] = SCHEMES

    def takes(self, scheme: str) -> bool:
        return not is_mixer(scheme)

    def check(self, scheme: str, workers: int) -> None:
        schemes.parse(scheme)


@dataclass(frozen=True)
class HierarchicalTopology(AllReduceTopology):
    """Exact inside a machine, the scheme between machines; see `thinwire.Hierarchical`.

    inside: how numbers travel inside.
    """

    inside: str = "fp32"

    def __post_init__(self) -> None:
        if not schemes.codec(self.inside).unbiased:
            raise ValueError(f"hierarchical: inside must be right on average, such as fp32 or bf16, got {self.inside}")


@dataclass(frozen=True)
class ServerTopology(Topology):
    """Workers push to servers and pull from them; the servers are processes (and links) beside the workers.

    servers: how many; parameters are divided among them.
    down: how answers come back; see `thinwire.join`. With `staleness`, how weights do: fp32, fp16 or bf16.
    staleness: how many steps old the weights may be that a gradient is computed on: the servers own the weights and
        nobody waits for everybody. None: all workers in step.
    """

    servers: int = 1
    down: str | None = None
    staleness: int | None = None

    defaults: ClassVar[tuple[str, ...]] = SCHEMES

    def __post_init__(self) -> None:
        if not isinstance(self.servers, int) or self.servers < 1:
            raise ValueError(f"server: servers must be at least 1, got {self.servers!r}")
        if self.staleness is not None and (not isinstance(self.staleness, int) or self.staleness < 0):
            raise ValueError(f"server: staleness must be 0 or more steps, got {self.staleness!r}")
        if self.down is None:
            object.__setattr__(self, "down", "same" if self.staleness is None else "fp32")
        elif self.staleness is not None and self.down not in CASTS:
            raise ValueError(f"server: with staleness, down is one of {', '.join(CASTS)}, got {self.down!r}")
        elif self.down != "same":
            schemes.codec(self.down)

    @property
    def server_count(self) -> int:
        return self.servers

    @property
    def steered(self) -> bool:
        return self.staleness is None

    def takes(self, scheme: str) -> bool:
        return not is_mixer(scheme)

    def check(self, scheme: str, workers: int) -> None:
        schemes.parse(scheme)
        if self.staleness is not None:
            try:
                schemes.codec(scheme)
            except ValueError as error:
                raise ValueError(f"with staleness a server takes gradients one by one: {error}") from None


@dataclass(frozen=True)
class GossipTopology(Topology):
    """Everybody has weights of its own and mixes them with its neighbours'; the mean of all is evaluated.

    graph: who neighbours whom; see `thinwire.graphs`.
    """

    graph: str = "ring"

    defaults: ClassVar[tuple[str, ...]] = ("dpsgd", "powergossip", 'choco(codec="qsgd(bits=4)")')

    def __post_init__(self) -> None:
        if self.graph not in GRAPHS:
            raise ValueError(f"gossip: graph must be one of {', '.join(GRAPHS)}, got {self.graph!r}")

    @property
    def steered(self) -> bool:
        return False

    def takes(self, scheme: str) -> bool:
        return is_mixer(scheme)

    def check(self, scheme: str, workers: int) -> None:
        mixers.parse(scheme)
        self.among(workers)

    def among(self, workers: int) -> graphs.Graph:
        """The graph of so many workers."""
        return GRAPHS[self.graph](workers)


def _hypercube(workers: int) -> graphs.Graph:
    if workers & (workers - 1):
        raise ValueError(f"a hypercube has 2, 4, 8, ... workers, got {workers}")
    return graphs.hypercube(workers.bit_length() - 1)


GRAPHS: dict[str, Callable[[int], graphs.Graph]] = {
    "ring": graphs.ring,
    "complete": graphs.complete,
    "star": graphs.star,
    "exponential": graphs.exponential,
    "hypercube": _hypercube,
}
KNOWN: dict[str, type[Topology]] = {
    "allreduce": AllReduceTopology,
    "hierarchical": HierarchicalTopology,
    "server": ServerTopology,
    "gossip": GossipTopology,
}


def parse_topology(text: str) -> Topology:
    """The exchange that `text` describes. Nothing is evaluated: options are literals."""
    return specs.make(text, Topology, KNOWN, kind="exchange", example="'allreduce' or 'server(servers=2)'")


def is_mixer(scheme: str) -> bool:
    return scheme.partition("(")[0].strip().lower() in mixers.registry()


def misfit(scheme: str, exchange: str) -> str:
    """One line for what cannot travel over an exchange, and where it could."""
    if is_mixer(scheme):
        return f"{scheme} mixes weights, {exchange} exchanges gradients: it needs --exchange gossip"
    parsed = schemes.parse(scheme)
    instead = f"choco(codec={parsed.spec!r})" if isinstance(parsed, Codec) else "dpsgd"
    known = ", ".join(mixers.registry())
    return f"{scheme} compresses gradients, {exchange} mixes weights with a mixer ({known}): perhaps {instead}"
