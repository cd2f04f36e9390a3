"""Snapshots: a state of tensors and plain values as bytes, for the way between a server and a worker. Never pickled.

    8 bytes: how long the header is | the header, JSON | every tensor's memory, each from a multiple of 16 bytes on

The header is the state with [dtype, shape] in the place of tensors; they follow in that order. Whoever reads checks
every size against the bytes that are there, and takes nothing but what is listed here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from thinwire.exchange.arithmetic import aligned
from thinwire.exchange.server import frames, limits

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16, torch.int8,
    torch.uint8, torch.bool,
)}  # fmt: skip
_PLAIN = (type(None), bool, int, float, str)


def pack(state: Any) -> Tensor:
    """uint8. ValueError for what is neither a tensor nor plain."""
    tensors: list[Tensor] = []
    header = json.dumps(_outline(state, tensors), separators=(",", ":")).encode()
    if len(header) > limits.HEADER_BYTES:
        raise ValueError(f"a state's header may have {limits.HEADER_BYTES} bytes, this has {len(header)}")
    begin = aligned(8 + len(header))
    data = torch.zeros(begin + sum(aligned(_nbytes(tensor)) for tensor in tensors), dtype=torch.uint8)
    data[:8] = torch.frombuffer(bytearray(len(header).to_bytes(8, "little")), dtype=torch.uint8)
    data[8 : 8 + len(header)] = torch.frombuffer(bytearray(header), dtype=torch.uint8)
    for tensor in tensors:
        if tensor.numel():
            data[begin : begin + _nbytes(tensor)] = frames.as_bytes(tensor.detach().cpu().contiguous())
        begin += aligned(_nbytes(tensor))
    return data


def unpack(data: Tensor) -> Any:
    """The state, in memory of its own; ValueError where the bytes are none."""
    size = int.from_bytes(data[:8].numpy().tobytes(), "little")
    if size > min(limits.HEADER_BYTES, data.numel() - 8):
        raise ValueError(f"a snapshot of {data.numel()} bytes cannot have a header of {size}")
    try:
        outline = json.loads(data[8 : 8 + size].numpy().tobytes())
        return _state(outline, _Tensors(data[aligned(8 + size) :]))
    except (RecursionError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"not a snapshot: {error}") from error


def _outline(state: Any, tensors: list[Tensor]) -> Any:
    """What JSON can hold: plain values as they are, all else as [kind, ...]."""
    if isinstance(state, Tensor):
        name = str(state.dtype).removeprefix("torch.")
        if name not in DTYPES:
            raise ValueError(f"a tensor of {state.dtype} cannot be in a snapshot; accepted: {', '.join(DTYPES)}")
        tensors.append(state)
        return ["tensor", name, list(state.shape)]
    if isinstance(state, Mapping):
        return ["dict", *([_outline(key, tensors), _outline(value, tensors)] for key, value in state.items())]
    if isinstance(state, list | tuple):
        return [type(state).__name__, *(_outline(each, tensors) for each in state)]
    if type(state) in _PLAIN:
        return state
    raise ValueError(f"a {type(state).__name__} cannot be in a snapshot: tensors and plain values can")


class _Tensors:
    """The tensors of a snapshot, one after the other."""

    def __init__(self, data: Tensor):
        self._left = data

    def take(self, name: Any, shape: Any) -> Tensor:
        known = isinstance(name, str) and name in DTYPES and isinstance(shape, list) and len(shape) <= limits.DIMENSIONS
        if not known or not all(type(size) is int and size >= 0 for size in shape):
            raise ValueError(f"a snapshot with a tensor of {str(name)[:20]!r}, {str(shape)[:60]} is corrupt")
        dtype = DTYPES[name]
        size = math.prod(shape) * dtype.itemsize
        if size > self._left.numel():
            raise ValueError(f"a snapshot ends {size - self._left.numel()} bytes before its tensors do")
        taken, self._left = self._left[:size], self._left[aligned(size) :]
        return taken.clone().view(dtype).view(shape)


def _state(outline: Any, tensors: _Tensors) -> Any:
    if not isinstance(outline, list):
        if type(outline) in _PLAIN:
            return outline
    elif outline and outline[0] in ("tensor", "dict", "list", "tuple"):
        kind, *items = outline
        if kind == "tensor" and len(items) == 2:
            return tensors.take(*items)
        if kind == "dict" and all(isinstance(item, list) and len(item) == 2 for item in items):
            return {_key(key): _state(value, tensors) for key, value in items}
        if kind in ("list", "tuple"):
            found = [_state(item, tensors) for item in items]
            return tuple(found) if kind == "tuple" else found
    raise ValueError(f"a snapshot with {str(outline)[:60]!r} in it is corrupt")


def _key(key: Any) -> Any:
    if type(key) not in _PLAIN:
        raise ValueError(f"a snapshot with the key {str(key)[:60]!r} is corrupt")
    return key


def _nbytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
