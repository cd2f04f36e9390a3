"""Made-up gradients, and how far an estimate of one is from it."""

import torch
from torch import Tensor


def gradient(*shape, seed=0, dtype=torch.float32) -> Tensor:
    """Laplace-like with a few large entries: what gradients look like."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.empty(shape).exponential_(generator=generator)
    return (x * torch.empty(shape).uniform_(-1, 1, generator=generator)).to(dtype)


def error(estimate, exact) -> float:
    return float((estimate - exact).norm() ** 2 / exact.norm() ** 2)
