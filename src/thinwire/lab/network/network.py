"""The networks of a comparison, from text such as "shaped:100mbit".

    none                    the machine's own loopback, as fast as it is
    shaped:100mbit          real links: each worker's namespace sends at this rate (needs root and iproute2)
    paced:100mbit,5ms       no privileges: every exchange is slowed to latency + bytes / bandwidth
    auto:100mbit, 100mbit   shaped where that can be had, else paced; the record says which

After the colon come, separated by commas, in any order:

    100mbit                 what every worker can send at; kbit, mbit, gbit (bits per second, decimal)
    20mbit/100mbit          20 up, 100 down (shaped only; without it, receiving is not limited)
    2=10mbit                worker 2's own rate: one slow worker (where machines have several, machine 2's)
    server=1gbit            the rate of every parameter server; without it, the workers'
    5ms                     latency of every exchange (paced only); us, ms, s
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

MODES = ("none", "shaped", "paced", "auto")
_BITS = {"kbit": 1e3, "mbit": 1e6, "gbit": 1e9}
_SECONDS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_RATE = re.compile(r"(\d+(?:\.\d+)?)([kmg]bit)")
_LATENCY = re.compile(r"(\d+(?:\.\d+)?)(us|ms|s)")


@dataclass(frozen=True)
class Rate:
    """What one worker's link carries, in bits per second; `down` None: as fast as it comes."""

    up: float
    down: float | None = None


@dataclass(frozen=True)
class Network:
    """What a network should be like. It does not know how to become so: see `shaped` and `paced`."""

    mode: str
    rate: Rate | None = None
    own_rates: tuple[tuple[int, Rate], ...] = ()  # (worker, its rate), where it differs
    latency_seconds: float = 0.0
    servers: Rate | None = None  # None: as the workers
    why_paced: str | None = None  # what "auto" found missing for shaped

    def rate_of(self, worker: int) -> Rate:
        assert self.rate is not None, "the loopback has no rate"
        return dict(self.own_rates).get(worker, self.rate)

    @property
    def server_rate(self) -> Rate:
        assert self.rate is not None, "the loopback has no rate"
        return self.servers or self.rate

    @property
    def rates(self) -> list[Rate]:
        return [rate for rate in (self.rate, self.servers, *dict(self.own_rates).values()) if rate is not None]

    def check(self, workers: int) -> None:
        """Raise unless every rate belongs to one of so many workers, or machines that have several."""
        for worker, _ in self.own_rates:
            if worker >= workers:
                raise ValueError(f"the network has a rate for worker {worker}, but the workers are 0..{workers - 1}")

    def __str__(self) -> str:
        if self.rate is None:
            return self.mode
        parts = [_rate_text(self.rate), *(f"{worker}={_rate_text(rate)}" for worker, rate in self.own_rates)]
        if self.servers is not None:
            parts.append(f"server={_rate_text(self.servers)}")
        if self.latency_seconds:
            parts.append(f"{self.latency_seconds * 1e3:g}ms")
        return f"{self.mode}:{','.join(parts)}"


def parse_network(text: str) -> Network:
    """The network that `text` describes (see above)."""
    mode, _, rest = text.strip().partition(":")
    if _RATE.match(mode):  # a rate alone
        mode, rest = "auto", text.strip()
    if mode not in MODES:
        raise ValueError(f"unknown network {text!r}; known: none, shaped:RATE, paced:RATE[,LATENCY], auto:RATE")
    if mode == "none":
        if rest:
            raise ValueError(f"network {text!r}: none takes no rate")
        return Network("none")

    rate, own_rates, servers, latency = None, {}, None, 0.0
    for part in rest.split(","):
        worker, equals, own = part.strip().partition("=")
        if _LATENCY.fullmatch(part.strip()):
            latency = seconds(part)
        elif not equals:
            rate = _rate(part.strip(), text)
        elif worker == "server":
            servers = _rate(own, text)
        elif worker.isdecimal():
            own_rates[int(worker)] = _rate(own, text)
        else:
            raise ValueError(
                f"network {text!r}: {part.strip()!r} should be WORKER=RATE or server=RATE, such as 2=10mbit"
            )
    if rate is None:
        raise ValueError(f"network {text!r} has no rate; it looks like {mode}:100mbit")

    network = Network(mode, rate, tuple(sorted(own_rates.items())), latency, servers)
    two_way = any(r.down is not None for r in network.rates)
    if two_way and latency:
        raise ValueError(f"network {text!r}: only shaped links have a down rate, and only paced ones a latency")
    if two_way and mode == "paced":
        raise ValueError(f"network {text!r}: a down rate needs shaped")
    if latency and mode == "shaped":
        raise ValueError(f"network {text!r}: a latency needs paced; shaped links only limit the rate")
    return network


def bits_per_second(text: str) -> float:
    """The rate that text such as "100mbit" says."""
    return _bits(text.strip(), text)


def seconds(text: str) -> float:
    """The time that text such as "5ms" says."""
    found = _LATENCY.fullmatch(text.strip())
    if not found:
        raise ValueError(f"cannot read the time {text!r}; it looks like 5ms (us, ms, s)")
    return float(found[1]) * _SECONDS[found[2]]


def resolve(network: Network, why_not_shaped: str | None) -> Network:
    """What "auto" comes to, given what stands in the way of shaped links (None: nothing)."""
    if network.mode == "shaped" and why_not_shaped:
        raise ValueError(f"network {network} cannot be had: {why_not_shaped}; paced needs no privileges")
    if network.mode != "auto":
        return network
    if network.latency_seconds:
        return replace(network, mode="paced", why_paced="shaped links add no latency")
    if not why_not_shaped:
        return replace(network, mode="shaped")
    if any(rate.down is not None for rate in network.rates):
        raise ValueError(f"network {network} cannot be had: {why_not_shaped}; paced links have no down rate")
    return replace(network, mode="paced", why_paced=why_not_shaped)


def _rate(text: str, whole: str) -> Rate:
    up, slash, down = text.partition("/")
    return Rate(_bits(up, whole), _bits(down, whole) if slash else None)


def _bits(text: str, whole: str) -> float:
    found = _RATE.fullmatch(text)
    if not found or float(found[1]) <= 0:
        where = "" if text == whole.strip() else f"network {whole!r}: "
        raise ValueError(f"{where}cannot read the rate {text!r}; it looks like 100mbit (kbit, mbit, gbit)")
    return float(found[1]) * _BITS[found[2]]


def _rate_text(rate: Rate) -> str:
    def one(bits: float) -> str:
        unit = next(unit for unit in ("gbit", "mbit", "kbit") if bits >= _BITS[unit] or unit == "kbit")
        return f"{bits / _BITS[unit]:g}{unit}"

    return one(rate.up) if rate.down is None else f"{one(rate.up)}/{one(rate.down)}"
