"""Asynchronous training: servers own the weights, workers run ahead of each other by at most `staleness` steps."""

import heapq

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from helpers.models import digest, mlp
from helpers.training import loss_of
from helpers.world import run_world
from thinwire.core.layout import Layout
from thinwire.exchange.server.frames import Kind, Push
from thinwire.exchange.server.peers import Incoming
from thinwire.exchange.server.weights import Gradient, SharedWeights


def momentum(weights):
    return torch.optim.SGD(weights, lr=0.05, momentum=0.9)


def _asynchronous(servers, spec, staleness, steps, down="fp32"):
    role = tw.join(servers=servers, timeout=30)
    if role.serves:
        return role.serve(optimizer=momentum, staleness=staleness)
    net = mlp(seed=role.exchange.worker)  # only the first worker's weights count
    optimizer = tw.ServerOptimizer(net, spec, role=role, down=down)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        loss = loss_of(net, step, worker=role.exchange.worker)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    stats = optimizer.stats()
    optimizer.close()
    return digest(net), losses, stats


def _synchronous(steps):
    model = DDP(mlp(seed=0))
    optimizer = momentum(model.parameters())
    for step in range(steps):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return digest(model)


@pytest.mark.parametrize("servers", [1, 2])
def test_staleness_0_is_synchronous_training(servers):
    expected = run_world(_synchronous, 3, 8)[0]
    for weights, _, stats in run_world(_asynchronous, servers + 3, servers, "fp32", 0, 8)[servers:]:
        for ours, theirs in zip(weights, expected, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
        assert stats["steps"] == 8


@pytest.mark.parametrize(("spec", "down"), [("qsgd(bits=4, block=64)", "fp32"), ("fp16", "bf16")])
def test_stale_and_compressed_training_still_learns(spec, down):
    served, *workers = run_world(_asynchronous, 4, 1, spec, 4, 40, down)
    assert served["stalest"] <= 4
    for _, losses, stats in workers:
        assert sum(losses[-5:]) < 0.8 * sum(losses[:5])
        assert stats["bytes_sent"] > 0


class Game:
    """SharedWeights, driven by hand: who may go on after which pushes."""

    def __init__(self, workers, staleness):
        self.operation = Gradient(((tw.FP32(), Layout.of([("w", (4,))])),), "float32")
        self.shared = SharedWeights(lambda weights: torch.optim.SGD(weights, lr=1.0), staleness)
        self.present = list(range(workers))
        for worker in self.present:
            self._push(worker, Kind.WEIGHTS, torch.zeros(4) if worker == 0 else None)
        assert sorted(self.released()) == []

    def _push(self, worker, kind, values):
        payload = None if values is None else values.view(torch.uint8)
        push = Push(kind, nbytes=0 if payload is None else 16, answer_bytes=16)
        self.shared.take(worker, Incoming(worker, push, payload), self.operation)
        self.last = sorted(arrival.worker for arrival in self.shared.released(self.present))

    def push(self, worker, value=1.0):
        self._push(worker, Kind.GRADIENT, torch.full((4,), value))
        return self.last

    def released(self):
        return [arrival.worker for arrival in self.shared.released(self.present)]

    @property
    def weight(self):
        out = torch.empty(16, dtype=torch.uint8)
        self.shared.write_weights(self.operation, out)
        return out.view(torch.float32)[0].item()


def test_without_staleness_all_wait_for_all():
    game = Game(3, 0)
    assert game.push(0, 1.0) == []
    assert game.push(2, 2.0) == []
    assert game.push(1, 6.0) == [0, 1, 2]
    assert game.weight == -3.0  # one step, with the mean


def test_a_worker_runs_ahead_by_its_staleness_and_no_further():
    game = Game(2, 2)
    assert game.push(0) == [0]  # one gradient waits for the step
    assert game.push(0) == [0]  # two gradients: a step
    assert game.shared.version == 1
    assert game.push(0) == [0] and game.push(0) == [0]
    assert game.shared.version == 2
    # Worker 1 still computes on version 0: a third step would make its gradient three steps old.
    assert game.push(0) == [0] and game.push(0) == [0]
    assert game.shared.version == 2
    assert game.push(0) == []  # three gradients wait: no further
    assert game.push(1) == [0, 1]
    assert game.shared.version == 3 and game.shared.stalest == 2


def test_a_lost_worker_frees_those_who_waited_for_it():
    game = Game(3, 0)
    game.push(0)
    game.push(1)
    game.present = [0, 1]
    assert sorted(game.released()) == [0, 1]


def test_a_gradient_that_is_not_finite_is_left_out():
    game = Game(2, 0)
    game.push(0, float("inf"))
    assert game.push(1, 2.0) == [0, 1]
    assert game.weight == -2.0 and game.shared.skipped == 1


SPEEDS = (1.0, 1.0, 4.0)  # seconds that each worker needs for a gradient; the last is the slow one


class Clock:
    """Three workers and a server that train together on a clock of the test's own."""

    def __init__(self, staleness):
        self.net = mlp(seed=3)
        weights = nn.utils.parameters_to_vector(self.net.parameters()).detach()
        self.operation = Gradient(((tw.FP32(), Layout.of([("w", tuple(weights.shape))])),), "float32")
        self.shared = SharedWeights(momentum, staleness)
        for worker in range(len(SPEEDS)):
            self._push(worker, Kind.WEIGHTS, weights if worker == 0 else None)
        self.held = dict.fromkeys(range(len(SPEEDS)), weights)  # by each worker, since it last pulled
        self.gradients = 0

    def _push(self, worker, kind, values):
        payload = None if values is None else values.contiguous().view(torch.uint8)
        push = Push(kind, nbytes=0 if payload is None else payload.numel(), answer_bytes=self.operation.down_bytes(0))
        self.shared.take(worker, Incoming(worker, push, payload), self.operation)
        return [arrival.worker for arrival in self.shared.released(list(range(len(SPEEDS))))]

    def loss(self, weights, worker, step):
        nn.utils.vector_to_parameters(weights, self.net.parameters())
        return loss_of(self.net, step, worker=worker)

    def run(self, seconds):
        """The mean loss on examples that nobody has trained on, with the weights at the end."""
        busy = [(speed, worker) for worker, speed in enumerate(SPEEDS)]
        while busy[0][0] <= seconds:
            now, worker = heapq.heappop(busy)
            loss = self.loss(self.held[worker], worker, self.gradients)
            gradient = nn.utils.parameters_to_vector(torch.autograd.grad(loss, list(self.net.parameters())))
            padded = torch.zeros(self.operation.up_bytes(0) // 4)
            padded[: gradient.numel()] = gradient
            self.gradients += 1
            for free in self._push(worker, Kind.GRADIENT, padded):
                out = torch.empty(self.operation.down_bytes(0), dtype=torch.uint8)
                self.shared.write_weights(self.operation, out)
                self.held[free] = out.view(torch.float32)[: gradient.numel()]
                heapq.heappush(busy, (now + SPEEDS[free], free))
        with torch.no_grad():
            return sum(self.loss(self.held[0], 100, step).item() for step in range(10)) / 10


def test_one_slow_worker_costs_little_when_staleness_is_allowed():
    """At least 1.5 times the gradients in the same time, and the model is better for it, not worse."""
    synchronous, stale = Clock(0), Clock(4)
    begun = synchronous.run(0)
    target = synchronous.run(400)
    assert target < 0.5 * begun
    assert stale.run(400) <= target
    assert synchronous.gradients == 300  # all at the pace of the slowest
    assert stale.gradients >= 1.5 * synchronous.gradients
    assert stale.shared.stalest <= 4


def _mistakes():
    role = tw.join(servers=1, timeout=30)
    if role.serves:
        with pytest.raises(ValueError, match="staleness must be 0 or more"):
            role.serve(optimizer=momentum, staleness=-1)
        return role.serve()["workers"]
    with pytest.raises(ValueError, match="weights come back as one of fp32, fp16, bf16, got 'qsgd'"):
        tw.ServerOptimizer(mlp(), "fp32", role=role, down="qsgd")
    with pytest.raises(RuntimeError, match="has no optimizer"):
        tw.ServerOptimizer(mlp(), "fp32", role=role)
    return "told"


def test_mistakes_raise_with_what_is_accepted():
    with pytest.raises(RuntimeError, match="workers were lost"):
        run_world(_mistakes, 3)
