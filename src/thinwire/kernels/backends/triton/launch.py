"""Where kernels are started: the one seam to the card. Tests and `benchmarks/cubins.py` put their own `run` here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def launch(kernel: Any, programs: int, *arguments: Any, warps: int = 4, **constants: Any) -> None:
    """Start so many programs of a kernel; none where there is nothing to do."""
    if programs:
        run(kernel, programs, arguments, constants, warps)


def run(kernel: Any, programs: int, arguments: tuple[Any, ...], constants: dict[str, Any], warps: int) -> None:
    device = next(each.device for each in arguments if isinstance(each, Tensor))
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return run(kernel, programs, arguments, constants, warps)
    # A fused multiply-add rounds once where the references round twice: without this the bits would differ.
    kernel[(programs,)](*arguments, **constants, num_warps=warps, enable_fp_fusion=False)
