"""Packed integers: every backend equals the reference for every width; sums saturate as they should."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from thinwire import kernels
from thinwire.kernels import reference

EXAMPLES = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
OPERATIONS = ["add_packed", "add_packed_saturating"]


def integers(numel: int, width: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    low, high = -(1 << (width - 1)), 1 << (width - 1)
    return torch.randint(low, high, (numel,), generator=generator, dtype=torch.int64).to(torch.int32)


@EXAMPLES
@given(
    st.one_of(st.integers(0, 300), st.just(70_001)),
    st.integers(1, 32),
    st.integers(0, 2**31),
    st.integers(0, 3),
)
def test_equal_reference(backend, numel, width, seed, offset):
    values = integers(numel + offset, width, seed)[offset:]
    room = torch.zeros(kernels.packed_int_bytes(numel, width) + offset, dtype=torch.uint8)[offset:]
    expected = room.clone()
    backend.pack_ints(values, width, room)
    reference.pack_ints(values, width, expected)
    assert torch.equal(room, expected)
    unpacked = torch.zeros(numel, dtype=torch.int32)
    backend.add_packed(room, width, unpacked)
    assert torch.equal(unpacked, values)
    for operation in OPERATIONS[: 2 if width > 1 else 1]:
        found = integers(numel, 32, seed + 1)
        expected = found.clone()
        getattr(backend, operation)(room, width, found)
        getattr(reference, operation)(room, width, expected)
        assert torch.equal(found, expected), operation


@pytest.mark.parametrize("width", [2, 4, 8, 29, 30, 31, 32])
def test_saturation_clips_after_every_addition(backend, width):
    most = (1 << (width - 1)) - 1
    data = torch.zeros(kernels.packed_int_bytes(3, width), dtype=torch.uint8)
    backend.pack_ints(torch.tensor([most, -most, 1], dtype=torch.int32), width, data)
    out = torch.tensor([1, -1, most - 1], dtype=torch.int32)
    backend.add_packed_saturating(data, width, out)
    assert out.tolist() == [most, -most, most]
    backend.pack_ints(torch.tensor([-1, 1, -1], dtype=torch.int32), width, data)
    backend.add_packed_saturating(data, width, out)
    assert out.tolist() == [most - 1, 1 - most, most - 1]


@pytest.mark.parametrize("value, width", [(1, 1), (-2, 1), (8, 4), (-9, 4), (1 << 30, 31)])
def test_values_that_do_not_fit_are_refused(backend, value, width):
    values = torch.zeros(100, dtype=torch.int32)
    values[77] = value
    with pytest.raises(ValueError, match=f"{width} bits"):
        backend.pack_ints(values, width, torch.zeros(kernels.packed_int_bytes(100, width), dtype=torch.uint8))


@pytest.mark.parametrize("operation", OPERATIONS)
def test_bad_arguments_are_refused(operation):
    call = getattr(kernels, operation)
    data, out = torch.zeros(5, dtype=torch.uint8), torch.zeros(10, dtype=torch.int32)
    call(data, 4, out)
    bad = [
        (data[:4], 4, out),
        (torch.zeros(6, dtype=torch.uint8), 4, out),
        (data, 0, out),
        (data, 33, out),
        (data, 4, out.long()),
        (data, 4, torch.zeros(20, dtype=torch.int32)[::2]),
        (data.to(torch.int8), 4, out),
        (torch.zeros(10, dtype=torch.uint8)[::2], 4, out),
        (data.to("meta"), 4, out),
    ]
    for arguments in bad:
        with pytest.raises(ValueError):
            call(*arguments)
