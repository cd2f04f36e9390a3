"""Levels: a sorted table of quantisation levels, with what the kernels need to search it in constant time."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from numpy.typing import ArrayLike
from torch import Tensor

from thinwire.kernels import check

_MOST_CELLS = 4096  # of the search grid: it must stay in the nearest cache


@dataclass(frozen=True)
class Levels:
    """2^bits strictly increasing float32 levels, bits = 1..8. Make it once and keep it.

    A grid of equal cells over the table lets a kernel look up the interval in which a value's cell begins; `crowd`
    comparisons inside the cell give the value's own. `crowd` is 1 unless gaps differ by a factor of thousands.
    """

    table: Tensor  # float32[2^bits], in CPU memory
    bits: int = field(init=False)
    # float32[2^bits]: the level that begins the next interval; NaN at the end
    next: Tensor = field(init=False, repr=False)
    # float32[2^bits, 2]: each level, and 1 / the gap above it
    interval: Tensor = field(init=False, repr=False)
    # float32[cells, 2]: the interval that the cell begins in (as int32), and what ends that
    cell: Tensor = field(init=False, repr=False)
    cells: int = field(init=False, repr=False)
    crowd: int = field(init=False, repr=False)
    cells_per_unit: float = field(init=False, repr=False)

    @classmethod
    def of(cls, levels: ArrayLike) -> Levels:
        return cls(torch.tensor(levels, dtype=torch.float32, device="cpu"))

    def __post_init__(self) -> None:
        table = self.table
        check.flat("levels", table, dtypes=(torch.float32,))
        bits = table.numel().bit_length() - 1
        if table.device.type != "cpu" or not 1 <= bits <= 8 or table.numel() != 1 << bits:
            raise ValueError(
                f"levels must be 2, 4, ... 256 numbers in CPU memory, got {table.numel()} on {table.device}"
            )
        gaps = torch.diff(table)
        if not bool((gaps > 2.0**-100).all()) or not bool(torch.isfinite(table).all() & torch.isfinite(gaps).all()):
            raise ValueError(f"levels must be finite and strictly increasing, got {table.tolist()}")
        following = torch.cat([table[1:-1], table.new_full((2,), torch.nan)])
        values = {
            "table": table.clone(),
            "bits": bits,
            "next": following,
            "interval": torch.stack([table, torch.cat([1.0 / gaps, table.new_zeros(1)])], dim=1),
        } | _grid(table, following)
        for name, value in values.items():
            object.__setattr__(self, name, value)


def _grid(table: Tensor, following: Tensor) -> dict[str, Tensor | int | float]:
    """The smallest grid of 2^k cells that holds no two inner levels in one cell, or the largest allowed."""
    span = table[-1] - table[0]
    cells = 2 * table.numel()
    while True:
        per_unit = float((cells / span).item())
        # The kernel's own arithmetic, float32 step by step: a level and a value in its cell must agree on the cell.
        cell = ((table[1:-1] - table[0]) * per_unit).clamp(0, cells - 1).to(torch.int64)
        inside = torch.bincount(cell, minlength=cells)
        crowd = int(inside.max())
        if crowd <= 1 or cells >= _MOST_CELLS:
            break
        cells *= 2
    before = torch.cumsum(inside, 0) - inside
    cell = torch.stack([before.to(torch.int32).view(torch.float32), following[before]], dim=1)
    return {"cell": cell, "cells": cells, "crowd": crowd, "cells_per_unit": per_unit}
