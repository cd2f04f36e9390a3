"""Frames, operations and owners by themselves: whatever arrives is checked, and bad bytes raise ValueError alone."""

import contextlib
import gc
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import thinwire as tw
from thinwire.core.layout import Layout
from thinwire.exchange.server import frames, operations, sharding, snapshots
from thinwire.exchange.server.frames import Kind, Push, Reply, Verdict
from thinwire.schemes.cast import FP16
from thinwire.schemes.qsgd import QSGD


def test_frames_round_trip():
    push = Push(Kind.ASK, 3, 2**63 + 5, 7, 0.25, 4, 10, 1 << 33, 99, 123456789)
    assert Push.unpack(push.pack()) == push
    assert push.pack().numel() == frames.PUSH_BYTES
    reply = Reply(Verdict.REFUSED, 3, 2, 4, 1, 99, 5, "because " + "é" * 200)
    again = Reply.unpack(reply.pack())
    assert again.reason.startswith("because é") and again.alive == 4


@settings(max_examples=200, deadline=None)
@given(st.binary(min_size=frames.REPLY_BYTES, max_size=frames.REPLY_BYTES), st.booleans())
def test_any_bytes_are_a_frame_or_a_value_error(raw, begun_well):
    head = frames.MAGIC + (1).to_bytes(2, "little") if begun_well else b""
    data = torch.frombuffer(bytearray(head + raw)[: frames.REPLY_BYTES], dtype=torch.uint8)
    for frame, kind in ((data[: frames.PUSH_BYTES], Push), (data, Reply)):
        with contextlib.suppress(ValueError):
            assert isinstance(kind.unpack(frame), kind)


def test_a_flipped_bit_changes_the_checksum():
    data = torch.arange(101, dtype=torch.uint8)
    before = frames.checksum(data)
    for place in (0, 50, 100):
        data[place] ^= 8
        assert frames.checksum(data) != before
        data[place] ^= 8
    assert frames.checksum(torch.arange(200, dtype=torch.uint8)[1:102]) >= 0  # unaligned memory is fine


OPERATIONS = [
    operations.PlainSum("sum", "float16", 33),
    operations.PackedSum(5, True, 100),
    operations.DecodedMean(QSGD(bits=3), Layout.of([("a", (40, 2)), ("b", (7,))]), "float32", 1, FP16(), 0.0),
]


@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: type(operation).__name__)
def test_operations_round_trip_as_text(operation):
    again = operations.parse(operation.text)
    assert (again.number, again.text) == (operation.number, operation.text)
    assert (again.up_bytes(3), again.down_bytes(3)) == (operation.up_bytes(3), operation.down_bytes(3))


def test_threads_may_read_specs_at_once():
    """Threads change while the collector runs, which it does in the middle of reading."""
    spec, often = tw.scheme("tnq").spec, gc.get_threshold()
    gc.callbacks.append(lambda *_: time.sleep(1e-6))
    gc.set_threshold(20)
    try:
        with ThreadPoolExecutor(8) as readers:
            found = list(readers.map(lambda _: operations.codec_of(spec).spec, range(40)))
    finally:
        gc.set_threshold(*often)
        gc.callbacks.pop()
    assert set(found) == {spec}


@pytest.mark.parametrize(
    "text",
    [
        "", "4", "{}", '{"kind":"Nothing"}', '{"kind":"PlainSum","numel":3}', "__import__('os')", "[" * 500,
        OPERATIONS[2].text.replace("qsgd(bits=3, block=1024, range='max')", "system('true')"),
        OPERATIONS[2].text.replace("qsgd(bits=3, block=1024, range='max')", "powersgd"),
        OPERATIONS[2].text.replace("0,80", "5,80"),
        OPERATIONS[2].text.replace("[40,2]", "[40,3]"),
    ],
)  # fmt: skip
def test_what_is_not_an_operation_raises(text):
    assert text not in [operation.text for operation in OPERATIONS]
    with pytest.raises(ValueError):
        operations.parse(text)


def test_tensors_go_whole_to_owners_by_size_and_stay_there():
    owners = sharding.Owners(2)
    layout = Layout.of([("small", (10,)), ("large", (100,)), ("middle", (60,)), ("last", (45,))])
    shards = owners.shards(layout, 8)
    assert [shard.tensors.layout.names for shard in shards] == [("small", "large"), ("middle", "last")]
    assert owners.entries == [110, 105]
    regrouped = owners.shards(Layout.of([("last", (45,)), ("small", (10,))]), 8)
    assert {shard.server: shard.tensors.layout.names for shard in regrouped} == {0: ("small",), 1: ("last",)}
    whole = torch.arange(215.0)
    put_back = torch.zeros(215)
    for shard in shards:
        shard.tensors.scatter(shard.tensors.gather(whole, torch.empty(shard.tensors.layout.numel)), put_back)
    assert torch.equal(put_back, whole)
    assert [shard.tensors.layout for shard in owners.shards(layout, None)] == [layout]  # cannot be cut


def test_shards_are_kept_with_their_layout_and_owners_for_good():
    owners, names = sharding.Owners(2), [f"t{number}" for number in range(8)]
    first = [shard.server for name in names for shard in owners.shards(Layout.of([(name, (10,))]), 8)]
    again = [shard.server for name in names for shard in owners.shards(Layout.of([(name, (10,))]), 8)]
    assert again == first
    layout = Layout.of([(name, (10,)) for name in names])
    shards = owners.shards(layout, 8)
    assert owners.shards(layout, 8) is shards and owners.shards(layout, None) is not shards
    assert sharding.Owners(2).shards(layout, 8) is not shards


STATE = {
    "memory": {"a.weight": {"residual": torch.randn(3, 5)}, "b": {"residual": torch.arange(7).to(torch.bfloat16)}},
    "shared": {"version": 3, "optimizer": {"state": {0: {"step": torch.tensor(4.0)}}, "param_groups": [
        {"lr": 0.1, "betas": (0.9, 0.999), "foreach": None, "name": "ä", "empty": torch.empty(0, 4), "params": [0]},
    ]}},
}  # fmt: skip


def test_a_snapshot_comes_back_as_it_was():
    data = snapshots.pack(STATE)
    assert data.dtype is torch.uint8 and b"pickle" not in data.numpy().tobytes()
    again = snapshots.unpack(data)
    assert repr(again) == repr(STATE)
    with pytest.raises(ValueError, match="a set cannot be in a snapshot"):
        snapshots.pack({"a": {1, 2}})


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=4), st.integers(0, 400))
def test_any_bytes_are_a_snapshot_or_a_value_error(changes, cut):
    data = snapshots.pack(STATE)[: None if cut == 0 else -cut].clone()
    for place, value in changes:
        data[place % data.numel()] = value
    with contextlib.suppress(ValueError):
        snapshots.unpack(data)


@pytest.mark.parametrize(
    "outline",
    ["[" * 100_000, '["tensor","float32",[1099511627776]]', '["tensor","float32",[-1]]', '["tensor","object",[1]]',
     '["dict",[["dict"],1]]', '["set",1]', "{}", '["tensor","float32",[' + "1," * 99 + "1]]"],
)  # fmt: skip
def test_what_is_no_snapshot_raises(outline):
    raw = len(outline).to_bytes(8, "little") + outline.encode() + bytes(64)
    with pytest.raises(ValueError):
        snapshots.unpack(torch.frombuffer(bytearray(raw), dtype=torch.uint8))


def test_numbers_are_cut_evenly_unless_they_are_few():
    assert sharding.ranges(10, 4, 2, turn=3) == [(1, 0, 10)]
    (_, a, b), (_, c, d) = sharding.ranges(100_001, 4, 2, turn=0)
    assert (a, d) == (0, 100_001) and b == c and abs((b - a) - (d - c)) <= 128
