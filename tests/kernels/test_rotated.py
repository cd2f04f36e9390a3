"""Rotate and quantise in one pass: every backend equals the reference to the bit, and pass after pass."""

import math

import pytest
import torch
from blocks_data import same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinwire import kernels
from thinwire.core import theory
from thinwire.kernels import Levels, check, reference

LEVELS = {bits: Levels.of(theory.gaussian_centroids(bits)) for bits in (1, 2, 3, 4)}


@st.composite
def rotated(draw):
    """x at any alignment, in stretches of any length, with gaps or without; all else that the operations ask for."""
    lengths = draw(st.lists(st.one_of(st.integers(0, 9), st.integers(60, 300), st.integers(900, 5000)), max_size=4))
    if draw(st.integers(0, 15)) == 0:
        lengths.append(140_001)  # more than one range, and with block 2^17 more than one thread inside a block
    gaps = draw(st.booleans())
    spans, at = [], draw(st.integers(0, 3)) if gaps else 0
    for length in lengths:
        spans.append((at, at + length))
        at += length + (draw(st.integers(0, 5)) if gaps else 0)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = (torch.randn(at + 1, generator=generator) * draw(st.sampled_from([1.0, 1e-3, 1e-42, 1e30])))[1:]
    if at and draw(st.booleans()):
        x[torch.randint(at, (2,), generator=generator)] = torch.tensor(draw(st.sampled_from([math.inf, math.nan, 0.0])))
    bounds = spans if gaps else [0, *(end for _, end in spans)]
    starts = torch.tensor(bounds, dtype=torch.int64).reshape((-1, 2) if gaps else (-1,))
    keys = torch.randint(-(2**63), 2**63 - 1, (2, len(spans)), generator=generator)
    counters = torch.randint(0, 2**31, (len(spans),), generator=generator)
    return x, starts, draw(st.sampled_from([64, 128, 1024, 1 << 17])), keys, counters


anything = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def deviation(x, starts, block):
    number = check.blocks(starts, block).count
    return torch.rand(number, generator=torch.Generator().manual_seed(7)) * float(
        x.nan_to_num(0, 1, 1).abs().mean() + 1e-9
    )


@anything
@given(rotated(), st.sampled_from([torch.int8, torch.int16, torch.int32]), st.sampled_from([0.5, -0.5, 0.0]))
def test_rounding_equals_the_reference(backend, data, dtype, offset):
    x, starts, block, (signs, keys), counters = data
    step = deviation(x, starts, block)
    made = []
    for module in (reference, backend):
        out, lost = torch.zeros(kernels.padded_numel(starts, block), dtype=dtype), torch.full_like(x, 9.0)
        how = {"signs": signs, "keys": keys, "counters": counters}
        module.rotate_round(x, starts, block, step, offset, -7, 8, **how, out=out, lost=lost)
        made.append((out, lost))
    assert torch.equal(made[0][0], made[1][0])
    assert same_bits(made[0][1], made[1][1])  # and gaps are left alone


@anything
@given(rotated(), st.sampled_from([torch.int8, torch.int32]))
def test_sums_equal_the_reference(backend, data, dtype):
    x, starts, block, (signs, _), counters = data
    scale = deviation(x, starts, block)
    total = (torch.arange(kernels.padded_numel(starts, block)) % 23 - 11).to(dtype)
    made = [torch.full_like(x, 9.0) for _ in range(2)]
    for module, out in zip((reference, backend), made, strict=True):
        module.unrotate_sum(total, starts, block, scale, 0.5, signs=signs, counters=counters, out=out)
    assert same_bits(*made)


@anything
@given(rotated(), st.sampled_from([1, 2, 4]))
def test_estimates_equal_the_reference(backend, data, bits):
    x, starts, block, (signs, others), counters = data
    made = []
    for module in (reference, backend):
        codes = torch.zeros(kernels.padded_numel(starts, block) * bits // 8, dtype=torch.uint8)
        scale, lost, out = (
            torch.zeros(check.blocks(starts, block).count),
            torch.full_like(x, 9.0),
            torch.full_like(x, 9.0),
        )
        module.rotate_quantize(
            x, starts, block, LEVELS[bits], signs=signs, counters=counters, scale=scale, out=codes, lost=lost
        )
        both = {"signs": [signs, others], "counters": counters}
        module.unrotate_levels_sum([codes] * 2, starts, block, LEVELS[bits], [scale] * 2, 0.3, **both, out=out)
        module.unrotate_levels_sum(
            [codes], starts, block, LEVELS[bits], [scale], 0.3, signs=[signs], counters=counters, out=out, add=True
        )
        made.append((scale, codes, lost, out))
    for expected, found in zip(*made, strict=True):
        assert torch.equal(expected, found) if expected.dtype is torch.uint8 else same_bits(expected, found)


def test_rounding_is_rotation_then_levels(backend):
    """The passes one after the other, at a length that needs no padding: the same integers, the same loss."""
    n, block = 3 * 1024, 1024
    x = torch.randn(n, generator=torch.Generator().manual_seed(0))
    starts, signs, keys, counters = torch.tensor([0, n]), torch.tensor([5]), torch.tensor([6]), torch.tensor([40])
    step = torch.tensor([0.1, 0.2, 0.3])
    out, lost = torch.zeros(n, dtype=torch.int8), torch.zeros(n)
    how = {"signs": signs, "keys": keys, "counters": counters}
    backend.rotate_round(x, starts, block, step, 0.5, -128, 127, **how, out=out, lost=lost)
    y, codes = x.clone(), torch.zeros(n, dtype=torch.uint8)
    table = Levels(torch.arange(-128, 128) + 0.5)
    reference.hadamard_(y, starts, block, keys=signs, counters=counters)
    reference.quantize_levels(y, starts, block, table, step, keys=keys, counters=counters, out=codes)
    assert torch.equal(out.int(), codes.int() - 128)
    assert out.unique().numel() > 50
    said = step.repeat_interleave(block) * (out + 0.5)
    reference.hadamard_(said, starts, block, keys=signs, counters=counters, inverse=True)
    assert torch.equal(lost, x - said)


def test_padding_is_to_powers_of_two():
    for length, block, expected in [(1, 64, 64), (64, 64, 64), (65, 1024, 128), (1000, 1024, 1024), (1030, 1024, 1088),
                                    (2048, 1024, 2048), (0, 64, 0)]:  # fmt: skip
        assert kernels.padded_numel(torch.tensor([0, length]), block) == expected


def test_threads_do_not_show(backend, threads):
    x = torch.randn(3_000_001, generator=torch.Generator().manual_seed(0))
    starts, key, counters = torch.tensor([0, x.numel()]), torch.tensor([5]), torch.tensor([0])
    for block in (4096, 1 << 18):
        made = []
        for count in (1, 3):
            threads(count)
            out, lost = torch.zeros(kernels.padded_numel(starts, block), dtype=torch.int8), torch.zeros_like(x)
            step = torch.full((-(-x.numel() // block),), 0.5)
            how = {"signs": key, "keys": key, "counters": counters}
            if backend is reference:
                return
            backend.rotate_round(x, starts, block, step, 0.5, -8, 7, **how, out=out, lost=lost)
            made.append((out, lost))
        assert torch.equal(made[0][0], made[1][0]) and torch.equal(made[0][1], made[1][1])


def test_mistakes_are_named():
    x, starts, one = torch.zeros(100), torch.tensor([0, 100]), torch.tensor([1])
    how = {"signs": one, "keys": one, "counters": one}
    out = torch.zeros(128, dtype=torch.int8)
    for change, message in [
        ({"block": 96}, "power of two"), ({"block": 32}, r"block must be an integer in 64\.\."),
        ({"starts": torch.tensor([0, 99])}, "starts must go from 0 to 100"),
        ({"starts": torch.tensor([[0, 50], [40, 100]])}, "must not decrease"),
        ({"out": out[:100]}, "out has 100 elements, expected 128"), ({"low": -200}, "low must be an integer"),
        ({"step": torch.zeros(2)}, "step has 2 elements, expected 1"),
    ]:  # fmt: skip
        given_ = {"starts": starts, "block": 128, "step": torch.ones(1), "low": -8, "high": 7, "out": out} | change
        block, low, high = (given_.pop(name) for name in ("block", "low", "high"))
        starts_, step = given_.pop("starts"), given_.pop("step")
        with pytest.raises(ValueError, match=message):
            kernels.rotate_round(x, starts_, block, step, 0.5, low, high, **how, **given_)
