"""Shaped links: a Linux network namespace per machine (and server), joined by a bridge, rates held by `tc tbf`.

    namespace tw-PID-0            namespace tw-PID-1
      eth0 10.77.0.1                eth0 10.77.0.2         egress: tbf at the machine's up rate
         |                             |
      port0 ------- bridge ------- port1                   egress: tbf at the machine's down rate, if any
              namespace tw-PID-switch

A machine is one worker, or several that share its link; among themselves these exchange inside their namespace, as fast
as the machine can.

Nothing is put into the machine's own namespace, so no firewall or route of it is touched or matters. Nothing
is left behind: a keeper process holds the end of a pipe, and when the pipe closes, however its owner ended,
it kills what still runs in the namespaces and removes them. Should the keeper be killed too, the next start
removes every namespace whose owner (the PID in the name) is dead.
"""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from thinwire.lab.network.network import Network, Rate

# What may leave at once after a pause: more flatters small messages, and less than one GSO packet (64 KiB, and a header
# for each of its 45 segments) has the kernel cut each of them up, which a real machine leaves to its network card.
BURST_BYTES = 72 * 1024
QUEUE_SECONDS = 0.4  # how long a packet may wait before tbf drops it: long, so that TCP is slowed and not punished
INTERFACE = "eth0"
HEADER_BYTES = 14 + 20 + 32  # of every TCP packet: Ethernet, IP, TCP with timestamps
SEGMENT_BYTES = 1500 - 20 - 32  # of data, in a packet as long as Ethernet takes
_FOLDER = Path("/run/netns")
_NAME = re.compile(r"tw-(\d+)-(?:\d+|server\d+|switch)")
_CLONE_NEWNET = 0x40000000

# Reads until its owner is gone (or says so by closing), then cleans up. Signals are for the owner to take.
_KEEPER = """
trap '' INT TERM HUP
cat >/dev/null
for namespace in "$@"; do
    ip netns pids "$namespace" 2>/dev/null | xargs -r kill -9 2>/dev/null
done
for namespace in "$@"; do
    ip netns del "$namespace" 2>/dev/null
done
exit 0
"""


class Shaped:
    """The namespaces of one comparison, from `with` to its end. One per process at a time."""

    def __init__(self, network: Network, workers: int, servers: int = 0, *, local: int = 1):
        self._machines = workers // local
        network.check(self._machines)
        self.network = network
        self.namespaces = [f"tw-{os.getpid()}-{machine}" for machine in range(self._machines)]
        self.namespaces += [f"tw-{os.getpid()}-server{server}" for server in range(servers)]
        self._local = local
        self._switch = f"tw-{os.getpid()}-switch"
        self._keeper: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Shaped:
        remove_stale()
        self._keeper = subprocess.Popen(
            ["sh", "-c", _KEEPER, "keeper", *self.namespaces, self._switch],
            stdin=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def by_rank(self, servers: int = 0) -> list[str]:
        """The namespaces of a group whose first ranks are so many servers."""
        workers = [machine for machine in self.namespaces[: self._machines] for _ in range(self._local)]
        return [*self.namespaces[self._machines : self._machines + servers], *workers]

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill what still runs in the namespaces and remove them. Safe to call twice."""
        if self._keeper is not None:
            assert self._keeper.stdin is not None
            self._keeper.stdin.close()
            self._keeper.wait()
            self._keeper = None

    def _build(self) -> None:
        _run("ip", "netns", "add", self._switch)
        _run("ip", "-n", self._switch, "link", "add", "bridge", "type", "bridge", "forward_delay", "0")
        _run("ip", "-n", self._switch, "link", "set", "bridge", "up")
        for number, namespace in enumerate(self.namespaces):
            port = f"port{number}"
            _run("ip", "netns", "add", namespace)
            _run("ip", "-n", namespace, "link", "set", "lo", "up")
            _run(
                "ip", "-n", self._switch, "link", "add", port, "type", "veth",
                "peer", "name", INTERFACE, "netns", namespace,
            )  # fmt: skip
            _run("ip", "-n", self._switch, "link", "set", port, "master", "bridge", "up")
            address = f"10.77.{number >> 8}.{(number & 255) + 1}/16"
            _run("ip", "-n", namespace, "addr", "add", address, "dev", INTERFACE)
            _run("ip", "-n", namespace, "link", "set", INTERFACE, "up")
            serves = number >= self._machines
            rate: Rate = self.network.server_rate if serves else self.network.rate_of(number)
            _limit(namespace, INTERFACE, rate.up)
            if rate.down is not None:
                _limit(self._switch, port, rate.down)


def why_not() -> str | None:
    """What stands in the way of shaped links on this machine, in one line; None: nothing."""
    if sys.platform != "linux":
        return "network namespaces are Linux's"
    missing = [tool for tool in ("ip", "tc") if not shutil.which(tool)]
    if missing:
        return f"{' and '.join(missing)} (Debian: apt-get install iproute2) not found"
    if os.geteuid() != 0:
        return "it needs root"
    trial = f"tw-{os.getpid()}-65535"  # no worker has that number
    try:
        _run("ip", "netns", "add", trial)
        _run("ip", "-n", trial, "link", "add", INTERFACE, "type", "veth", "peer", "name", "port0")
        _limit(trial, INTERFACE, 1e8)
    except OSError as error:
        return str(error)
    finally:
        subprocess.run(["ip", "netns", "del", trial], capture_output=True, check=False)
    return None


def remove_stale() -> list[str]:
    """Remove the namespaces whose owner is dead; their names."""
    stale = [namespace for namespace in existing() if not Path("/proc", namespace.split("-")[1]).exists()]
    if stale:
        subprocess.run(["sh", "-c", _KEEPER, "keeper", *stale], stdin=subprocess.DEVNULL, check=False)
    return stale


def existing() -> list[str]:
    """Every namespace that a Shaped of any process has made and not yet removed."""
    return sorted(path.name for path in _FOLDER.glob("tw-*") if _NAME.fullmatch(path.name))


def enter(namespace: str) -> None:
    """Move the calling thread, and threads it starts from now on, into a namespace."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(_FOLDER / namespace) as file:
        if libc.setns(file.fileno(), _CLONE_NEWNET) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"cannot enter the namespace {namespace}: {os.strerror(error)}")


class Sent(NamedTuple):
    """What this namespace's interface has sent so far, as the kernel counts."""

    nbytes: int  # with headers
    packets: int
    again: int  # segments TCP sent a second time: a matter of the machine's load, not of what was to be sent

    @property
    def payload(self) -> int:
        """Bytes without headers, each once."""
        return self.nbytes - self.packets * HEADER_BYTES - self.again * SEGMENT_BYTES


def sent() -> Sent:
    """By this namespace's interface, since it was made."""
    net = Path("/proc/thread-self/net")
    interfaces = dict(_two_parts(line) for line in (net / "dev").read_text().splitlines() if ":" in line)
    if INTERFACE not in interfaces:
        raise OSError(f"this namespace has no interface {INTERFACE}")
    nbytes, packets = interfaces[INTERFACE].split()[8:10]
    names, numbers = (line.split() for line in (net / "snmp").read_text().splitlines() if line.startswith("Tcp:"))
    return Sent(int(nbytes), int(packets), int(numbers[names.index("RetransSegs")]))


def _two_parts(line: str) -> tuple[str, str]:
    name, _, counts = line.partition(":")
    return name.strip(), counts


def _limit(namespace: str, interface: str, bits_per_second: float) -> None:
    _run(
        "tc", "-n", namespace, "qdisc", "replace", "dev", interface, "root", "tbf",
        "rate", f"{bits_per_second:.0f}bit", "burst", str(BURST_BYTES),
        "latency", f"{QUEUE_SECONDS * 1e3:.0f}ms",
    )  # fmt: skip


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        raise OSError(f"{' '.join(command)}: {reason[-1]}")
