"""Warm-up: dense or milder first steps, for every scheme."""

import pytest
import torch

import thinwire as tw
from specs import every_spec


@pytest.mark.parametrize("spec", [spec for spec in every_spec() if not tw.parse(spec).exact])
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
