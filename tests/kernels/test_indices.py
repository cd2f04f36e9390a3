"""Compact indices: every backend equals the reference, sizes follow from (k, n), the decoder believes nothing."""

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinwire import kernels
from thinwire.kernels import native, reference

ON_BACKENDS = [HealthCheck.function_scoped_fixture]


@st.composite
def choices(draw, fewest=0, longest=5000):
    """(indices, n): k of n at any density, spread evenly, in a cluster, or at the ends."""
    n = draw(st.one_of(st.integers(1, 64), st.integers(1, longest), st.just(2**31 - 1)))
    k = draw(st.one_of(st.integers(fewest, min(n, 40)), st.integers(fewest, min(n, longest))))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**32)))
    where = draw(st.sampled_from(["anywhere", "front", "back", "cluster"]))
    if where == "front":
        return torch.arange(k).int(), n
    if where == "back":
        return torch.arange(n - k, n).int(), n
    span = min(n, 2 * k + 1) if where == "cluster" else n
    first = draw(st.integers(0, n - span))
    chosen = (
        torch.randint(span, (k,), generator=generator) if span > 10**6 else torch.randperm(span, generator=generator)
    )
    return (first + chosen[:k].unique()).int(), n


@settings(max_examples=200, deadline=None, suppress_health_check=ON_BACKENDS)
@given(choices())
def test_round_trip_and_equality_with_the_reference(backend, case):
    indices, n = case
    k = indices.numel()
    data = backend.encode_indices(indices, n)
    assert data.numel() == kernels.index_bytes(k, n)
    assert torch.equal(data, reference.encode_indices(indices, n))
    assert torch.equal(backend.decode_indices(data, k, n), indices)


def entropy(k: int, n: int) -> float:
    return (math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)) / math.log(2)


@pytest.mark.parametrize(
    "density, bits", [(0.0001, 15.23), (0.001, 11.96), (0.01, 8.55), (0.1, 5.13), (0.25, 3.51), (0.5, 2.01)]
)
def test_size_is_close_to_the_entropy(density, bits):
    n = 25_000_000
    k = int(n * density)
    size = 8 * kernels.index_bytes(k, n) / k
    assert entropy(k, n) / k < size + 1e-6 < min(bits, entropy(k, n) / k + 0.6)


def test_never_larger_than_a_bitmap_or_plain_indices():
    for n in (1, 7, 100, 1001, 10**6):
        for k in {0, 1, n // 100, n // 10, n // 6, n // 3, n // 2, n - 1, n}:
            if k <= n:
                assert kernels.index_bytes(k, n) <= min(-(-n // 8) + 1, 4 * k)
    assert kernels.index_bytes(0, 10**6) == 0


def mutated(data: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """The payload with a few bits flipped, bytes replaced or swapped, or all of it random."""

    def below(limit: int) -> int:
        return int(torch.randint(limit, (), generator=generator))

    data = data.clone()
    kind = below(8)
    if kind == 0:
        return torch.randint(256, data.shape, generator=generator, dtype=torch.uint8)
    for _ in range(1 + below(3)):
        a, b = below(len(data)), below(len(data))
        if kind < 4:
            data[a] ^= 1 << below(8)
        elif kind < 6:
            data[a], data[b] = int(data[b]), int(data[a])
        else:
            data[a] = (0, 255, below(256))[below(3)]
    return data


def attack(backend, indices: torch.Tensor, n: int, seed: int, times: int) -> None:
    k = indices.numel()
    data = backend.encode_indices(indices, n)
    generator = torch.Generator().manual_seed(seed)
    for number in range(times):
        damaged = mutated(data, generator)
        try:
            decoded = backend.decode_indices(damaged, k, n)
        except ValueError as error:
            with pytest.raises(ValueError, match=str(error)):
                reference.decode_indices(damaged, k, n)
            continue
        # Accepted: then these are the bytes that encode what was read, which is well formed.
        assert torch.equal(backend.encode_indices(decoded, n), damaged), number


@settings(max_examples=60, deadline=None, suppress_health_check=ON_BACKENDS)
@given(choices(fewest=1, longest=600), st.integers(0, 2**32))
def test_damaged_payloads_are_refused_or_read_as_what_they_say(backend, case, seed):
    attack(backend, *case, seed=seed, times=20)


@pytest.mark.full
@pytest.mark.timeout(900)
@settings(max_examples=2200, deadline=None)
@given(choices(fewest=1, longest=600), st.integers(0, 2**32))
def test_a_hundred_thousand_damaged_payloads(case, seed):
    attack(native, *case, seed=seed, times=50)


@pytest.mark.parametrize("k, n", [(1, 1), (3, 1000), (50, 100), (200, 300)])
def test_every_other_length_is_refused(k, n):
    data = kernels.encode_indices(torch.arange(n - k, n).int(), n)
    for other in (data[:-1], torch.cat([data, data[:1]]), data[:0]):
        with pytest.raises(ValueError, match=f"data has {other.numel()} elements, expected {data.numel()}"):
            kernels.decode_indices(other, k, n)


def test_every_single_bit_flip_is_noticed_or_read_as_another_choice(backend):
    indices, n = torch.tensor([0, 1, 5, 77, 300, 301, 999]).int(), 1000
    data = backend.encode_indices(indices, n)
    for bit in range(8 * data.numel()):
        damaged = data.clone()
        damaged[bit // 8] ^= 1 << (bit % 8)
        try:
            decoded = backend.decode_indices(damaged, len(indices), n)
        except ValueError:
            continue
        assert not torch.equal(decoded, indices)


@pytest.mark.parametrize("indices", [[3, 3], [4, 3], [-1, 3], [3, 10], [0, 5, 5, 9]])
def test_encoding_refuses_what_does_not_ascend_below_n(backend, indices):
    with pytest.raises(ValueError, match="indices must ascend, without repeats"):
        backend.encode_indices(torch.tensor(indices).int(), 10)


def test_bad_arguments():
    indices = torch.tensor([1, 2]).int()
    with pytest.raises(ValueError, match=r"k must be an integer in 0..1, got 2"):
        kernels.encode_indices(indices, 1)
    with pytest.raises(ValueError, match=r"n must be an integer in 0..2147483647"):
        kernels.index_bytes(1, 2**31)
    with pytest.raises(ValueError, match=r"indices has dtype torch.int64"):
        kernels.encode_indices(indices.long(), 10)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.encode_indices(torch.arange(8).int()[::2], 10)
    with pytest.raises(ValueError, match="out has 9 elements"):
        kernels.encode_indices(indices, 10, out=torch.empty(9, dtype=torch.uint8))
    with pytest.raises(ValueError, match=r"data has dtype torch.int32"):
        kernels.decode_indices(indices, 2, 10)
