"""Casts equal PyTorch's to the bit, for every kind of float there is."""

import pytest
import torch
from blocks_data import buffers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinwire import kernels
from thinwire.kernels import check

EXAMPLES = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
HALVES = [torch.float16, torch.bfloat16]


def same(a, b):
    word = torch.int16 if a.element_size() == 2 else torch.int32
    return torch.equal(a.isnan(), b.isnan()) and torch.equal(a[~a.isnan()].view(word), b[~b.isnan()].view(word))


@EXAMPLES
@given(buffers(), st.sampled_from([1.0, 1 / 3, -2.0, 1e-30, 0.0]), st.sampled_from([*HALVES, torch.float32]))
def test_scale_cast_rounds_the_product(backend, buffer, weight, dtype):
    found = torch.zeros_like(buffer.x, dtype=dtype)
    backend.scale_cast(buffer.x, weight, found)
    assert same(found, (buffer.x * weight).to(dtype))


@EXAMPLES
@given(buffers(), st.sampled_from([1, 2, 3]), st.sampled_from([*HALVES, torch.float32]), st.booleans())
def test_scale_cast_says_what_is_lost(backend, buffer, workers, dtype, in_place):
    said = (buffer.x * (1.0 / workers)).to(dtype)
    expected = buffer.x - said.float() * workers
    found, lost = torch.zeros_like(buffer.x, dtype=dtype), buffer.x if in_place else torch.full_like(buffer.x, 7.0)
    backend.scale_cast(buffer.x, 1.0 / workers, found, lost=lost, back=workers)
    assert same(found, said) and same(lost, expected)


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize(("count", "size"), [(1, 9), (2, 1025), (5, 70_001)])
def test_sums_of_halves_are_rounded_once(backend, threads, dtype, count, size):
    threads(2)
    x = (torch.randn(count * size) * 100).to(dtype)
    x[3] = torch.inf
    total = torch.zeros(size)
    for part in x.view(count, -1):
        total += part.float()
    out = torch.zeros(size, dtype=dtype)
    backend.sum_halves(x, count, out)
    assert same(out, total.to(dtype))
    backend.sum_halves(x, count, x[:size])
    assert same(x[:size], out)


def test_sums_of_halves_refuse_parts_that_differ():
    with pytest.raises(ValueError, match="2 parts of 3 are 6 elements, got 7"):
        kernels.sum_halves(torch.zeros(7, dtype=torch.float16), 2, torch.zeros(3, dtype=torch.float16))


def test_what_is_lost_needs_x():
    x = torch.ones(4)
    with pytest.raises(ValueError, match="which out must not overwrite"):
        kernels.scale_cast(x, 0.5, x, lost=torch.ones(4))


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("dtype", HALVES)
def test_narrow_and_widen_keep_to_their_own_memory(backend, threads, dtype, count):
    """Sizes around the spans that are cast at a time; what lies before and after stays as it was."""
    threads(count)
    for size in (0, 1, 9, 4095, 4096, 4097, 8191, 8193, 65_535, 300_007, 4_500_001):
        memory = torch.randn(size + 20)
        x, before = memory[7 : 7 + size], memory.clone()
        halves = backend.narrow(x, 1 / 3, dtype)
        expected = (before[7 : 7 + size] * (1 / 3)).to(dtype)
        assert halves.data_ptr() == x.data_ptr() and same(halves, expected)
        backend.widen(halves, x)
        assert same(x, expected.float())
        assert torch.equal(memory[:7], before[:7]) and torch.equal(memory[7 + size :], before[7 + size :])


@EXAMPLES
@given(buffers(), st.sampled_from([1.0, 1 / 3, 1e-30]), st.sampled_from(HALVES))
def test_narrow_and_widen_round_the_product(backend, buffer, weight, dtype):
    x, expected = buffer.x.clone(), (buffer.x * weight).to(dtype)
    halves = backend.narrow(x, weight, dtype)
    assert same(halves, expected)
    backend.widen(halves, x)
    assert same(x, expected.float())


@pytest.mark.parametrize("dtype", HALVES)
def test_every_half_is_read_and_written(backend, dtype):
    """All 65,536 halves, and the floats around the middle between two: rounding to even, overflow, denormals."""
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    for weight in (1.0, 0.3):
        found = torch.full((65_536,), 0.25)
        backend.cast_add(halves, weight, found)
        assert same(found, halves.float() * weight + 0.25)
    exact = halves.float()
    memory = torch.zeros(65_536)
    memory.view(dtype)[:65_536] = halves
    backend.widen(memory.view(dtype)[:65_536], memory)
    assert same(memory, exact)
    step = torch.nextafter(exact, torch.tensor(torch.inf)) if dtype is torch.bfloat16 else exact
    middle = (exact.double() + torch.roll(exact, -1).double()).div(2).float()
    for values in (
        exact,
        step,
        middle,
        torch.nextafter(middle, torch.zeros(1)),
        torch.nextafter(middle, middle * 2),
    ):
        back = torch.zeros(65_536, dtype=dtype)
        backend.scale_cast(values, 1.0, back)
        assert same(back, values.to(dtype))


def test_other_dtypes_and_bad_arguments():
    x = torch.randn(10, dtype=torch.float64)
    out = torch.zeros(10, dtype=torch.float16)
    kernels.scale_cast(x, 2.0, out)
    assert torch.equal(out, (2 * x).half())
    for dtype in check.FLOATS:
        wide = x.clone()
        halves = kernels.narrow(wide, 1 / 3, dtype)
        assert torch.equal(halves, (x * (1 / 3)).to(dtype))
        kernels.widen(halves, wide)
        assert torch.equal(wide, (x * (1 / 3)).to(dtype).double())
    for bad in (
        torch.zeros(9),
        torch.zeros(20)[::2],
        torch.zeros(10, dtype=torch.int32),
        torch.zeros(10, device="meta"),
    ):
        with pytest.raises(ValueError):
            kernels.scale_cast(x, 1.0, bad)
        with pytest.raises(ValueError):
            kernels.cast_add(x, 1.0, bad)
    with pytest.raises(ValueError, match="at most 2 bytes"):
        kernels.narrow(out, 1.0, torch.float32)
    with pytest.raises(ValueError, match="a float"):
        kernels.narrow(x, 1.0, torch.int16)
    with pytest.raises(ValueError, match="in the front of out's memory"):
        kernels.widen(out, x)
