"""Every operation is the same on every backend: parameters, and results of one call; each is where it should be."""

import inspect

import pytest
import torch
from cases_data import CASES, COMPOSED, WITHOUT_TRITON, elsewhere

from thinwire import kernels
from thinwire.kernels import native, reference
from thinwire.kernels.backends import FAST, fast, implementation

SIZES = {"index_bytes", "packed_bytes", "packed_int_bytes", "padded_numel"}  # plain arithmetic: no backend has a say
JUDGEMENTS = {"at_hand", "carried", "doubt", "outlive", "seen_nonfinite", "spoil_", "warm_up"}  # whoever does them
OPERATIONS = {name for name in kernels.__all__ if inspect.isfunction(getattr(kernels, name))} - SIZES - JUDGEMENTS
WITHOUT_NATIVE = {"dequantize_bank_add", "keep_finite_", "quantize_bank", "random_u32"}  # a device needs them


@pytest.mark.parametrize("name", sorted(CASES))
def test_a_call_elsewhere_is_the_same_call(name):
    """As the tests on cards make it: nothing that an operation changes gets lost on the way."""
    expected = CASES[name](getattr(reference, name, getattr(kernels, name)))
    found = CASES[name](elsewhere(getattr(reference, name, getattr(kernels, name)), torch.device("cpu")))
    assert found.dtype is expected.dtype and torch.equal(found, expected)


def test_there_is_a_case_for_every_operation():
    assert set(CASES) == OPERATIONS


@pytest.mark.parametrize("name", sorted(CASES))
def test_one_call_of_each_operation(backend, name):
    """The backend and the face, which here uses the same instructions, against the reference."""
    call = getattr(backend, name, None)
    missing = WITHOUT_NATIVE if backend is native else WITHOUT_TRITON
    assert call or name in COMPOSED | missing, backend.__name__
    expected = CASES[name](getattr(reference, name, getattr(kernels, name)))
    found = [CASES[name](one) for one in (call, getattr(kernels, name)) if one]
    assert expected.count_nonzero() > 0
    if name == "block_statistics":  # sums agree within one unit in the last place
        assert all(torch.allclose(one, expected, rtol=2e-7, atol=0) for one in found)
    elif name == "quantize_laplace":  # ranges are made of such sums; see test_laplace
        assert all(torch.allclose(one, expected, rtol=1e-6, atol=1e-6) for one in found)
    else:
        assert all(one.dtype is expected.dtype and torch.equal(one, expected) for one in found)


@pytest.mark.parametrize("name", sorted(OPERATIONS - COMPOSED))
def test_signatures_are_the_same(name):
    face = inspect.signature(getattr(kernels, name))
    for backend in (reference, *(fast(device)[0] for device in FAST)):
        if backend is reference or hasattr(backend, name):
            assert inspect.signature(getattr(backend, name)) == face, backend.__name__


@pytest.mark.parametrize("name", sorted(OPERATIONS - COMPOSED))
def test_float32_in_cpu_memory_is_native_and_all_else_runs_on_the_reference(name):
    meaning = getattr(reference, name)
    dtypes = {"narrow": (torch.float32, torch.float16), "scale_cast": (torch.float32, torch.bfloat16),
              "widen": (torch.float16, torch.float32), "cast_add": (torch.bfloat16, torch.float32),
              "sum_halves": (torch.float16,)}  # fmt: skip
    expected = meaning if name in WITHOUT_NATIVE else getattr(native, name)
    cpu = torch.device("cpu")
    assert implementation(meaning, cpu, *dtypes.get(name, (torch.float32,))) is expected
    assert implementation(meaning, cpu, torch.float32, torch.float64) is meaning
    assert implementation(meaning, torch.device("meta"), torch.float32) is meaning
