"""The workers' gradients of one step: which tensors get compressed, their mean, and how far an estimate is from it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from thinwire.core.partition import small

Named = dict[str, Tensor]


def compressed(tensor: Tensor) -> bool:
    """As `attach` does by default: small and 1-d tensors travel exact."""
    return not small(tensor.shape, tensor.numel())


def mean_of(workers: Sequence[Named]) -> Named:
    return {name: torch.stack([gradient[name] for gradient in workers]).mean(0) for name in workers[0]}


def vnmse(estimate: Named, exact: Named) -> float:
    """|X - Xhat|^2 / |X|^2, of the tensors that the estimate has."""
    lost = sum((tensor - exact[name]).double().square().sum().item() for name, tensor in estimate.items())
    return lost / sum(exact[name].double().square().sum().item() for name in estimate)
