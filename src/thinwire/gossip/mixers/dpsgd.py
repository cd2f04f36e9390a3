"""D-PSGD: exact gossip averaging, the baseline that compresses nothing (Lian et al., 2017)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch

from thinwire import kernels
from thinwire.gossip.mixer import Mixer, Mixing, as_bytes, as_values
from thinwire.gossip.node import Node


@dataclass(frozen=True)
class DPSGD(Mixer):
    """x_i = sum_j w_ij x_j.

    Written x_i += sum_{j != i} w_ij (x_j - x_i), so that replicas that are equal stay equal to the bit.
    """

    summary: ClassVar[str] = "all weights to every neighbour, exact; the reference"

    def mix(self, node: Node, weights: Mapping[int, float]) -> Mixing:
        answers = yield dict.fromkeys(weights, as_bytes(node.flat))
        mine = node.scratch.take("mine", node.flat.numel(), node.flat.dtype).copy_(node.flat)
        if not kernels.all_finite(mine):
            return
        difference = node.scratch.take("difference", node.flat.numel(), node.flat.dtype)
        for neighbour in (j for j in weights if j in answers):
            torch.sub(as_values(answers[neighbour], mine), mine, out=difference)
            if kernels.all_finite(difference):
                node.flat.add_(difference, alpha=weights[neighbour])
