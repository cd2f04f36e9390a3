"""What follows from a layout is made once and kept with it, in bounds."""

from collections import Counter

import pytest
import torch

import thinwire as tw
from thinwire.core import layout as layouts
from thinwire.core.bucket import Bucket
from thinwire.core.layout import Layout
from thinwire.schemes import _rotation, _tables


@pytest.mark.parametrize("spec", ["eden", "tnq(bits=3)", "qsgd"])
def test_nothing_is_planned_twice_with_64_workers_and_five_buckets(spec, monkeypatch):
    """A two-shot has 64 parts of each bucket: more layouts than a cache for all of them would hold."""
    planned = Counter()

    def count(owner, name):
        original = getattr(owner, name)

        def counted(*arguments, **options):
            planned[name] += 1
            return original(*arguments, **options)

        monkeypatch.setattr(owner, name, counted)

    count(Layout, "_between")
    count(_rotation.Rotation, "__init__")
    count(_tables, "_lengths")
    count(layouts, "integers")
    codec, workers = tw.scheme(spec), 64
    buckets = [Bucket.of(torch.randn(64, 64), workers=workers) for _ in range(5)]

    def step():
        for bucket in buckets:
            for part in bucket.split(workers, codec.grain):
                codec.encode(part, codec.level, torch.empty(codec.nbytes(part.layout, codec.level), dtype=torch.uint8))

    step()
    before = dict(planned)
    assert before["_between"] == 5 * workers
    assert before.get("__init__", 0) == (5 * workers if spec == "eden" else 0)
    step()
    assert planned == before


def test_what_a_layout_keeps_is_bounded_and_what_is_in_use_stays(monkeypatch):
    monkeypatch.setattr(layouts, "KEPT", 5)
    layout = Layout.of([(f"t{number}", (10,)) for number in range(20)])
    parts = layout.split(4, 8)
    for number in range(20):
        assert layout.select({f"t{number}"}).layout.names == (f"t{number}",)
        assert layout.split(4, 8) is parts
        assert len(layout._derived) <= 5
    assert layout.select({"t0"}).runs == ((0, 10),)  # forgotten, and made again


def test_a_budget_that_divides_a_bucket_ever_anew_keeps_a_bounded_number_of_divisions(monkeypatch):
    monkeypatch.setattr(layouts, "KEPT", 8)
    draw, divisions, select = torch.Generator().manual_seed(0), set(), Layout.select
    monkeypatch.setattr(Layout, "select", lambda self, names: (divisions.add(frozenset(names)), select(self, names))[1])
    group = tw.Simulation("tnq(budget=3.2)", workers=2, seed=0, feedback=False)
    for _ in range(20):
        scales = torch.exp(2 * torch.randn(8, generator=draw)).tolist()
        given = {f"t{n}": scale * torch.randn(2000, generator=draw) for n, scale in enumerate(scales)}
        mean, fresh = group.reduce([given, given]), tw.Simulation("tnq(budget=3.2)", workers=2, seed=0, feedback=False)
        fresh.step = group.step - 1
        again = fresh.reduce([given, given])
        assert all(torch.equal(mean[name], again[name]) for name in given)
    assert len(divisions) > 8
    assert len(group._layout._derived) <= 8
