"""Sketches add up as what they are of does, and are as long."""

import pytest
import torch

from thinwire.core import sketch as module
from thinwire.core.sketch import sketch


@pytest.mark.parametrize("elements", [0, 1, 255, 256, 3000, 70_000])
def test_a_sketch_is_linear_and_as_long_as_what_it_is_of(elements, monkeypatch):
    monkeypatch.setattr(module, "_ROWS", 4096)  # several parts
    first, second = torch.randn(2, elements, generator=torch.Generator().manual_seed(elements))
    found = sketch(first, 256), sketch(second, 256), sketch((first + second) / 2, 256)
    assert all(each.shape == (256,) and each.dtype is torch.float64 for each in found)
    torch.testing.assert_close((found[0] + found[1]) / 2, found[2], rtol=1e-5, atol=1e-4)
    assert float(found[0].norm()) == pytest.approx(float(first.norm()), rel=0.2)
    torch.testing.assert_close(found[0], sketch(first, 256), rtol=0, atol=0)


def test_what_is_alike_everywhere_is_not_lost_and_not_counted_twice():
    """Equal elements would add up, or cancel, without random signs."""
    lengths = [float(sketch(value * torch.ones(65_536), 256).norm()) for value in (1.0, -2.0)]
    assert lengths[0] == pytest.approx(256, rel=0.2) and lengths[1] == 2 * lengths[0]


def test_parts_that_are_alike_add_up_to_the_whole():
    """With the same signs a part and its negative would come to nothing."""
    part = torch.randn(3000, generator=torch.Generator().manual_seed(1))
    whole = sketch(part, 256, "first") + sketch(-part, 256, "second")
    assert float(whole.norm()) == pytest.approx(2**0.5 * float(part.norm()), rel=0.2)
