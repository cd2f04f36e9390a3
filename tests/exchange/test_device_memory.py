"""What every scheme's conversation takes of a device, without one: memory, and copies that a host would wait for."""

import pytest
import torch

from helpers.specs import every_spec
from helpers.unmade import Made, step_of
from thinwire.core.memory import Memory
from thinwire.schemes import _banks, parse

pytest.importorskip("triton")

from benchmarks import cubins

SHAPES = [*((f"w{number}", (512, 512)) for number in range(8)), ("b", (512,))]
WIDE = [("w", (64, 32768))]  # one tensor, and a factor of which has more entries than the other
SMALL = [("w", (64, 1024)), ("v", (1000, 37)), ("b", (11,))]
SPECS = [spec for spec in every_spec() if not parse(spec).sized_by_numbers]
# What does not grow with a bucket, and so is more than the message of a small one: the counts of a radix select,
# pieces of 1,024 entries, and the fits of power laws to tensors.
FIXED = {"topk": 12_296, "regtopk": 12_296, "topkc": 12_296, "randomk": 3_073, "tnq": 174_544}
# A block that is longer than a program's 4,096 entries is held whole between two passes over it, in float32, beside
# what must not be touched: the gradient that is encoded, or the sum of the payloads before. So it takes 4 bytes for
# each of its entries, where a message has 3 bits, and 16 for each 4,096 of them, which are sums of a program's.
HELD = "eden(bits=3, rotate=30)"  # and `thc` is held where its mean will be, or what it loses


@pytest.fixture(autouse=True)
def quick_thresholds(monkeypatch):
    """The least errors of 384 power laws take seconds to find, and have no part in this."""
    monkeypatch.setattr(Memory, "show", lambda self, name, key: None)  # there is nothing to show
    monkeypatch.setattr(_banks, "_thresholds", lambda bits, shape, device: torch.full((3, 128), 2.0, device=device))


def check(spec, dtype, shapes=SHAPES, fixed=0, **options):
    with cubins.watched(lambda *launch: None) as device:
        made, message = step_of(spec, shapes, device, dtype, **options)
    assert made.peak <= max(message, fixed), (made.peak, message)
    keys = 4 * len(shapes) + 8  # two for each tensor and each part of one that was cut, once or twice in a step
    assert sum(made.carried.values()) <= 8 * keys, made.carried


@pytest.mark.parametrize("spec", SPECS)
def test_fresh_memory_is_at_most_a_message_and_only_keys_come_over(spec):
    """What comes over is pinned, so that nobody waits."""
    check(spec, torch.float32)


@pytest.mark.parametrize("spec", [*SPECS, "powersgd(factor_rank=1)", "powersgd(factor_rank=1, sided='one')"])
def test_the_same_of_one_wide_tensor_and_of_a_small_bucket(spec):
    check(spec, torch.float32, WIDE, room(64 * 32768) if spec == HELD else 0)
    check(spec, torch.float32, SMALL, room(64 * 1024) if spec == HELD else FIXED.get(parse(spec).name, 0))


def room(longest):
    return (4 + 16 / 4096) * longest + 512  # keys, and scales of blocks


@pytest.mark.parametrize("spec", ["fp16", "fp32", "fp64", "powersgd", "qsgd(bits=4)", "topk"])
def test_the_same_of_float64(spec):
    """By the references, where a scheme works in it; others get float32."""
    check(spec, torch.float64)


@pytest.mark.parametrize("spec", ["fp16", "bf16"])
def test_the_same_of_casts_with_memory(spec):
    check(spec, torch.float32, feedback=True)


def test_without_error_memory_a_long_block_is_held_beside_its_gradient():
    check("thc(bits=2, rotate=30)", torch.float32, WIDE, room(64 * 32768), feedback=False)


@pytest.mark.parametrize("spec", ["eden(bits=1, rotate=13)", "thc(bits=2, rotate=13)"])
def test_long_blocks_take_no_more_than_a_message_where_there_are_many(spec):
    check(spec, torch.float32)
    check(spec, torch.float32, WIDE)


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
