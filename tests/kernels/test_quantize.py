"""Quantisers: all backends make the same bits; the mean of stochastic codes is right; bad arguments are refused."""

import math

import pytest
import torch
from blocks_data import Buffer, buffers, same_bits
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinwire import kernels
from thinwire.core.randomness import mix
from thinwire.kernels import Levels, reference
from thinwire.lab.bench.cases import tnq_levels

EXAMPLES = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
ranges = st.sampled_from(["absmax", "clipped", "zero", "tiny", "huge", "inf", "nan", "negative"])


def ranges_for(buffer: Buffer, kinds: list[str]) -> torch.Tensor:
    peak = torch.zeros(buffer.blocks)
    kernels.block_absmax(buffer.x, buffer.starts, buffer.block, peak)
    fixed = {"zero": 0.0, "tiny": 1e-40, "huge": 3.4e38, "inf": math.inf, "nan": math.nan, "negative": -1.0}
    for block in range(min(len(peak), 64)):
        kind = kinds[block % len(kinds)]
        peak[block] = fixed.get(kind, float(peak[block]) * (0.25 if kind == "clipped" else 1.0))
    return peak


@st.composite
def tables(draw) -> torch.Tensor:
    """Exponential levels, or any levels, some of them very close together."""
    bits = draw(st.integers(1, 8))
    if draw(st.booleans()):
        return tnq_levels(bits)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    gaps = torch.exp(
        draw(st.sampled_from([0.1, 1.0, 4.0])) * torch.randn(1 << bits, generator=generator, dtype=torch.float64)
    )
    gaps = gaps.clamp(min=1e-5 * float(gaps.sum()))  # float32 must tell all levels apart
    return (gaps.cumsum(0) - gaps.sum() / 2).to(torch.float32)


@EXAMPLES
@given(buffers(), st.integers(1, 8), st.booleans(), st.booleans(), st.lists(ranges, min_size=1, max_size=4))
def test_uniform_equals_reference(backend, buffer, bits, stochastic, residual, kinds):
    radius = ranges_for(buffer, kinds)
    keys = buffer.keys if stochastic else None
    outcomes = []
    for module in (backend, reference):
        codes, lost = buffer.codes(bits), torch.full_like(buffer.x, 7.0) if residual else None
        module.quantize_uniform(
            buffer.x, buffer.starts, buffer.block, bits, radius,
            keys=keys, counters=buffer.counters, out=codes, lost=lost,
        )  # fmt: skip
        added = torch.full_like(buffer.x, 0.5)
        module.dequantize_uniform_add(codes, buffer.starts, buffer.block, bits, radius, 0.3, out=added)
        outcomes.append((codes, lost, added))
    (codes, lost, added), expected = outcomes
    assert torch.equal(codes, expected[0])
    assert lost is None or same_bits(lost, expected[1])
    assert same_bits(added, expected[2])


@EXAMPLES
@given(buffers(), tables(), st.booleans(), st.booleans(), st.lists(ranges, min_size=1, max_size=4))
def test_levels_equal_reference(backend, buffer, table, stochastic, residual, kinds):
    levels, scale = Levels(table), ranges_for(buffer, kinds) / table.abs().max()
    keys = buffer.keys if stochastic else None
    outcomes = []
    for module in (backend, reference):
        codes, lost = buffer.codes(levels.bits), torch.full_like(buffer.x, 7.0) if residual else None
        module.quantize_levels(
            buffer.x, buffer.starts, buffer.block, levels, scale,
            keys=keys, counters=buffer.counters, out=codes, lost=lost,
        )  # fmt: skip
        added, replaced = torch.full_like(buffer.x, 0.5), torch.full_like(buffer.x, 0.5)
        module.dequantize_levels_add(codes, buffer.starts, buffer.block, levels, scale, 0.3, out=added)
        module.dequantize_levels_sum(
            [codes, codes], buffer.starts, buffer.block, levels, [scale, scale / 3], 0.3, out=replaced
        )
        outcomes.append((codes, lost, added, replaced))
    (codes, lost, added, replaced), expected = outcomes
    assert torch.equal(codes, expected[0])
    assert lost is None or same_bits(lost, expected[1])
    assert same_bits(added, expected[2])
    assert same_bits(replaced, expected[3])


@pytest.mark.parametrize("bits", range(1, 9))
def test_values_on_a_level_keep_it(backend, bits):
    """Whatever the draw: a level is its own code. The last may fall to its neighbour, by a draw within 2^-22 of 1."""
    table = tnq_levels(bits)
    starts, ones = torch.tensor([0, len(table)]), torch.ones(1)
    codes = torch.zeros(kernels.packed_bytes(starts, 0, bits), dtype=torch.uint8)
    decoded = torch.zeros(len(table))
    for number in range(20):
        keys, counters = torch.tensor([mix(number) - 2**63]), torch.zeros(1, dtype=torch.int64)
        backend.quantize_levels(table, starts, 0, Levels(table), ones, keys=keys, counters=counters, out=codes)
        backend.dequantize_levels_sum([codes], starts, 0, Levels(table), [ones], 1.0, out=decoded)
        assert torch.equal(decoded, table)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("quantizer", ["uniform", "tnq"])
def test_stochastic_codes_are_unbiased(bits, quantizer):
    """The mean error of n = 2^18 draws per value lies within 5 standard errors.

    41 values, so one false alarm in 40,000 runs; and the draws are fixed by their keys: what passes passes always.
    """
    n = 1 << 18
    starts, one, counters = torch.tensor([0, n]), torch.ones(1), torch.zeros(1, dtype=torch.int64)
    levels = Levels(tnq_levels(bits) / tnq_levels(bits)[-1])
    codes, decoded = torch.zeros(kernels.packed_bytes(starts, 0, bits), dtype=torch.uint8), torch.zeros(n)
    for number, value in enumerate(torch.linspace(-1, 1, 41).tolist()):
        x, keys = torch.full((n,), value), torch.tensor([mix(number) - 2**63])
        if quantizer == "uniform":
            kernels.quantize_uniform(x, starts, 0, bits, one, keys=keys, counters=counters, out=codes)
            kernels.dequantize_uniform_add(codes, starts, 0, bits, one, 1.0, out=decoded.zero_())
        else:
            kernels.quantize_levels(x, starts, 0, levels, one, keys=keys, counters=counters, out=codes)
            kernels.dequantize_levels_sum([codes], starts, 0, levels, [one], 1.0, out=decoded)
        standard_error = float(decoded.double().std()) / math.sqrt(n)
        assert abs(float(decoded.double().mean()) - value) <= 5 * standard_error + 2e-6, value


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_results_do_not_depend_on_threads(backend, threads, bits):
    buffer = Buffer(
        torch.randn(300_001),
        torch.tensor([0, 5, 200_000, 300_001]),
        0,
        torch.tensor([1, 2**62, -3]),
        torch.tensor([0, 9, 4]),
    )
    radius, table = torch.tensor([2.0, 3.0, 4.0]), Levels(tnq_levels(bits))
    outcomes = []
    for count in (1, 2, 7):
        threads(count)
        uniform, levels = buffer.codes(bits), buffer.codes(bits)
        lost, out = torch.zeros(300_001), torch.zeros(300_001)
        where = {"keys": buffer.keys, "counters": buffer.counters}
        backend.quantize_uniform(buffer.x, buffer.starts, 0, bits, radius, **where, out=uniform, lost=lost)
        backend.quantize_levels(buffer.x, buffer.starts, 0, table, radius, **where, out=levels)
        backend.dequantize_uniform_add(uniform, buffer.starts, 0, bits, radius, 1.0, out=out)
        outcomes.append((uniform, levels, lost, out))
    for outcome in outcomes[1:]:
        assert all(torch.equal(a, b) for a, b in zip(outcome, outcomes[0], strict=True))


@pytest.mark.parametrize("bits", [1, 4, 8])
def test_a_bank_is_a_table_for_every_stretch(bits):
    """To the bit what each stretch's own table makes; and NaN for one that is not there."""
    starts, x = torch.tensor([0, 5, 5, 400, 1000, 1100]), torch.randn(1100)
    tables = [Levels(tnq_levels(bits) * factor) for factor in (1.0, 0.5, 3.0)]
    bank, row = torch.stack([each.interval for each in tables]), torch.tensor([2, 0, 1, 0, 3])
    scale, keys = torch.tensor([1.0, 2.0, 0.5, torch.inf, 1.0]), torch.arange(5)
    codes, lost, out = torch.zeros(kernels.packed_bytes(starts, 0, bits), dtype=torch.uint8), x.clone(), x.clone()
    kernels.quantize_bank(lost, starts, bank, row, scale, keys=keys, counters=keys, out=codes, lost=lost)
    kernels.dequantize_bank_add(codes, starts, bank, row, scale, 0.3, out=out)
    at = 0
    for number, (begin, end) in enumerate(zip(starts[:-1].tolist(), starts[1:].tolist(), strict=True)):
        own, which = torch.tensor([0, end - begin]), (scale[number : number + 1], keys[number : number + 1])
        size, table = kernels.packed_bytes(own, 0, bits), tables[row[number] % 3]
        expected, left, added = torch.zeros(size, dtype=torch.uint8), x[begin:end].clone(), x[begin:end].clone()
        if number == 4:
            which = (scale[3:4], which[1])
        how = {"keys": which[1], "counters": which[1], "out": expected, "lost": left}
        kernels.quantize_levels(left, own, 0, table, which[0], **how)
        kernels.dequantize_levels_add(expected, own, 0, table, which[0], 0.3, out=added)
        assert torch.equal(codes[at : at + size], expected)
        assert torch.equal(lost[begin:end].nan_to_num(), left.nan_to_num())
        assert torch.equal(out[begin:end].nan_to_num(), added.nan_to_num())
        at += size
    assert bool(out[400:].isnan().all()) and bool(out[:400].isfinite().all())


@pytest.mark.parametrize("bank", [torch.zeros(0, 4, 2), torch.zeros(3, 5, 2), torch.zeros(3, 4), torch.zeros(3, 4, 1)])
def test_what_is_no_bank_is_refused(bank):
    one, codes = torch.zeros(1, dtype=torch.int64), torch.zeros(1, dtype=torch.uint8)
    with pytest.raises(ValueError, match="bank must be"):
        kernels.dequantize_bank_add(codes, torch.tensor([0, 3]), bank, one, torch.ones(1), 1.0, out=torch.zeros(3))


def test_residual_may_overwrite_its_input(backend):
    x, starts = torch.randn(1001), torch.tensor([0, 1001])
    radius, codes = torch.full((1,), 4.0), torch.zeros(501, dtype=torch.uint8)
    keys, counters, lost = torch.tensor([5]), torch.zeros(1, dtype=torch.int64), torch.zeros(1001)
    backend.quantize_uniform(x, starts, 0, 4, radius, keys=keys, counters=counters, out=codes, lost=lost)
    own = x.clone()
    backend.quantize_uniform(own, starts, 0, 4, radius, keys=keys, counters=counters, out=codes, lost=own)
    assert torch.equal(own, lost)


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_a_block_with_a_non_finite_value_decodes_to_nan(backend, bad):
    x, starts = torch.randn(64), torch.tensor([0, 64])
    x[10] = bad
    absmean, absmax, codes = torch.zeros(2), torch.zeros(2), torch.zeros(32, dtype=torch.uint8)
    backend.block_statistics(x, starts, 32, absmean=absmean, absmax=absmax)
    counters = torch.zeros(1, dtype=torch.int64)
    for scale in (absmean, absmax):
        out = torch.zeros(64)
        backend.quantize_uniform(x, starts, 32, 4, scale, keys=None, counters=counters, out=codes)
        backend.dequantize_uniform_add(codes, starts, 32, 4, scale, 1.0, out=out)
        assert bool(out[:32].isnan().all()) and bool(out[32:].isfinite().all())


def test_float64_runs_on_the_reference():
    x, starts, radius = torch.randn(100, dtype=torch.float64), torch.tensor([0, 100]), torch.full((1,), 4.0)
    codes, out = torch.zeros(100, dtype=torch.uint8), torch.zeros(100, dtype=torch.float64)
    kernels.quantize_uniform(x, starts, 0, 8, radius, keys=None, counters=torch.zeros(1, dtype=torch.int64), out=codes)
    kernels.dequantize_uniform_add(codes, starts, 0, 8, radius, 1.0, out=out)
    assert float((x - out).abs().max()) <= 4.0 / 255 + 1e-6


def _call(**changes):
    arguments = {
        "x": torch.randn(100),
        "starts": torch.tensor([0, 40, 100]),
        "block": 32,
        "bits": 4,
        "radius": torch.ones(4),
        "keys": torch.tensor([1, 2]),
        "counters": torch.tensor([0, 0]),
        "out": torch.zeros(50, dtype=torch.uint8),
        "lost": None,
    } | changes
    x, starts, block, bits, radius = (arguments.pop(name) for name in ("x", "starts", "block", "bits", "radius"))
    kernels.quantize_uniform(x, starts, block, bits, radius, **arguments)
    return arguments["out"]


def test_good_arguments_are_taken():
    assert _call().any()


@pytest.mark.parametrize(
    "changes",
    [
        {"x": torch.randn(200)[::2]},
        {"x": torch.randn(100, device="meta")},
        {"x": torch.randn(100).half()},
        {"x": torch.randn(10, 10)},
        {"x": torch.randn(99)},
        {"starts": torch.tensor([0, 60, 40, 100])},
        {"starts": torch.tensor([1, 40, 100])},
        {"starts": torch.tensor([0, 40, 100], dtype=torch.int32)},
        {"block": -1},
        {"block": 32.0},
        {"bits": 0},
        {"bits": 9},
        {"bits": True},
        {"radius": torch.ones(3)},
        {"radius": torch.ones(8)[::2]},
        {"radius": torch.ones(4, dtype=torch.int32)},
        {"out": torch.zeros(49, dtype=torch.uint8)},
        {"out": torch.zeros(50, dtype=torch.int8)},
        {"out": torch.zeros(100, dtype=torch.uint8)[::2]},
        {"keys": torch.tensor([1])},
        {"keys": torch.tensor([1.0, 2.0])},
        {"counters": torch.tensor([0])},
        {"counters": torch.tensor([-1, 0])},
        {"counters": torch.tensor([2**32 - 50, 0])},
        {"lost": torch.zeros(99)},
        {"lost": torch.zeros(100, dtype=torch.float64)},
    ],
    ids=lambda changes: next(iter(changes)),  # values are random: names of tests are not
)
def test_bad_arguments_are_refused(changes):
    with pytest.raises(ValueError):
        _call(**changes)


@pytest.mark.parametrize(
    "table",
    [[0.0], [1.0, 1.0], [2.0, 1.0], [0.0, 1.0, 2.0], [0.0, math.inf], [math.nan, 1.0], list(range(512)), []],
)
def test_bad_levels_are_refused(table):
    with pytest.raises(ValueError, match="levels"):
        Levels(torch.tensor(table, dtype=torch.float32))


@pytest.mark.parametrize("table", ["table", "next", "interval", "cell"])
def test_tables_of_another_dtype_are_refused(table):
    """Compiled code would read them as float32, whatever they are."""
    levels, x, starts = Levels(tnq_levels(4)), torch.randn(100), torch.tensor([0, 100])
    object.__setattr__(levels, table, getattr(levels, table).double())
    where = {"keys": None, "counters": torch.zeros(1, dtype=torch.int64)}
    with pytest.raises(ValueError, match="float64"):
        kernels.quantize_levels(x, starts, 0, levels, torch.ones(1), **where, out=torch.zeros(50, dtype=torch.uint8))
