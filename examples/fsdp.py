"""FSDP2 with compressed gradients: between the replicas of a sharded model, or between its shards.

torchrun --nproc-per-node 4 examples/fsdp.py                                  # 2 replicas of 2 shards each
torchrun --nproc-per-node 4 examples/fsdp.py --scheme "powersgd(factor_rank=4)"
torchrun --nproc-per-node 4 examples/fsdp.py --shards 4                       # one replica: a codec between shards
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import thinwire as tw

WORDS, WIDTH, LENGTH = 64, 128, 16


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.Sequential(
            *(nn.TransformerEncoderLayer(WIDTH, 4, 256, 0.0, batch_first=True) for _ in range(2))
        )
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.words(words)).flatten(0, 1))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--scheme", default="qsgd(bits=4)", help="what travels (see `thinwire list`)")
    options.add_argument("--shards", type=int, default=2, help="of each replica")
    options.add_argument("--steps", type=int, default=60)
    given = options.parse_args()

    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # replicas begin with the same weights
    names = ("replicate", "shard")
    mesh = init_device_mesh("cpu", (ranks // given.shards, given.shards), mesh_dim_names=names)
    model = Model()
    for block in model.blocks:
        fully_shard(block, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    replicas = mesh["replicate"].get_group() if ranks > given.shards else None
    wire = tw.attach(model, given.scheme, replicas=replicas)  # the one line that is new

    for step in range(given.steps):
        words = torch.randint(WORDS, (8, LENGTH), generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = nn.functional.cross_entropy(model(words), (7 * words % WORDS).flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1:4d}  loss {loss.item():.3f}")

    stats = wire.stats()
    if rank == 0:
        what = "its shard's mean over replicas" if replicas else "the reduce-scatter"
        print(f"{what} was given {stats['bytes_given'] / stats['bytes_dense']:.0%} of the bytes")
    wire.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
