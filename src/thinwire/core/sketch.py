"""A sketch: few numbers that stand for many. Sketches add up as what they are of does, and are about as long."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.core import randomness

_ROWS = 1 << 20  # elements at a time, or one row of them: signs take memory, too


def sketch(flat: Tensor, width: int, name: str = "") -> Tensor:
    """float64[width]: sums of elements with random signs, the same in every process and at every call.

    name: of what this is a part. Parts have signs of their own, so that the sum of their sketches is one of the whole.

    The mean of several workers' sketches is the sketch of their mean. Its squared length is that of the whole on
    average, and deviates from it by about sqrt(2 / width) of it.
    """
    total = torch.zeros(width, dtype=torch.float64, device=flat.device)
    generator = torch.Generator("cpu").manual_seed(randomness.key(0, 0, name) >> 1)
    for part in flat.split(max(1, _ROWS // width) * width) if flat.numel() else ():
        rows = torch.nn.functional.pad(part.double(), (0, -part.numel() % width)).view(-1, width)
        signs = torch.randint(0, 2, rows.shape, generator=generator, dtype=torch.int8, device="cpu")
        total += (rows * (2 * signs - 1).to(flat.device)).sum(0)
    return total
