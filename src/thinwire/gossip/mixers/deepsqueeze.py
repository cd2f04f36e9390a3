"""DeepSqueeze: compressed weights with error feedback (Tang et al., 2019)."""

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
class DeepSqueeze(Mixer):
    """The weights themselves, compressed; what a message lost is added to the next.

    1. v_i = x_i + r_i; C(v_i) goes to all neighbours; r_i = v_i - C(v_i).
    2. x_i += step sum_{j != i} w_ij (C(v_j) - C(v_i)).

    A message that is not finite changes neither a residual nor the weights at either end.
    """

    codec: Codec | str = "qsgd(bits=4)"  # C: any codec, as an object or as spec text
    step: float = 1.0  # must be tuned to the codec: the more it loses, the smaller the step that converges

    summary: ClassVar[str] = "compressed weights with error feedback, any codec; its step must be tuned"

    def __post_init__(self) -> None:
        object.__setattr__(self, "codec", schemes.codec(self.codec))
        if not 0 < self.step < 2:
            raise ValueError(f"deepsqueeze: step must be between 0 and 2, got {self.step!r}")

    def init(self, node: Node) -> dict[str, dict[str, Tensor]]:
        return {name: {"residual": torch.zeros_like(view)} for name, view in node.views.items()}

    def mix(self, node: Node, weights: Mapping[int, float]) -> Mixing:
        residual = node.own.flat("residual", node.layout)
        owed = node.flat + residual
        payload = encoded(schemes.codec(self.codec), owed, node)
        answers = yield dict.fromkeys(weights, payload)
        mine = decoded(schemes.codec(self.codec), payload, node)
        if not kernels.all_finite(mine):
            return
        residual.copy_(owed - mine)
        for j in (j for j in weights if j in answers):
            theirs = decoded(schemes.codec(self.codec), answers[j], node)
            if kernels.all_finite(theirs):
                node.flat.add_(theirs - mine, alpha=self.step * weights[j])
