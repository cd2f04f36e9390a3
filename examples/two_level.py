"""Two levels: exact inside a machine, where links are fast; compressed between machines, where they are thin.

torchrun --nproc-per-node 4 examples/two_level.py --per-machine 2                  # one machine plays two
torchrun --nnodes 2 --nproc-per-node 2 --rdzv-endpoint HOST examples/two_level.py   # on each of two machines
"""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--scheme", default="qsgd(bits=4)", help="what travels between machines (`thinwire list`)")
    options.add_argument("--inside", default="fp32", help="what travels inside: fp32, bf16, qsgd(bits=8) ...")
    options.add_argument("--per-machine", type=int, help="ranks of a machine, where torchrun does not know")
    options.add_argument("--steps", type=int, default=100)
    given = options.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    levels = tw.Hierarchical.of_nodes(given.per_machine, inside=given.inside)
    wire = tw.attach(model, given.scheme, exchange=levels)

    teacher = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    for step in range(given.steps):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1:4d}  loss {loss.item():.3f}")

    stats = wire.stats()
    sent = torch.tensor([stats["bytes_sent_inside"], stats["bytes_sent_outside"]]) / given.steps
    dist.all_reduce(sent)
    if rank == 0:
        print(f"all ranks sent in a step: {sent[0]:,.0f} bytes inside machines, {sent[1]:,.0f} between machines")
    wire.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
