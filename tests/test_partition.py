"""Exempt tensors travel exact; the others stay where they are in the bucket, whatever lies between them."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import thinwire as tw
from helpers.specs import every_spec
from thinwire.core import partition
from thinwire.core.bucket import Bucket, Scratch
from thinwire.core.layout import Layout, Segment
from thinwire.core.memory import Memory
from thinwire.core.partition import Partition
from thinwire.lab.cost.rehearsal import Rehearsal
from thinwire.reducer import Reducer
from thinwire.schemes import parse

SHAPES = {"norm": (40,), "a": (48, 40), "a.bias": (48,), "b": (64, 48), "b.bias": (64,), "c": (3, 700), "tail": (33,)}
ORDERS = {
    "exempt at the ends": list(SHAPES),
    "compressed at the ends": ["a", "norm", "tail", "b", "b.bias", "c"],
}
LOSSY = [spec for spec in every_spec() if not parse(spec).exact]
# A chunk is so many neighbours in the bucket: with gaps there are others.
CHUNKED = ("topkc",)


def gradients(workers, seed, order):
    generator = torch.Generator().manual_seed(seed)
    names = ORDERS[order]
    return [{name: torch.randn(SHAPES[name], generator=generator) for name in names} for _ in range(workers)]


def trained(spec, workers, feedback, order):
    """The means of five steps, of which the third has an Inf, and what is remembered after them."""
    group = tw.Simulation(spec, workers=workers, exempt="auto", feedback=feedback, seed=3)
    means = []
    for step in range(5):
        given = gradients(workers, step, order)
        if step == 2:
            given[-1]["b"][0, 0] = math.inf
        means.append(group.reduce(given))
    return means, [memory.state_dict() for memory in group.memories], group.bytes_sent


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("workers", [2, 5])
@pytest.mark.parametrize("spec", [spec for spec in LOSSY if parse(spec).name not in CHUNKED])
def test_gaps_change_nothing(spec, workers, order, monkeypatch):
    for feedback in (True, False):
        means, memory, nbytes = trained(spec, workers, feedback, order)
        with monkeypatch.context() as patched:
            patched.setattr(partition, "GAPS", -1.0)  # so that all is copied
            copied, copied_memory, copied_nbytes = trained(spec, workers, feedback, order)
        assert nbytes == copied_nbytes
        for with_gaps, without in zip(means, copied, strict=True):
            for name, mean in with_gaps.items():
                torch.testing.assert_close(mean, without[name], rtol=0, atol=0, equal_nan=True)
        for with_gaps, without in zip(memory, copied_memory, strict=True):
            assert with_gaps.keys() == without.keys()
            for name, kept in with_gaps.items():
                for key, tensor in kept.items():
                    assert torch.equal(tensor, without[name][key]), (name, key)


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("spec", LOSSY)
def test_nothing_is_copied_and_nothing_lies_in_the_gaps(spec, order, monkeypatch):
    """The scheme is given the bucket's own memory, with 0 between its tensors, and leaves 0 there in all that stays."""
    seen = []
    plain = type(parse(spec)).converse

    def watched(scheme, bucket, memory, level):
        if scheme == parse(spec) and not bucket.layout.chosen:
            seen.append(bucket)
            for tensor in filter(lambda each: each is not None, (bucket.flat, bucket.owed)):
                for (_, stop), (start, _) in zip(bucket.layout.runs, bucket.layout.runs[1:], strict=False):
                    assert not tensor[stop:start].any()
        return (yield from plain(scheme, bucket, memory, level))

    monkeypatch.setattr(type(parse(spec)), "converse", watched)
    # Fresh memory holds anything: here, what would show.
    taken = Scratch.take
    monkeypatch.setattr(Scratch, "take", lambda *args, **how: _soiled(taken, *args, **how))
    group = tw.Simulation(spec, workers=2, exempt="auto", feedback=True, seed=3)
    for step in range(3):
        mean = group.reduce(gradients(2, step, order))
        assert all(bool(torch.isfinite(each).all()) for each in mean.values())
    compressed = sum(math.prod(SHAPES[name]) for name in ORDERS[order] if len(SHAPES[name]) > 1)
    assert len(seen) == 6
    for bucket in seen:
        assert bucket.layout.has_gaps and bucket.layout.numel == compressed < bucket.flat.numel()


def test_what_a_controller_measures_is_not_of_the_gaps(monkeypatch):
    """Neither what the message lost, nor what another level's would."""
    taken = Scratch.take
    monkeypatch.setattr(Scratch, "take", lambda *args, **how: _soiled(taken, *args, **how))
    tensors = {name: torch.empty(SHAPES[name]) for name in ORDERS["compressed at the ends"]}
    exchange = Rehearsal(2, lambda: None)
    seen = []
    with Reducer(tensors, "qsgd(bits=4)", None, exchange=exchange, controller="mqgrad(interval=2)") as reducer:
        decide = reducer.steering.controller.decide
        reducer.steering.controller.decide = lambda observed: seen.append(observed) or decide(observed)
        for step in range(8):
            reducer.reduce(gradients(1, step, "compressed at the ends")[0])
            reducer.observe(1.0)
    assert len(seen) == 4
    for each in seen:
        for square in (each.compression_error, each.wondered_error, each.given_square, each.mean_square):
            assert math.isfinite(square) and square > 0


def _soiled(taken, scratch, name, numel, dtype, device="cpu", **how):
    known = (name, dtype, torch.device(device)) in scratch._kept
    memory = taken(scratch, name, numel, dtype, device, **how)
    if not known and dtype.is_floating_point:
        memory.fill_(math.nan)
    return memory


def test_long_gaps_and_other_schemes_are_copied():
    layout = Layout.of([("a", (40, 40)), ("long", (3000,)), ("b", (40, 40))])
    flat = torch.randn(layout.numel)
    given = []

    class Watching(tw.QSGD):
        def converse(self, bucket, memory, level):
            given.append(bucket)
            return (yield from super().converse(bucket, memory, level))

    for scheme, exempt in ((Watching(), frozenset({"long"})), (_without_gaps(Watching)(), frozenset({"b"}))):
        bucket = Bucket(flat.clone(), layout)
        conversation = Partition(scheme, exempt).converse(bucket, Memory(), 4)
        next(conversation)
    assert not given[0].layout.has_gaps and given[0].flat.untyped_storage().data_ptr() != bucket.flat.data_ptr()
    assert not given[1].layout.has_gaps


def _without_gaps(scheme):
    return type("Without", (scheme,), {"gaps": False})


@st.composite
def layouts(draw):
    segments, at = [], 0
    for number in range(draw(st.integers(1, 6))):
        numel = draw(st.integers(0, 60))
        segments.append(Segment(str(number), at, at + numel, (numel,), draw(st.sampled_from([0, 0, 8, 16]))))
        at += numel + draw(st.sampled_from([0, 0, 1, 17]))
    return Layout(segments)


@settings(deadline=None)
@given(layouts(), st.integers(1, 9), st.sampled_from([1, 8, 16]))
def test_a_layout_with_gaps_is_cut_as_without(layout, parts, grain):
    closed = layout.closed
    assert not closed.has_gaps and closed.numel == layout.numel and closed.names == layout.names
    where = torch.cat([torch.arange(0), *(torch.arange(s.start, s.stop) for s in layout.segments)])
    at = 0
    for cut, span, flat in zip(
        layout.split(parts, grain), layout.spans(parts, grain), closed.split(parts, grain), strict=True
    ):
        assert [(s.name, s.shape, s.offset) for s in cut.segments] == [
            (s.name, s.shape, s.offset) for s in flat.segments
        ]
        assert span[1] - span[0] == cut.extent
        places = torch.cat([torch.arange(0), *(span[0] + torch.arange(s.start, s.stop) for s in cut.segments)])
        assert torch.equal(places, where[at : at + cut.numel])
        at += cut.numel
    assert at == layout.numel


@settings(deadline=None)
@given(layouts(), st.data())
def test_places_are_counted_end_to_end_and_back(layout, data):
    where = torch.cat([torch.arange(0), *(torch.arange(s.start, s.stop) for s in layout.segments)])
    chosen = sorted(data.draw(st.sets(st.integers(0, max(0, layout.numel - 1))))) if layout.numel else []
    places = where[chosen].int()
    layout.close_(places)
    assert places.tolist() == chosen
    layout.open_(places)
    assert torch.equal(places.long(), where[chosen])


def test_memory_follows_a_bucket_whose_gaps_move():
    """DDP makes new buckets after its first step: the same tensors, and other ones between them."""
    memory = Memory()
    for name in "ab":
        memory.add(name, {"residual": torch.full((2, 3), float(ord(name)))})
    near, far = (Layout([Segment("a", 0, 6, (2, 3)), Segment("b", at, at + 6, (2, 3))]) for at in (6, 9))
    first = memory.flat("residual", near)
    assert memory.flat("residual", near) is first
    second = memory.flat("residual", far)
    assert second.tolist() == [97.0] * 6 + [0.0] * 3 + [98.0] * 6
    second[9:] = 5.0
    assert memory.flat("residual", near).tolist() == [97.0] * 6 + [5.0] * 6
