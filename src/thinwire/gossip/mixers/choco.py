"""CHOCO-SGD: neighbours correct their estimates of each other (Koloskova, Stich and Jaggi, 2019)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from thinwire import kernels, schemes
from thinwire.core.scheme import Codec
from thinwire.gossip.compression import decoded, encoded
from thinwire.gossip.mixer import Mixer, Mixing
from thinwire.gossip.node import Node


@dataclass(frozen=True)
class Choco(Mixer):
    """Everybody follows everybody's estimate e, which moves only by what was sent.

    1. q_i = C(x_i - e_i) goes to all neighbours; all who hear it, and i itself, add it to their e_i.
    2. x_i += step sum_j w_ij (e_j - e_i).

    Estimates start at zero, or at the common weights where replicas start equal. A message that is not finite
    is ignored by all alike.

    Differs from the paper: each neighbour's estimate is kept by itself instead of their weighted sum. That
    costs a copy of the weights per neighbour, but a neighbour that dies can be left out.
    """

    codec: Codec | str = "qsgd(bits=4)"  # C: any codec, as an object or as spec text
    step: float = 1.0  # must be tuned to the codec: the more it loses, the smaller the step that converges

    varying: ClassVar[bool] = False  # a neighbour that missed a correction has another estimate for good
    summary: ClassVar[str] = "compressed corrections to shared estimates, any codec; its step must be tuned"

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec", schemes.codec(self.codec))
        if not 0 < self.step < 2:
            raise ValueError(f"choco: step must be between 0 and 2, got {self.step!r}")

    def init(self, node: Node) -> dict[str, dict[str, Tensor]]:
        return {name: {"estimate": torch.zeros_like(view)} for name, view in node.views.items()}

    def meet(self, node: Node, neighbour: int) -> dict[str, dict[str, Tensor]]:
        # Before the first message all estimates are the same, so one's own says where the neighbour's starts.
        return {name: {"estimate": node.own[name, "estimate"].clone()} for name in node.views}

    def start_equal(self, node: Node) -> None:
        node.own.flat("estimate", node.layout).copy_(node.flat)

    def mix(self, node: Node, weights: Mapping[int, float]) -> Mixing:
        own = node.own.flat("estimate", node.layout)
        payload = encoded(schemes.codec(self.codec), node.flat - own, node)
        answers = yield dict.fromkeys(weights, payload)
        said = decoded(schemes.codec(self.codec), payload, node)
        if kernels.all_finite(said):
            own.add_(said)
        for j in (j for j in weights if j in answers):
            theirs = node.edge(j).flat("estimate", node.layout)
            said = decoded(schemes.codec(self.codec), answers[j], node)
            if kernels.all_finite(said):
                theirs.add_(said)
            node.flat.add_(theirs - own, alpha=self.step * weights[j])
            node.rounds[j] += 1
