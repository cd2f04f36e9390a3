"""What must hold for every scheme the registry finds, on virtual workers."""

import copy
from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import torch

import thinwire as tw
from helpers.gradients import error, gradient
from helpers.specs import every_spec, saturates, sum_rounding
from thinwire.core import theory
from thinwire.core.bucket import Bucket
from thinwire.core.memory import Memory
from thinwire.core.request import Sum
from thinwire.core.scheme import Wrapper
from thinwire.schemes import parse

UNBIASED = [spec for spec in every_spec() if parse(spec).unbiased]
KNOBS = [spec for spec in every_spec() if parse(spec).knob]
SIZES = [1, 2, 7, 8, 63, 1000, 4097]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", every_spec())
def test_shape_and_dtype_come_back(spec, dtype):
    simulation = tw.Simulation(spec, workers=2)
    named = [{"w": gradient(37, 53, seed=i, dtype=dtype), "b": gradient(11, seed=i, dtype=dtype)} for i in range(2)]
    mean = simulation.reduce(named)
    assert list(mean) == ["w", "b"]
    for name, tensor in mean.items():
        assert tensor.shape == named[0][name].shape and tensor.dtype is dtype
        assert torch.isfinite(tensor).all()


@pytest.mark.parametrize("spec", every_spec())
def test_what_is_merely_summed_is_one_sum_of_the_divided_bucket(spec):
    """A wire takes a scheme's word for it, and does not ask for the conversation."""
    scheme = parse(spec)
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        summed_as = scheme.summed_as(dtype, 3)
        assert (summed_as is None) == (spec not in ("fp64", "fp32", "fp16", "bf16"))
        if summed_as is None:
            continue
        assert summed_as.itemsize <= dtype.itemsize, "there must be room in the bucket's own memory"
        given = gradient(57, dtype=dtype)
        bucket = Bucket.of(given.clone(), workers=3)
        talk = scheme.converse(bucket, Memory(), scheme.level)
        request = next(talk)
        assert isinstance(request, Sum) and request.width is None and request.tensor.dtype is summed_as
        assert torch.equal(request.tensor, (given * (1.0 / 3)).to(summed_as))
        with pytest.raises(StopIteration) as end:
            talk.send(request.tensor * 3)
        assert torch.equal(end.value.value, (request.tensor * 3).to(dtype))


@pytest.mark.parametrize("spec", [spec for spec in every_spec() if not parse(spec).wide])
def test_what_loses_anyhow_works_in_float32(spec):
    """A float64 gradient is rounded first, by 6e-8 of each entry: the kernels are fast in float32."""
    wide, narrow = tw.Simulation(spec, workers=2, feedback=True), tw.Simulation(spec, workers=2, feedback=True)
    for step in range(2):
        tensors = [gradient(30, 47, seed=10 * step + i, dtype=torch.float64) for i in range(2)]
        expected = narrow.reduce([tensor.float() for tensor in tensors])
        assert torch.equal(wide.reduce(tensors), expected.double())
        for one, other in zip(wide.memories, narrow.memories, strict=True):
            assert {where: t.dtype for where, t in one.items()} == {where: t.dtype for where, t in other.items()}


@pytest.mark.parametrize("feedback", [False, True])
@pytest.mark.parametrize("spec", ["fp64", "fp32", "fp16", "bf16"])
def test_casts_take_float64_as_it_is(spec, feedback):
    x, dtype = gradient(1000, dtype=torch.float64), parse(spec).dtype
    mean = tw.Simulation(spec, workers=1, feedback=feedback).reduce([x])
    assert torch.equal(mean, x.to(dtype).double())


@pytest.mark.parametrize("workers", [1, 2, 3])
@pytest.mark.parametrize("spec", every_spec())
def test_odd_sizes(spec, workers):
    for size in SIZES:
        for feedback in ("auto", True):
            simulation = tw.Simulation(spec, workers=workers, feedback=feedback)
            for step in range(3):
                mean = simulation.reduce([gradient(size, seed=10 * step + i) for i in range(workers)])
                assert mean.shape == (size,) and torch.isfinite(mean).all()


@pytest.mark.parametrize("spec", every_spec())
def test_zeros_stay_zero(spec):
    simulation = tw.Simulation(spec, workers=3, feedback=True)
    for _ in range(3):
        assert torch.equal(simulation.reduce([torch.zeros(40, 33)] * 3), torch.zeros(40, 33))
    for memory in simulation.memories:
        assert all(torch.isfinite(tensor).all() for _, tensor in memory.items())


@pytest.mark.parametrize("spec", every_spec())
def test_pure(spec):
    """Inputs are left alone, and the same inputs give the same bits in another group."""
    outcomes = []
    for _ in range(2):
        simulation = tw.Simulation(spec, workers=3, seed=5)
        for step in range(3):
            tensors = [gradient(41, 25, seed=10 * step + i) for i in range(3)]
            before = copy.deepcopy(tensors)
            outcomes.append(simulation.reduce(tensors))
            assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))
    for a, b in zip(outcomes[:3], outcomes[3:], strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("route", ["gather", "two-shot"])
@pytest.mark.parametrize("spec", UNBIASED)
def test_unbiased(spec, route):
    """The mean of T results is T times closer (in squared error) than one: what no bias allows.

    Chance of a false alarm below 1e-6: the ratio of the two errors has mean 1 and, over 2,000 entries, a
    relative deviation under 0.1.
    """
    if route == "two-shot" and getattr(parse(spec), "grain", None) is None:
        route = "gather"  # payloads that cannot be cut have no other way
    repeats = 50
    simulation = tw.Simulation(spec, workers=3, route=route, seed=11)
    tensors = [gradient(2000, seed=i) for i in range(3)]
    exact = sum(t.double() for t in tensors) / 3
    results = [simulation.reduce(tensors).double() for _ in range(repeats)]
    single = sum(error(result, exact) for result in results) / repeats
    together = error(sum(results) / repeats, exact)
    rounding = 1e-5 if parse(spec).exact else 1e-12  # casts round to nearest, the same way every time
    assert together <= 1.5 * single / repeats + rounding


@pytest.mark.parametrize("spec", [spec for spec in every_spec() if not parse(spec).unbiased])
def test_biased_schemes_contract(spec):
    """Without memory a biased message never has more error than sending nothing."""
    simulation = tw.Simulation(spec, workers=1, feedback=False)
    for seed in range(5):
        x = gradient(60, 50, seed=seed)
        assert error(simulation.reduce([x]), x) <= 1.0 + 1e-6


@pytest.mark.parametrize("workers", [1, 2, 5])
@pytest.mark.parametrize("spec", every_spec())
def test_feedback_telescopes(spec, workers):
    """sum of means + mean of residuals = sum of mean gradients, whatever was lost on the way.

    It cannot hold where the running sum of several workers saturates: what is clipped there is no one worker's loss,
    and none learns of it. The gap is then no larger than clipping and rounding are together, by theory.
    """
    simulation = tw.Simulation(spec, workers=workers, feedback=True)
    came = exact = torch.zeros(30, 47, dtype=torch.float64)
    for step in range(12):
        tensors = [gradient(30, 47, seed=100 * step + i) for i in range(workers)]
        came = came + simulation.reduce(tensors)
        exact = exact + sum(t.double() for t in tensors) / workers
    owed = sum(memory["tensor", "residual"].double() for memory in simulation.memories) / workers
    gap, scheme = (came + owed - exact).norm(), parse(spec)
    if not getattr(scheme, "linear", True) and workers > 1:
        assert gap > 0.1 * exact.norm()  # means over few are larger than what those few are owed
        return
    if saturates(spec) and workers > 1:
        error = theory.saturation_error(theory.saturation_kappa(scheme.bits, workers), scheme.bits, workers)
        assert 0 < gap <= error**0.5 * exact.norm()
    else:
        assert gap <= sum_rounding(spec, exact=1e-6) * (came.norm() + owed.norm())


@pytest.mark.parametrize("spec", KNOBS)
def test_the_knob_is_ordered(spec):
    """More level, more bytes and less error."""
    knob = parse(spec).knob
    assert list(knob.menu) == sorted(knob.menu) and knob.default in knob.menu
    tensors = [gradient(64, 80, seed=i) for i in range(2)]
    exact = sum(tensors) / 2
    sizes, errors = [], []
    for level in knob.menu:
        simulation = tw.Simulation(spec, workers=2, feedback=False)
        errors.append(sum(error(simulation.reduce(tensors, level=level), exact) for _ in range(5)))
        sizes.append(simulation.bytes_sent)
    assert sizes == sorted(sizes) and sizes[0] < sizes[-1]
    assert all(worse >= better * 0.98 for worse, better in pairwise(errors)), errors


@pytest.mark.parametrize("spec", every_spec())
def test_state_round_trip(spec):
    """A group that takes over another's memory and step goes on with the same bits."""
    first = tw.Simulation(spec, workers=2, feedback=True)
    steps = [[gradient(45, 31, seed=10 * s + i) for i in range(2)] for s in range(6)]
    for tensors in steps[:3]:
        first.reduce(tensors)
    second = tw.Simulation(spec, workers=2, feedback=True)
    second.reduce(steps[0])
    second.step = first.step
    for mine, theirs in zip(second.memories, first.memories, strict=True):
        mine.load_state_dict(copy.deepcopy(theirs.state_dict()))
    for tensors in steps[3:]:
        assert torch.equal(first.reduce(tensors), second.reduce(tensors))


@pytest.mark.parametrize("spec", every_spec())
def test_non_finite_reaches_everybody_and_stays_nowhere(spec):
    for poison in (float("inf"), float("-inf"), float("nan")):
        simulation = tw.Simulation(spec, workers=3, feedback=True)
        simulation.reduce([gradient(40, 33, seed=i) for i in range(3)])
        residuals = [memory["tensor", "residual"].clone() for memory in simulation.memories]
        bad = [gradient(40, 33, seed=i) for i in range(3)]
        bad[1][7, 3] = poison
        assert not torch.isfinite(simulation.reduce(bad)).all()
        for memory, residual in zip(simulation.memories, residuals, strict=True):
            assert torch.equal(memory["tensor", "residual"], residual)
            assert all(torch.isfinite(tensor).all() for _, tensor in memory.items())
        assert torch.isfinite(simulation.reduce([gradient(40, 33, seed=i) for i in range(3)])).all()


@dataclass(frozen=True)
class FullOfNaN(Wrapper):
    """A scheme that is asked what its messages lost, in memory that holds nothing but NaN."""

    def converse(self, bucket, memory, level):
        lost = torch.full_like(bucket.flat, torch.nan)
        mean = yield from self.scheme.converse(replace(bucket, lost=lost), memory, level)
        missing = int(lost.isnan().sum())
        assert not missing, f"{self.spec} left {missing} of {lost.numel()} entries of bucket.lost as it found them"
        return mean


@pytest.mark.parametrize("workers", [1, 3])
@pytest.mark.parametrize("spec", every_spec())
def test_what_was_lost_is_written_in_full(spec, workers):
    for route in ("gather", "two-shot") if getattr(parse(spec), "grain", None) else ("auto",):
        simulation = tw.Simulation(FullOfNaN(parse(spec)), workers=workers, feedback=False, route=route)
        for step in range(2):
            named = [{"w": gradient(37, 53, seed=10 * step + i), "b": gradient(11, seed=i)} for i in range(workers)]
            assert torch.isfinite(simulation.reduce(named)["w"]).all()


@pytest.mark.parametrize("scale", [1e6, 1e12])
@pytest.mark.parametrize("spec", [*every_spec(), "topk(values='fp16')", "regtopk(values='fp16')"])
def test_large_finite_values_stay_finite_in_the_mean(spec, scale):
    """Where what was lost is remembered, a narrow dtype's end is no reason for an Inf: the rest comes later.

    Without memory fp16 overflows, as it says, so that a GradScaler sees it.
    """
    simulation = tw.Simulation(spec, workers=3, feedback=True)
    for step in range(3):
        mean = simulation.reduce([gradient(40, 33, seed=10 * step + i) * scale for i in range(3)])
        assert torch.isfinite(mean).all()
    assert all(torch.isfinite(tensor).all() for memory in simulation.memories for _, tensor in memory.items())


def test_virtual_workers_answer_mistakes():
    with pytest.raises(ValueError, match="workers must be at least 1, got 0"):
        tw.Simulation("fp32", workers=0)
    with pytest.raises(ValueError, match="route must be one of auto, gather, two-shot, got 'ring'"):
        tw.Simulation("fp32", workers=2, route="ring")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="topk payloads cannot be cut into parts; accepted routes: auto, gather"):
        tw.Simulation("topk", workers=2, route="two-shot")
    with pytest.raises(ValueError, match="cannot be cut into parts"):
        tw.Simulation("regtopk", workers=2, route="two-shot").reduce([torch.ones(9), torch.ones(9)])
    with pytest.raises(ValueError, match="feedback must be 'auto', True or False, got 'on'"):
        tw.Simulation("fp32", workers=2, feedback="on")
    with pytest.raises(ValueError, match="each of 2 workers, got 1"):
        tw.Simulation("fp32", workers=2).reduce([torch.zeros(3)])
    with pytest.raises(ValueError, match="worker 1 brings other names or shapes"):
        tw.Simulation("fp32", workers=2).reduce([torch.zeros(3), torch.zeros(4)])
