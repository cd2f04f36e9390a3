"""The links of a group as its network wants them: shaped namespaces, or transports that wait, or the plain loopback."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from thinwire.exchange.transport import Transport
from thinwire.lab.network import shaped
from thinwire.lab.network.network import Network, parse_network, resolve
from thinwire.lab.network.paced import Pace, Paced
from thinwire.lab.network.shaped import Shaped


def resolved(text: str, workers: int, local: int = 1) -> Network:
    """The network that `text` describes, as this machine can have it. `local`: how many workers share a link."""
    network = parse_network(text)
    network.check(workers // local)
    network = resolve(network, shaped.why_not() if network.mode in ("shaped", "auto") else None)
    if network.mode == "paced" and local > 1:
        why = f" ({network.why_paced})" if network.why_paced else ""
        raise ValueError(f"workers that share a machine's link need shaped links, or none at all; this is paced{why}")
    return network


def opened(
    network: Network, workers: int, servers: int = 0, *, local: int = 1
) -> AbstractContextManager[Shaped | None]:
    """The namespaces of shaped links, from `with` to its end; None for other networks."""
    return Shaped(network, workers, servers, local=local) if network.mode == "shaped" else nullcontext()


def transport(network: Network, worker: int, workers: int, servers: int = 0) -> Transport:
    """A worker's: a plain one, or on paced links one that waits. A server's rate is divided among all workers."""
    if network.mode != "paced":
        return Transport()
    up = Pace(network.rate_of(worker).up, network.latency_seconds)
    if not servers:
        return Paced(up)
    return Paced(up, down=Pace(network.server_rate.up * servers / workers, network.latency_seconds))
