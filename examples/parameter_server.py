"""Training on a parameter server, in one command:

    torchrun --nproc-per-node 4 examples/parameter_server.py
    torchrun --nproc-per-node 4 examples/parameter_server.py --controller mqgrad
    torchrun --nproc-per-node 4 --max-restarts 2 examples/parameter_server.py --checkpoints /tmp/run --die-at 60
    torchrun --nproc-per-node 4 examples/parameter_server.py --staleness 4 --slow

The first rank serves, the others train. With --checkpoints, a group that torchrun restarts goes on from the last
checkpoint. With --staleness, training is asynchronous; --slow makes one worker four times slower than the others.
"""

from __future__ import annotations

import argparse
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10))


def batch(worker: int, step: int) -> tuple[Tensor, Tensor]:
    """Ten noisy clusters: every worker and step has its own examples."""
    generator = torch.Generator().manual_seed(1_000_003 * worker + step)
    labels = torch.randint(10, (64,), generator=generator)
    centres = torch.randn(10, 64, generator=torch.Generator().manual_seed(7))
    return centres[labels] + 1.5 * torch.randn(64, 64, generator=generator), labels


def accuracy(net: nn.Module) -> float:
    with torch.no_grad():
        scores = [(net(x).argmax(1) == y).float().mean() for x, y in (batch(1000, n) for n in range(10))]
    return float(torch.stack(scores).mean())


def synchronous(role: tw.Role, options: argparse.Namespace) -> None:
    assert role.exchange is not None
    worker = role.exchange.worker
    model = DDP(network(), process_group=role.workers)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    path = options.checkpoints / f"worker{worker}.pt" if options.checkpoints else None
    with tw.attach(model, options.scheme, exchange=role.exchange, controller=options.controller) as wire:
        first = 0
        if path and path.exists():
            saved = torch.load(path, weights_only=True)
            model.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
            wire.load_state_dict(saved["wire"])
            first = saved["step"]
        for step in range(first, options.steps):
            if step == options.die_at and first == 0 and worker == 0:
                os._exit(1)
            x, y = batch(worker, step)
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(x), y)
            loss.backward()
            optimizer.step()
            wire.observe(loss)
            if path and (step + 1) % 25 == 0:
                saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "wire": wire.state_dict()}
                torch.save(saved | {"step": step + 1}, path)
        stats = wire.stats()
    if worker == 0:
        began = f"from step {first}, " if first else ""
        print(
            f"{began}{options.steps} steps with {stats['workers']:.0f} workers: accuracy {accuracy(model.module):.3f}, "
            f"sent {stats['bytes_sent'] / 1e6:.1f} MB and received {stats['bytes_received'] / 1e6:.1f} MB per worker "
            f"where plain DDP would send {stats['bytes_dense'] / 1e6:.1f} MB; level {stats['level']:g}"
        )


def asynchronous(role: tw.Role, options: argparse.Namespace) -> None:
    assert role.exchange is not None
    worker, net = role.exchange.worker, network()
    optimizer = tw.ServerOptimizer(net, options.scheme, role=role)
    began, step = time.perf_counter(), 0
    while time.perf_counter() - began < options.seconds:
        x, y = batch(worker, step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        time.sleep(0.08 if options.slow and worker == 1 else 0.02)  # stands for the computing of a larger model
        optimizer.step()
        step += 1
    stats = optimizer.stats()
    optimizer.close()
    print(f"worker {worker}: {stats['steps']:.0f} gradients in {options.seconds:g} s, accuracy {accuracy(net):.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--servers", type=int, default=1)
    parser.add_argument("--scheme", default="qsgd(bits=4)")
    parser.add_argument("--down", default="same", help="how means come back: same, fp16, fp32, qsgd(bits=8) ...")
    parser.add_argument("--controller", help="who sets the level, such as mqgrad")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--checkpoints", type=Path, help="folder to save to and resume from")
    parser.add_argument("--die-at", type=int, help="one worker dies at this step, once, to see the restart")
    parser.add_argument("--staleness", type=int, help="asynchronous: how many steps workers may run ahead")
    parser.add_argument("--slow", action="store_true", help="asynchronous: one worker is four times slower")
    parser.add_argument("--seconds", type=float, default=10.0, help="asynchronous: how long to train")
    options = parser.parse_args()
    if options.checkpoints:
        options.checkpoints.mkdir(parents=True, exist_ok=True)

    torch.set_num_threads(1)
    # A group that torchrun restarts finds the addresses of the dead one in the store (seen with PyTorch 2.13 and gloo);
    # a prefix for every attempt keeps them apart.
    store, rank, world_size = next(dist.rendezvous("env://"))
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    dist.init_process_group(
        "gloo", store=dist.PrefixStore(f"attempt{attempt}", store), rank=rank, world_size=world_size
    )
    role = tw.join(servers=options.servers, down=options.down, timeout_seconds=60, on_failure="stop")
    if role.serves and options.staleness is None:
        role.serve()
    elif role.serves:
        totals = role.serve(
            optimizer=lambda weights: torch.optim.SGD(weights, lr=0.1, momentum=0.9), staleness=options.staleness
        )
        print(f"server: {totals['steps']:.0f} steps, no gradient older than {totals['stalest']:.0f} steps")
    elif options.staleness is None:
        synchronous(role, options)
    else:
        asynchronous(role, options)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
