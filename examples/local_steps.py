"""Local steps: every worker trains on its own, and now and then they agree, in a few bits. With a checkpoint.

torchrun --nproc-per-node 2 examples/local_steps.py
torchrun --nproc-per-node 2 examples/local_steps.py --every 50 --scheme "qsgd(bits=2)" --checkpoint /tmp/run

With --late the first rank serves, and any other may be killed and started again, by the same command:

export WORLD_SIZE=4 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500
for rank in 0 1 2 3; do RANK=$rank python examples/local_steps.py --late --steps 20000 & done
"""

import argparse
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--every", type=int, default=10, help="steps between two exchanges")
    options.add_argument("--scheme", default="qsgd(bits=4)", help="how weight changes travel (see `thinwire list`)")
    options.add_argument("--outer", default="average", help="moves the common weights")
    options.add_argument("--steps", type=int, default=100)
    options.add_argument("--late", action="store_true", help="workers may come late, or again: not under torchrun")
    options.add_argument("--checkpoint", type=Path, help="a folder to save to at the end, and to resume from")
    given = options.parse_args()

    exchange = None
    if given.late:
        role = tw.join(late=True)
        if role.exchange is None:
            role.serve()
            return
        exchange, rank = role.exchange, role.exchange.worker
    else:
        dist.init_process_group("gloo")
        rank = dist.get_rank()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))  # no DistributedDataParallel
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    local = tw.LocalSteps(
        net, optimizer, every=given.every, scheme=given.scheme, outer=given.outer, exchange=exchange
    )  # fmt: skip

    file = given.checkpoint / f"rank{rank}.pt" if given.checkpoint else None
    last = given.steps
    if local.steps:
        print(f"worker {rank} goes on from step {local.steps}")
    elif file and file.exists():
        state = torch.load(file, weights_only=True)
        net.load_state_dict(state["net"])
        optimizer.load_state_dict(state["optimizer"])
        local.load_state_dict(state["local"])
        last = local.steps + given.steps

    teacher = torch.randn(64, 10, generator=torch.Generator().manual_seed(1))
    unseen = torch.randn(1000, 64, generator=torch.Generator().manual_seed(2))
    for step in range(local.steps, last):  # an ordinary loop
        x = torch.randn(32, 64, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = nn.functional.cross_entropy(net(x), (x @ teacher).argmax(1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0 and (step + 1) % 20 == 0:
            print(f"step {step + 1:4d}  loss {loss.item():.3f}")

    with local.synchronised(), torch.no_grad():  # the weights that all have in common
        right = (net(unseen).argmax(1) == (unseen @ teacher).argmax(1)).float().mean().item()
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "local": local.state_dict()}
        torch.save(state, file)
    stats = local.stats()
    if rank == 0:
        share = stats["bytes_given"] / stats["bytes_dense"]
        print(f"{right:.1%} right; gave {share:.1%} of the bytes that plain DDP gives to its all-reduce")
    local.close()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
