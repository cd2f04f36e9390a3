"""Networks as text, and the paced kind, on a clock of our own."""

import pytest

from thinwire.lab.network import network, paced
from thinwire.lab.network.network import Network, Rate, parse_network
from thinwire.lab.network.paced import Pace, Paced


@pytest.mark.parametrize(
    "text, expected",
    [
        ("none", Network("none")),
        ("shaped:100mbit", Network("shaped", Rate(100e6))),
        ("paced:1.5gbit,5ms", Network("paced", Rate(1.5e9), latency_seconds=0.005)),
        ("paced:5ms, 64kbit", Network("paced", Rate(64e3), latency_seconds=0.005)),
        ("auto:20mbit/100mbit", Network("auto", Rate(20e6, 100e6))),
        ("shaped:100mbit,2=10mbit,0=1mbit/5mbit",
         Network("shaped", Rate(100e6), ((0, Rate(1e6, 5e6)), (2, Rate(10e6))))),
        ("paced:100mbit,server=1gbit", Network("paced", Rate(100e6), servers=Rate(1e9))),
    ],
)  # fmt: skip
def test_text_is_read_and_written(text, expected):
    assert parse_network(text) == expected
    assert parse_network(str(expected)) == expected


@pytest.mark.parametrize(
    "text",
    ["", "fast", "shaped", "shaped:", "shaped:100", "shaped:0mbit", "shaped:-1mbit", "shaped:100mbit/",
     "none:1mbit", "shaped:2=10mbit", "shaped:100mbit,x=1mbit", "shaped:100mbit,5ms", "paced:1mbit/2mbit",
     "auto:1mbit/2mbit,5ms", "paced:1mbit,server=1mbit/2mbit", "paced:5ms", "paced:1mbit,5min"],
)  # fmt: skip
def test_mistakes_are_one_line(text):
    with pytest.raises(ValueError, match="network") as caught:
        parse_network(text)
    assert "\n" not in str(caught.value) and repr(text) in str(caught.value)


def test_rates_are_looked_up_and_checked_per_worker():
    net = parse_network("shaped:100mbit,2=10mbit")
    assert [net.rate_of(worker).up for worker in range(3)] == [100e6, 100e6, 10e6]
    assert net.server_rate.up == 100e6
    assert parse_network("shaped:100mbit,server=1gbit").server_rate.up == 1e9
    net.check(3)
    with pytest.raises(ValueError, match="worker 2"):
        net.check(2)


def test_auto_takes_what_it_can_get_and_says_why():
    auto = parse_network("auto:100mbit")
    assert parse_network("100mbit") == auto and parse_network("1gbit,2=10mbit,5ms").mode == "auto"
    assert str(network.resolve(auto, None)) == "shaped:100mbit"
    without = network.resolve(auto, "it needs root")
    assert str(without) == "paced:100mbit" and without.why_paced == "it needs root"
    assert network.resolve(parse_network("auto:1mbit,5ms"), None).mode == "paced"
    with pytest.raises(ValueError, match="needs root"):
        network.resolve(parse_network("shaped:100mbit"), "it needs root")
    with pytest.raises(ValueError, match="no down rate"):
        network.resolve(parse_network("auto:1mbit/2mbit"), "it needs root")


def test_a_link_carries_one_byte_after_the_other():
    pace = Pace(8000, latency_seconds=0.5)  # 1,000 bytes per second
    assert pace.send(1000, now=10.0) == 11.5
    assert pace.send(500, now=10.2) == 12.0  # waits for the first
    assert pace.send(1000, now=20.0) == 21.5  # the link has been idle since


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self):
        self.now = 100.0

    def perf_counter(self):
        return self.now

    def sleep(self, seconds):
        self.now += seconds


class Sending:
    """A collective of so many bytes, which a loopback has done at once."""

    def __init__(self, **amounts):
        self._amounts = amounts

    def amounts(self):
        return self._amounts

    def start(self):
        return self

    def wait(self):
        return None


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(paced, "time", clock)
    monkeypatch.setattr("thinwire.core.ledger.time", clock)
    return clock


def test_a_paced_wire_takes_as_long_as_the_wire(clock):
    wire = Paced(Pace(8e6, latency_seconds=0.25))  # 1 MB per second
    work = wire.start(Sending(bytes_sent=500_000))
    with wire.ledger.timed("wire_seconds"):
        clock.sleep(0.1)  # what the loopback takes counts as part of it
        work.wait()
    assert clock.now == pytest.approx(100.75)
    with wire.ledger.timed("encode_seconds"):
        clock.sleep(1.0)
    wire.start(Sending()).wait()  # nothing was sent: nothing to wait for
    assert clock.now == pytest.approx(101.75)
    assert wire.ledger.totals() == pytest.approx(
        {"bytes_sent": 500_000, "messages": 2, "wire_seconds": 0.75, "encode_seconds": 1.0}
    )


def test_each_job_is_due_when_its_own_bytes_are_there(clock):
    """Two buckets in flight share the link: the first does not wait for the second's bytes, nor the second twice."""
    wire = Paced(Pace(8e6, latency_seconds=0.25))
    first = wire.start(Sending(bytes_sent=1_000_000))
    second = wire.start(Sending(bytes_sent=2_000_000))
    first.wait()
    assert clock.now == pytest.approx(101.25)
    third = wire.start(Sending(bytes_sent=1_000_000))  # behind the second, which leaves until 103
    second.wait()
    assert clock.now == pytest.approx(103.25)  # latency does not occupy the link
    third.wait()
    assert clock.now == pytest.approx(104.25)
    first.wait()  # long there
    assert clock.now == pytest.approx(104.25)


def test_an_answer_begins_when_the_question_has_arrived(clock):
    wire = Paced(Pace(8e6), down=Pace(16e6, latency_seconds=0.5))
    push = wire.start(Sending(bytes_sent=1_000_000))
    pull = wire.start(Sending(bytes_received=1_000_000))
    push.wait()
    assert clock.now == pytest.approx(101.0)
    wire.start(Sending(bytes_sent=3_000_000)).wait()  # the other direction is free meanwhile
    assert clock.now == pytest.approx(104.0)
    pull.wait()  # 101 + 0.5 + 0.5: it came while the next was pushed
    assert clock.now == pytest.approx(104.0)
    wire.start(Sending(bytes_received=1_000_000)).wait()
    assert clock.now == pytest.approx(105.0)
