"""Where every block lies: the arrays that let the references work on all blocks at once."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Blocks:
    """The blocks of a buffer, as int64 arrays with one element per block. All of it is about the stretches end to end;
    where there are gaps between them, `take`, `put` and `add` lead there and back.
    """

    begin: Tensor
    end: Tensor
    stretch: Tensor
    starts: Tensor  # int64[S + 1], in CPU memory
    at: Tensor | None  # where the elements lie in the buffer; None: without gaps

    @classmethod
    def of(cls, starts: Tensor, block: int, device: torch.device | str = "cpu") -> Blocks:
        at = None
        if starts.dim() == 2:
            at = elements(starts).to(device)
            starts = torch.cumsum(torch.cat([starts.new_zeros(1), starts[:, 1] - starts[:, 0]]), 0)
        lengths = torch.diff(starts)
        counts = -(-lengths // block) if block else torch.ones_like(lengths)
        stretch = torch.repeat_interleave(_numbers(len(counts), starts.device), counts)
        ordinal = _numbers(len(stretch), starts.device) - (torch.cumsum(counts, 0) - counts)[stretch]
        begin = starts[:-1][stretch] + ordinal * block
        stop = starts[1:][stretch]
        end = torch.minimum(begin + block, stop) if block else stop
        return cls(begin.to(device), end.to(device), stretch.to(device), starts, at)

    def take(self, x: Tensor) -> Tensor:
        """The buffer's elements."""
        return x if self.at is None else x[self.at]

    def put(self, values: Tensor, out: Tensor) -> None:
        """The buffer's elements = values; what is in its gaps stays."""
        if self.at is None:
            out.copy_(values)
        else:
            out[self.at] = values.to(out.dtype)

    def clear(self, out: Tensor) -> None:
        if self.at is None:
            out.zero_()
        else:
            out.index_fill_(0, self.at, 0.0)

    def add(self, values: Tensor, out: Tensor) -> None:
        if self.at is None:
            out.add_(values)
        else:
            out.index_add_(0, self.at, values.to(out.dtype))

    @property
    def lengths(self) -> Tensor:
        return self.end - self.begin

    @property
    def of_element(self) -> Tensor:
        """For each element: the number of its block."""
        return torch.repeat_interleave(_numbers(len(self.begin), self.begin.device), self.lengths)

    def bytes(self, bits: int) -> Tensor:
        """The size of each block's packed codes."""
        return -(-self.lengths * bits // 8)

    def bit_positions(self, bits: int) -> Tensor:
        """For each element: the first bit of its code in the packed codes of all blocks."""
        sizes = self.bytes(bits)
        first = 8 * (torch.cumsum(sizes, 0) - sizes) - self.begin * bits
        block = self.of_element
        return first[block] + _numbers(len(block), block.device) * bits


def elements(starts: Tensor) -> Tensor:
    """int64: the places of all elements of stretches with gaps between them."""
    return torch.cat([_numbers(0), *(begin + _numbers(end - begin) for begin, end in starts.tolist())])


def _numbers(count: int, device: torch.device | str = "cpu") -> Tensor:
    return torch.arange(count, dtype=torch.int64, device=device)
