"""The synchronous parameter server, held against AllReduce."""

import torch
import torch.distributed as dist
from models import batch, digest, mlp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from world import run_world

import thinwire as tw


def train(model, wire, worker, steps=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(steps):
        x, y = batch(worker, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return digest(model), wire.stats()


def _all_reduce(spec, route):
    model = DDP(mlp(), bucket_cap_mb=0.01)
    with tw.attach(model, spec, exchange=tw.AllReduce(route=route)) as wire:
        return train(model, wire, dist.get_rank())


def _served(spec, servers, down):
    role = tw.join(servers=servers, down=down, timeout=30)
    if role.serves:
        return role.serve()
    model = DDP(mlp(), process_group=role.workers, bucket_cap_mb=0.01)
    with tw.attach(model, spec, exchange=role.exchange) as wire:
        return train(model, wire, role.exchange.worker)


def test_try():
    for spec in ("fp32", "qsgd(bits=4,block=64)"):
        a = run_world(_all_reduce, 2, spec, "gather")
        b = run_world(_served, 3, spec, 1, "fp32")
        print(b[0], b[1][1])
        for x, y in zip(a[0][0], b[1][0]):
            assert torch.equal(x, y)
        for x, y in zip(a[0][0], b[2][0]):
            assert torch.equal(x, y)
