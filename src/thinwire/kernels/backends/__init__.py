"""What does the work. `reference` says in PyTorch what each operation means; the others do the same, fast.

A backend is a module with the reference's operations under the same names, with the same parameters, and with
`takes(operation, dtypes)`. To add one, give its device a row in `FAST`. What it lacks, the reference does.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

FAST = {"cpu": "native", "cuda": "triton"}  # by type of device, imported when first asked for

Operation = TypeVar("Operation", bound=Callable[..., Any])


def implementation(meaning: Operation, device: torch.device, *dtypes: torch.dtype) -> Operation:
    """What does an operation of the reference fastest, on this device and for the dtypes of its tensors."""
    return _found(meaning, device.type, dtypes)


@cache  # a dictionary's look-up per call: kernels run in the middle of backward
def _found(meaning: Callable[..., Any], device: str, dtypes: tuple[torch.dtype, ...]) -> Any:
    backend, name = fast(device)[0], meaning.__name__
    return getattr(backend, name, meaning) if backend and backend.takes(name, dtypes) else meaning


def fast(device: str) -> tuple[Any, str]:
    """The fast backend for a type of device, or None; and why there is none."""
    name = FAST.get(device)
    return _loaded(name) if name else (None, f"references only: nothing faster is known for {device}")


@cache
def _loaded(name: str) -> tuple[Any, str]:
    try:
        return importlib.import_module(f"thinwire.kernels.backends.{name}"), ""
    except ImportError as error:
        return None, f"references only: {error}"
