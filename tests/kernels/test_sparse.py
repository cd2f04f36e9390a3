"""Selecting and moving entries: every backend equals the reference, on any data and number of threads."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinwire import kernels
from thinwire.kernels import native, reference

ON_BACKENDS = [HealthCheck.function_scoped_fixture]
SPECIAL = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan, 1e-45, -1e-45, 1e-39, 3.4e38])


def draw_values(kind: str, n: int, generator: torch.Generator) -> torch.Tensor:
    normal = torch.randn(n, generator=generator)
    if kind == "heavy":
        return normal / torch.randn(n, generator=generator)
    if kind == "few":
        return torch.randint(-2, 3, (n,), generator=generator).float()
    if kind == "mostly zero":
        return normal * (torch.rand(n, generator=generator) < 0.02)
    if kind == "equal":
        return torch.full((n,), -3.5)
    if kind == "denormal":
        return normal * 1e-41
    if kind == "sorted":
        return normal.sort().values
    if kind == "special":
        return SPECIAL[torch.randint(len(SPECIAL), (n,), generator=generator)]
    if kind == "poisoned":
        return torch.where(torch.rand(n, generator=generator) < 0.001, math.nan, normal)
    assert kind == "normal"
    return normal


KINDS = ["normal", "heavy", "few", "mostly zero", "equal", "denormal", "sorted", "special", "poisoned"]


@st.composite
def selections(draw):
    """(x, k, weight): views at any alignment, short enough for plain passes or long enough to be sampled."""
    n = draw(st.one_of(st.integers(0, 200), st.integers(0, 9000), st.integers(8192, 30000)))
    k = draw(st.one_of(st.integers(0, n), st.integers(0, n // 8)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    offset = draw(st.integers(0, 9))
    x = draw_values(draw(st.sampled_from(KINDS)), n + offset, generator)[offset:]
    weight = draw(st.sampled_from([None, "uniform", "few"]))
    if weight is not None:
        weight = torch.rand(n, generator=generator) if weight == "uniform" else (torch.arange(n) % 3).float()
    return x, k, weight


@settings(max_examples=100, deadline=None, suppress_health_check=ON_BACKENDS)
@given(selections())
def test_top_k_equals_its_reference(backend, case):
    assert torch.equal(backend.top_k(*case), reference.top_k(*case))


@pytest.mark.full
@settings(max_examples=5000, deadline=None)
@given(selections())
def test_top_k_equals_its_reference_at_length(case):
    assert torch.equal(native.top_k(*case), reference.top_k(*case))


@pytest.mark.parametrize("kind", KINDS)
def test_top_k_on_every_thread_count(backend, threads, kind):
    x = draw_values(kind, 210_001, torch.Generator().manual_seed(1))
    for k in (21, 2100, 90_000):
        expected = reference.top_k(x, k)
        for count in (1, 2, 3, 8):
            threads(count)
            assert torch.equal(backend.top_k(x, k), expected), (k, count)


@settings(max_examples=60, deadline=None, suppress_health_check=ON_BACKENDS)
@given(selections(), st.sampled_from(KINDS), st.booleans())
def test_top_k_adds_what_is_owed(backend, case, kind, in_place):
    x, k, weight = case
    owed = draw_values(kind, len(x), torch.Generator().manual_seed(k))
    sums = x + owed
    total = x if in_place else torch.full((len(x) + 1,), 7.0)[1:]
    expected = reference.top_k(sums, k, weight)
    assert torch.equal(backend.top_k(x, k, weight, owed=owed, total=total), expected)
    assert torch.equal(total.view(torch.int32)[~sums.isnan()], sums.view(torch.int32)[~sums.isnan()])
    assert torch.equal(total.isnan(), sums.isnan())


@pytest.mark.parametrize("offset", [0, 3])
@pytest.mark.parametrize("count", [1, 3])
def test_top_k_adds_what_is_owed_to_long_buffers(backend, threads, count, offset):
    """Long enough for a sum that goes past the caches, from any alignment on, and for several threads."""
    threads(count)
    n = 300_001
    x, owed, memory = torch.randn(n), torch.randn(n), torch.full((n + 20,), 7.0)
    total = memory[offset : offset + n]
    for k in (1, 3000, 200_000):
        assert torch.equal(backend.top_k(x, k, owed=owed, total=total.fill_(0)), reference.top_k(x + owed, k))
        assert torch.equal(total, x + owed)
    assert (memory[:offset] == 7).all() and (memory[offset + n :] == 7).all()


@pytest.mark.parametrize("seen, unseen", [(100.0, 1.0), (1.0, 100.0)])
def test_top_k_survives_a_misleading_sample(backend, seen, unseen):
    # The kernel looks at one entry in each of n / 16 strata of 16, at a hashed place; here those entries lie.
    n, strata = 16 * 4096, 4096
    stratum = torch.arange(strata)
    looked_at = stratum * 16 + ((stratum * 2654435761 & 0xFFFFFFFF) * 16 >> 32)
    x = torch.rand(n) + unseen
    x[looked_at] = torch.rand(strata) + seen
    for k in (10, 600, 5000, 8000):
        assert torch.equal(backend.top_k(x, k), reference.top_k(x, k))


def test_top_k_takes_nan_first_and_the_lowest_index_among_equals(backend):
    x = torch.tensor([1.0, -math.inf, math.nan, 2.0, -2.0, -math.nan, math.inf])
    order = [2, 5, 1, 6, 3, 4, 0]  # NaN, NaN, Inf, Inf, 2, 2, 1
    for k in range(len(x) + 1):
        assert backend.top_k(x, k).tolist() == sorted(order[:k])
    weight = torch.tensor([1.0, 0.0, 1.0, 1.0, 1.5, 1.0, 1.0])  # 0 * Inf is NaN: it still travels
    assert backend.top_k(x, 3, weight).tolist() == [1, 2, 5]
    assert backend.top_k(x, 5, weight).tolist() == [1, 2, 4, 5, 6]


def test_top_k_serves_other_dtypes_and_kept_memory():
    x = torch.randn(1000, dtype=torch.float64)
    kept = torch.empty(10, dtype=torch.int32)
    assert kernels.top_k(x, 10, out=kept) is kept
    assert set(kept.tolist()) == set(x.abs().topk(10).indices.tolist())


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"x": torch.ones(4), "k": 5}, "k must be an integer in 0..4, got 5"),
        ({"x": torch.ones(4), "k": -1}, "k must be an integer in 0..4, got -1"),
        ({"x": torch.ones(8)[::2], "k": 1}, "contiguous"),
        ({"x": torch.ones(4, dtype=torch.int32), "k": 1}, "dtype torch.int32"),
        ({"x": torch.ones(4), "k": 1, "weight": torch.ones(3)}, "weight has 3 elements, expected 4"),
        ({"x": torch.ones(4), "k": 1, "weight": torch.ones(4).double()}, "weight has dtype torch.float64"),
        ({"x": torch.ones(4), "k": 1, "out": torch.ones(2, dtype=torch.int32)}, "out has 2 elements"),
        ({"x": torch.ones(4), "k": 1, "out": torch.empty(1, dtype=torch.int64)}, "out has dtype torch.int64"),
        ({"x": torch.ones(4), "k": 1, "owed": torch.ones(4)}, "owed needs total="),
        ({"x": torch.ones(4), "k": 1, "owed": torch.ones(3), "total": torch.ones(4)}, "owed has 3 elements"),
        ({"x": torch.ones(4), "k": 1, "owed": torch.ones(4), "total": torch.ones(5)}, "total has 5 elements"),
        ({"x": torch.empty(4, device="meta"), "k": 1, "out": torch.ones(1, dtype=torch.int32)}, "on cpu"),
    ],
)
def test_top_k_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        kernels.top_k(**arguments)


def test_top_k_refuses_what_int32_cannot_index():
    with pytest.raises(ValueError, match=r"the length of x must be an integer in 0..2147483647"):
        kernels.top_k(torch.empty(2**31, dtype=torch.float32, device="meta"), 1)


@st.composite
def moves(draw):
    """(x, indices, chunk, values, weight): indices ascend, or come in any order and repeat."""
    n = draw(st.integers(1, 2000))
    chunk = draw(st.sampled_from([1, 1, 2, 7, 64, 128, 3000]))
    chunks = -(-n // chunk)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    if draw(st.booleans()):
        indices = torch.randperm(chunks, generator=generator)[: draw(st.integers(0, chunks))].sort().values.int()
    else:
        indices = torch.randint(chunks, (draw(st.integers(0, 300)),), generator=generator).int()
    x = draw_values(draw(st.sampled_from(["normal", "denormal", "special"])), n + 1, generator)[1:]
    values = draw_values(draw(st.sampled_from(["normal", "special"])), indices.numel() * chunk, generator)
    return x, indices, chunk, values, draw(st.sampled_from([1.0, 0.125, 1 / 3, -7.3]))


def same(a, b):
    return torch.equal(a.nan_to_num(123.0), b.nan_to_num(123.0)) and torch.equal(a.isnan(), b.isnan())


@settings(max_examples=100, deadline=None, suppress_health_check=ON_BACKENDS)
@given(moves())
def test_moves_equal_their_references(backend, case):
    x, indices, chunk, values, weight = case
    expected = reference.gather(x, indices, chunk=chunk)
    assert same(backend.gather(x, indices, chunk=chunk), expected)

    left, taken = x.clone(), x.clone()
    assert same(reference.take_(left, indices, chunk=chunk), expected)
    assert same(backend.take_(taken, indices, chunk=chunk), expected)
    assert same(taken, left)

    distinct = indices.unique()
    parts = values[: distinct.numel() * chunk]
    reference.put_(left, distinct, parts, chunk=chunk)
    backend.put_(taken, distinct, parts, chunk=chunk)
    assert same(taken, left)

    summed, out = x.clone(), x.clone()
    reference.scatter_add(values, indices, weight, summed, chunk=chunk)
    backend.scatter_add(values, indices, weight, out, chunk=chunk)
    assert same(out, summed)


def test_moves_do_not_depend_on_threads(backend, threads):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300_000, generator=generator)
    for indices in (backend.top_k(x, 60_000), torch.randint(300_000, (60_000,), generator=generator).int()):
        results = []
        for count in (1, 4):
            threads(count)
            out = x.clone()
            values = backend.take_(out, indices)
            backend.scatter_add(values, indices, 0.3, out)
            results.append(torch.cat([values, backend.gather(x, indices), out]))
        assert torch.equal(*results)


@pytest.mark.parametrize("bad", [-1, 10, 2**31 - 1, -(2**31)])
def test_a_bad_index_raises_before_anything_is_written(backend, bad):
    x = torch.ones(100)
    for indices in (torch.tensor([0, 3, bad]), torch.tensor([bad, 0, 3])):
        indices = indices.to(torch.int32)
        out = torch.full((30,), 7.0)
        for move in (backend.gather, backend.take_):
            with pytest.raises(ValueError, match=r"indices must be in 0\.\.9, got"):
                move(x, indices, chunk=10, out=out)
        with pytest.raises(ValueError, match=r"indices must be in 0\.\.9, got"):
            backend.scatter_add(out, indices, 1.0, x, chunk=10)
        with pytest.raises(ValueError, match=r"indices must be in 0\.\.9, got"):
            backend.put_(x, indices, out, chunk=10)
        assert bool((x == 1).all()) and bool((out == 7).all())


def test_moves_refuse_what_does_not_fit():
    x, indices = torch.ones(100), torch.tensor([1, 2], dtype=torch.int32)
    with pytest.raises(ValueError, match=r"indices has dtype torch.int64"):
        kernels.gather(x, indices.long())
    with pytest.raises(ValueError, match="out has 2 elements, expected 20"):
        kernels.gather(x, indices, chunk=10, out=torch.empty(2))
    with pytest.raises(ValueError, match="values has 3 elements, expected 2"):
        kernels.scatter_add(torch.ones(3), indices, 1.0, x)
    with pytest.raises(ValueError, match=r"chunk must be an integer in 1..2147483647, got 0"):
        kernels.take_(x, indices, chunk=0)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.gather(x[::2], indices)


def test_an_empty_buffer_has_no_entries(backend):
    none = torch.empty(0, dtype=torch.int32)
    assert backend.top_k(torch.empty(0), 0).numel() == 0
    assert backend.gather(torch.empty(0), none).numel() == 0
    with pytest.raises(ValueError, match="indices must be in"):
        backend.gather(torch.empty(0), torch.zeros(1, dtype=torch.int32))
