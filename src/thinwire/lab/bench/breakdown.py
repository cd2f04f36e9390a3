"""Where the seconds of a conversation go, operation by operation, and what it allocates.

Every kernel and every PyTorch operation that is called meanwhile is timed, and booked under what it does, or under what
it is called for: whatever `core/feedback.py` calls is feedback. What is left is Python. Watching has a price of some
microseconds a call, so totals are measured without it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from thinwire import kernels

OPERATIONS = (
    "copy", "statistics", "select", "rotate", "quantise", "pack", "products", "orthonormalise", "feedback", "decode",
    "other", "python",
)  # fmt: skip

# By the beginning of a kernel's name, the longest that fits.
_KERNELS = {
    "keep_": "copy", "draw": "select", "sum_halves": "decode",
    "all_finite": "statistics", "block_": "statistics", "top_k": "select", "hadamard_": "rotate", "rotate": "rotate",
    "quantize": "quantise", "dequantize": "decode", "unrotate": "decode", "pack_ints": "pack", "add_packed": "decode",
    "encode_indices": "pack", "decode_indices": "decode", "gather": "copy", "take_": "copy", "put_": "copy",
    "scatter_add": "decode", "scale_cast": "quantise", "narrow": "quantise", "widen": "decode", "cast_add": "decode",
    "random": "select", "times_": "products", "outer_product": "products",
}  # fmt: skip
# By the name of a PyTorch operation.
_TORCH = {
    "copy_": "copy", "_to_copy": "copy", "clone": "copy", "cat": "copy", "stack": "copy", "zero_": "copy",
    "fill_": "copy", "bmm": "products", "baddbmm_": "products", "mm": "products", "linalg_qr": "orthonormalise",
    "sort": "select", "topk": "select", "repeat_interleave": "copy",
}  # fmt: skip
_CALLERS = {"feedback.py": "feedback", "partition.py": "copy"}


SMALL = 4096  # bytes: smaller tensors are not counted as fresh, since they come from what malloc keeps anyway


class Breakdown:
    """Seconds by operation; bytes of fresh tensors of at least SMALL bytes."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = dict.fromkeys(OPERATIONS, 0.0)
        self.allocated = 0
        self._inside = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Book what is called inside."""
        named = {name: getattr(kernels, name) for name in kernels.__all__}
        faces = {name: face for name, face in named.items() if callable(face) and not isinstance(face, type)}
        began = time.perf_counter()
        booked = sum(self.seconds.values())
        try:
            for name, face in faces.items():
                setattr(kernels, name, self._timed(name, face))
            with _Watch(self):
                yield
        finally:
            for name, face in faces.items():
                setattr(kernels, name, face)
        watched = time.perf_counter() - began
        self.seconds["python"] += max(0.0, watched - (sum(self.seconds.values()) - booked))

    def _timed(self, name: str, face: Callable[..., Any]) -> Callable[..., Any]:
        fitting = [begin for begin in _KERNELS if name.startswith(begin)]
        operation = _KERNELS[max(fitting, key=len)] if fitting else "other"

        @wraps(face)
        def timed(*args: Any, **kwargs: Any) -> Any:
            return self.book(operation, lambda: face(*args, **kwargs))

        return timed

    def book(self, operation: str, call: Callable[[], Any]) -> Any:
        """The call's seconds, unless it is part of one that is being timed already."""
        if self._inside:
            return call()
        self._inside, began = True, time.perf_counter()
        try:
            return call()
        finally:
            self.seconds[_called_for() or operation] += time.perf_counter() - began
            self._inside = False


class _Watch(TorchDispatchMode):
    def __init__(self, breakdown: Breakdown) -> None:
        super().__init__()
        self._breakdown = breakdown

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        operation = _TORCH.get(func.overloadpacket.__name__, "other")
        result = self._breakdown.book(operation, lambda: func(*args, **kwargs))
        known = {_memory(tensor) for tensor in tree_iter((args, kwargs)) if isinstance(tensor, torch.Tensor)}
        fresh = {_memory(t): t for t in tree_iter(result) if isinstance(t, torch.Tensor) and _memory(t) not in known}
        sizes = (tensor.untyped_storage().nbytes() for tensor in fresh.values())
        self._breakdown.allocated += sum(size for size in sizes if size >= SMALL)
        return result


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _called_for() -> str | None:
    """What the file that called works for, where it says so."""
    frame = sys._getframe(2)
    while frame is not None:
        folder, _, file = frame.f_code.co_filename.rpartition("/")
        if "/thinwire/" in folder and not folder.endswith(("/kernels", "/bench")):
            return _CALLERS.get(file)
        frame = frame.f_back
    return None
