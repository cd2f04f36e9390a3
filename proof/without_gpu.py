"""PyTorch's tests without a GPU: most of its DDP tests ask for one, but mean nothing by it. Here the CPU stands in."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.overrides import TorchFunctionMode


def lift_skips() -> None:
    """Before the tests are imported: they are not skipped for want of a GPU. Those for nccl alone still are."""
    from torch.testing._internal import common_distributed as common

    common.skip_if_no_gpu = lambda test: test
    common.skip_if_lt_x_gpu = lambda *_, **__: lambda test: test


class OnTheCPU(TorchFunctionMode):
    """Inside, whoever asks for a GPU gets the CPU."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.cuda:
            return args[0]
        if "device" in kwargs:
            kwargs["device"] = _cpu(kwargs["device"])
        if func is torch.Tensor.to and len(args) > 1:
            args = (args[0], _cpu(args[1]), *args[2:])
        return func(*args, **kwargs)


def _cpu(device: Any) -> Any:
    """What is no device stays what it is."""
    number = isinstance(device, int) and not isinstance(device, bool)
    named = isinstance(device, str | torch.device) and str(device).startswith("cuda")
    return torch.device("cpu") if number or named else device


def stand_in() -> None:
    """In this process: no model is told of a GPU, and streams and devices are none."""
    plain = DistributedDataParallel.__init__

    def on_the_cpu(self: DistributedDataParallel, *arguments: Any, **keywords: Any) -> None:
        arguments = (*arguments[:1], *(None for _ in arguments[1:3]), *arguments[3:])  # device_ids, output_device
        keywords = {name: value for name, value in keywords.items() if name not in ("device_ids", "output_device")}
        plain(self, *arguments, **keywords)

    move = torch.nn.Module.to

    def to_the_cpu(self: torch.nn.Module, *arguments: Any, **keywords: Any) -> torch.nn.Module:
        return move(self, *map(_cpu, arguments), **{name: _cpu(value) for name, value in keywords.items()})

    DistributedDataParallel.__init__ = on_the_cpu
    torch.nn.Module.to = to_the_cpu
    torch.cuda.set_device = lambda device: None
    torch.cuda.synchronize = lambda device=None: None
    torch.cuda.device = lambda device: nullcontext()
    torch.cuda.stream = lambda stream: nullcontext()
    torch.cuda.current_device = lambda: 0
