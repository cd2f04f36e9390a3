"""Before the first step: a device has compiled all that the steps start, for whatever they were told to do."""

import pytest
import torch

from helpers.specs import every_spec
from helpers.unmade import Unmade
from thinwire.core.layout import Layout
from thinwire.core.memory import Memory
from thinwire.reducer import Reducer
from thinwire.schemes import _banks, parse

pytest.importorskip("triton")

from benchmarks import cubins

SHAPES = [
    ("w", (96, 512)), ("n", (77,)), ("v", (100, 37)), ("b", (11,)), ("k", (16, 3, 7, 7)), ("u", (65, 129)),
    ("t", (301, 256)), ("m", (12, 50)),
]  # fmt: skip
BUCKETS = [SHAPES[:3], SHAPES[3:5], SHAPES[5:]]
SPECS = [spec for spec in every_spec() if not parse(spec).sized_by_numbers]


@pytest.fixture(autouse=True)
def quick_thresholds(monkeypatch):
    """The least errors of 384 power laws take seconds to find, and have no part in this."""
    monkeypatch.setattr(Memory, "show", lambda self, name, key: None)  # there is nothing to show
    monkeypatch.setattr(_banks, "_thresholds", lambda bits, shape, device: torch.full((3, 128), 2.0, device=device))


def compiled(spec, workers, steps, **options):
    """(what was compiled before the first step, what in the steps), as Triton tells one kernel from another.

    But for addresses: where one that divided by 16 does not, it compiles once more.
    """
    before, after, found = set(), set(), set()

    def look(kernel, programs, arguments, constants, warps):
        kinds = tuple(cubins._type(each) for each in arguments)
        found.add((kernel.fn.__name__, kinds, tuple(constants.items()), warps))

    with cubins.watched(look) as device:
        tensors = {name: torch.zeros(shape, device=device) for name, shape in SHAPES}
        reducer = Reducer(tensors, spec, None, exchange=Unmade(workers), **options)
        before, found = found, set()
        for _ in range(steps):
            reducer.begin_step()
            for number, bucket in enumerate(BUCKETS):
                layout, last = Layout.of(bucket), number == len(BUCKETS) - 1
                buffer = torch.zeros(layout.numel, device=device)
                reducer.submit(buffer, layout, last=last, done=lambda error: None)
            reducer.end_step()
        after = found
    assert reducer.stats()["bytes_sent"] > 0 or not steps
    return before, after


@pytest.mark.parametrize("spec", SPECS)
def test_no_step_waits_for_the_compiler(spec):
    for workers in (2, 7):
        before, after = compiled(spec, workers, 2)
        assert not after - before


@pytest.mark.parametrize("options", [{"warmup_steps": 1}, {"warmup_steps": 1, "warmup_level": 8.0}, {"feedback": True}])
def test_nor_after_the_warm_up(options):
    before, after = compiled("qsgd(bits=4)", 3, 3, **options)
    assert not after - before and len(after) >= 3


def test_nor_where_a_controller_turns_the_level():
    """All levels that it may choose."""
    before, _ = compiled("qsgd(bits=4)", 2, 0, controller="mqgrad(interval=5)")
    for bits in range(1, 9):
        _, after = compiled(f"qsgd(bits={bits})", 2, 1)
        assert not after - before and after


def test_nothing_of_it_is_counted_or_remembered():
    with cubins.watched(lambda *launch: None) as device:
        tensors = {name: torch.zeros(shape, device=device) for name, shape in SHAPES}
        exchange = Unmade(3)
        Reducer(tensors, "powersgd", None, exchange=exchange)
    assert exchange.transport.ledger.totals() == {}
