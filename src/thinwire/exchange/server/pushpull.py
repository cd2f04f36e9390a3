"""Asynchronous training, the workers' side: gradients up, weights down. See `weights` for the servers' side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from thinwire.core.bucket import Bucket, Scratch
from thinwire.core.feedback import compensated
from thinwire.core.layout import Layout
from thinwire.core.memory import Memory
from thinwire.core.partition import small
from thinwire.core.scheme import Codec
from thinwire.exchange.lane import Landings
from thinwire.exchange.server import frames
from thinwire.exchange.server.client import ParameterServer
from thinwire.exchange.server.frames import Kind
from thinwire.exchange.server.operations import DTYPES
from thinwire.exchange.server.weights import Gradient
from thinwire.schemes.cast import FP32


@dataclass(frozen=True)
class _Section:
    """The parameters of one server that one codec encodes."""

    codec: Codec
    names: tuple[str, ...]
    layout: Layout
    flat: Tensor
    remembers: bool  # what its messages lost


class PushPull:
    """One worker's gradients and weights, divided among the servers by size. Runs in the training thread, no lane.

    Those of a GPU are copied by itself from and to pinned memory. Gradients are waited for once, when all are on their
    way; weights not at all, but before their memory is used again.
    """

    def __init__(
        self,
        exchange: ParameterServer,
        parameters: Sequence[tuple[str, nn.Parameter]],
        codec: Codec,
        down: str,
        seed: int,
    ) -> None:
        self.parameters: list[tuple[str, nn.Parameter]] = list(parameters)
        self.memory: Memory = Memory()
        self.step: int = 0
        self._exchange = exchange
        self._by_name = dict(self.parameters)
        self._codec, self._seed = codec, seed
        self._scratch = Scratch()
        self._landings = Landings({parameter.device for _, parameter in self.parameters})
        self._delivered = self._landings.mark()
        self._pinned = any(parameter.is_cuda for _, parameter in self.parameters)
        exact = FP32()
        layout = Layout.of([(name, tuple(parameter.shape)) for name, parameter in self.parameters])
        self._servers: list[tuple[int, list[_Section], Gradient]] = []
        for shard in exchange.owners.shards(layout, exact.grain):
            segments = shard.tensors.layout.segments
            few = [s.name for s in segments if small(s.shape, s.numel)]
            rest = [s.name for s in segments if s.name not in few]
            sections = [self._section(each, names) for each, names in ((codec, rest), (exact, few)) if names]
            operation = Gradient(tuple((section.codec, section.layout) for section in sections), down)
            self._servers.append((shard.server, sections, operation))

    def _section(self, codec: Codec, names: list[str]) -> _Section:
        layout = Layout.of([(name, tuple(self._by_name[name].shape)) for name in names])
        remembers = codec.wants_memory(torch.float32)
        if remembers:
            for name in names:
                self.memory.add(name, {"residual": torch.zeros(self._by_name[name].shape, device="cpu")})
        flat = torch.zeros(layout.numel, device="cpu", pin_memory=self._pinned)
        return _Section(codec, tuple(names), layout, flat, remembers)

    def pull(self, *, first: bool = False) -> None:
        """Take the servers' weights; with `first`, the first worker offers its own as the ones to begin with."""
        offers = first and self._exchange.worker == 0
        if offers:
            self._fetch(lambda parameter: parameter.detach())
        messages = []
        for _, sections, operation in self._servers:
            offered = torch.empty(0, dtype=torch.float32, device="cpu")
            if offers:
                offered = torch.cat([section.flat for section in sections])
            messages.append((operation, frames.as_bytes(offered)))
        self._exchange_weights(Kind.WEIGHTS, messages)

    def trade(self) -> None:
        """Push the gradient, pull the weights."""
        level, messages = self._codec.level, []
        self._fetch(lambda parameter: parameter.grad)
        for server, sections, operation in self._servers:
            data = self._scratch.take(f"up-{server}", operation.up_bytes(level), torch.uint8)
            for section, part in zip(sections, data.split(operation.section_bytes(level)), strict=True):
                self._encode(section, level, part)
            messages.append((operation, data))
        self._exchange_weights(Kind.GRADIENT, messages)
        self.step += 1

    def _fetch(self, values: Callable[[nn.Parameter], Tensor | None]) -> None:
        """Bring what parameters have, 0 where that is nothing, to the sections' memory."""
        for section in (section for _, sections, _ in self._servers for section in sections):
            for segment in section.layout.segments:
                value, target = values(self._by_name[segment.name]), section.flat[segment.start : segment.stop]
                target.zero_() if value is None else target.copy_(value.reshape(-1), non_blocking=True)
        self._landings.wait(self._landings.mark())

    def _encode(self, section: _Section, level: float, out: Tensor) -> None:
        exchange = self._exchange
        bucket = Bucket(
            section.flat, section.layout, exchange.workers, exchange.worker, self.step, self._seed, None, self._scratch
        )
        if section.remembers:
            compensated(section.codec, bucket, self.memory.flat("residual", section.layout), level, out)
        else:
            section.codec.encode_padded(bucket, level, out)

    def _exchange_weights(self, kind: Kind, messages: list[tuple[Gradient, Tensor]]) -> None:
        level = self._codec.level
        asks, answers = [], []
        self._landings.wait(self._delivered)
        for (server, _, operation), (_, data) in zip(self._servers, messages, strict=True):
            size = operation.down_bytes(level)
            answer = self._scratch.take(f"down-{server}", size, torch.uint8, pinned=self._pinned)
            asks.append((server, operation, data, answer))
            answers.append(answer)
        self._exchange.trade(kind, asks, self.step, level)
        for (_, sections, operation), answer in zip(self._servers, answers, strict=True):
            weights, at = answer.view(DTYPES[operation.down]), 0
            for section in sections:
                for segment in section.layout.segments:
                    parameter = self._by_name[segment.name]
                    _deliver(weights[at + segment.start : at + segment.stop].view(parameter.shape), parameter)
                at += section.layout.numel
        self._delivered = self._landings.mark()


def _deliver(values: Tensor, parameter: nn.Parameter) -> None:
    if values.dtype is not parameter.dtype:
        values = values.to(parameter.device, non_blocking=True)  # first as it is: to convert on the way would wait
    parameter.data.copy_(values, non_blocking=True)
