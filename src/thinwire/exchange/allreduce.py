"""AllReduce: answers requests by the collectives of torch.distributed.

Sum, Max of floats: all-reduce. (Of whole buckets in halves, the direct way: see `direct`.)
Sum of narrow integers: two-shot, that is all-to-all of packed slices, add, all-gather.
Mean: gather, that is all-gather of the payloads, decode and add in rank order; or two-shot: every worker owns a part
of the bucket, gets everybody's payload of it, adds, encodes the mean again, and all-gather.

A gather sends (workers - 1) payloads per worker, a two-shot about 2, whatever the number of workers.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from thinwire.core import parts
from thinwire.core.bucket import Bucket, Scratch
from thinwire.core.request import Max, Mean, Sum
from thinwire.core.scheme import Codec, Conversation, Scheme, innermost
from thinwire.exchange import arithmetic, objects
from thinwire.exchange.arithmetic import Link, Route
from thinwire.exchange.collectives import AllGathered, AllReduced, AllToAll
from thinwire.exchange.direct import Direct
from thinwire.exchange.exchange import CPU, drive
from thinwire.exchange.lane import CudaSide, Lane, Rounds, Streamed, Threaded
from thinwire.exchange.objects import timeout_of
from thinwire.exchange.transport import Transport


class AllReduce:
    """All workers are equal and exchange by collectives, on a group of their own; the direct way, on the model's.

    `route`: how Means travel: "auto" (fewest bytes), "gather" (encoded once: less error) or "two-shot" (traffic
    that does not grow with the workers).
    `link`: latency in seconds and bandwidth in bits per second; "auto" then means the least predicted time.
    `transport`: starts and counts what is sent.
    """

    def __init__(
        self, *, route: Route = "auto", link: tuple[float, float] | None = None, transport: Transport | None = None
    ):
        if route not in arithmetic.ROUTES:
            raise ValueError(f"route must be one of {', '.join(arithmetic.ROUTES)}, got {route!r}")
        self.route: Route = route
        self.link: Link | None = arithmetic.link_of(link)
        self.transport: Transport = transport or Transport()
        self.lane: Lane | None = None
        self.device: torch.device = CPU
        self._brought = False
        self._direct: Direct | None = None
        self._let_go: Callable[[], object] | None = None

    def open(self, group: dist.ProcessGroup | None, scheme: Scheme, device: torch.device = CPU) -> None:
        """Make the lane, beside `group`. Every worker of the group must call this, in the same order of calls."""
        assert group is not None
        if self.lane is not None:
            raise ValueError("this AllReduce is in use by another attach(); make one for each")
        arithmetic.check_route(self.route, scheme)
        self.join(group, workplace(group, scheme, device))
        self._beside, self._brought = group, device != self.device
        if self.device.type == "cpu":
            self.lane = Threaded(self.transport, f"thinwire-lane-{dist.get_rank()}")
        else:
            self.lane = Streamed(self.transport, CudaSide(self.device))

    def join(self, group: dist.ProcessGroup, device: torch.device) -> None:
        """Make a group of our own of the same workers, so that nobody else's collectives come between ours.

        On an accelerator none may: all that a device sends has one order, and so the group itself is in use.
        """
        self.workers: int = dist.get_world_size(group)
        self.worker: int = dist.get_rank(group)
        self.device = device
        if device.type != "cpu":
            self.group: dist.ProcessGroup = group
            return
        ranks = dist.get_process_group_ranks(group)
        everyone = len(ranks) == dist.get_world_size()
        own = dist.new_group(
            ranks,
            timeout=timeout_of(group),
            backend=dist.get_backend(group),
            use_local_synchronization=not everyone,
        )
        assert isinstance(own, dist.ProcessGroup)
        self.group = own
        # A group of some of the ranks is named after the groups alive: destroyed, its name would come again and meet
        # what it left in the store. It stays until the user destroys all groups.
        if everyone:
            self._let_go = weakref.finalize(self, _destroy, own)
            self._let_go.atexit = False

    @property
    def place(self) -> int:
        return self.worker

    def direct(self, scheme: Scheme) -> Direct | None:
        """On the model's own group, as plain DDP: all is started by the training thread, in its order.

        On an accelerator waiting is the device's, and the lane does as well; what is brought to the CPU takes it, too.
        """
        if self._brought or self.device.type != "cpu":
            return None
        gloo = dist.get_backend(self.group) == "gloo"
        self._direct = Direct(self._beside, scheme, self.transport, self.group if gloo else None)
        return self._direct

    def relays(self, scheme: Scheme) -> bool:
        codec = innermost(scheme)
        if not isinstance(codec, Codec) or codec.grain is None:
            return False
        return self.route == "two-shot" or (self.route == "auto" and self.workers > 2)

    def agree(self, given: Mapping[str, str] | None) -> None:
        objects.agree(given and {**given, "link": str(self.link)}, self.group, self.device)

    def close(self) -> None:
        """Join the lane, then let go of its process group. Safe to call twice, and after the groups are destroyed."""
        if self.lane is not None:
            self.lane.close()
            self.lane = None
        if self._direct is not None:
            self._direct.close()
            self._direct = None
        if self._let_go is not None:
            self._let_go()

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state:
            raise ValueError(f"the state holds {', '.join(state)}, which only a parameter server can take")

    def deal(self, tensors: Mapping[str, Tensor], exact: Collection[str], scheme: Scheme) -> Sequence[parts.Piece]:
        return parts.undivided(tensors)

    def hold(self, bucket: Bucket, converse: Callable[[Bucket], Conversation]) -> Rounds:
        return drive(converse(bucket), self, bucket.scratch)

    def answer(self, request: Sum | Max | Mean, workers: int, scratch: Scratch) -> Rounds:
        if isinstance(request, Mean):
            route = arithmetic.route_for(request, self.route, self.workers, self.link)
            return (yield from (self._gather if route == "gather" else self._two_shot)(request))
        if isinstance(request, Max):
            yield [AllReduced(request.tensor, self.group, dist.ReduceOp.MAX)]
            return request.tensor
        if request.width is None:
            yield [AllReduced(request.tensor, self.group)]
            return request.tensor
        return (yield from self._integer_sum(request, scratch))

    def _gather(self, mean: Mean) -> Rounds:
        codec, bucket, level = mean.codec, mean.bucket, mean.level
        size = arithmetic.aligned(codec.nbytes(bucket.layout, level))
        own = _bytes(bucket, "payload", size)
        all_ = _bytes(bucket, "gathered", size * self.workers)
        codec.encode_padded(bucket, level, own, mean.encode)
        yield [AllGathered(all_, own, self.group)]
        share = 1.0 / self.workers
        bucket.verdict.add(arithmetic.add_payloads(codec, bucket.layout, level, all_.split(size), share, bucket.target))
        return bucket.target

    def _two_shot(self, mean: Mean) -> Rounds:
        """1. encode each part; 2. all-to-all; 3. the owner adds and encodes again; 4. all-gather; 5. decode."""
        codec, bucket, level = mean.codec, mean.bucket, mean.level
        assert codec.grain is not None
        sizes = arithmetic.part_bytes(codec, bucket.layout, self.workers, level)
        outgoing = _bytes(bucket, "payload", sum(sizes))
        arithmetic.encode_parts(mean, self.workers, outgoing)
        mine, size = bucket.part(self.worker, self.workers, codec.grain), sizes[self.worker]
        incoming = _bytes(bucket, "incoming", size * self.workers)
        yield [AllToAll(incoming, outgoing, [size] * self.workers, sizes, self.worker, self.group)]

        again = _bytes(bucket, "again", max(sizes))
        arithmetic.relay(mean, mine, incoming.split(size) if size else [], again[:size])
        again[size:].zero_()
        all_ = _bytes(bucket, "gathered", max(sizes) * self.workers)
        yield [AllGathered(all_, again, self.group)]

        bucket.verdict.add(arithmetic.decode_parts(mean, self.workers, all_))
        return bucket.target

    def _integer_sum(self, request: Sum, scratch: Scratch) -> Rounds:
        tensor, width = request.tensor, request.width
        assert width is not None
        places = arithmetic.integer_parts(tensor.numel(), self.workers)
        sizes = [arithmetic.packed_size(stop - start, width) for start, stop in places]
        outgoing = scratch.take("integers-out", sum(sizes), torch.uint8, tensor.device)
        for (start, stop), data in zip(places, outgoing.split(sizes), strict=True):
            arithmetic.pack_padded(tensor[start:stop], width, data)
        (start, stop), size = places[self.worker], sizes[self.worker]
        incoming = scratch.take("integers-in", size * self.workers, torch.uint8, tensor.device)
        yield [AllToAll(incoming, outgoing, [size] * self.workers, sizes, self.worker, self.group)]

        arithmetic.add_integers(incoming.split(size) if size else [], width, request.saturate, tensor[start:stop])
        again = scratch.take("integers-again", max(sizes), torch.uint8, tensor.device)
        arithmetic.pack_padded(tensor[start:stop], width, again)
        all_ = scratch.take("integers-all", max(sizes) * self.workers, torch.uint8, tensor.device)
        yield [AllGathered(all_, again, self.group)]

        for (start, stop), data in zip(places, all_.split(max(sizes)), strict=True):
            arithmetic.add_integers([data], width, False, tensor[start:stop])
        return tensor


def _bytes(bucket: Bucket, name: str, size: int) -> Tensor:
    return bucket.scratch.take(name, size, torch.uint8, bucket.flat.device)


def _destroy(group: dist.ProcessGroup) -> None:
    with suppress(ValueError, AssertionError):  # destroyed already
        dist.destroy_process_group(group)


def workplace(group: dist.ProcessGroup, scheme: Scheme, device: torch.device) -> torch.device:
    """Where the conversations about a device's buckets are held. ValueError for a scheme that cannot be held there."""
    if not streams(group, device):
        return CPU
    if scheme.sized_by_numbers:
        raise ValueError(
            f"{scheme.spec}: its messages are as long as the gradients have it, and nobody waits for {device} to know "
            "that; accepted: bits= instead of budget=, or a group of gloo, whose buckets come to the CPU"
        )
    return device


def streams(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether the group's collectives of such tensors are a stream's business. gloo's are not: it has CPU memory."""
    return device.type == "cuda" and isinstance(group._get_backend(device), getattr(dist, "ProcessGroupNCCL", ()))
