"""Gossip about weights of a device that is played: mixed in CPU memory, which nobody touches before a copy is over."""

import pytest
import torch

from helpers.played import HostWait, PlayedLandings, TooEarly, on_a_device
from thinwire.gossip import GossipSimulation, graphs
from thinwire.gossip.mixers import registry

NODES, STEPS = 3, 3


def replicas(dtype):
    generator = torch.Generator().manual_seed(1)
    shapes = {"w": (20, 30), "v": (7, 11), "b": (5,)}
    return [{name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
            for _ in range(NODES)]  # fmt: skip


def train(mixer, dtype=torch.float32, prepare=lambda node, weights: None):
    """What a training loop does to the weights, and what it finds there in the end."""
    all_weights = replicas(dtype)
    simulation = GossipSimulation(all_weights, graphs.ring(NODES), mixer)
    for node, weights in zip(simulation.nodes, all_weights, strict=True):
        prepare(node, weights)
    for step in range(STEPS):
        simulation.mix()
        for weights in all_weights:
            for tensor in weights.values():
                tensor.mul_(0.9 + 0.01 * step)
    return [tensor * 1 for weights in all_weights for tensor in weights.values()]


def on_played(device):
    def prepare(node, weights):
        node._landings = PlayedLandings(device)
        device.bring(*weights.values())

    return prepare


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mixer", sorted(registry()))
def test_weights_are_mixed_as_on_the_cpu(mixer, dtype, monkeypatch):
    wanted = train(mixer, dtype)
    with monkeypatch.context() as patch, on_a_device(patch, watch_flights=True) as device:
        found = train(mixer, dtype, on_played(device))
    assert device.operations > 20 and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_wait_that_is_forgotten_is_found(monkeypatch):
    with monkeypatch.context() as patch, on_a_device(patch, watch_flights=True) as device:
        patch.setattr(device, "land", lambda mark: None)
        with pytest.raises(TooEarly, match="against a copy of training that is not over"):
            train("dpsgd", prepare=on_played(device))


def test_a_copy_that_is_waited_for_is_found(monkeypatch):
    whole = torch.Tensor.copy_
    with monkeypatch.context() as patch, on_a_device(patch, watch_flights=True) as device:
        patch.setattr(torch.Tensor, "copy_", lambda tensor, source, non_blocking=False: whole(tensor, source))
        with pytest.raises(HostWait, match="that is waited for"):
            train("dpsgd", prepare=on_played(device))
