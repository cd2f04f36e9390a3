"""The generator: even, without memory, and different under every key.

Keys are fixed: what passes once passes always. Each check rejects a perfect generator with probability below 1e-5
per key.
"""

import math

import pytest
import torch

from thinwire.core.randomness import key, mix
from thinwire.kernels import draw_places, random_u32, reference
from thinwire.kernels.backends.reference.draws import random_unit

N = 1 << 17
KEYS = [key(seed, step, name, worker) for seed in (0, 1) for step in (0, 1) for name in "ab" for worker in (0, 1)]
# Their halves as they are would make poor walks: small, sparse, regular, or near a simple fraction of 2^32.
REGULAR_KEYS = [0, 1, 2**63, 2**64 - 1, 0x0001000100010001, 0xFFFF0000FFFF0000, 0x5555555500000000, 0x80000001 << 32]
KEYS += REGULAR_KEYS


@pytest.mark.parametrize("density", [1, 3, 40, 100])
def test_places_equal_their_reference(backend, density):
    """Stretches of any length, also empty ones; from one place in each to all of them."""
    lengths = torch.tensor([100, 0, 1, 4097, 33])
    starts, few = (torch.cat([torch.zeros(1, dtype=torch.int64), each.cumsum(0)]) for each in (
        lengths, torch.minimum(lengths, (lengths * density / 100).ceil().long()),
    ))  # fmt: skip
    keys = torch.tensor([key(1, 2, name, 0) - (1 << 63) for name in "abcde"])
    expected, found = (torch.full((int(few[-1]),), -1, dtype=torch.int32) for _ in range(2))
    reference.draw_places(starts, few, keys, expected)
    backend.draw_places(starts, few, keys, found)
    assert torch.equal(found, expected) and len(set(found.tolist())) == len(found)


def test_no_more_places_are_drawn_than_there_are():
    starts, few = torch.tensor([0, 3, 10]), torch.tensor([0, 4, 5])
    with pytest.raises(ValueError, match=r"the number of places in a stretch must be an integer in 0..3, got 4"):
        draw_places(starts, few, torch.tensor([1, 2]), torch.zeros(5, dtype=torch.int32))


def draws(number: int, first: int = 0) -> torch.Tensor:
    return random_unit(number, torch.arange(first, first + N)).double()


@pytest.mark.parametrize("number", KEYS)
def test_even(number):
    counts = torch.bincount((draws(number) * 256).long(), minlength=256).double()
    chi_square = float(((counts - N / 256) ** 2 / (N / 256)).sum())
    assert abs(chi_square - 255) < 5 * math.sqrt(2 * 255)


@pytest.mark.parametrize("number", KEYS)
def test_every_bit_is_fair(number):
    words = random_u32(number, torch.arange(N))
    ones = torch.stack([(words >> bit) & 1 for bit in range(32)]).double().mean(1)
    assert float((ones - 0.5).abs().max()) < 5.5 * 0.5 / math.sqrt(N)


@pytest.mark.parametrize("number", KEYS)
@pytest.mark.parametrize("lag", [1, 2, 8, 1024])
def test_neighbours_are_not_correlated(number, lag):
    x = draws(number) - 0.5
    assert abs(float((x[:-lag] * x[lag:]).mean())) * 12 < 5 / math.sqrt(N - lag)


def test_keys_are_not_correlated():
    all_draws = torch.stack([draws(number) - 0.5 for number in KEYS])
    correlation = 12 * (all_draws @ all_draws.T) / N - torch.eye(len(KEYS))
    off_diagonal = correlation - torch.diag(torch.diagonal(correlation))
    assert float(off_diagonal.abs().max()) < 5.5 / math.sqrt(N)


def test_a_thousand_keys_behave():
    """Mean, and correlation with the next draw, of 2^13 draws under each key: 6 standard errors, 2,000 checks."""
    count, draws_each = 1000, 1 << 13
    keys = torch.tensor([key(7, step, "many") - 2**63 for step in range(count)])
    x = random_unit(keys[:, None], torch.arange(draws_each)[None, :]).double() - 0.5
    assert float(x.mean(1).abs().max()) < 6 * math.sqrt(1 / 12 / draws_each)
    assert float((x[:, 1:] * x[:, :-1]).mean(1).abs().max()) * 12 < 6 / math.sqrt(draws_each - 1)


def test_keys_and_counters_may_be_arrays():
    counter = torch.tensor([0, 5, 2**32 - 1])
    expected = [int(random_u32(number, counter[i : i + 1])) for i, number in enumerate(KEYS[:3])]
    signed = torch.tensor([number - (1 << 64 if number >> 63 else 0) for number in KEYS[:3]])
    assert random_u32(signed, counter).tolist() == expected


def test_a_key_is_scrambled_by_splitmix64():
    """Against the same round in plain integers: key's halves, and from them the first word of the walk."""
    for number in KEYS:
        scrambled = mix(number)
        step, low = scrambled >> 32 | 1, scrambled & 0xFFFFFFFF
        for counter in (0, 1, 12345):
            x = (counter * step + low) % 2**32
            x = (x ^ x >> 16) * 0x21F0AAAD % 2**32
            x = (x ^ x >> 15) * 0x735A2D97 % 2**32
            assert int(random_u32(number, torch.tensor(counter))) == x ^ x >> 15


@pytest.mark.parametrize("key, counter", [(1, torch.arange(3.0)), (torch.ones(1), torch.arange(3))])
def test_other_numbers_are_refused(key, counter):
    with pytest.raises(ValueError, match=r"has dtype torch.float32, accepted: torch.int64"):
        random_u32(key, counter)
