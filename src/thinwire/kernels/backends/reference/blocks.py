"""Where every block lies: the arrays that let the references work on all blocks at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """The blocks of a buffer, as int64 arrays with one element per block."""

    begin: Tensor
    end: Tensor
    stretch: Tensor

    @classmethod
    def of(cls, starts: Tensor, block: int, device: torch.device | str = "cpu") -> Blocks:
        lengths = torch.diff(starts)
        counts = -(-lengths // block) if block else torch.ones_like(lengths)
        stretch = torch.repeat_interleave(_numbers(len(counts), starts.device), counts)
        ordinal = _numbers(len(stretch), starts.device) - (torch.cumsum(counts, 0) - counts)[stretch]
        begin = starts[:-1][stretch] + ordinal * block
        stop = starts[1:][stretch]
        end = torch.minimum(begin + block, stop) if block else stop
        return cls(begin.to(device), end.to(device), stretch.to(device))

    @property
    def lengths(self) -> Tensor:
        return self.end - self.begin

    @property
    def of_element(self) -> Tensor:
        """For each element from the first block's begin to the last one's end: the number of its block."""
        return torch.repeat_interleave(_numbers(len(self.begin), self.begin.device), self.lengths)

    def bytes(self, bits: int) -> Tensor:
        """The size of each block's packed codes."""
        return -(-self.lengths * bits // 8)

    def bit_positions(self, bits: int) -> Tensor:
        """For each element: the first bit of its code in the packed codes of all blocks."""
        sizes = self.bytes(bits)
        first = 8 * (torch.cumsum(sizes, 0) - sizes) - self.begin * bits
        block = self.of_element
        element = _numbers(len(block), block.device) + (self.begin[0] if len(self.begin) else 0)
        return first[block] + element * bits


def _numbers(count: int, device: torch.device) -> Tensor:
    return torch.arange(count, dtype=torch.int64, device=device)
