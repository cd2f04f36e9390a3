"""Warm-up: dense or milder first steps, for every scheme."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from helpers.models import batch, mlp
from helpers.specs import every_spec
from helpers.world import run_world


@pytest.mark.parametrize("spec", [spec for spec in every_spec() if not tw.scheme(spec).exact])
def test_the_first_steps_are_exact_for_every_scheme(spec):
    simulation, sent = tw.Simulation(spec, workers=3, warmup_steps=2), [0.0]
    for step in range(4):
        tensors = [torch.randn(64, 48) for _ in range(3)]
        mean, exact = simulation.reduce(tensors), sum(tensors) / 3
        assert torch.allclose(mean, exact, atol=1e-6) is (step < 2)
        sent.append(simulation.bytes_sent)
    dense, later = sent[1] - sent[0], sent[4] - sent[3]
    assert dense == 2 * 2 / 3 * 4 * 64 * 48
    assert later < dense


def _bytes_by_step(specs):
    told = {}
    for spec in specs:
        model = DDP(mlp())
        with tw.attach(model, spec, exempt=(), warmup_steps=2) as wire:
            sent = [0.0]
            for step in range(3):
                x, y = batch(dist.get_rank(), step)
                nn.functional.mse_loss(model(x), y).backward()
                sent.append(wire.stats()["bytes_sent"])
        told[spec] = [after - before for before, after in pairwise(sent)]
    return told


def test_attached_schemes_send_their_first_steps_dense():
    specs = [spec for spec in every_spec() if not tw.scheme(spec).exact]
    dense = 4 * sum(p.numel() for p in mlp().parameters())  # two ranks: an all-reduce sends each entry once
    for rank in run_world(_bytes_by_step, 2, specs):
        for spec, (first, second, third) in rank.items():
            assert first == second == dense > third, spec


def test_milder_steps_use_the_level_given_and_then_the_schemes_own():
    simulation = tw.Simulation("topk(density=0.01)", workers=1, warmup_steps=2, warmup_level=0.25)
    kept = [int(simulation.reduce([torch.randn(400)]).count_nonzero()) for _ in range(4)]
    assert kept == [100, 100, 4, 4]


def test_a_dense_step_pays_what_is_owed():
    simulation = tw.Simulation("topk(density=0.1)", workers=1, warmup_steps=1)
    x = torch.randn(50)
    assert torch.equal(simulation.reduce([x]), x)
    assert not simulation.memories[0]["tensor", "residual"].any()


@pytest.mark.parametrize(
    "spec, steps, level, message",
    [
        ("topk", -1, None, "warmup_steps must be an integer, 0 or more, got -1"),
        ("topk", 1.5, None, "got 1.5"),
        ("topk", 3, 2.0, "warmup_level must be a density of topk, 0.001..0.3, got 2.0"),
        ("fp16", 3, 0.5, "fp16 has no level to turn"),
    ],
)
def test_mistakes_are_named(spec, steps, level, message):
    with pytest.raises(ValueError, match=message):
        tw.Simulation(spec, workers=1, warmup_steps=steps, warmup_level=level)
