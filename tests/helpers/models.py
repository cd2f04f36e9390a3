"""Small models and data for tests, the same in every process."""

import torch
from torch import Tensor, nn


def mlp(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """About 6,000 weights in tensors on both sides of the exemption rule."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(20, 64), nn.Tanh(), nn.Linear(64, 60), nn.Tanh(), nn.Linear(60, 7)
    ).to(dtype)  # fmt: skip


def batch(rank: int, step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rank + step)
    x = torch.randn(16, 20, generator=generator)
    return x.to(dtype), x[:, :7].tanh().to(dtype)


def digest(model: nn.Module) -> list[Tensor]:
    """The weights, copied, for comparison to the bit."""
    return [p.detach().clone() for p in model.parameters()]
