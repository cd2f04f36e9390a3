"""What every scheme's conversation takes of a device, without one: memory, and copies that a host would wait for."""

import pytest
import torch

from helpers.specs import every_spec
from helpers.unmade import Made, step_of
from thinwire.core.memory import Memory
from thinwire.schemes import _banks, parse
from thinwire.schemes._sparse import kept

pytest.importorskip("triton")

from benchmarks import cubins

SHAPES = [*((f"w{number}", (512, 512)) for number in range(8)), ("b", (512,))]
NUMEL = 8 * 512 * 512 + 512
LONG = ["eden(bits=3, rotate=30)", "thc(bits=2, rotate=30)"]  # blocks that are longer than a program: by the references
STUDIES = ["thc(levels='table')", "topkc(density=0.2, chunk=8, shuffle=True)"]  # rungs of a ladder, not for use there
SPECS = [spec for spec in every_spec() if not parse(spec).sized_by_numbers and spec not in LONG + STUDIES]


@pytest.fixture(autouse=True)
def quick_thresholds(monkeypatch):
    """The least errors of 384 power laws take seconds to find, and have no part in this."""
    monkeypatch.setattr(Memory, "show", lambda self, name, key: None)  # there is nothing to show
    monkeypatch.setattr(_banks, "_thresholds", lambda bits, shape, device: torch.full((3, 128), 2.0, device=device))


def check(spec, dtype, **options):
    with cubins.watched(lambda *launch: None) as device:
        made, message = step_of(spec, SHAPES, device, dtype, **options)
    # `randomk` draws on the host, and its places are brought over as keys are: 4 bytes for each entry that it sends.
    places = 4 * sum(kept(parse(spec).density, 512 * 512) for _ in range(8)) if spec.startswith("randomk") else 0
    assert made.peak <= max(message, NUMEL * dtype.itemsize / 32) + places, (made.peak, message)
    assert sum(made.carried.values()) <= 4 * 8 * len(SHAPES) + places, made.carried


@pytest.mark.parametrize("spec", SPECS)
def test_fresh_memory_is_at_most_a_message_and_only_keys_come_over(spec):
    """A message, or a 32nd of the bucket where that is more. What comes over is pinned, so that nobody waits."""
    check(spec, torch.float32)


@pytest.mark.parametrize("spec", ["fp16", "fp32", "fp64", "powersgd", "qsgd(bits=4)", "topk"])
def test_the_same_of_float64(spec):
    """By the references, where a scheme works in it; others get float32."""
    check(spec, torch.float64)


@pytest.mark.parametrize("spec", ["fp16", "bf16"])
def test_the_same_of_casts_with_memory(spec):
    check(spec, torch.float32, feedback=True)


def test_those_with_long_blocks_are_known():
    assert [spec for spec in every_spec() if getattr(parse(spec), "rotate", 0) > 12] == LONG


def test_a_temporary_and_a_copy_are_seen():
    made = Made()
    with made:
        x = torch.zeros(1000, dtype=torch.float32, device="meta")
        del x
        y = torch.zeros(500, dtype=torch.float32, device="meta")
        whole = y.view(50, 10)
        del y
        assert (made.now, made.peak) == (2000, 4000)
        whole.copy_(torch.zeros(50, 10))
    assert made.carried == {"aten::copy_": 2000}
