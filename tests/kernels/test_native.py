"""The compiled module is there, is used, and says so."""

import importlib
from types import SimpleNamespace

import pytest
import torch

import thinwire as tw
from thinwire import kernels
from thinwire.kernels import backends, native
from thinwire.lab import doctor


def test_native_kernels_run():
    assert native.module() is not None, native.status()
    assert native.status() == f"native kernels, {native.module().instruction_set()}"


@pytest.fixture
def instead(monkeypatch):
    """instead(imports): what importing the compiled module does until the test is over."""

    def forget():
        native._load.cache_clear()
        backends._found.cache_clear()

    def replace(imports):
        monkeypatch.setattr(importlib, "import_module", imports)
        forget()

    yield replace
    monkeypatch.undo()
    forget()


def no_compiler(name):
    """As the module that CMakeLists.txt leaves where it could compile nothing."""
    raise ImportError("no C++ compiler was found when thinwire was installed")


# All that neither sums over a block nor chooses by such a sum: sums agree within one unit in the last place.
SAME_BITS = ("fp16", "bf16", "qsgd(bits=4)", "topk(density=0.1)", "randomk(density=0.1)", "thc", "natural", "powersgd")


@pytest.mark.parametrize("spec", SAME_BITS)
def test_without_the_module_a_simulation_has_the_same_bits(spec, instead):
    gradients = [torch.randn(3000, generator=torch.Generator().manual_seed(worker)) for worker in range(3)]

    def means():
        group = tw.Simulation(spec, workers=3, seed=0)
        return [group.reduce([gradient.view(60, 50).clone() for gradient in gradients]) for _ in range(3)]

    expected = means()
    instead(no_compiler)
    assert native.module() is None
    assert all(torch.equal(found, mean) for found, mean in zip(means(), expected, strict=True))


def test_without_the_module_status_and_doctor_say_why(instead):
    assert next(row for row in doctor.examine() if row.what == "kernels").fine
    instead(no_compiler)
    row = next(row for row in doctor.examine() if row.what == "kernels")
    assert row.found == native.status() == "references only: no C++ compiler was found when thinwire was installed"
    assert not row.fine and "install a C++20 compiler" in row.follows


def test_a_module_of_another_version_is_not_used(instead):
    instead(lambda name: SimpleNamespace(abi=native.ABI - 1))
    assert native.module() is None
    assert native.status() == f"references only: the compiled kernels have ABI {native.ABI - 1}, expected {native.ABI}"
    x, out = torch.randn(100), torch.zeros(1)
    kernels.block_absmax(x, torch.tensor([0, 100]), 0, out)
    assert float(out) == float(x.abs().max())


def test_unknown_instruction_sets_are_refused():
    with pytest.raises(ValueError, match="avx1024"):
        native.module().use_instruction_set("avx1024")
