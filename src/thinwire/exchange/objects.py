"""What workers tell each other beside gradients: small objects, now and then."""

from __future__ import annotations

import pickle
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from thinwire.exchange.collectives import Started, all_gather

# The last works of every group. PyTorch's all_gather_object lets go of its own at once: if the group's thread is then
# the last to hold one, it needs the interpreter to free the tensors, and where that is on its way out, the process
# aborts.
_held: WeakKeyDictionary[dist.ProcessGroup, tuple[Started, Started]] = WeakKeyDictionary()


def all_gather_objects(what: Any, group: dist.ProcessGroup) -> list[Any]:
    """What everybody in the group says, in rank order. Every worker calls it."""
    device = device_of(group)
    pickled = torch.frombuffer(bytearray(pickle.dumps(what)), dtype=torch.uint8).to(device)
    sizes, told_size = _gathered(torch.tensor([pickled.numel()], device=device), group)
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=device)
    padded[: pickled.numel()] = pickled
    everyone, told = _gathered(padded, group)
    _held[group] = (told_size, told)
    rows = everyone.cpu().view(sizes.numel(), -1)
    return [pickle.loads(row[:size].numpy().tobytes()) for row, size in zip(rows, sizes.tolist(), strict=True)]


def agree(what: str, group: dist.ProcessGroup, name: str) -> None:
    """Raise on every worker, naming the ranks (by `name`), unless all say the same."""
    said = all_gather_objects(what, group)
    if len(set(said)) > 1:
        told = "; ".join(f"{name} {rank}: {text}" for rank, text in enumerate(said))
        raise ValueError(f"the workers do not agree on what to do: {told}")


def device_of(group: dist.ProcessGroup) -> str:
    """Where the group's tensors are."""
    return "cuda" if dist.get_backend(group) == "nccl" else "cpu"


def _gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, Started]:
    everyone = tensor.new_empty(tensor.numel() * dist.get_world_size(group))
    work = all_gather(everyone, tensor, group=group, async_op=True)
    assert work is not None
    work.wait()
    return everyone, work
