"""Mixer: what a gossip algorithm is to the rest of thinwire.

A mixer is a conversation, as a scheme is, with another question: it yields `{neighbour: payload}` and is sent
`{neighbour: payload}`. How the payloads travel (processes, or virtual workers in one) is not its business.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, TypeAlias

import torch
from torch import Tensor

from thinwire.core.spec import Specced

if TYPE_CHECKING:
    from thinwire.gossip.node import Node

Messages: TypeAlias = dict[int, Tensor]  # neighbour -> uint8, 1-d; both ends of an edge send equally many bytes
Mixing: TypeAlias = Generator[Messages, Messages, None]


@dataclass(frozen=True)
class Mixer(Specced, ABC):
    """One gossip step: neighbours talk, and `node.flat` moves towards their mean.

    Subclasses are frozen dataclasses whose fields are the options of the spec text; all that lasts lives in
    the node. Laws: both ends of an edge change by opposite amounts, so the mean of all replicas stays;
    nothing that is not finite passes from one replica to another, nor into what a node remembers.

    `varying`: whether neighbours may change from step to step.
    """

    varying: ClassVar[bool] = True
    summary: ClassVar[str]  # one line: what it is for

    def init(self, node: Node) -> dict[str, dict[str, Tensor]]:
        """{parameter: {key: tensor}}: what a node remembers of itself before the first step."""
        return {}

    def meet(self, node: Node, neighbour: int) -> dict[str, dict[str, Tensor]]:
        """{parameter: {key: tensor}}: what a node remembers of an edge when the edge is first used."""
        return {}

    def start_equal(self, node: Node) -> None:
        """Hear that all replicas equal `node.flat` now. Nothing is sent to learn it."""
        return None

    @abstractmethod
    def mix(self, node: Node, weights: Mapping[int, float]) -> Mixing:
        """Talk with the neighbours in `weights` and change `node.flat`.

        A neighbour that is missing from an answer is gone: its edge is left out from there on, which is the
        same as giving its weight to oneself. Every node yields equally often, also one without neighbours.
        """


def as_bytes(values: Tensor) -> Tensor:
    """The same memory as it travels."""
    return values.view(torch.uint8)


def as_values(payload: Tensor, like: Tensor) -> Tensor:
    """A neighbour's payload as numbers like those it was sent for."""
    if payload.numel() != like.numel() * like.element_size():
        raise ValueError(f"a neighbour sent {payload.numel()} bytes, expected {like.numel() * like.element_size()}")
    return payload.view(like.dtype)
