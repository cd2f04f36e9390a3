"""What all sparse and low-rank schemes owe: telescoping residuals, clean memory, checkpoints, edge cases."""

import pytest
import torch

import thinwire as tw

EXACT = [  # nothing is rounded by a sum on the wire
    "topk(density=0.05, values='fp16')",
    "topk(density=0.05, values='tnq(bits=4)')",
    "regtopk(density=0.05, mu=1)",
    "regtopk(density=0.05, mu=4, denominator='current', values='qsgd(bits=4)')",
    "randomk(density=0.05, values='fp32')",
    "randomk(density=0.05, values='qsgd(bits=4)')",
    "topkc(density=0.1, chunk=16, values='fp32')",
    "topkc(density=0.1, chunk=16, values='tnq(bits=4)')",
    "powersgd(factor_rank=2)",
    "powersgd(factor_rank=2, sided='one')",
]
SHAPES = {"a": (40, 30), "b": (40,), "c": (40, 30), "d": (7, 3, 3), "e": (60, 50)}


def gradients(workers, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [
        {name: torch.randn(shape, generator=generator, dtype=dtype) for name, shape in SHAPES.items()}
        for _ in range(workers)
    ]


def mean_of(named):
    return {name: sum(each[name] for each in named) / len(named) for name in SHAPES}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spec", EXACT)
def test_residuals_telescope_past_a_poisoned_step(spec, dtype):
    """sum of means + mean of residuals = sum of mean gradients, over all steps that were finite.

    To the rounding of what a scheme works in: float32, unless it is there for float64.
    """
    spec = spec.replace("fp32", "fp64") if dtype is torch.float64 else spec
    tolerance = 1e-13 if dtype is torch.float64 and tw.scheme(spec).wide else 2e-5
    simulation = tw.Simulation(spec, workers=3)
    came, exact = dict.fromkeys(SHAPES, 0), dict.fromkeys(SHAPES, 0)
    for step in range(12):
        given = gradients(3, step, dtype)
        if step == 4:
            given[1]["e"][3, 3] = torch.inf
        if step == 7:
            given[2]["b"][0] = torch.nan
        means = simulation.reduce(given)
        if step in (4, 7):
            assert not all(torch.isfinite(mean).all() for mean in means.values())
            continue
        for name in SHAPES:
            assert torch.isfinite(means[name]).all()
            came[name] = came[name] + means[name]
            exact[name] = exact[name] + mean_of(given)[name]
    for name in SHAPES:
        owed = sum(memory[name, "residual"] for memory in simulation.memories) / 3
        torch.testing.assert_close(came[name] + owed, exact[name], atol=tolerance, rtol=0)


@pytest.mark.parametrize("poison", [torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("spec", [*EXACT, "randomk", "topkc"])
def test_a_poisoned_step_leaves_every_memory_as_it_was(spec, poison):
    clean, poisoned = tw.Simulation(spec, workers=2), tw.Simulation(spec, workers=2)
    for step in range(4):
        given = gradients(2, step)
        if step == 2:
            given[1]["c"][-1, -1] = poison
            before = [{key: tensor.clone() for key, tensor in m.items()} for m in poisoned.memories]
            means = poisoned.reduce(given)
            assert not all(torch.isfinite(mean).all() for mean in means.values())
            for memory, kept in zip(poisoned.memories, before, strict=True):
                assert all(torch.equal(tensor, kept[key]) for key, tensor in memory.items())
            clean.step += 1
        else:
            expected, means = clean.reduce(given), poisoned.reduce(given)
            assert all(torch.equal(means[name], expected[name]) for name in SHAPES)


@pytest.mark.parametrize("spec", EXACT)
def test_memory_survives_a_checkpoint_to_the_bit(spec):
    first, second = tw.Simulation(spec, workers=2), tw.Simulation(spec, workers=2)
    for step in range(3):
        first.reduce(gradients(2, step))
    second.reduce(gradients(2, 99))  # so that the parameters are known
    for old, new in zip(first.memories, second.memories, strict=True):
        new.load_state_dict(old.state_dict())
    second.step = first.step
    for step in range(3, 6):
        expected, means = first.reduce(gradients(2, step)), second.reduce(gradients(2, step))
        assert all(torch.equal(means[name], expected[name]) for name in SHAPES)


@pytest.mark.parametrize("spec", [*EXACT, "randomk", "topkc"])
def test_zero_gradients_are_zero_and_forgotten(spec):
    simulation = tw.Simulation(spec, workers=2)
    zeros = [{name: torch.zeros(shape) for name, shape in SHAPES.items()}] * 2
    for _ in range(3):
        assert not any(mean.any() for mean in simulation.reduce(zeros).values())
    means = simulation.reduce(gradients(2, 0))
    assert all(torch.isfinite(mean).all() for mean in means.values())
    assert any(mean.any() for mean in means.values())


@pytest.mark.parametrize("name", ["topk", "regtopk", "randomk", "topkc"])
def test_density_one_is_exact(name):
    given = gradients(3, 0, torch.float64)
    means = tw.Simulation(f"{name}(density=1, values='fp64')", workers=3).reduce(given)
    for tensor, mean in mean_of(given).items():
        torch.testing.assert_close(means[tensor], mean, rtol=1e-14, atol=1e-15)


@pytest.mark.parametrize("name", ["topk", "regtopk", "randomk", "topkc"])
def test_a_density_that_keeps_nothing_keeps_one(name):
    kept = tw.Simulation(f"{name}(density=1e-12)", workers=2).reduce([torch.arange(1.0, 513.0)] * 2)
    assert kept.count_nonzero() == (64 if name == "topkc" else 1)


@pytest.mark.parametrize("spec", ["topk(density=0.25)", "regtopk(density=0.25)", "topkc(density=0.25, chunk=4)"])
def test_ties_everywhere_go_to_the_first_and_feedback_gets_round_to_all(spec):
    """Equal entries, then nothing: a quarter comes in each of four steps, in order, and no entry is lost."""
    simulation = tw.Simulation(spec, workers=2)
    for step in range(4):
        mean = simulation.reduce([torch.full((64,), 2.0 if step == 0 else 0.0)] * 2)
        assert mean.nonzero().squeeze(1).tolist() == list(range(16 * step, 16 * step + 16))
        assert torch.equal(mean[mean != 0], torch.full((16,), 2.0))
    assert not any(memory["tensor", "residual"].any() for memory in simulation.memories)


@pytest.mark.parametrize("spec", ["topk", "regtopk", "randomk", "topkc(chunk=2)", "powersgd"])
def test_the_knob_is_ordered(spec):
    """A higher level sends more bytes and loses less."""
    levels = tw.scheme(spec).knob.menu
    given = [{"a": torch.randn(80, 90).cumsum(0)} for _ in range(2)]
    exact = (given[0]["a"] + given[1]["a"]) / 2
    sent, errors = [], []
    for level in levels:
        simulation = tw.Simulation(spec, workers=2, feedback=False)
        errors.append(float((simulation.reduce(given, level=level)["a"] - exact).norm()))
        sent.append(simulation.bytes_sent)
    assert list(levels) == sorted(levels)
    assert sent == sorted(set(sent))
    assert errors == sorted(errors, reverse=True)
