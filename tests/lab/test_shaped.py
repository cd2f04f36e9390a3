"""Shaped links hold their rates' settings while they last, and go away however their owner ends."""

import os
import select
import signal
import subprocess
import sys

import pytest

from helpers.needs import shaping
from thinwire.lab.network import shaped
from thinwire.lab.network.network import parse_network
from thinwire.lab.network.shaped import Shaped

OWNER = """
import sys
from thinwire.lab.network import shaped
from thinwire.lab.network.network import parse_network
with shaped.Shaped(parse_network("shaped:50mbit"), 2) as links:
    print(links._keeper.pid, *links.namespaces, flush=True)
    sys.stdin.read()
"""


def tc(namespace: str, interface: str) -> str:
    command = ["tc", "-n", namespace, "qdisc", "show", "dev", interface]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def wait_for_end(pid: int) -> None:
    """Until a process that is not our child has ended."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    ready, _, _ = select.select([handle], [], [], 30)
    os.close(handle)
    assert ready, f"process {pid} did not end"


def ours() -> list[str]:
    return [namespace for namespace in shaped.existing() if namespace.startswith(f"tw-{os.getpid()}-")]


@shaping
def test_links_have_the_rates_asked_for_and_are_removed():
    with Shaped(parse_network("shaped:100mbit,1=10mbit/20mbit,server=200mbit"), 3, servers=1) as links:
        assert len(ours()) == 5
        assert "rate 100Mbit burst 72Kb" in tc(links.namespaces[0], "eth0")
        assert "rate 10Mbit burst 72Kb" in tc(links.namespaces[1], "eth0")
        assert "rate 200Mbit burst 72Kb" in tc(links.by_rank(servers=1)[0], "eth0")
        switch = f"tw-{os.getpid()}-switch"
        assert "rate 20Mbit" in tc(switch, "port1") and "tbf" not in tc(switch, "port0")
    assert ours() == []
    links.close()


@shaping
def test_workers_of_a_machine_share_its_link():
    with Shaped(parse_network("shaped:100mbit,1=10mbit"), 4, local=2) as links:
        first, second = links.namespaces
        assert links.by_rank() == [first, first, second, second]
        assert "rate 10Mbit" in tc(second, "eth0")
    with pytest.raises(ValueError, match="rate for worker 2"):
        Shaped(parse_network("shaped:100mbit,2=10mbit"), 4, local=2)


@shaping
def test_what_still_runs_inside_is_ended():
    with Shaped(parse_network("shaped:1gbit"), 1) as links:
        inside = subprocess.Popen(["ip", "netns", "exec", links.namespaces[0], "sleep", "1000"])
        # `ip netns pids` lists it once it has entered; until then closing could miss it.
        pids = ""
        while str(inside.pid) not in pids.split():
            pids = subprocess.run(
                ["ip", "netns", "pids", links.namespaces[0]], capture_output=True, text=True, check=True
            ).stdout
    assert inside.wait(timeout=30) == -signal.SIGKILL


@shaping
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_nothing_is_left_when_the_owner_is_killed(how):
    with subprocess.Popen(
        [sys.executable, "-c", OWNER],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
    ) as owner:  # fmt: skip
        keeper, *namespaces = owner.stdout.readline().split()
        assert set(namespaces) <= set(shaped.existing())
        owner.send_signal(how)
    wait_for_end(int(keeper))
    assert not set(namespaces) & set(shaped.existing())


@shaping
def test_what_the_dead_left_behind_is_removed_at_the_next_start():
    with subprocess.Popen(["true"]) as dead:
        pass
    stale = f"tw-{dead.pid}-0"
    subprocess.run(["ip", "netns", "add", stale], check=True)
    with Shaped(parse_network("shaped:1gbit"), 1):
        assert stale not in shaped.existing()
        assert shaped.remove_stale() == []
        assert len(ours()) == 2  # the living keep theirs


@shaping
def test_a_failure_while_building_leaves_nothing(monkeypatch):
    run = shaped._run

    def failing(*command):
        if "tc" in command:
            raise OSError("no tbf here")
        run(*command)

    monkeypatch.setattr(shaped, "_run", failing)
    with pytest.raises(OSError, match="no tbf here"):
        Shaped(parse_network("shaped:1gbit"), 2).__enter__()
    assert ours() == []
    assert shaped.why_not() == "no tbf here"


def test_what_is_missing_is_said_in_one_line(monkeypatch):
    monkeypatch.setattr(shaped.shutil, "which", lambda tool: None)
    assert shaped.why_not() == "ip and tc (Debian: apt-get install iproute2) not found"
    monkeypatch.setattr(shaped.shutil, "which", lambda tool: tool)
    monkeypatch.setattr(shaped.os, "geteuid", lambda: 1000)
    assert shaped.why_not() == "it needs root"


def test_rates_of_workers_that_do_not_exist_are_refused():
    with pytest.raises(ValueError, match="worker 5"):
        Shaped(parse_network("shaped:1gbit,5=1mbit"), 4)
