"""The native module: loaded where it can be, and if it cannot, why. Nothing here decides by itself to be
slow: see `doctor`.
"""

from __future__ import annotations

import importlib
from functools import cache
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

ABI = 3  # what this package expects of the compiled module


@cache
def _load() -> tuple[ModuleType | None, str]:
    try:
        module = importlib.import_module("thinwire.kernels._native")
    except ImportError as error:
        return None, f"the compiled kernels did not load ({error}); everything runs on the PyTorch reference"
    if module.abi != ABI:
        return None, f"the compiled kernels have ABI {module.abi}, expected {ABI}; rebuild the package"
    return module, f"native kernels, {module.instruction_set()}"


def module() -> Any:
    """The compiled kernels, or None."""
    return _load()[0]


def status() -> str:
    """One line: which kernels run here, and why."""
    return _load()[1]


def for_tensors(*tensors: Tensor | None) -> Any:
    """The compiled kernels, if all these tensors are in CPU memory; else None: the reference serves them."""
    if all(tensor is None or tensor.device.type == "cpu" for tensor in tensors):
        return module()
    return None


def address(tensor: Tensor | None) -> int:
    """Where the tensor's memory begins; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def threads() -> int:
    """How many threads a kernel may use: as many as PyTorch."""
    return torch.get_num_threads()
