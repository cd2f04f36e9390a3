"""Memory that a caller may bring along or lets go of, and the way of small things to a device."""

from __future__ import annotations

import torch
from torch import Tensor


def or_empty(out: Tensor | None, numel: int, dtype: torch.dtype, *, like: Tensor) -> Tensor:
    """`out`, or fresh memory on the device of `like`."""
    return torch.empty(numel, dtype=dtype, device=like.device) if out is None else out


def pieces(x: Tensor) -> list[Tensor]:
    """A flat tensor in 16 parts, of 1,024 elements at least: what is computed part by part takes little memory."""
    return list(x.split(max(1024, -(-x.numel() // 16)))) if x.numel() else []


def carried(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, for the stream that asks; where it is there already, itself.

    Through pinned memory: a copy of any other makes the host wait for all that the stream still has to do.
    """
    if device.type != "cuda" or tensor.is_cuda:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def outlive(tensor: Tensor) -> None:
    """Have its memory, once nobody holds it, wait for what this stream has to do with it by now.

    For what was made for another stream: that one would use the memory again at once.
    """
    if tensor.is_cuda:
        tensor.record_stream(torch.cuda.current_stream(tensor.device))
