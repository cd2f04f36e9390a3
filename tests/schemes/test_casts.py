"""Casts: what a sum of many workers' 16-bit gradients is."""

import pytest
import torch

import thinwire as tw
from thinwire.core.bucket import Bucket
from thinwire.core.memory import Memory
from thinwire.core.request import Mean, Sum
from thinwire.schemes import parse

EPS = {"fp16": 2.0**-11, "bf16": 2.0**-8}


def gradient(dtype=torch.float32):
    return 1 + torch.rand(64, generator=torch.Generator().manual_seed(0)).to(dtype)


@pytest.mark.parametrize(("spec", "dtype"), [
    ("bf16", torch.float32), ("bf16", torch.float64), ("fp16", torch.float32), ("fp32", torch.bfloat16),
    ("bf16", torch.bfloat16), ("fp32", torch.float16),
])  # fmt: skip
def test_any_number_of_like_workers_has_their_mean(spec, dtype):
    """A sum in bfloat16 no longer grows after 256 of them: 1,024 workers would get half of it."""
    x = gradient(dtype)
    mean = tw.Simulation(spec, workers=1024, route="gather").reduce([x] * 1024)
    rounding = max(EPS.get(spec, 0.0), torch.finfo(dtype).eps)
    assert ((mean.double() - x.double()).abs() <= rounding * x.double()).all()


def test_parts_of_the_mean_are_rounded_only_once_more():
    x = gradient()
    mean = tw.Simulation("bf16", workers=70, route="two-shot").reduce([x] * 70)
    assert torch.equal(mean, x.bfloat16().float())


def test_error_memory_sees_what_a_large_group_rounds():
    group = tw.Simulation("bf16", workers=70, feedback=True)
    tensors = [gradient() * (1 + worker / 70) for worker in range(70)]
    came = sum(group.reduce(tensors).double() for _ in range(3))
    owed = sum(memory["tensor", "residual"].double() for memory in group.memories) / 70
    exact = 3 * sum(tensor.double() for tensor in tensors) / 70
    assert (came + owed - exact).norm() <= 1e-6 * exact.norm()


def test_exempt_tensors_of_many_bfloat16_workers_have_their_mean():
    x = {"w": torch.ones(2, 1024, dtype=torch.bfloat16), "b": gradient(torch.bfloat16)}
    mean = tw.Simulation("qsgd(bits=8)", workers=300, route="gather", exempt="auto").reduce([x] * 300)
    torch.testing.assert_close(mean["b"], x["b"], rtol=2.0**-7, atol=0)


@pytest.mark.parametrize(("spec", "most"), [("bf16", 64), ("fp16", 512)])
def test_up_to_a_stated_number_of_workers_16_bits_are_summed(spec, most):
    scheme = parse(spec)
    for workers, asked in ((most, Sum), (most + 1, Mean)):
        bucket = Bucket.of(gradient(), workers=workers)
        assert isinstance(next(scheme.converse(bucket, Memory(), scheme.level)), asked)
        assert (scheme.summed_as(torch.float32, workers) is None) == (asked is Mean)
