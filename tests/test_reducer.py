"""The pipeline of one worker without any front door; what every exchange owes it is in the laws."""

import pytest
import torch
import torch.distributed as dist

import thinwire as tw
from helpers.gradients import gradient
from helpers.world import run_world
from thinwire.core.layout import Layout
from thinwire.reducer import Reducer

SHAPES = {"w": (40, 50), "b": (50,), "v": (64, 33)}


def inputs(step, worker, dtype=torch.float32):
    return {name: gradient(*shape, seed=100 * step + worker, dtype=dtype) for name, shape in SHAPES.items()}


def _reduced(spec, dtype, exempt):
    tensors = {name: torch.empty(shape, dtype=dtype) for name, shape in SHAPES.items()}
    with Reducer(tensors, spec, dist.group.WORLD, exempt=exempt) as reducer:
        means = [reducer.reduce(inputs(step, dist.get_rank(), dtype)) for step in range(3)]
        return means, reducer.stats()


@pytest.mark.parametrize("exempt", ["auto", (), ("w", "v")])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("spec", ["tnq(bits=4)", "fp16", "powersgd"])
def test_named_tensors_go_in_and_their_mean_comes_out(spec, dtype, exempt):
    results = run_world(_reduced, 2, spec, dtype, exempt)
    simulation = tw.Simulation(spec, workers=2, exempt=exempt)
    for step in range(3):
        right = simulation.reduce([inputs(step, worker, dtype) for worker in range(2)])
        for means, _ in results:
            assert list(means[step]) == list(SHAPES)
            assert all(torch.equal(means[step][name], right[name]) for name in SHAPES)
    assert results[0][1]["steps"] == 3
    assert results[0][1]["bytes_dense"] == 3 * sum(torch.empty(s).numel() for s in SHAPES.values()) * dtype.itemsize


def _in_buckets():
    """Two buckets a step, submitted as a front door would."""
    tensors = {name: torch.empty(shape) for name, shape in SHAPES.items()}
    layouts = [Layout.of([(name, SHAPES[name]) for name in names]) for names in (("v",), ("w", "b"))]
    told, means = [], []
    with Reducer(tensors, "qsgd(bits=4)", dist.group.WORLD, exempt=()) as reducer:
        for step in range(2):
            given = inputs(step, dist.get_rank())
            reducer.begin_step()
            buffers = [torch.cat([given[name].reshape(-1) for name in layout.names]) for layout in layouts]
            for layout, buffer in zip(layouts, buffers, strict=True):
                reducer.submit(buffer, layout, last=layout is layouts[-1], done=told.append)
            reducer.end_step()
            means.append(torch.cat(buffers))
    return means, told


def test_buckets_of_a_step_are_done_when_it_ends():
    """The bits do not depend on how tensors are grouped: they are named."""
    results = run_world(_in_buckets, 2)
    simulation = tw.Simulation("qsgd(bits=4)", workers=2)
    for step in range(2):
        right = simulation.reduce([inputs(step, worker) for worker in range(2)])
        for means, told in results:
            assert told == [None] * 4
            assert torch.equal(means[step], torch.cat([right[name].reshape(-1) for name in ("v", "w", "b")]))


def _steered():
    tensors = {name: torch.empty(shape) for name, shape in SHAPES.items()}
    levels = []
    with Reducer(tensors, "qsgd(bits=4)", dist.group.WORLD, controller="uniform(interval=1, seed=3)") as reducer:
        for step in range(8):
            reducer.reduce(inputs(step, dist.get_rank()))
            reducer.steering.settle()
            levels.append(reducer.level)
    return levels


def test_a_controller_needs_no_door():
    first, second = run_world(_steered, 2)
    assert first == second and len(set(first)) > 1


def _short():
    with Reducer({"w": torch.empty(40, 50)}, "qsgd", dist.group.WORLD) as reducer:
        reducer.begin_step()
        with pytest.raises(ValueError, match=r"a bucket of 4000 elements is said to hold 2000: .*'w'"):
            reducer.submit(torch.zeros(4000), Layout.of([("w", (40, 50))]), last=True, done=lambda error: None)
    return True


def test_a_layout_that_does_not_fill_its_bucket_is_refused():
    """Else half of a gradient would stay at home, and replicas would part without a word."""
    assert run_world(_short, 1) == [True]
