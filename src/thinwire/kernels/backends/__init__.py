"""What does the work. `reference` says in PyTorch what each operation means; the others do the same, fast.

A backend is a module with the reference's operations under the same names, with the same parameters, and with
`takes(operation, dtypes)`. To add one, give its device a row in `FAST`. What it lacks, the reference does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import torch

from thinwire.kernels.backends import native

FAST = {"cpu": native}  # by type of device

Operation = TypeVar("Operation", bound=Callable[..., Any])


def implementation(meaning: Operation, device: torch.device, *dtypes: torch.dtype) -> Operation:
    """What does an operation of the reference fastest, on this device and for the dtypes of its tensors."""
    return _found(meaning, device.type, dtypes)


@cache  # a dictionary's look-up per call: kernels run in the middle of backward
def _found(meaning: Callable[..., Any], device: str, dtypes: tuple[torch.dtype, ...]) -> Any:
    backend, name = FAST.get(device), meaning.__name__
    return getattr(backend, name, meaning) if backend and backend.takes(name, dtypes) else meaning
