"""The compiled module is there, is used, and says so."""

import importlib

import pytest
import torch

from thinwire import kernels
from thinwire.kernels import backends, native


def test_native_kernels_run():
    assert native.module() is not None, native.status()
    assert native.status() == f"native kernels, {native.module().instruction_set()}"


def test_a_module_that_does_not_load_says_why_and_the_reference_serves(monkeypatch):
    def fails(name):
        raise ImportError("no such file")

    native._load.cache_clear()
    backends._found.cache_clear()
    monkeypatch.setattr(importlib, "import_module", fails)
    try:
        assert native.module() is None
        assert "no such file" in native.status()
        x, out = torch.randn(100), torch.zeros(1)
        kernels.block_absmax(x, torch.tensor([0, 100]), 0, out)
        assert float(out) == float(x.abs().max())
    finally:
        native._load.cache_clear()
        backends._found.cache_clear()


def test_unknown_instruction_sets_are_refused():
    with pytest.raises(ValueError, match="avx1024"):
        native.module().use_instruction_set("avx1024")
