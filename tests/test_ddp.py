"""attach() under DistributedDataParallel on gloo ranks."""

import torch
import torch.distributed as dist
from models import batch, digest, mlp
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from world import run_world

import thinwire as tw


def train(model, steps, wire=None, dtype=torch.float32, first=0):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(first, first + steps):
        x, y = batch(dist.get_rank(), step, dtype)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return digest(model)


def same(results):
    return all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


def _train_attached(spec, dtype):
    model = DDP(mlp(dtype=dtype), bucket_cap_mb=0.01)
    with tw.attach(model, spec):
        return train(model, 20, dtype=dtype)


def test_replicas_are_equal():
    for spec in ("fp32","fp16","bf16","qsgd(bits=4,block=64)"):
        for dt in (torch.float32, torch.bfloat16, torch.float16,torch.float64):
            assert same(run_world(_train_attached, 3, spec, dt)), (spec, dt)
