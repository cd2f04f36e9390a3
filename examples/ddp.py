"""DistributedDataParallel with compressed gradients, and a checkpoint that resumes to the bit.

torchrun --nproc-per-node 2 examples/ddp.py
torchrun --nproc-per-node 2 examples/ddp.py --scheme "qsgd(bits=2)" --checkpoint /tmp/run
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import thinwire as tw


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--scheme", default="qsgd(bits=4)", help="what travels (see `thinwire list`)")
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--checkpoint", type=Path, help="a folder to save to at the end, and to resume from")
    given = options.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    wire = tw.attach(model, given.scheme)  # the one line that is new

    file = given.checkpoint / f"rank{rank}.pt" if given.checkpoint else None
    first = 0
    if file and file.exists():
        state = torch.load(file, weights_only=True)
        model.module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        wire.load_state_dict(state["wire"])
        first = state["step"]

    teacher = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    for step in range(first, first + given.steps):
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = nn.functional.cross_entropy(model(x), (x @ teacher).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1:4d}  loss {loss.item():.3f}")

    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        state = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "wire": wire.state_dict()}
        torch.save(state | {"step": first + given.steps}, file)
    stats = wire.stats()
    if rank == 0:
        share = stats["bytes_given"] / stats["bytes_dense"]
        print(f"gave {share:.0%} of the bytes that plain DDP gives to its all-reduce")
    wire.close()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
