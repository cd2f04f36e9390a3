"""Checks that every kernel makes of its arguments before it touches memory: bad ones raise ValueError."""

from __future__ import annotations

import torch
from torch import Tensor

FLOATS = (torch.float32, torch.float64, torch.float16, torch.bfloat16)


def flat(name: str, tensor: Tensor, *, dtypes: tuple[torch.dtype, ...], like: Tensor | None = None,
         numel: int | None = None, at_least: int | None = None) -> None:  # fmt: skip
    """`tensor` is 1-d, contiguous, of one of `dtypes`, on `like`'s device, and has the length asked for."""
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name} has dtype {tensor.dtype}, accepted: {', '.join(map(str, dtypes))}")
    if tensor.dim() != 1 or not tensor.is_contiguous():
        raise ValueError(f"{name} must be 1-d and contiguous, got shape {tuple(tensor.shape)}, stride {tensor.stride()}")
    if like is not None and tensor.device != like.device:
        raise ValueError(f"{name} is on {tensor.device}, expected {like.device}")
    if numel is not None and tensor.numel() != numel:
        raise ValueError(f"{name} has {tensor.numel()} elements, expected {numel}")
    if at_least is not None and tensor.numel() < at_least:
        raise ValueError(f"{name} has {tensor.numel()} elements, expected at least {at_least}")


def within(name: str, value: int, low: int, high: int) -> None:
    """`value` is an integer in low..high."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise ValueError(f"{name} must be an integer in {low}..{high}, got {value!r}")
