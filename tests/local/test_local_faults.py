"""LocalSteps when a worker dies: an error over all-reduce; over servers, the others go on if that was asked for."""

import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from helpers.models import batch, digest, mlp
from helpers.plain import die, run_plain
from helpers.training import assert_equal


def _train(worker, dies, exchange=None, group=None):
    net = mlp()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    local = tw.LocalSteps(net, optimizer, every=2, scheme="qsgd(bits=8)", exchange=exchange, group=group)
    for step in range(8):
        if worker == dies and step == 3:
            die()
        x, y = batch(worker, step)
        optimizer.zero_grad()
        nn.functional.mse_loss(net(x), y).backward()
        optimizer.step()
    stats = local.stats()
    local.close()
    return digest(net), stats["workers"], stats["rounds"]


def _all_reduce(dies):
    return _train(dist.get_rank(), dies)


def test_over_all_reduce_a_dead_worker_is_an_error_for_all():
    ends = run_plain(_all_reduce, 3, 1, stuck=(1,))
    for rank in (0, 2):
        assert "weight changes of round 1 could not be exchanged" in ends[rank].error


def _served(on_failure, dies):
    role = tw.join(servers=1, on_failure=on_failure, timeout_seconds=20)
    if role.serves:
        return role.serve()
    return _train(role.exchange.worker, dies, role.exchange, role.workers)


def test_over_servers_the_others_go_on_with_equal_weights():
    ends = run_plain(_served, 4, "continue", 1, stuck=(2,))
    (first, workers, rounds), (other, *_) = ends[1].value, ends[3].value
    assert (workers, rounds) == (2, 4)
    assert_equal(first, other)


def test_over_servers_that_stop_all_hear_of_it():
    ends = run_plain(_served, 4, "stop", 1, stuck=(2,))
    for rank in (1, 3):
        assert "worker 1" in ends[rank].error
