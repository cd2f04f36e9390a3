"""Error memory with a decay, and in bfloat16: the law with what is forgotten, and to what rounding."""

import pytest
import torch

import thinwire as tw
from helpers.gradients import gradient
from helpers.specs import every_spec, sum_rounding, telescopes

WORKERS, STEPS = 3, 6


def owed(group):
    """The mean residual, once the first step has made one."""
    memories = [dict(memory.items()) for memory in group.memories]
    if not memories[0]:
        return torch.zeros(40, 50, dtype=torch.float64)
    return sum(memory["tensor", "residual"].double() for memory in memories) / WORKERS


def residue(spec, *, decay, residual):
    """|sum of means + mean residual + forgotten - sum of gradients| / |sum of gradients|, and all residuals' norms."""
    group = tw.Simulation(spec, workers=WORKERS, feedback=True, decay=decay, residual=residual)
    given, got, forgotten, norms = 0.0, 0.0, 0.0, 0.0
    for step in range(STEPS):
        gradients = [gradient(40, 50, seed=10 * step + worker) for worker in range(WORKERS)]
        forgotten = forgotten + (1 - decay) * owed(group)
        given = given + sum(g.double() for g in gradients) / WORKERS
        got = got + group.reduce(gradients).double()
        norms += sum(float(memory["tensor", "residual"].float().norm()) for memory in group.memories) / WORKERS
    return float((got + owed(group) + forgotten - given).norm() / given.norm()), norms / float(given.norm())


@pytest.mark.parametrize("spec", [spec for spec in every_spec() if telescopes(spec)])
def test_with_a_decay_nothing_is_lost_but_what_is_forgotten(spec):
    assert residue(spec, decay=0.8, residual="fp32")[0] < sum_rounding(spec, 1e-5)


@pytest.mark.parametrize("spec", ["topk(density=0.1)", "qsgd(bits=2)", "signsgd", "powersgd", "regtopk", "thc"])
def test_residuals_in_bfloat16_lose_their_rounding_and_no_more(spec):
    """A residual is rounded by 2^-9 of itself at most, in each of the steps."""
    group = tw.Simulation(spec, workers=WORKERS, feedback=True, residual="bf16")
    group.reduce([gradient(40, 50, seed=worker) for worker in range(WORKERS)])
    assert all(m["tensor", "residual"].dtype is torch.bfloat16 for m in group.memories)
    rounding, norms = residue(spec, decay=1.0, residual="bf16")
    assert 1e-6 < rounding < 2**-9 * norms


def test_a_decay_is_of_what_was_owed_before():
    """e = 0.5 e + g; the largest entry is said and struck out."""
    group = tw.Simulation("topk(density=0.34, values='fp32')", workers=1, decay=0.5)
    said = [group.reduce([torch.tensor([4.0, 3.0, 1.0])]) for _ in range(3)]
    assert [each.tolist() for each in said] == [[4.0, 0.0, 0.0], [0.0, 4.5, 0.0], [6.0, 0.0, 0.0]]


@pytest.mark.parametrize("options, message", [
    ({"decay": 1.1}, "decay must be 0"), ({"residual": "fp16"}, "'fp32' or 'bf16'"),
    ({"feedback": False, "decay": 0.9}, "feedback=True"), ({"feedback": False, "residual": "bf16"}, "feedback=True"),
])  # fmt: skip
def test_what_error_memory_cannot_be_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        tw.Simulation("topk", workers=2, **options)
