"""Statistics: within one unit in the last place of the reference; the same bits on any threads and instructions."""

import pytest
import torch
from blocks_data import buffers, same_bits
from hypothesis import HealthCheck, given, settings

from thinwire import kernels
from thinwire.kernels import native, reference

EXAMPLES = settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


def statistics(module, buffer, names=("absmean", "absmax", "square")):
    outs = {name: torch.full((buffer.blocks,), 7.0) for name in names}
    module.block_statistics(buffer.x, buffer.starts, buffer.block, **outs)
    return outs


def units_apart(a, b):
    """How many floats lie between; NaN and NaN are the same."""
    if not torch.equal(a.isnan(), b.isnan()):
        return torch.tensor(torch.inf)
    bits = [t.nan_to_num(0, torch.inf, -torch.inf).view(torch.int32).long() for t in (a, b)]
    return (bits[0] - bits[1]).abs().max() if len(a) else torch.tensor(0)


@EXAMPLES
@given(buffers())
def test_equal_reference(backend, buffer):
    found, expected = statistics(backend, buffer), statistics(reference, buffer)
    assert same_bits(found["absmax"], expected["absmax"])
    assert units_apart(found["absmean"], expected["absmean"]) <= 1
    assert units_apart(found["square"], expected["square"]) <= 1
    for names in (("absmean",), ("absmax",), ("square",), ("absmean", "absmax"), ("absmean", "square"), ()):
        some = statistics(backend, buffer, names)
        assert all(same_bits(some[name], found[name]) for name in names)
    assert backend.all_finite(buffer.x) == bool(buffer.x.isfinite().all())


@EXAMPLES
@given(buffers())
def test_what_is_owed_is_added_in_the_same_pass(backend, buffer):
    owed = torch.roll(buffer.x, 1)
    expected = buffer.x + owed
    square, alone, total = torch.zeros(buffer.blocks), torch.zeros(buffer.blocks), torch.full_like(buffer.x, 9.0)
    backend.block_statistics(expected, buffer.starts, buffer.block, square=alone)
    backend.block_statistics(buffer.x, buffer.starts, buffer.block, square=square, owed=owed, total=total)
    assert same_bits(total, expected) and same_bits(square, alone)
    backend.block_statistics(buffer.x, buffer.starts, buffer.block, square=square, owed=owed, total=buffer.x)
    assert same_bits(buffer.x, expected) and same_bits(square, alone)


@pytest.mark.parametrize("block", [0, 64, 1024, 65_536, 70_000])
def test_same_bits_on_any_threads_and_instructions(block, threads):
    x = torch.randn(400_001, generator=torch.Generator().manual_seed(0))
    starts = torch.tensor([0, 3, 3, 150_000, 400_001])
    module, outcomes = native.module(), []
    count = kernels.check.blocks(starts, block).count
    for instructions in module.instruction_sets():  # the best comes last, and stays
        module.use_instruction_set(instructions)
        for number in (1, 3):
            threads(number)
            outs = {name: torch.zeros(count) for name in ("absmean", "absmax", "square")}
            native.block_statistics(x, starts, block, **outs)
            outcomes.append(torch.stack(list(outs.values())))
    assert all(torch.equal(outcome, outcomes[0]) for outcome in outcomes)


def test_long_sums_are_accurate(backend):
    """4 M entries of 0.1 in one block: float32 sums would be off by percents."""
    x, starts = torch.full((4_000_000,), 0.1), torch.tensor([0, 4_000_000])
    absmean, square = torch.zeros(1), torch.zeros(1)
    backend.block_statistics(x, starts, 0, absmean=absmean, square=square)
    assert float(absmean) == float(x[0])
    assert float(square) == pytest.approx(4e6 * float(x[0]) ** 2, rel=1e-7)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 255, 256, 70_000])
def test_one_bad_entry_is_found(backend, bad, place):
    x = torch.zeros(70_001)
    assert backend.all_finite(x)
    x[place] = bad
    assert not backend.all_finite(x)


def test_all_finite_takes_any_float_and_any_stride():
    assert kernels.all_finite(torch.zeros(0))
    for dtype in kernels.check.FLOATS:
        x = torch.randn(100, 3).to(dtype)
        x[5, 1] = torch.inf
        assert not kernels.all_finite(x) and not kernels.all_finite(x[:, 1]) and kernels.all_finite(x[:, 0])


def test_bad_arguments_are_refused():
    x, starts = torch.randn(10), torch.tensor([0, 10])
    for bad in (
        torch.zeros(2),
        torch.zeros(4)[::2][:1].expand(2),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(1, 1),
    ):
        with pytest.raises(ValueError):
            kernels.block_absmax(x, starts, 0, bad)
    with pytest.raises(ValueError, match="contiguous"):
        kernels.block_absmax(torch.randn(20)[::2], starts, 0, torch.zeros(1))
    with pytest.raises(ValueError, match="starts"):
        kernels.block_absmax(x, torch.tensor([0, 9]), 0, torch.zeros(1))


@pytest.mark.parametrize("block", [0, 64, 96, 1024, 5000])
def test_what_is_owed_is_added_to_long_buffers(backend, threads, block):
    """Long enough for a sum that goes past the caches; blocks that are, and are not, parts of a tile."""
    threads(2)
    x, owed, starts = torch.randn(300_001), torch.randn(300_001), torch.tensor([0, 100_003, 300_001])
    count = sum(-(-n // block) if block else 1 for n in (100_003, 199_998))
    (square, largest), (alone, most) = (torch.zeros(2, count) for _ in range(2))
    backend.block_statistics(x + owed, starts, block, square=alone, absmax=most)
    total = torch.zeros(300_004)[3:]
    backend.block_statistics(x, starts, block, square=square, absmax=largest, owed=owed, total=total)
    assert torch.equal(total, x + owed) and torch.equal(square, alone) and torch.equal(largest, most)


@pytest.mark.parametrize("size", [0, 5, 300_001])
def test_what_is_kept_is_a_copy(backend, threads, size):
    """Of any alignment, and long enough to go past the caches."""
    threads(2)
    new, memory = torch.randn(size), torch.full((size + 20,), 7.0)
    backend.keep_(memory[3 : 3 + size], new)
    assert torch.equal(memory[3 : 3 + size], new) and (memory[:3] == 7).all() and (memory[3 + size :] == 7).all()


def test_what_is_owed_needs_a_total():
    x, starts, total = torch.ones(4), torch.tensor([0, 4]), torch.full((4,), 7.0)
    with pytest.raises(ValueError, match="owed needs total="):
        kernels.block_statistics(x, starts, 4, absmax=torch.empty(1), owed=torch.ones(4))
    kernels.block_statistics(x, starts, 4, absmax=torch.empty(1), total=total)
    assert (total == 7).all(), "nothing is owed, so nothing is added up"


@pytest.mark.parametrize("bad", [None, torch.nan, torch.inf])
@pytest.mark.parametrize("module", [kernels, reference])
def test_only_what_is_finite_is_kept(module, bad):
    kept, new, judged = torch.zeros(5, dtype=torch.bfloat16), torch.arange(5.0), torch.ones(9)
    if bad is not None:
        judged[7] = bad
    module.keep_finite_(kept, new, judged)
    assert torch.equal(kept, (new if bad is None else torch.zeros(5)).to(torch.bfloat16))
    assert kernels.seen_nonfinite(judged) == (bad is not None)


def test_keeping_what_does_not_fit_is_refused():
    with pytest.raises(ValueError, match="must be alike"):
        kernels.keep_finite_(torch.zeros(5), torch.zeros(1), torch.zeros(5))
