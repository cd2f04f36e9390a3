"""What a framework wraps around a model, taken off; and what adapters pass on to `attach`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from thinwire.reducer import Reducer, Scaler

_REFUSED = {
    "FullyShardedDataParallel": "FSDP1, which has no place for a codec: use FSDP2",
    "DeepSpeedEngine": "DeepSpeed, which reduces gradients by itself: use DDP",
    "DataParallel": "DataParallel, one process for all devices: use DDP",
}


def parallel(model: Any, advice: str) -> Any:
    """What `attach` takes, in what a framework made of a model: DDP, or the root of what FSDP2 sharded.

    advice: how this framework is told to use DDP.
    """
    for wrapper in ("_forward_module", "_orig_mod"):  # Fabric's and torch.compile's
        model = getattr(model, wrapper, model)
    if isinstance(model, DistributedDataParallel):
        return model
    if not isinstance(model, nn.Module):
        raise ValueError(f"a model is needed as the framework prepared it, got {type(model).__name__}")
    for module in model.modules():
        if type(module).__name__ in _REFUSED:
            raise ValueError(f"this model is under {_REFUSED[type(module).__name__]}")
    roots = _sharded_roots(model)
    if len(roots) > 1:
        raise ValueError(
            f"{len(roots)} parts of this model are sharded apart: fully_shard() the module around them, too"
        )
    if not roots:
        workers = dist.get_world_size() if dist.is_initialized() else 1
        kind = type(model).__name__
        raise ValueError(f"{kind} is not under DDP or FSDP2 ({workers} processes), so nothing is sent: {advice}")
    return roots[0]


def _sharded_roots(model: nn.Module) -> list[nn.Module]:
    """The outermost modules that FSDP2 sharded."""
    if hasattr(model, "set_requires_gradient_sync") and hasattr(model, "reshard"):
        return [model]
    return [root for child in model.children() for root in _sharded_roots(child)]


def checked(options: Mapping[str, Any], target: Callable[..., Any], own: frozenset[str]) -> dict[str, Any]:
    """Options for `target`; those in `own` are the adapter's to give. TypeError now, not when training starts."""
    for name in options:
        known = [each for each in inspect.signature(target).parameters if each not in own]
        if name not in known:
            raise TypeError(f"there is no option {name!r}; those of {target.__name__} are {', '.join(known)}")
    return dict(options)


def made(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options whose values need process groups may come as functions that make them once there are any."""
    late = ("exchange", "replicas")
    return {name: value() if name in late and callable(value) else value for name, value in options.items()}


def follow_scaler(wire: Reducer, scaler: object) -> None:
    """What is owed follows the loss scale, where the framework has one."""
    if isinstance(scaler, Scaler) and getattr(scaler, "is_enabled", lambda: True)():
        wire.scale(scaler)
