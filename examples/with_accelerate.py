"""Accelerate's prepared loop with compressed gradients; its save_state and load_state resume to the bit.

torchrun --nproc-per-node 2 examples/with_accelerate.py
torchrun --nproc-per-node 2 examples/with_accelerate.py --scheme "topk(density=0.01)" --checkpoint /tmp/run
"""

import argparse
from pathlib import Path

import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from thinwire.integrations.accelerate import attach


def examples() -> TensorDataset:
    x = torch.randn(6400, 64, generator=torch.Generator().manual_seed(0))
    return TensorDataset(x, (x @ torch.randn(64, 10, generator=torch.Generator().manual_seed(1))).argmax(1))


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    options.add_argument("--scheme", default="qsgd(bits=4)", help="what travels (see `thinwire list`)")
    options.add_argument("--steps", type=int, default=100, help="at most 100, an epoch")
    options.add_argument("--checkpoint", type=Path, help="a folder to save to at the end, and to resume from")
    given = options.parse_args()

    accelerator = Accelerator(cpu=True)
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 10))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, data = accelerator.prepare(net, optimizer, DataLoader(examples(), batch_size=32, shuffle=True))
    wire = attach(accelerator, model, given.scheme)  # the one line that is new
    if given.checkpoint and given.checkpoint.exists():
        accelerator.load_state(str(given.checkpoint))

    for number, (x, y) in enumerate(data):
        if number == given.steps:
            break
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        if (number + 1) % 20 == 0:
            accelerator.print(f"step {int(wire.stats()['steps']):4d}  loss {loss.item():.3f}")

    if given.checkpoint:
        accelerator.save_state(str(given.checkpoint))
    stats = wire.stats()
    accelerator.print(f"gave {stats['bytes_given'] / stats['bytes_dense']:.0%} of the bytes that plain DDP gives")
    wire.close()
    accelerator.end_training()


if __name__ == "__main__":
    main()
