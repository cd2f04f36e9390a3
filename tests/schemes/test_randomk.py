"""Random-k: everybody draws alike, and fairly."""

import torch

import thinwire as tw
from thinwire import kernels
from thinwire.core.layout import Layout
from thinwire.schemes.randomk import _few


def places_of(layout, density, key):
    keys = torch.arange(len(layout.segments)) + 1_000_003 * key
    few = _few(layout, density)
    places = torch.empty(few.numel, dtype=torch.int32)
    kernels.draw_places(layout.starts, few.starts, keys, out=places)
    return places, few


def test_places_are_different_and_every_entry_is_as_likely():
    layout = Layout.of([("a", (10,)), ("b", (37,)), ("c", (3,))])
    counts, draws = torch.zeros(50), 4000
    for key in range(draws):
        places, few = places_of(layout, 0.3, key)
        assert few.starts.tolist() == [0, 3, 14, 15] and len(set(places.tolist())) == 15
        counts[places.long()] += 1
    for segment, kept in zip(layout.segments, (3, 11, 1), strict=True):
        share = kept / segment.numel
        spread = 5 * (share * (1 - share) / draws) ** 0.5
        assert (counts[segment.start : segment.stop] / draws - share).abs().max() < spread


def test_all_workers_keep_the_same_entries_without_sending_places():
    simulation = tw.Simulation("randomk(density=0.25, values='fp32')", workers=4, feedback=False)
    tensors = [torch.randn(400) for _ in range(4)]
    mean = simulation.reduce(tensors)
    kept = mean != 0
    assert kept.sum() == 100
    torch.testing.assert_close(mean[kept], sum(tensors)[kept] / 4)
    assert simulation.bytes_sent == 2 * 3 / 4 * 100 * 4


def test_every_step_draws_anew_and_feedback_sends_all_in_the_end():
    simulation = tw.Simulation("randomk(density=0.25, values='fp32')", workers=2)
    total = simulation.reduce([torch.ones(64)] * 2)
    for _ in range(60):
        total = total + simulation.reduce([torch.zeros(64)] * 2)
    torch.testing.assert_close(total, torch.ones(64))


def test_the_choice_does_not_depend_on_the_bucket():
    a, b = torch.ones(2, 60), torch.ones(2, 80)
    together = tw.Simulation("randomk(density=0.1)", workers=1).reduce([{"a": a, "b": b}])
    alone = tw.Simulation("randomk(density=0.1)", workers=1).reduce([{"b": b}])
    assert torch.equal(together["b"], alone["b"])
