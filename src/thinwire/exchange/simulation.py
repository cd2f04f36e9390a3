"""Simulation: n virtual workers in one process, with the scheme code that runs on the network."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from thinwire.core.bucket import Bucket, Scratch
from thinwire.core.feedback import wrap
from thinwire.core.layout import Layout
from thinwire.core.memory import Memory
from thinwire.core.partition import Exempt, Partition, exempted, like
from thinwire.core.request import Answer, Max, Mean, Request, Sum
from thinwire.core.scheme import Scheme
from thinwire.core.warmup import warm_up
from thinwire.exchange import arithmetic
from thinwire.exchange.arithmetic import Link, Route
from thinwire.schemes import parse

Named = Mapping[str, Tensor]


class Simulation:
    """A group of virtual workers that hold conversations in lockstep.

    Every answer is computed once, by the arithmetic that the network's ranks use, so the result is what they would
    get, bit for bit; only float sums may differ, because an all-reduce adds in an order of its own.

    exempt: which tensors travel exact, as in `attach`; here none unless it is said.
    route, link: as in `AllReduce`.

    >>> group = tw.Simulation("fp16", workers=2)
    >>> group.reduce([torch.zeros(3), torch.ones(3)])
    tensor([0.5000, 0.5000, 0.5000])
    >>> group.bytes_sent  # what each of the two would have sent
    6.0
    """

    def __init__(
        self,
        scheme: str | Scheme,
        *,
        workers: int,
        feedback: str | bool = "auto",
        decay: float = 1.0,
        residual: str = "fp32",
        exempt: Exempt = (),
        route: Route = "auto",
        link: tuple[float, float] | None = None,
        warmup_steps: int = 0,
        warmup_level: float | None = None,
        seed: int = 0,
    ) -> None:
        if workers < 1:
            raise ValueError(f"workers must be at least 1, got {workers}")
        self.scheme: Scheme = wrap(warm_up(parse(scheme), warmup_steps, warmup_level), feedback, decay, residual)
        arithmetic.check_route(route, self.scheme)
        self.workers = workers
        self.route: Route = route
        self.link: Link | None = arithmetic.link_of(link)
        self.seed = seed
        self.step: int = 0
        self.bytes_sent: float = 0.0  # per worker, all steps: what AllReduce would send, averaged over the workers
        self.memories: list[Memory] = [Memory() for _ in range(workers)]
        self._exempt = exempt
        self._exempted: dict[str, bool] = {}  # by name
        self._scratches = [Scratch() for _ in range(workers)]
        self._layout: Layout | None = None

    def reduce(self, tensors: Sequence[Tensor] | Sequence[Named], *, level: float | None = None) -> Any:
        """The mean of one tensor (or one dict of named tensors) per worker, as every worker gets it."""
        if len(tensors) != self.workers:
            raise ValueError(f"expected one tensor for each of {self.workers} workers, got {len(tensors)}")
        given = [t if isinstance(t, Mapping) else {"tensor": t} for t in tensors]
        layout = self._layout_of(given)
        self._meet(given[0])
        dtypes = {name: tensor.dtype for name, tensor in given[0].items()}
        dtype = functools.reduce(torch.promote_types, dtypes.values())
        buckets = [
            Bucket(
                torch.cat([named[name].detach().reshape(-1).to(dtype) for name in layout.names]),
                layout, self.workers, worker, self.step, self.seed, scratch=self._scratches[worker],
            )
            for worker, named in enumerate(given)
        ]  # fmt: skip
        scheme = Partition(self.scheme, frozenset(name for name in layout.names if self._exempted[name]))
        mean = self._converse(scheme, buckets, self.scheme.level if level is None else level)
        self.step += 1
        means = {s.name: mean[s.start : s.stop].view(s.shape).to(dtypes[s.name]) for s in layout.segments}
        return means if isinstance(tensors[0], Mapping) else means["tensor"]

    def _layout_of(self, given: Sequence[Named]) -> Layout:
        shapes = [(name, tuple(tensor.shape)) for name, tensor in given[0].items()]
        for worker, named in enumerate(given):
            if [(name, tuple(tensor.shape)) for name, tensor in named.items()] != shapes:
                raise ValueError(f"worker {worker} brings other names or shapes than worker 0")
        layout = Layout.of(shapes)
        if self._layout is None or self._layout.segments != layout.segments:
            self._layout = layout
        return self._layout

    def _meet(self, named: Named) -> None:
        """For names that were not here before: are they exempt, and if not, what is remembered of them."""
        for name, tensor in named.items():
            if name not in self._exempted:
                self._exempted[name] = exempted(self._exempt, self.scheme, name, tensor)
                for memory in self.memories if not self._exempted[name] else ():
                    memory.add(name, self.scheme.init(name, like(tensor, self.scheme, tensor.device), self.seed))

    def _converse(self, scheme: Scheme, buckets: list[Bucket], level: float) -> Tensor:
        conversations = [
            scheme.converse(bucket, memory, level) for bucket, memory in zip(buckets, self.memories, strict=True)
        ]
        answers: list[Any] = [None] * self.workers
        while True:
            requests, means = [], []
            for conversation, answer in zip(conversations, answers, strict=True):
                try:
                    requests.append(conversation.send(answer))
                except StopIteration as stop:
                    means.append(stop.value)
            if means:
                assert not requests, "some workers ended the conversation before others"
                return means[0]
            answer = self._answer(requests)
            # A worker may write over its answer, so each gets its own.
            answers = [answer, *(_copy(answer) for _ in range(self.workers - 1))]

    def _answer(self, requests: Sequence[Any]) -> Answer:
        first: Request = requests[0]
        assert all(type(request) is type(first) for request in requests), "workers ask different things"
        if isinstance(first, tuple):
            return tuple(self._answer(each) for each in zip(*requests, strict=True))
        if isinstance(first, Mean):
            return self._mean(requests)
        if isinstance(first, Max):
            self._count_all_reduce(first.tensor)
            return torch.stack([request.tensor for request in requests]).amax(0)
        if first.width is not None:
            return self._integer_sum(requests)
        self._count_all_reduce(first.tensor)
        total = first.tensor.clone()
        for request in requests[1:]:
            total += request.tensor
        return total

    def _mean(self, requests: Sequence[Mean]) -> Tensor:
        first = requests[0]
        codec, layout, level = first.codec, first.bucket.layout, first.level
        out = torch.zeros_like(first.bucket.flat)
        if arithmetic.route_for(first, self.route, self.workers, self.link) == "gather":
            size = arithmetic.aligned(codec.nbytes(layout, level))
            datas = [self._buffer(request, "gather", size) for request in requests]
            for request, data in zip(requests, datas, strict=True):
                codec.encode_padded(request.bucket, level, data, request.encode)
            arithmetic.add_payloads(codec, layout, level, datas, 1.0 / self.workers, out)
            self.bytes_sent += (self.workers - 1) * size
            return out

        assert codec.grain is not None
        parts = [request.bucket.split(self.workers, codec.grain) for request in requests]
        sizes = arithmetic.part_bytes(codec, layout, self.workers, level)
        for owner in range(self.workers):
            datas = []
            for request, pieces in zip(requests, parts, strict=True):
                data = self._buffer(request, "gather", sizes[owner])
                codec.encode_padded(pieces[owner], level, data, request.encode)
                datas.append(data)
            part = parts[owner][owner]
            again = torch.empty(sizes[owner], dtype=torch.uint8, device=out.device)
            arithmetic.relay(requests[owner], part, datas, again)
            start, stop = layout.spans(self.workers, codec.grain)[owner]
            arithmetic.add_payloads(codec, part.layout, level, [again], 1.0, out[start:stop])
        self.bytes_sent += (sum(sizes) - sum(sizes) / self.workers) + (self.workers - 1) * max(sizes)
        return out

    def _integer_sum(self, requests: Sequence[Sum]) -> Tensor:
        width, saturate = requests[0].width, requests[0].saturate
        assert width is not None
        out = torch.empty_like(requests[0].tensor)
        sizes = []
        for start, stop in arithmetic.integer_parts(out.numel(), self.workers):
            size = arithmetic.packed_size(stop - start, width)
            datas = []
            for request in requests:
                data = torch.empty(size, dtype=torch.uint8, device=out.device)
                arithmetic.pack_padded(request.tensor[start:stop], width, data)
                datas.append(data)
            arithmetic.add_integers(datas, width, saturate, out[start:stop])
            sizes.append(size)
        self.bytes_sent += sum(sizes) - sum(sizes) / self.workers + (self.workers - 1) * max(sizes)
        return out

    def _buffer(self, request: Mean, name: str, size: int) -> Tensor:
        return request.bucket.scratch.take(name, size, torch.uint8, request.bucket.flat.device)

    def _count_all_reduce(self, tensor: Tensor) -> None:
        self.bytes_sent += 2 * (self.workers - 1) * tensor.numel() * tensor.element_size() / self.workers


def _copy(answer: Answer) -> Answer:
    return tuple(_copy(each) for each in answer) if isinstance(answer, tuple) else answer.clone()
