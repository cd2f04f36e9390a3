"""An ordinary training loop on the small models, for those who listen to its optimizer."""

import torch
import torch.distributed as dist
from torch import nn

from helpers.models import batch


def steps(net, optimizer, first, count, *, worker=None, after=lambda: None):
    for step in range(first, first + count):
        x, y = batch(dist.get_rank() if worker is None else worker, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
        after()


def sgd(net, momentum=0.9):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=momentum)
