"""What must hold for every codec: sizes, payloads, cuts."""

import pytest
import torch

from helpers.gradients import gradient
from helpers.specs import every_spec
from thinwire.core.bucket import Bucket
from thinwire.core.layout import Layout
from thinwire.core.request import Mean
from thinwire.core.scheme import Codec
from thinwire.exchange import arithmetic
from thinwire.schemes import parse

CODECS = [spec for spec in every_spec() if isinstance(parse(spec), Codec)]
SIZES = [1, 2, 7, 8, 63, 1000, 4097]


def encoded(codec, bucket, filling=0):
    """The payload, written into memory that holds `filling`; and that nothing beyond it was touched."""
    nbytes = codec.nbytes(bucket.layout, codec.level)
    memory = torch.full((nbytes + 64,), filling, dtype=torch.uint8)
    codec.encode(bucket, codec.level, memory[:nbytes])
    assert (memory[nbytes:] == filling).all(), f"{codec.spec} wrote beyond its nbytes()"
    return memory[:nbytes].clone()


def decoded(codec, payload, layout):
    out = torch.zeros(layout.numel)
    codec.decode_add(payload, layout, codec.level, out, 1.0)
    return out


@pytest.mark.parametrize("spec", CODECS)
def test_size_is_honest(spec):
    """`nbytes` is written in full and nothing beyond it; the payload alone is enough to decode."""
    codec = parse(spec)
    for size in SIZES:
        layout = Layout.of([("a", (size,)), ("b", (3, 5))])
        bucket = Bucket(gradient(layout.numel), layout, lost=torch.full((layout.numel,), torch.nan))
        payloads = [encoded(codec, bucket, filling) for filling in (0x00, 0xFF)]
        unwritten = int((payloads[0] != payloads[1]).sum())
        assert not unwritten, f"{spec} leaves {unwritten} of {len(payloads[0])} bytes of a payload as it found them"
        assert not bucket.lost.isnan().any(), f"{spec} leaves entries of bucket.lost as it found them"
        out = decoded(codec, payloads[0], layout)
        torch.testing.assert_close(bucket.flat - out, bucket.lost, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("spec", CODECS)
def test_payloads_of_another_size_are_refused(spec):
    codec = parse(spec)
    bucket = Bucket.of(gradient(1000))
    payload = codec.payload(bucket, codec.level)
    for bad in (payload[:-1], torch.cat([payload, payload[:1]]), payload[:0]):
        with pytest.raises(ValueError, match="bytes"):
            codec.decode_add(bad.clone(), bucket.layout, codec.level, torch.zeros(1000), 1.0)


@pytest.mark.parametrize("spec", [spec for spec in CODECS if parse(spec).grain])
def test_a_bucket_cut_at_the_grain_decodes_to_the_same(spec):
    """Where a bucket was cut cannot be seen, unless scales are of whole tensors: those that are cut have others."""
    codec = parse(spec)
    layout = Layout.of([("a", (3001,)), ("b", (3, 5)), ("c", (70, 130))])
    bucket = Bucket(gradient(layout.numel), layout, worker=2, step=3, seed=4)
    whole = decoded(codec, encoded(codec, bucket), layout)
    seen = False
    for parts in (2, 3, 7):
        cut = bucket.split(parts, codec.grain)
        assert all(segment.offset % codec.grain == 0 for part in cut for segment in part.segments)
        said = torch.cat([decoded(codec, encoded(codec, part), part.layout) for part in cut])
        torn = {segment.name for part in cut for segment in part.segments if segment.offset}
        for segment in layout.segments:
            if not torch.equal(said[segment.start : segment.stop], whole[segment.start : segment.stop]):
                assert codec.per_tensor, f"{spec} does not mean the same when cut every {codec.grain} entries"
                assert segment.name in torn
                seen = True
    assert seen == codec.per_tensor, f"{spec} has no scales of whole tensors, though it says so"


@pytest.mark.parametrize("spec", [spec for spec in CODECS if parse(spec).grain])
def test_messages_about_parts_are_the_same_whether_made_at_once_or_one_by_one(spec, monkeypatch):
    codec = parse(spec)
    layout = Layout.of([("a", (3001,)), ("b", (3, 5)), ("c", (70, 130))])
    found = []
    for short in (0, arithmetic.SHORT):
        monkeypatch.setattr(arithmetic, "SHORT", short)
        bucket = Bucket(gradient(layout.numel), layout, worker=2, step=3, seed=4, lost=torch.zeros(layout.numel))
        mean = Mean(codec, bucket, codec.level)
        lengths = arithmetic.part_bytes(codec, layout, 7, codec.level)
        out = torch.full((sum(lengths),), 0xFF, dtype=torch.uint8)
        arithmetic.encode_parts(mean, 7, out)
        padded = torch.zeros(7, max(lengths), dtype=torch.uint8)
        for row, message in zip(padded, out.split(lengths), strict=True):
            row[: len(message)] = message
        arithmetic.decode_parts(mean, 7, padded.view(-1))
        found.append((out, bucket.lost, bucket.target))
    for one_by_one, at_once in zip(*found, strict=True):
        assert torch.equal(one_by_one, at_once)


def test_some_messages_are_made_at_once():
    at_once = {parse(spec).name for spec in CODECS if parse(spec).blockwise}
    assert at_once >= {"qsgd", "nuqsgd", "tnq", "tq", "nq"}
