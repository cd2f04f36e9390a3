"""What the tests of framework adapters share: a rank as a launcher starts it, a model, and the loop by hand."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw
from helpers.models import batch, digest, mlp


def as_launched() -> None:
    """What torchrun tells a rank."""
    rank, ranks = str(dist.get_rank()), str(dist.get_world_size())
    os.environ.update(RANK=rank, WORLD_SIZE=ranks)  # which Lightning takes away
    os.environ.update(LOCAL_RANK=rank, LOCAL_WORLD_SIZE=ranks, NODE_RANK="0", MASTER_ADDR="127.0.0.1", MASTER_PORT="0")
    os.environ.update(HF_HUB_OFFLINE="1", ACCELERATE_USE_CPU="true", TRANSFORMERS_VERBOSITY="error")


class Net(nn.Module):
    """The small model, as a part of another."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)


def loss_of(model: nn.Module, step: int) -> Tensor:
    x, y = batch(dist.get_rank(), step)
    return nn.functional.mse_loss(model(x), y)


def by_hand(spec: str, steps: int, *, accumulate: int = 1) -> list[Tensor]:
    """The weights after a DDP loop that nobody's framework has written."""
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with tw.attach(model, spec):
        for step in range(steps):
            optimizer.zero_grad()
            with model.no_sync():
                for micro in range(accumulate - 1):
                    (loss_of(model, accumulate * step + micro) / accumulate).backward()
            (loss_of(model, accumulate * step + accumulate - 1) / accumulate).backward()
            optimizer.step()
    return digest(model)


def residuals(wire) -> dict[str, Tensor]:
    return {name: tensor.clone() for (name, key), tensor in wire.memory.items() if key == "residual"}
