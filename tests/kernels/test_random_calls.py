"""Decoders on hostile bytes: those of the right length decode, any other length is a ValueError, nothing crashes.

`make sanitize` runs this under ASan and UBSan, where reading or writing one byte out of bounds ends the process.
"""

import random

import pytest
import torch

from thinwire import kernels
from thinwire.kernels import Levels
from thinwire.lab.bench.cases import tnq_levels

LEVELS = {bits: Levels(tnq_levels(bits)) for bits in range(1, 9)}


def mutated(data: torch.Tensor, chance: random.Random) -> torch.Tensor:
    """The bytes with some flipped, cut off, added, or all replaced."""
    how = chance.choice(["flip", "cut", "grow", "noise", "same length"])
    if how == "cut":
        return data[: chance.randrange(data.numel() + 1)].clone()
    if how == "grow":
        return torch.cat([data, torch.randint(0, 256, (chance.randrange(1, 9),), dtype=torch.uint8)])
    if how == "noise":
        return torch.randint(0, 256, (chance.randrange(2 * data.numel() + 2),), dtype=torch.uint8)
    if how == "flip" and data.numel():
        data = data.clone()
        data[chance.randrange(data.numel())] ^= 1 << chance.randrange(8)
        return data
    return torch.randint(0, 256, (data.numel(),), dtype=torch.uint8)


def decode_all(count: int, seed: int) -> tuple[int, int]:
    """(decoded, refused) of `count` mutated payloads."""
    chance = random.Random(seed)
    torch.manual_seed(seed)
    decoded = refused = 0
    for _ in range(count):
        numel, block = chance.choice([0, 1, 5, 63, 64, 65, 200]), chance.choice([0, 1, 7, 64])
        bits = chance.randint(1, 8)
        cut = chance.randint(0, numel)
        starts = torch.tensor([0, cut, numel])
        blocks = kernels.check.blocks(starts, block, bits=bits)
        payload = mutated(torch.zeros(4 * blocks.count + blocks.packed, dtype=torch.uint8), chance)
        ranges, codes = payload[: 4 * blocks.count].clone(), payload[4 * blocks.count :].clone()
        out, width = torch.zeros(numel), chance.randint(2, 32)
        ints = torch.zeros(numel, dtype=torch.int32)
        packed = mutated(torch.zeros(kernels.packed_int_bytes(numel, width), dtype=torch.uint8), chance)
        blocked = (codes, starts, block)
        for decode, arguments in (
            (kernels.dequantize_uniform_add, (*blocked, bits)),
            (kernels.dequantize_levels_add, (*blocked, LEVELS[bits])),
            (kernels.add_packed, (packed, width, ints)),
            (kernels.add_packed_saturating, (packed, width, ints)),
        ):
            try:
                if arguments[0] is codes:
                    # A payload cut inside a float: viewing its bytes as floats is what a scheme must refuse first.
                    if ranges.numel() % 4:
                        raise ValueError("cut")
                    decode(*arguments, ranges.view(torch.float32), 0.5, out=out)
                else:
                    decode(*arguments)
                decoded += 1
            except ValueError:
                refused += 1
    return decoded, refused


def test_mutated_payloads_decode_or_are_refused():
    decoded, refused = decode_all(400, seed=1)
    assert decoded > 400 and refused > 400


@pytest.mark.full
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("seed", range(10))
def test_many_mutated_payloads_decode_or_are_refused(seed):
    decoded, refused = decode_all(10_000, seed=100 + seed)
    assert decoded > 10_000 and refused > 10_000
