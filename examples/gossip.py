"""Decentralised training: no server, no all-reduce; every process talks to its two neighbours on a ring.

    torchrun --nproc-per-node 4 examples/gossip.py
    torchrun --nproc-per-node 4 examples/gossip.py --mixer dpsgd          # exact gossip, to compare

Each process learns from data of its own, a made-up classification; the mean of all replicas is evaluated.
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn

from thinwire.gossip import Gossip, graphs


def examples(count: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points in 64 dimensions; the class is the largest of ten fixed random projections."""
    classes = torch.randn(64, 10, generator=torch.Generator().manual_seed(0))
    x = torch.randn(count, 64, generator=torch.Generator().manual_seed(seed))
    return x, (x @ classes).argmax(1)


def main() -> None:
    arguments = argparse.ArgumentParser(description="Train by gossip on a ring, under torchrun.")
    arguments.add_argument("--mixer", default="powergossip", help="dpsgd, powergossip(iterations=2), ...")
    arguments.add_argument("--steps", type=int, default=300)
    options = arguments.parse_args()

    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9)
    x, y = examples(4000, seed=1 + rank)

    with Gossip(model, graph=graphs.ring(ranks), mixer=options.mixer) as gossip:
        for step in range(options.steps):
            chosen = torch.randint(len(x), (32,), generator=torch.Generator().manual_seed(step))
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x[chosen]), y[chosen])
            gossip.mix_begin()  # neighbours talk while backward computes
            loss.backward()
            gossip.mix_end()
            optimizer.step()
            if step % 100 == 99:
                distance = gossip.consensus()
                if rank == 0:
                    print(f"step {step + 1}: loss {loss:.3f}, distance between replicas {distance:.3f}")

        stats = gossip.stats()
        with gossip.average():
            test_x, test_y = examples(2000, seed=10_000)
            accuracy = (model(test_x).argmax(1) == test_y).float().mean()
        if rank == 0:
            less = stats["bytes_dense"] / stats["bytes_sent"]
            print(f"the mean of {ranks} replicas is right in {accuracy:.1%} of cases")
            print(f"sent {stats['bytes_sent'] / 1e6:.2f} MB, {less:.0f} times less than exact gossip")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
