"""Staging: buckets of a device, brought to CPU memory and back by a lane that holds its conversations there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor

from thinwire.core.bucket import Scratch
from thinwire.exchange.lane.lane import Rounds


class Stage(Protocol):
    """The way between a device and CPU memory. The training thread marks, the lane's thread moves and waits."""

    def mark(self) -> Any:
        """What a bucket that is ready only later, on the caller's stream, can be waited for by."""
        ...

    def fetch(self, bucket: Tensor, ready: Any, scratch: Scratch) -> Tensor:
        """The bucket in CPU memory, complete."""
        ...

    def deliver(self, there: Tensor, bucket: Tensor) -> None:
        """The bucket as it is there, complete: any stream may read it."""
        ...


def staged(stage: Stage, bucket: Tensor, about: Callable[[Tensor, Scratch], Rounds]) -> Callable[[Scratch], Rounds]:
    """A conversation about what is in the bucket by now, held in CPU memory; its mean comes back to the bucket."""
    ready = stage.mark()

    def begin(scratch: Scratch) -> Rounds:
        there = stage.fetch(bucket, ready, scratch)
        yield from about(there, scratch)
        stage.deliver(there, bucket)
        return bucket

    return begin


class CudaStage:
    """By pinned memory, on a stream of its own: training is not waited for, and does not wait."""

    def __init__(self, device: torch.device):
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def fetch(self, bucket: Tensor, ready: torch.cuda.Event, scratch: Scratch) -> Tensor:
        there = scratch.take("staged", bucket.numel(), bucket.dtype, pinned=True)
        self._stream.wait_event(ready)
        return self._move(bucket, there)

    def deliver(self, there: Tensor, bucket: Tensor) -> None:
        self._move(there, bucket)

    def _move(self, source: Tensor, to: Tensor) -> Tensor:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            to.copy_(source, non_blocking=True)
        self._stream.synchronize()
        return to


class Landings:
    """When copies between devices and pinned memory are over, which nobody waits for one by one."""

    def __init__(self, devices: Iterable[torch.device]):
        self._devices = [device for device in devices if device.type == "cuda"]

    def mark(self) -> list[torch.cuda.Event]:
        """After all that the caller's streams have to do by now."""
        events = [torch.cuda.Event() for _ in self._devices]
        for event, device in zip(events, self._devices, strict=True):
            event.record(torch.cuda.current_stream(device))
        return events

    def wait(self, mark: list[torch.cuda.Event]) -> None:
        for event in mark:
            event.synchronize()
