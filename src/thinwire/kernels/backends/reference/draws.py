"""The counter-based generator: 32 bits that are a pure function of a 64-bit key and a counter. Ours."""

from __future__ import annotations

import torch
from torch import Tensor

from thinwire.kernels.backends.memory import carried
from thinwire.kernels.backends.reference.blocks import Blocks

COUNTERS = 1 << 32  # counters are below this
_WORD = 0xFFFFFFFF


def random_u32(key: int | Tensor, counter: Tensor) -> Tensor:
    """32 bits (in int64) for each counter (int64, 0 <= counter < 2^32) under a key: one, or one per counter (int64).

    The scrambled key's halves choose one of 2^63 affine walks through the 32-bit integers, a two-round
    multiplicative hash hides that it is a walk. Two keys so visit the integers in different orders, not in one
    order from different beginnings. Few walks are poor, such as those with a small or regular step; scrambling
    keeps regular keys away from them.
    """
    key = _scrambled(key, counter.device)
    low, high = key & _WORD, key >> 32 & _WORD
    x = (counter * (high | 1) + low) & _WORD
    x = ((x ^ (x >> 16)) * 0x21F0AAAD) & _WORD
    x = ((x ^ (x >> 15)) * 0x735A2D97) & _WORD
    return x ^ (x >> 15)


def draw_places(starts: Tensor, few: Tensor, keys: Tensor, out: Tensor) -> None:
    """out: places in stretches of a buffer, few[s]..few[s + 1] of them in stretch s; every one as likely as any other.

    One is drawn from each of as many equal parts of the stretch, laid out as a ring with a random beginning.
    """
    owner = torch.repeat_interleave(_numbers(len(few) - 1), torch.diff(few))
    number = _numbers(int(few[-1])) - few[owner]
    begins, ends = (starts[:-1], starts[1:]) if starts.dim() == 1 else starts.unbind(1)
    count, numel = torch.diff(few)[owner], (ends - begins)[owner]
    begin, end = number * numel // count, (number + 1) * numel // count
    inside = random_u32(keys[owner], number) * (end - begin) >> 32
    turn = random_u32(keys[owner], count) * numel >> 32
    places = begins[owner] + (begin + inside + turn) % numel
    out.copy_(carried(places.to(out.dtype), out.device))


def _numbers(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int64, device="cpu")


def random_unit(key: int | Tensor, counter: Tensor) -> Tensor:
    """float32 in [0, 1), 24 bits, from `random_u32`."""
    return (random_u32(key, counter) >> 8).to(torch.float32) * 2.0**-24


def _scrambled(key: int | Tensor, device: torch.device) -> Tensor:
    """One round of splitmix64, a bijection. int64 wraps around; a logical shift is an arithmetic one, masked."""
    if isinstance(key, int):
        key = torch.tensor(_signed(key), dtype=torch.int64, device=device)
    key = key + _signed(0x9E3779B97F4A7C15)
    key = (key ^ (key >> 30 & (1 << 34) - 1)) * _signed(0xBF58476D1CE4E5B9)
    key = (key ^ (key >> 27 & (1 << 37) - 1)) * _signed(0x94D049BB133111EB)
    return key ^ (key >> 31 & (1 << 33) - 1)


def _signed(number: int) -> int:
    """The int64 with the same low 64 bits."""
    return (number + (1 << 63)) % (1 << 64) - (1 << 63)


def stretch_draws(blocks: Blocks, keys: Tensor | None, counters: Tensor) -> Tensor | float:
    """The draw of every element; 1/2, which rounds to the nearest, where there are no keys."""
    if keys is None:
        return 0.5
    device = blocks.begin.device
    stretch = blocks.stretch[blocks.of_element]
    first = (counters - blocks.starts[:-1]).to(device)
    counter = torch.arange(len(stretch), dtype=torch.int64, device=device) + first[stretch]
    return random_unit(keys.to(device)[stretch], counter)
