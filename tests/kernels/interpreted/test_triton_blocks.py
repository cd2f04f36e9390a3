"""Statistics, quantisers, integers and casts in Triton, interpreted: to the bit what the references make."""

import pytest
import torch
from buffers_data import buffers, every_length, same_bits, units_apart
from hypothesis import given
from hypothesis import strategies as st

from thinwire import kernels
from thinwire.kernels import Levels, reference
from thinwire.lab.bench.cases import tnq_levels

LENGTHS = [0, 1, 7, 8, 64, 100, 1024, 1500, 2048, 70_000]
BLOCKS = st.sampled_from(LENGTHS)
HALVES = st.sampled_from([torch.float16, torch.bfloat16])
FLOATS = st.sampled_from([torch.float32, torch.float16, torch.bfloat16])


@given(buffers(longest=7000), BLOCKS, st.booleans())
def test_statistics(backend, buffer, block, owed):
    check_statistics(backend, buffer, block, owed)


@pytest.mark.parametrize("block", LENGTHS)
def test_every_length_of_blocks(backend, block):
    buffer = every_length()
    check_statistics(backend, buffer, block, owed=block % 2 == 0)
    check_quantiser(backend, buffer, block, bits=1 + LENGTHS.index(block) % 8, even=block % 2 == 0)


def check_statistics(backend, buffer, block, owed):
    made = []
    for module in (reference, backend):
        outs = {name: torch.full((buffer.count(block),), 7.0) for name in ("absmean", "absmax", "square")}
        total, debt = torch.full_like(buffer.x, 9.0), buffer.like() if owed else None
        module.block_statistics(buffer.x, buffer.starts, block, **outs, owed=debt, total=total)
        made.append((outs, total))
    (expected, total), (found, also) = made
    assert same_bits(total, also)
    assert same_bits(found["absmax"], expected["absmax"])
    assert units_apart(found["absmean"], expected["absmean"]) <= 1
    assert units_apart(found["square"], expected["square"]) <= 1
    alone = torch.full((buffer.count(block),), 7.0)
    backend.block_statistics(total if owed else buffer.x, buffer.starts, block, square=alone)
    assert same_bits(alone, found["square"])


@given(buffers(), FLOATS, FLOATS)
def test_verdicts(backend, buffer, of, into):
    judged = buffer.x.to(of)
    assert backend.all_finite(judged) == bool(judged.isfinite().all())
    kept, expected = buffer.like().to(into), buffer.like().to(into)
    backend.keep_finite_(kept, buffer.like(2), judged)
    reference.keep_finite_(expected, buffer.like(2), judged)
    assert same_bits(kept, expected)


@given(buffers(), BLOCKS, st.integers(1, 8), st.booleans(), st.booleans(), st.booleans())
def test_quantisers(backend, buffer, block, bits, even, stochastic, residual):
    check_quantiser(backend, buffer, block, bits, even, stochastic, residual)


@pytest.mark.parametrize("bits", range(1, 9))
def test_every_number_of_bits(backend, bits):
    check_quantiser(backend, every_length(), 1024, bits, even=bits % 2 == 0)


def check_quantiser(backend, buffer, block, bits, even, stochastic=True, residual=True):
    levels = bits if even else Levels(tnq_levels(bits))
    name, ranges = "uniform" if even else "levels", buffer.ranges(block)
    made = []
    for module in (reference, backend):
        codes = torch.full((kernels.packed_bytes(buffer.starts, block, bits),), 0xAA, dtype=torch.uint8)
        lost, added = torch.full_like(buffer.x, 7.0) if residual else None, torch.full_like(buffer.x, 0.5)
        how = {"keys": buffer.keys if stochastic else None, "counters": buffer.counters, "out": codes, "lost": lost}
        getattr(module, f"quantize_{name}")(buffer.x, buffer.starts, block, levels, ranges, **how)
        where = (buffer.starts, block, levels)
        getattr(module, f"dequantize_{name}_add")(codes, *where, ranges, 0.3, out=added)
        made.append((codes, lost, added))
    assert torch.equal(made[0][0], made[1][0])
    assert not residual or same_bits(made[0][1], made[1][1])
    assert same_bits(made[0][2], made[1][2])


@given(buffers(), st.integers(1, 8), st.integers(1, 5), st.booleans(), st.booleans())
def test_banks(backend, buffer, bits, rows, stochastic, residual):
    """Tables of their own, some of which the bank does not have."""
    generator = torch.Generator().manual_seed(buffer.seed)
    tables = torch.rand(rows, 1 << bits, generator=generator).add(0.01).cumsum(1)
    bank = torch.stack([tables, torch.nn.functional.pad(1 / tables.diff(dim=1), (0, 1))], dim=2)
    row = torch.randint(-1, rows + 1, (len(buffer.keys),), generator=generator)
    how = {"keys": buffer.keys if stochastic else None, "counters": buffer.counters}
    where, made = (buffer.starts, bank, row, buffer.ranges(0)), []
    for module in (reference, backend):
        codes = torch.full((kernels.packed_bytes(buffer.starts, 0, bits),), 0xAA, dtype=torch.uint8)
        lost, added = torch.full_like(buffer.x, 7.0) if residual else None, torch.full_like(buffer.x, 0.5)
        module.quantize_bank(buffer.x, *where, **how, out=codes, lost=lost)
        module.dequantize_bank_add(codes, *where, 0.3, out=added)
        made.append((codes, lost, added))
    assert torch.equal(made[0][0], made[1][0]) and same_bits(made[0][2], made[1][2])
    assert not residual or same_bits(made[0][1], made[1][1])


@given(buffers(), BLOCKS, st.integers(1, 8), st.booleans(), st.integers(0, 4), st.booleans())
def test_sums_of_payloads(backend, buffer, block, bits, even, count, gathered):
    """Out of one buffer, as they are gathered, or out of several."""
    levels = bits if even else Levels(tnq_levels(bits))
    size, numel = kernels.packed_bytes(buffer.starts, block, bits), buffer.count(block)
    data = torch.randint(0, 256, (5 * (size + 4),), dtype=torch.uint8, generator=torch.Generator().manual_seed(bits))
    codes = [data[n * (size + 4) : n * (size + 4) + size] for n in range(count)]
    scales = torch.rand(5 * numel) * 3
    ranges = [scales[n * numel : (n + 1) * numel] for n in range(count)]
    if not gathered:
        codes, ranges = [each.clone() for each in codes], [each.clone() for each in ranges]
    made = [torch.full_like(buffer.x, 7.0) for _ in range(2)]
    for module, out in zip((reference, backend), made, strict=True):
        if count:
            call = getattr(module, f"dequantize_{'uniform' if even else 'levels'}_sum")
            call(codes, buffer.starts, block, levels, ranges, 0.3, out=out)
    assert same_bits(*made)


@given(st.integers(0, 3000), st.integers(1, 32), st.integers(0, 2**31), st.integers(0, 3))
def test_integers(backend, numel, width, seed, offset):
    generator, limit = torch.Generator().manual_seed(seed), 1 << (width - 1)
    dtype = next(d for d in (torch.int8, torch.int16, torch.int32) if width <= 8 * d.itemsize)
    values = torch.randint(-limit, limit, (numel + offset,), generator=generator).to(dtype)[offset:]
    start = torch.randint(torch.iinfo(dtype).min, torch.iinfo(dtype).max, (numel,), generator=generator).to(dtype)
    made = []
    for module in (reference, backend):
        data = torch.full((kernels.packed_int_bytes(numel, width) + offset,), 0xAA, dtype=torch.uint8)[offset:]
        module.pack_ints(values, width, data)
        sums, clipped = start.clone(), start.clone()
        module.add_packed(data, width, sums)
        if width > 1:
            module.add_packed_saturating(data, width, clipped)
        made.append((data, sums, clipped))
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))


@given(buffers(), FLOATS, FLOATS, st.sampled_from([1.0, 1 / 3, -2.0, 1e-30, 0.0]))
def test_casts(backend, buffer, source, target, weight):
    made = []
    for module in (reference, backend):
        x, out, total = buffer.x.to(source), torch.zeros_like(buffer.x, dtype=target), buffer.like().to(target)
        module.scale_cast(x, weight, out)
        module.cast_add(x, weight, total)
        said, lost = torch.zeros_like(out), torch.zeros_like(x)
        module.scale_cast(x, weight, said, lost=lost, back=3.0)
        made.append((out, total, said, lost))
    assert all(same_bits(a, b) for a, b in zip(*made, strict=True))


@given(buffers(), HALVES, st.sampled_from([1.0, 1 / 3]))
def test_casts_in_place(backend, buffer, dtype, weight):
    made = []
    for module in (reference, backend):
        x = buffer.x.clone()
        halves = module.narrow(x, weight, dtype)
        narrow = halves.clone()
        module.widen(halves, x)
        made.append((narrow, x))
    assert all(same_bits(a, b) for a, b in zip(*made, strict=True))


def test_every_half(backend):
    """All 65,536 of each kind, and the floats in the middle between two: rounding to even, overflow, denormals."""
    for dtype in (torch.float16, torch.bfloat16):
        halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
        total, expected = torch.full((65_536,), 0.25), torch.full((65_536,), 0.25)
        backend.cast_add(halves, 0.3, total)
        reference.cast_add(halves, 0.3, expected)
        assert same_bits(total, expected)
        middle = (halves.double() + halves.roll(-1).double()).div(2).float()
        found = torch.zeros(65_536, dtype=dtype)
        backend.scale_cast(middle, 1.0, found)
        assert same_bits(found, middle.to(dtype))


@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 2**32 - 2000))
def test_draws(backend, key, first):
    counters = first + torch.arange(1500)
    expected = reference.random_u32(key, counters)
    assert torch.equal(backend.random_u32(key, counters), expected)
    assert torch.equal(backend.random_u32(torch.full((1500,), key), counters), expected)


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.integers(0, 2500)), max_size=4), st.integers(0, 2**31))
def test_places(backend, sizes, seed):
    """Of stretches that are empty, or as long as int32 can say; none of some."""
    lengths = [length // max(1, len(sizes)) for length, _ in sizes]
    few = torch.tensor([0, *(min(count, length) for length, (_, count) in zip(lengths, sizes, strict=True))]).cumsum(0)
    starts = torch.tensor([0, *lengths]).cumsum(0)
    keys = torch.randint(-(2**63), 2**63 - 1, (len(sizes),), generator=torch.Generator().manual_seed(seed))
    found, expected = (torch.full((int(few[-1]),), -7, dtype=torch.int32) for _ in range(2))
    backend.draw_places(starts, few, keys, found)
    reference.draw_places(starts, few, keys, expected)
    assert torch.equal(found, expected)
