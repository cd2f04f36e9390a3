"""The rotation: every backend equals the reference to the bit, is orthonormal, and goes back."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinwire import kernels
from thinwire.kernels import reference


def whole(x: torch.Tensor) -> torch.Tensor:
    return torch.tensor([0, x.numel()])


def rotated(backend, x, block, *, starts=None, keys=None, counters=None, inverse=False):
    starts = whole(x) if starts is None else starts
    keys = torch.arange(1, len(starts)) * 0x1234_5678_9ABC_DEF1 if keys is None else keys
    counters = torch.zeros(len(starts) - 1, dtype=torch.int64) if counters is None else counters
    out = x.clone()
    backend.hadamard_(out, starts, block, keys=keys, counters=counters, inverse=inverse)
    return out


@st.composite
def rotations(draw):
    """x at any alignment, cut into stretches, with all that `hadamard_` asks for."""
    n = draw(st.one_of(st.integers(0, 100), st.integers(0, 20_000)))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    x = torch.randn(n + 1, generator=generator)[1:]
    kind = draw(st.sampled_from(["normal", "denormal", "special", "zero"]))
    if kind == "denormal":
        x = x * 1e-40
    elif kind == "zero":
        x = x * 0
    elif kind == "special" and n:
        x = x.clone()
        places = torch.randint(n, (3,), generator=generator)
        x[places] = torch.tensor([math.inf, -math.inf, math.nan])
    cuts = sorted(draw(st.lists(st.integers(0, n), max_size=3)))
    starts = torch.tensor([0, *cuts, n])
    keys = torch.randint(-(2**63), 2**63 - 1, (len(starts) - 1,), generator=generator)
    counters = torch.tensor([draw(st.sampled_from([0, 1, 31, 32, 1024, 2**31 + 5])) for _ in keys])
    block = 2 ** draw(st.integers(0, 15))
    return x, block, {"starts": starts, "keys": keys, "counters": counters, "inverse": draw(st.booleans())}


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Equal to the bit, signs of zeros too; all NaN are one."""
    a, b = (
        a.nan_to_num(nan=1.5, posinf=math.inf, neginf=-math.inf),
        b.nan_to_num(nan=1.5, posinf=math.inf, neginf=-math.inf),
    )
    return torch.equal(a.view(torch.int32), b.view(torch.int32))


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rotations())
def test_equals_its_reference_to_the_bit(backend, case):
    x, block, given = case
    assert same_bits(rotated(backend, x, block, **given), rotated(reference, x, block, **given))


@pytest.mark.parametrize("block", [1024, 2**14, 2**20])
def test_every_thread_count_gives_the_same_bits(backend, threads, block):
    x = torch.randn(150_001, generator=torch.Generator().manual_seed(0))
    expected = rotated(reference, x, block)
    for count in (1, 2, 5):
        threads(count)
        assert torch.equal(rotated(backend, x, block), expected), count


@pytest.mark.parametrize("n", [1, 2, 3, 1023, 1024, 1025, 5000, 100_003])
@pytest.mark.parametrize("block", [64, 1024, 2**17])
def test_going_back_restores_and_lengths_are_kept(backend, n, block):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n))
    y = rotated(backend, x, block)
    assert y.double().norm().item() == pytest.approx(x.double().norm().item(), rel=1e-6)
    # 2 log2(block) roundings, each by at most half an ulp of a value of a few units.
    assert torch.allclose(rotated(backend, y, block, inverse=True), x, rtol=0, atol=2e-6)


def test_it_is_the_hadamard_matrix_with_signs(backend):
    size = 8
    matrix = torch.tensor([[(-1.0) ** bin(i & j).count("1") for j in range(size)] for i in range(size)]) / size**0.5
    columns = torch.stack([rotated(backend, row, size) for row in torch.eye(size)], dim=1)
    signs = columns[0].sign()
    assert set(signs.tolist()) == {1.0, -1.0}
    assert torch.allclose(columns, matrix * signs)


def test_the_tail_is_cut_into_smaller_powers_of_two(backend):
    x = torch.randn(16 + 8 + 2 + 1, generator=torch.Generator().manual_seed(3))
    for place, (begin, end) in {3: (0, 16), 16: (16, 24), 25: (24, 26), 26: (26, 27)}.items():
        changed = x.clone()
        changed[place] += 1.0
        touched = (rotated(backend, changed, 16) != rotated(backend, x, 16)).nonzero().squeeze(1)
        assert touched.tolist() == list(range(begin, end))


def test_signs_depend_on_key_and_counter_alone(backend):
    x = torch.randn(2048, generator=torch.Generator().manual_seed(0))
    key = torch.tensor([42])
    both = rotated(backend, x, 1024, keys=key)
    second = rotated(backend, x[1024:], 1024, keys=key, counters=torch.tensor([1024]))
    assert torch.equal(both[1024:], second)
    assert not torch.equal(rotated(backend, x, 1024, keys=torch.tensor([43])), both)
    minus = (rotated(backend, torch.ones(2**16), 1, keys=key) < 0).double().mean().item()
    assert minus == pytest.approx(0.5, abs=5 * 0.5 / 2**8)  # 5 sigma: fails for one key in 1.7 million


def test_it_flattens_a_spike(backend):
    x = torch.zeros(4096)
    x[77] = 64.0
    assert torch.equal(rotated(backend, x, 4096).abs(), torch.ones(4096))


def test_float64_runs_on_the_reference():
    x = torch.randn(3000, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    y = rotated(kernels, x, 1024)
    assert torch.allclose(y.float(), rotated(kernels, x.float(), 1024), atol=1e-5)
    assert torch.allclose(rotated(kernels, y, 1024, inverse=True), x, rtol=0, atol=1e-14)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"block": 1000}, "block must be a power of two, got 1000"),
        ({"block": 0}, "block must be an integer in 1..1073741824, got 0"),
        ({"x": torch.ones(128)[::2]}, "contiguous"),
        ({"x": torch.ones(64, dtype=torch.float16)}, "x has dtype torch.float16"),
        ({"starts": torch.tensor([0, 65])}, "starts must go from 0 to 64, got 0 to 65"),
        ({"starts": torch.tensor([1, 64])}, "starts must go from 0 to 64, got 1"),
        ({"starts": torch.tensor([0, 70, 64])}, "starts must not decrease, got 70 before 64"),
        ({"starts": torch.tensor([0, 64], dtype=torch.int32)}, "starts has dtype torch.int32"),
        ({"keys": torch.tensor([1.0])}, "keys has dtype torch.float32"),
        ({"counters": torch.tensor([1, 2])}, "counters has 2 elements, expected 1"),
        ({"counters": torch.tensor([-1])}, "counters must stay in 0"),
    ],
)
def test_refuses(change, message):
    arguments = {
        "x": torch.ones(64), "starts": torch.tensor([0, 64]), "block": 64, "keys": torch.tensor([1]),
        "counters": torch.tensor([0]),
    } | change  # fmt: skip
    x, starts, block = (arguments.pop(name) for name in ("x", "starts", "block"))
    with pytest.raises(ValueError, match=message):
        kernels.hadamard_(x, starts, block, **arguments)
