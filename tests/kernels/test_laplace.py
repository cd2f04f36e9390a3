"""Blocks that are truncated by their own fit: one pass makes what statistics, ranges and codes make one by one."""

import pytest
import torch

from thinwire import kernels
from thinwire.core.bucket import Bucket
from thinwire.core.layout import Layout
from thinwire.kernels.backends.reference.blocks import Blocks
from thinwire.kernels.backends.reference.laplace import truncation
from thinwire.schemes import _tables, parse

LAYOUT = Layout.of([("a", (3001,)), ("b", (1,)), ("c", (0,)), ("d", (70, 130)), ("e", (5,))])


def data(kind):
    """Blocks of every size of numbers, some of zeros; and, where asked for, of what no float holds."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(LAYOUT.numel, generator=generator) ** 3
    x *= torch.logspace(-30, 15, LAYOUT.numel)
    x[1000:2200] = 0
    if kind != "finite":
        x[2500], x[7000] = float(kind), -float(kind)
    return x


def one_by_one(codec, bucket):
    layout, threshold = bucket.layout, codec._threshold(codec.bits)
    payload = torch.zeros(codec.nbytes(layout, codec.level), dtype=torch.uint8)
    radius, _, codes = codec.fields(payload, layout)
    mean, largest, square = (torch.zeros_like(radius) for _ in range(3))
    how = {"absmean": mean, "absmax": largest, "square": square}
    total = bucket.flat if bucket.owed is None else bucket.flat + bucket.owed
    kernels.block_statistics(total, layout.starts, codec.block, **how)
    lengths = Blocks.of(layout.starts, codec.block).lengths
    radius.copy_(truncation(mean, largest, square, lengths, threshold, codec.scale == "moments"))
    levels, lost = _tables.laplace_blocks(codec.bits, codec.block, threshold), torch.zeros(layout.numel)
    how = {"keys": bucket.keys(), "counters": layout.counters, "out": codes, "lost": lost}
    kernels.quantize_levels(total, layout.starts, codec.block, levels, radius, **how)
    return payload, lost


@pytest.mark.parametrize("kind", ["finite", "inf", "nan"])
@pytest.mark.parametrize("remembers", [False, True])
@pytest.mark.parametrize("spec", [
    *(f"tnq(bits={bits})" for bits in range(1, 9)), "tnq(group=8)", "tnq(group=4096)", "tnq(scale='mean')",
])  # fmt: skip
def test_one_pass_is_the_same_to_the_bit(spec, remembers, kind):
    codec = parse(spec)
    owed = data("finite").flip(0) if remembers else None
    bucket = Bucket(data(kind), LAYOUT, worker=1, step=2, seed=3, lost=torch.zeros(LAYOUT.numel), owed=owed)
    expected, also_lost = one_by_one(codec, bucket)
    found = codec.payload(bucket, codec.level)
    for one, other in zip(codec.fields(found, LAYOUT), codec.fields(expected, LAYOUT), strict=True):
        assert torch.equal(one.nan_to_num(-1), other.nan_to_num(-1))  # a NaN is a NaN
    assert torch.equal(bucket.lost.nan_to_num(7e33), also_lost.nan_to_num(7e33))


def test_longer_blocks_take_two_passes_which_mean_the_same(monkeypatch):
    """But for the last bit of a range: PyTorch's roots are not always the nearest."""
    codec, lost = parse("tnq(group=4096)"), []
    for longest in (kernels.LONGEST, 0):
        monkeypatch.setattr(kernels, "LONGEST", longest)
        bucket = Bucket(data("finite"), LAYOUT, lost=torch.zeros(LAYOUT.numel))
        codec.payload(bucket, codec.level)
        lost.append(bucket.lost)
    off = (lost[0] - lost[1]).abs() > 1e-5 * lost[0].abs().clamp(min=1e-20)
    assert off.float().mean() < 1e-2


def test_what_it_cannot_do_is_refused():
    x, starts = torch.zeros(5000), torch.tensor([0, 5000])
    how = {"moments": True, "keys": None, "counters": torch.tensor([0])}
    levels = kernels.Levels(torch.linspace(-1, 1, 16))
    for block, owed, message in ((4097, None, "block must be"), (0, None, "block must be"), (1000, x[1:], "owed has")):
        out = torch.zeros(2500, dtype=torch.uint8)
        with pytest.raises(ValueError, match=message):
            kernels.quantize_laplace(x, starts, block, levels, 2.5, radius=torch.zeros(5), out=out, owed=owed, **how)
