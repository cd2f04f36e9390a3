"""What workers tell each other beside gradients: small objects, now and then."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from thinwire.exchange.collectives import Started, all_gather
from thinwire.exchange.server import limits, snapshots

# The last works of every group. PyTorch's all_gather_object lets go of its own at once: if the group's thread is then
# the last to hold one, it needs the interpreter to free the tensors, and where that is on its way out, the process
# aborts.
_held: WeakKeyDictionary[dist.ProcessGroup, tuple[Started, Started]] = WeakKeyDictionary()


LIMIT_BYTES = 1 << 26  # of what one worker says: nobody allocates more because another says so
CHUNK_BYTES = 1 << 26  # of a state on its way: so much room beside the states themselves


def all_gather_objects(what: Any, group: dist.ProcessGroup, device: torch.device | None = None) -> list[Any]:
    """What everybody in the group says, in rank order: JSON, so tuples arrive as lists. Every worker calls it.

    device: this worker's, for a group that has none but CUDA's; unless given, the one that PyTorch calls current.
    """
    device = device_of(group, device)
    told = torch.frombuffer(bytearray(json.dumps(what).encode()), dtype=torch.uint8).to(device)
    sizes, saying_size = _gathered(torch.tensor([told.numel()], dtype=torch.int64, device=device), group)
    # All see the same sizes, so all raise alike.
    if not 0 < int(sizes.min()) <= int(sizes.max()) <= LIMIT_BYTES:
        raise ValueError(f"workers tell each other at most {LIMIT_BYTES} bytes, got {sizes.tolist()}")
    padded = torch.zeros(int(sizes.max()), dtype=torch.uint8, device=device)
    padded[: told.numel()] = told
    everyone, saying = _gathered(padded, group)
    _held[group] = (saying_size, saying)
    rows = everyone.cpu().view(sizes.numel(), -1)
    return [_read(row[:size], rank) for rank, (row, size) in enumerate(zip(rows, sizes.tolist(), strict=True))]


def gather_states(
    state: Any, group: dist.ProcessGroup, *, to_all: bool, device: torch.device | None = None
) -> list[Any]:
    """Everybody's state, of tensors and plain values, in rank order, on the CPU. Every worker calls it.

    to_all: for everybody; else for the first worker, and the others get a list of their own alone.
    """
    device, own = device_of(group, device), snapshots.pack(state)
    sizes = all_gather_objects(own.numel(), group, device)
    if not all(type(size) is int and size > 0 for size in sizes) or sum(sizes) > limits.memory_bytes():
        raise ValueError(f"states of {sizes} bytes are more than this machine has memory")
    receives = to_all or dist.get_rank(group) == 0
    everyone = [torch.empty(size, dtype=torch.uint8) for size in sizes] if receives else []
    for begin in range(0, max(sizes), CHUNK_BYTES):
        length = min(CHUNK_BYTES, max(sizes) - begin)
        chunk = torch.zeros(length, dtype=torch.uint8, device=device)
        said = own[begin : begin + length]
        chunk[: said.numel()] = said
        for kept, came in zip(everyone, _chunks(chunk, group, to_all=to_all), strict=bool(everyone)):
            there = kept[begin : begin + length]
            there.copy_(came[: there.numel()])
    return [snapshots.unpack(data) for data in everyone] if receives else [state]


def _chunks(chunk: torch.Tensor, group: dist.ProcessGroup, *, to_all: bool) -> list[torch.Tensor]:
    if to_all:
        everyone, work = _gathered(chunk, group)
        chunks = list(everyone.chunk(dist.get_world_size(group)))
    else:
        first = dist.get_rank(group) == 0
        chunks = [torch.empty_like(chunk) for _ in range(dist.get_world_size(group))] if first else []
        work = dist.gather(chunk, chunks or None, group=group, group_dst=0, async_op=True)
        assert work is not None
        work.wait()
    _held[group] = (work, work)
    return chunks


def _read(raw: torch.Tensor, rank: int) -> Any:
    try:
        return json.loads(raw.numpy().tobytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"what rank {rank} says cannot be read: {error}") from error


def agree(given: Mapping[str, str] | None, group: dist.ProcessGroup, device: torch.device | None = None) -> None:
    """Compare what each rank was given, field by field; every rank raises ValueError alike if they differ.

    A rank that refused its arguments takes part with None, so that the others hear of it instead of waiting.
    """
    compare(all_gather_objects(given, group, device))


def compare(everyone: Sequence[Mapping[str, str] | None]) -> None:
    """Raise ValueError unless all were given the same, in rank order; None is one who refused its arguments."""
    refused = [rank for rank, theirs in enumerate(everyone) if theirs is None]
    if refused:
        raise ValueError(f"ranks {refused} refused their arguments; see their own errors")
    willing = [theirs for theirs in everyone if theirs is not None]
    for field in willing[0]:
        camps: dict[str, list[int]] = {}
        for rank, theirs in enumerate(willing):
            camps.setdefault(str(theirs.get(field, "nothing")), []).append(rank)
        if len(camps) > 1:
            against = " against ".join(f"ranks {ranks} ({text[:60]})" for text, ranks in camps.items())
            raise ValueError(f"the {field} differs between ranks: {against}")


def digest(what: Any) -> str:
    """Short text that differs where `what` prints differently: for what is too long to tell."""
    return f"digest {hashlib.blake2b(repr(what).encode(), digest_size=8).hexdigest()}"


def timeout_of(group: dist.ProcessGroup) -> timedelta:
    """How long its members wait for each other."""
    return group._get_backend(device_of(group)).options._timeout


def device_of(group: dist.ProcessGroup, device: torch.device | None = None) -> torch.device:
    """Where small tensors of the group are: in CPU memory, where it takes such; else on this worker's device."""
    if dist.get_backend(group) != "nccl":
        return torch.device("cpu")
    return device if device is not None and device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())


def _gathered(tensor: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, Started]:
    everyone = tensor.new_empty(tensor.numel() * dist.get_world_size(group))
    work = all_gather(everyone, tensor, group=group, async_op=True)
    assert work is not None
    work.wait()
    return everyone, work
