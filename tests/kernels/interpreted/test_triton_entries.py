"""Rotations, selections, moves, indices and products in Triton, interpreted: to the bit what the references make."""

import math

import pytest
import torch
from buffers_data import buffers, every_length, same_bits, several_lengths
from hypothesis import given
from hypothesis import strategies as st

from thinwire import kernels
from thinwire.core import theory
from thinwire.kernels import Levels, reference

ROTATED = st.sampled_from([64, 128, 1024, 4096])
SPECIAL = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 1e-45, -1e-45, 1e-39, 3.4e38])


@given(buffers(longest=9000), st.integers(0, 15), st.booleans())
def test_rotations(backend, buffer, log, inverse):
    made = [buffer.x.clone() for _ in range(2)]
    for module, x in zip((reference, backend), made, strict=True):
        how = {"keys": buffer.keys, "counters": buffer.counters, "inverse": inverse}
        module.hadamard_(x, buffer.starts, 1 << log, **how)
    assert same_bits(*made)


@pytest.mark.parametrize(("block", "inverse"), [(8192, False), (1 << 30, True)])
def test_blocks_longer_than_a_tile(backend, block, inverse):
    """Passes over memory: lengths just above powers of two, so that blocks halve at the end."""
    starts = torch.tensor([0, 9001, 9001, 9001 + 8193])
    x = torch.randn(int(starts[-1]), generator=torch.Generator().manual_seed(0))
    how = {"keys": torch.tensor([3, 4, -5]), "counters": torch.tensor([0, 7, 31]), "inverse": inverse}
    made = [x.clone() for _ in range(2)]
    for module, each in zip((reference, backend), made, strict=True):
        module.hadamard_(each, starts, block, **how)
    assert same_bits(*made)


@given(buffers(gaps=True, longest=5000), ROTATED, st.sampled_from([torch.int8, torch.int32]), st.booleans())
def test_rotated_rounding_and_sums(backend, buffer, block, dtype, residual):
    check_rounding(backend, buffer, block, dtype, residual)


def test_every_length_rotated(backend):
    check_rounding(backend, every_length(), 4096, torch.int16, True)
    check_estimates(backend, every_length(), 4096, 3, True, True)


@pytest.mark.parametrize("block", [8192, 1 << 30])
def test_rotated_blocks_longer_than_a_tile(backend, block):
    """Several groups of them, with shorter ones between: whole, padded, of one entry more than a tile; gaps stay."""
    check_rounding(backend, several_lengths(), block, torch.int16, True)
    check_estimates(backend, several_lengths(), block, 3, block == 8192, True)


def test_what_is_lost_of_a_longer_block_may_be_written_over_it(backend):
    buffer, made = several_lengths(), []
    step = buffer.ranges(8192)
    for module in (reference, backend):
        x = buffer.x.clone()
        out = torch.zeros(kernels.padded_numel(buffer.starts, 8192), dtype=torch.int16)
        how = {"signs": buffer.keys, "counters": buffer.counters, "keys": buffer.keys, "out": out, "lost": x}
        module.rotate_round(x, buffer.starts, 8192, step, 0.5, -7, 8, **how)
        made.append((out, x))
    assert torch.equal(made[0][0], made[1][0]) and same_bits(made[0][1], made[1][1])


@given(buffers(gaps=True, longest=20_000), st.sampled_from([8192, 16_384, 1 << 20]), st.integers(1, 4), st.booleans())
def test_longer_blocks_of_any_values(backend, buffer, block, bits, flag):
    check_rounding(backend, buffer, block, torch.int8, flag)
    check_estimates(backend, buffer, block, bits, not flag, flag)


def check_rounding(backend, buffer, block, dtype, residual):
    x, starts, step = buffer.x, buffer.starts, buffer.ranges(block)
    made = []
    for module in (reference, backend):
        out = torch.zeros(kernels.padded_numel(starts, block), dtype=dtype)
        lost, mean = torch.full_like(x, 9.0) if residual else None, torch.full_like(x, 9.0)
        how = {"signs": buffer.keys, "counters": buffer.counters}
        module.rotate_round(x, starts, block, step, 0.5, -7, 8, **how, keys=buffer.keys + 1, out=out, lost=lost)
        module.unrotate_sum(out, starts, block, step, 0.5, **how, out=mean)
        made.append((out, lost, mean))
    assert torch.equal(made[0][0], made[1][0])
    assert not residual or same_bits(made[0][1], made[1][1])
    assert same_bits(made[0][2], made[1][2])  # and gaps are left alone


@given(buffers(gaps=True, longest=5000), ROTATED, st.integers(1, 4), st.booleans(), st.booleans())
def test_rotated_estimates(backend, buffer, block, bits, residual, gathered):
    check_estimates(backend, buffer, block, bits, residual, gathered)


def check_estimates(backend, buffer, block, bits, residual, gathered):
    x, starts, levels = buffer.x, buffer.starts, Levels.of(theory.gaussian_centroids(bits))
    size, count = kernels.padded_numel(starts, block) * bits // 8, buffer.count(block)
    made = []
    for module in (reference, backend):
        codes, scale = torch.zeros(2, size, dtype=torch.uint8), torch.zeros(2, count)
        lost, out = torch.full_like(x, 9.0) if residual else None, torch.full_like(x, 9.0)
        for number in range(2):
            how = {"signs": buffer.keys + number, "counters": buffer.counters}
            module.rotate_quantize(x, starts, block, levels, **how, scale=scale[number], out=codes[number], lost=lost)
        both = [list(each) if gathered else [row.clone() for row in each] for each in (codes, scale)]
        how = {"signs": [buffer.keys, buffer.keys + 1], "counters": buffer.counters, "out": out}
        module.unrotate_levels_sum(both[0], starts, block, levels, both[1], 0.3, **how)
        module.unrotate_levels_sum(both[0], starts, block, levels, both[1], 0.3, **how, add=True)
        made.append((codes, scale, lost, out))
    assert torch.equal(made[0][0], made[1][0])
    assert same_bits(made[0][1], made[1][1]) and same_bits(made[0][3], made[1][3])
    assert not residual or same_bits(made[0][2], made[1][2])


@st.composite
def values(draw, longest):
    """Floats with many equals, none, or of every special kind."""
    n, generator = draw(st.integers(1, longest)), torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    kind = draw(st.sampled_from(["normal", "few", "equal", "denormal", "special", "mostly zero"]))
    normal = torch.randn(n, generator=generator)
    made = {
        "normal": normal, "few": torch.randint(-2, 3, (n,), generator=generator).float(),
        "equal": torch.full((n,), -3.5), "denormal": normal * 1e-41,
        "special": SPECIAL[torch.randint(len(SPECIAL), (n,), generator=generator)],
        "mostly zero": normal * (torch.rand(n, generator=generator) < 0.02),
    }  # fmt: skip
    return made[kind]


@given(values(longest=40_000), st.data(), st.booleans())
def test_top_k(backend, x, data, weighted):
    k = data.draw(st.one_of(st.integers(0, x.numel()), st.integers(0, x.numel() // 50)))
    weight = torch.rand(x.numel(), generator=torch.Generator().manual_seed(k)) if weighted else None
    assert torch.equal(backend.top_k(x, k, weight), reference.top_k(x, k, weight))
    sums = [torch.zeros_like(x) for _ in range(2)]
    found = [
        module.top_k(x, k, weight, owed=x.flip(0), total=total)
        for module, total in zip((backend, reference), sums, strict=True)
    ]
    assert torch.equal(*found) and same_bits(*sums)


@given(values(longest=3000), st.sampled_from([1, 1, 2, 7, 64, 5000]), st.data(), st.booleans())
def test_moves(backend, x, chunk, data, ascending):
    chunks = -(-x.numel() // chunk)
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    k = data.draw(st.integers(0, min(chunks, 200)))
    if ascending:
        indices = torch.randperm(chunks, generator=generator)[:k].sort().values.int()
    else:
        indices = torch.randint(chunks, (min(k, 30),), generator=generator).int()
    news = torch.randn(indices.numel() * chunk, generator=generator)
    made = []
    for module in (reference, backend):
        left, summed = x.clone(), x.clone()
        taken = module.take_(left, indices, chunk=chunk)
        gathered = module.gather(x, indices, chunk=chunk)
        module.scatter_add(news, indices, 1 / 3, summed, chunk=chunk)
        put, distinct = x.clone(), indices.unique()
        module.put_(put, distinct, news[: distinct.numel() * chunk], chunk=chunk)
        made.append((taken, gathered, left, summed, put))
    assert all(same_bits(a, b) for a, b in zip(*made, strict=True))


def test_a_bad_index_touches_nothing_and_shows(backend):
    """Where the reference raises: nobody waits for a device."""
    for bad in (-1, 10, 2**31 - 1, -(2**31)):
        memory = torch.ones(120)
        x, indices = memory[10:110], torch.tensor([3, bad], dtype=torch.int32)
        assert backend.gather(x, indices, chunk=10).isnan().tolist() == [False] * 10 + [True] * 10
        backend.scatter_add(torch.ones(20), indices, 1.0, x, chunk=10)
        assert x[0].isnan() and torch.equal(x[30:40], torch.full((10,), 2.0))
        x[0] = 1.0
        backend.put_(x, indices, torch.full((20,), 5.0), chunk=10)
        assert x[0].isnan() and torch.equal(x[30:40], torch.full((10,), 5.0))
        x[0] = 1.0
        backend.take_(x, indices, chunk=10)
        assert x[0].isnan() and not x[30:40].any()
        x[0], x[30:40] = 1.0, 1.0
        assert bool((memory == 1).all())


@given(st.one_of(st.integers(1, 64), st.integers(1, 20_000), st.just(2**31 - 1)), st.data())
def test_indices(backend, n, data):
    k = data.draw(st.one_of(st.integers(0, min(n, 40)), st.integers(0, min(n, 2000))))
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 2**31)))
    chosen = torch.randint(n, (k,), generator=generator) if n > 10**6 else torch.randperm(n, generator=generator)[:k]
    indices = chosen.unique().int()
    encoded = backend.encode_indices(indices, n)
    assert torch.equal(encoded, reference.encode_indices(indices, n))
    assert torch.equal(backend.decode_indices(encoded, indices.numel(), n), indices)


@given(st.integers(1, 60), st.integers(60, 900), st.integers(0, 2**31))
def test_damaged_indices_are_all_minus_one_or_what_the_reference_reads(backend, k, n, seed):
    generator = torch.Generator().manual_seed(seed)
    data = reference.encode_indices(torch.randperm(n, generator=generator)[:k].sort().values.int(), n)
    for _ in range(3):
        at = int(torch.randint(len(data), (), generator=generator))
        data[at] ^= 1 << int(torch.randint(8, (), generator=generator))
        try:
            expected = reference.decode_indices(data, k, n)
        except ValueError:
            expected = torch.full((k,), -1, dtype=torch.int32)
        assert torch.equal(backend.decode_indices(data, k, n), expected)


@pytest.mark.parametrize(("rows", "cols", "rank"), [(1, 1, 1), (3, 5, 2), (17, 64, 4), (40, 47, 5), (10, 65, 16)])
def test_products(backend, rows, cols, rank):
    check_products(backend, rows, cols, rank)


@given(st.integers(1, 90), st.integers(1, 140), st.integers(1, 17))
def test_products_of_any_size(backend, rows, cols, rank):
    check_products(backend, rows, cols, rank)


def check_products(backend, rows, cols, rank):
    generator = torch.Generator().manual_seed(rows)
    matrix, p, q = (torch.randn(shape, generator=generator) for shape in ((rows, cols), (rank, rows), (rank, cols)))
    made = []
    for module in (reference, backend):
        left, right = torch.full((rank, rows), 9.0), torch.full((rank, cols), 9.0)
        module.times_rows(matrix, q, left)
        settled, total = torch.zeros_like(left), torch.zeros_like(matrix)
        module.times_rows(matrix, q, settled, owed=2 * matrix, total=total)
        module.times_columns(matrix, p, right)
        out, lost, own = torch.zeros(rows, cols), torch.zeros(rows, cols), matrix.clone()
        module.outer_product(p, q, out, matrix=matrix, lost=lost)
        module.outer_product(p, q, own)
        made.append((left, right, out, lost, own, settled, total))
    assert all(torch.equal(a, b) for a, b in zip(*made, strict=True))
