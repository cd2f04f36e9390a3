"""Short training runs on the small models, and the comparison of what came out."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from helpers.models import batch, digest

MANY_BUCKETS = 0.01  # MB: several buckets even for these small models


def train(model, steps, *, worker=None, dtype=torch.float32, first=0, accumulate=1) -> list[Tensor]:
    """The weights after `steps` on this worker's batches; `worker` is the rank unless it is given."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(first, first + steps):
        optimizer.zero_grad()
        for micro in range(accumulate - 1):
            with model.no_sync():
                loss_of(model, step + 100 * (micro + 1), dtype, worker).backward()
        loss_of(model, step, dtype, worker).backward()
        optimizer.step()
    return digest(model)


def loss_of(model, step, dtype=torch.float32, worker=None) -> Tensor:
    x, y = batch(dist.get_rank() if worker is None else worker, step, dtype)
    return nn.functional.mse_loss(model(x), y)


def assert_equal(a, b):
    assert len(a) == len(b)
    for mine, theirs in zip(a, b, strict=True):
        assert torch.equal(mine, theirs)


def assert_replicas_equal(results):
    for other in results[1:]:
        assert_equal(results[0], other)
