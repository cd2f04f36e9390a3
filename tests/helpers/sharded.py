"""A small transformer for FSDP2, wrapped block by block, with rows that no number of shards divides."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

WORDS, WIDTH, LENGTH, BATCH = 51, 32, 6, 4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 63), nn.GELU(), nn.Linear(63, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (each.view(*x.shape[:2], 2, -1).transpose(1, 2) for each in self.qkv(self.norm(x)).chunk(3, -1))
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(x)


class Transformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.extra = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: Tensor, *, extra: bool = True) -> Tensor:
        x = self.words(words)
        for block in self.blocks:
            x = block(x)
        return self.head((x + self.extra(x) if extra else x).flatten(0, 1))


def transformer() -> Transformer:
    torch.manual_seed(0)
    return Transformer()


def loss_of(model: nn.Module, step: int, rank: int, *, extra: bool = True) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * step + rank)
    words = torch.randint(WORDS, (BATCH, LENGTH), generator=generator)
    return nn.functional.cross_entropy(model(words, extra=extra).float(), (words * 7 % WORDS).flatten())


def meshes(shards: int) -> DeviceMesh:
    """(replicate, shard)"""
    return init_device_mesh("cpu", (dist.get_world_size() // shards, shards), mesh_dim_names=("replicate", "shard"))


def sharded(mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None) -> Transformer:
    model, policy = transformer(), policy or MixedPrecisionPolicy()
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    return model


def whole(model: nn.Module) -> dict[str, Tensor]:
    """The weights, of all shards."""
    return {name: parameter.full_tensor().detach().clone() for name, parameter in model.named_parameters()}
