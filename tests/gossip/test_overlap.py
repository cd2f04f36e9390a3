"""What waits for whom: mixing behind backward, neighbours all at once, and what mixing leaves alone."""

import torch
import torch.distributed as dist
from torch import nn

from helpers.models import mlp
from helpers.world import run_world
from thinwire.gossip import Gossip, graphs

WORD = 7  # the tag of the tests' own messages, which say "now you may"


def begun():
    """Rank 1 begins only when rank 0 is back from mix_begin(): if that waited for its neighbour, nobody would go on."""
    rank, word = dist.get_rank(), torch.zeros(1)
    model = mlp()
    with Gossip(model, graphs.ring(2), "dpsgd", timeout_seconds=20) as gossip:
        gossip.mix()
        with torch.no_grad():
            model[0].weight.fill_(float(rank))
        if rank == 0:
            gossip.mix_begin()
            dist.send(word, 1, tag=WORD)
        else:
            dist.recv(word, 0, tag=WORD)
            gossip.mix_begin()
        assert (model[0].weight == rank).all(), "the weights are written by mix_end(), not behind backward's back"
        gossip.mix_end()
        return bool((model[0].weight == 0.5).all())


def test_mix_begin_does_not_wait_for_the_neighbours():
    assert run_world(begun, 2) == [True, True]


def one_by_one():
    """The leaves of a star: rank 1 speaks only when rank 2 has heard the centre, so the centre must not wait for 1."""
    rank, word = dist.get_rank(), torch.zeros(1)
    with Gossip(mlp(), graphs.star(3), "powergossip", timeout_seconds=20) as gossip:
        gossip.mix()
        if rank == 1:
            dist.recv(word, 2, tag=WORD)
        gossip.mix()
        if rank == 2:
            dist.send(word, 1, tag=WORD)
        return gossip.stats()["messages"]


def test_neighbours_are_spoken_to_at_once_and_in_one_message_each():
    assert run_world(one_by_one, 3) == [2, 1, 1]


def local_buffers():
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    frozen = model[0].bias.requires_grad_(False)
    model[1].running_mean.fill_(rank)
    with Gossip(model, graphs.ring(3), "dpsgd") as gossip:
        assert (model[1].running_mean == 0).all(), "all start with rank 0's buffers"
        gossip.mix()
        model[1].running_mean.fill_(rank)
        with torch.no_grad():
            frozen.fill_(float(rank))
            model[0].weight.fill_(float(rank))
        gossip.mix()
        return float(model[0].weight[0, 0]), float(model[1].running_mean[0]), float(frozen[0])


def test_mixing_leaves_buffers_and_frozen_parameters_alone():
    for rank, (weight, running_mean, frozen) in enumerate(run_world(local_buffers, 3)):
        assert abs(weight - 1) < 1e-6
        assert running_mean == frozen == rank
