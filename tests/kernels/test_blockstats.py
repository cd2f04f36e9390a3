"""Statistics: within one unit in the last place of the reference, the same bits for any threads and
instruction set.
"""

import pytest
import torch
from blocks_data import buffers, same_bits
from hypothesis import HealthCheck, given, settings

from thinwire import kernels
from thinwire.kernels import native
from thinwire.kernels.backends.reference import blockstats as reference

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
def test_equal_reference(instructions, buffer):
    found, expected = statistics(kernels, buffer), statistics(reference, buffer)
    assert same_bits(found["absmax"], expected["absmax"])
    assert units_apart(found["absmean"], expected["absmean"]) <= 1
    assert units_apart(found["square"], expected["square"]) <= 1
    for names in (("absmean",), ("absmax",), ("square",), ("absmean", "absmax"), ("absmean", "square"), ()):
        some = statistics(kernels, buffer, names)
        assert all(same_bits(some[name], found[name]) for name in names)
    assert kernels.all_finite(buffer.x) == reference.all_finite(buffer.x)


@pytest.mark.parametrize("block", [0, 64, 1024, 65_536, 70_000])
def test_same_bits_on_any_threads_and_instructions(block):
    x, starts = (
        torch.randn(400_001, generator=torch.Generator().manual_seed(0)),
        torch.tensor([0, 3, 3, 150_000, 400_001]),
    )
    module, before = native.module(), torch.get_num_threads()
    sets, outcomes = module.instruction_sets(), []
    count = kernels.check.blocks(starts, block).count
    try:
        for instructions in sets:
            module.use_instruction_set(instructions)
            for threads in (1, 3):
                torch.set_num_threads(threads)
                outs = {name: torch.zeros(count) for name in ("absmean", "absmax", "square")}
                kernels.block_statistics(x, starts, block, **outs)
                outcomes.append(torch.stack(list(outs.values())))
    finally:
        module.use_instruction_set(sets[-1])
        torch.set_num_threads(before)
    assert all(torch.equal(outcome, outcomes[0]) for outcome in outcomes)


def test_long_sums_are_accurate():
    """4 M entries of 0.1 in one block: float32 sums would be off by percents."""
    x, starts = torch.full((4_000_000,), 0.1), torch.tensor([0, 4_000_000])
    absmean, square = torch.zeros(1), torch.zeros(1)
    kernels.block_statistics(x, starts, 0, absmean=absmean, square=square)
    assert float(absmean) == float(x[0])
    assert float(square) == pytest.approx(4e6 * float(x[0]) ** 2, rel=1e-7)


@pytest.mark.parametrize("bad", [float("inf"), float("-inf"), float("nan")])
@pytest.mark.parametrize("place", [0, 255, 256, 70_000])
def test_one_bad_entry_is_found(instructions, bad, place):
    x = torch.zeros(70_001)
    assert kernels.all_finite(x)
    x[place] = bad
    assert not kernels.all_finite(x)


def test_all_finite_takes_any_float_and_any_stride():
    x = torch.randn(100, 3, dtype=torch.float64)
    assert kernels.all_finite(x[:, 1]) and kernels.all_finite(x.half()) and kernels.all_finite(torch.zeros(0))
    x[5, 1] = torch.inf
    assert not kernels.all_finite(x[:, 1]) and kernels.all_finite(x[:, 0])


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
