"""Whatever one worker says, the server lives, allocates next to nothing for it, and the others train on."""

import json
import resource

import pytest
import torch

from helpers.served import Served
from thinwire.core.layout import Layout
from thinwire.core.request import Sum
from thinwire.exchange.server import frames, limits, operations
from thinwire.exchange.server.frames import Kind, Push, Reply, Verdict
from thinwire.exchange.server.operations import number
from thinwire.exchange.server.weights import Gradient
from thinwire.schemes.qsgd import QSGD

HUGE = 1 << 39
SMALL = operations.PlainSum("sum", "float32", 4)
MEAN = operations.DecodedMean(QSGD(), Layout.of([("a", (8,))]), "float32", 0, QSGD(), None)


def described(text, nbytes=16, answer_bytes=16, kind=Kind.ASK, level=0.0):
    """A push with an operation's description, and as much of a payload as a description with these sizes needs."""
    raw = text if isinstance(text, bytes) else text.encode()
    named = number(text) if isinstance(text, str) else 0
    push = Push(kind, 1, named, 0, level, 3, len(raw), nbytes, answer_bytes)
    return [push.pack(), raw]


def mean(**changes):
    return json.dumps({**json.loads(MEAN.text), **changes}, separators=(",", ":"))


def plain(**changes):
    return json.dumps({**json.loads(SMALL.text), **changes}, separators=(",", ":"))


ATTACKS = {
    "a huge answer to nonsense": described("nonsense", answer_bytes=HUGE),
    "a huge answer to a small sum": described(SMALL.text, answer_bytes=HUGE),
    "a huge payload for a small sum": described(SMALL.text, nbytes=HUGE),
    "a payload above every limit": described(SMALL.text, nbytes=1 << 60),
    "a huge sum, described as such": described(plain(numel=HUGE // 4), HUGE, HUGE),
    "a sum of more than can be counted": described(plain(numel=1 << 70)),
    "a negative sum": described(plain(numel=-4)),
    "half a number": described(plain(numel=2.5)),
    "a truth for a number": described(plain(numel=True)),
    "no dtype": described(plain(dtype="float33")),
    "a list for a dtype": described(plain(dtype=["float32"])),
    "no reduction": described(plain(reduction="product")),
    "wide integers": described('{"kind":"PackedSum","width":4096,"saturate":false,"numel":4}'),
    "a few bytes of a huge tensor": described(
        mean(codec="topk(density=0.001)", layout=[["a", 0, 1 << 50, [1 << 50], 0]]), level=1e-15
    ),
    "a long description": [Push(Kind.ASK, text_bytes=(1 << 32) - 1).pack()],
    "megabytes of ones": described("[" + "1," * (1 << 20) + "1]"),
    "megabytes of brackets": described("[" * (1 << 21)),
    "megabytes of tensors": described(mean(layout=[["", 0, 0, [0], 0]] * 100_000)),
    "a thousand dimensions": described(mean(layout=[["a", 0, 8, [1] * 1000 + [8], 0]])),
    "a product without end": described(mean(layout=[["a", 0, 8, [9] * 500_000, 0]])),
    "two tensors of one name": described(mean(layout=[["a", 0, 4, [4], 0], ["a", 4, 8, [4], 0]])),
    "a gap": described(mean(layout=[["a", 0, 4, [4], 0], ["b", 5, 8, [3], 0]])),
    "a long spec": described(mean(codec="qsgd(bits=" + "(" * 50_000 + "4" + ")" * 50_000 + ")")),
    "code for a codec": described(mean(codec="__import__('os').system('true')")),
    "a module for a codec": described(mean(codec="this")),
    "a level that is none": described(MEAN.text, level=1e300),
    "a level that is no number": described(MEAN.text, level=float("nan")),
    "no text at all": described(b"\xff\xfe\x00"),
    "another operation's number": [Push(Kind.ASK, 1, 7, text_bytes=len(SMALL.text)).pack(), SMALL.text.encode()],
    "what was never described": [Push(Kind.ASK, 1, 7, nbytes=16, answer_bytes=16).pack()],
    "a gradient as a question": described(Gradient(((QSGD(), Layout.of([("a", (8,))])),), "float32").text),
    "a question as a gradient": described(SMALL.text, kind=Kind.GRADIENT),
    "a gradient for a server without weights": described(
        Gradient(((QSGD(), Layout.of([("a", (8,))])),), "float32").text, 0, 32, Kind.WEIGHTS
    ),
    "a huge snapshot to load": [Push(Kind.LOAD, nbytes=HUGE).pack()],
    "a snapshot from nobody who may load one": [Push(Kind.LOAD, nbytes=0).pack()],
    "a snapshot that was never made": [Push(Kind.FETCH, answer_bytes=HUGE).pack()],
    "a snapshot for a curious worker": [Push(Kind.STATE).pack()],
    "a knock where there is no door": [Push(Kind.KNOCK).pack()],
    "a huge roll": [Push(Kind.ROLL, answer_bytes=HUGE).pack()],
    "a small roll": [Push(Kind.ROLL, answer_bytes=3).pack()],
    "a huge state for nobody": [Push(Kind.GIVE, nbytes=HUGE).pack()],
    "a state that nobody told": [Push(Kind.TAKE, answer_bytes=1 << 20).pack()],
    "nobody let in": [Push(Kind.ADMIT).pack()],
    "a payload with a goodbye": [Push(Kind.BYE, nbytes=1000).pack()],
    "a short header": [b"TWPS"],
    "another protocol": [b"GET / HTTP/1.1".ljust(frames.PUSH_BYTES)],
}


def total_of(served, workers, value=1.0):
    """What the workers' sum comes to on each of them."""
    asked = [served.ask(worker, Sum(torch.full((4,), value))) for worker in workers]
    return [each.result(20)[0].item() for each in asked]


@pytest.mark.parametrize("attack", ATTACKS)
def test_whatever_one_worker_says_the_others_train_on(attack):
    served = Served(3, memory_bytes=1 << 26)
    assert total_of(served, (0, 1, 2)) == [3.0] * 3
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    served.send(2, *ATTACKS[attack])
    # The sum of that one round is scaled to the number of workers that were counted on.
    assert total_of(served, (0, 1)) in ([3.0] * 2, [2.0] * 2)
    assert total_of(served, (0, 1)) == [2.0] * 2
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 300 * 1024  # kilobytes
    served.channels[2].cut()
    served.leave(0, 1)
    assert served.ended.result(20)["workers"] == 2.0


def test_a_worker_that_asks_without_end_is_stopped_at_its_share():
    served = Served(2, memory_bytes=1 << 20)
    nothing = torch.zeros(16, dtype=torch.uint8)
    served.send(1, *described(SMALL.text), nothing)
    for _ in range(200):  # each counts for some 4 kB, and it may have half a megabyte
        served.send(1, Push(Kind.ASK, 1, SMALL.number, 0, 0.0, 2, 0, 16, 16).pack(), nothing)
    reply = torch.empty(frames.REPLY_BYTES, dtype=torch.uint8)
    served.channels[1].receive(reply).wait()
    told = Reply.unpack(reply)
    assert told.verdict is Verdict.REFUSED and "memory_bytes" in told.reason
    assert total_of(served, (0,)) == [2.0]
    served.channels[1].cut()
    served.leave(0)
    assert served.ended.result(20)["workers"] == 1.0


def test_both_ends_forget_the_same_operations(monkeypatch):
    monkeypatch.setattr(limits, "KNOWN_OPERATIONS", 3)
    served = Served(2)
    for size in (1, 2, 3, 4, 5, 1, 2, 5, 5, 3, 1):
        asked = [served.ask(worker, Sum(torch.ones(size))) for worker in (0, 1)]
        assert [each.result(20).tolist() for each in asked] == [[2.0] * size] * 2
    assert len(served.clients[0]._described[0]) == len(served.server._peers[0]._known) == 3
    served.leave(0, 1)
    assert served.ended.result(20)["workers"] == 2.0
