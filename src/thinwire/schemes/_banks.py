"""Families of level tables, one table for every row of shape parameters: looked up on a CPU, made where a device is.

A device chooses by numbers that the host does not have. Laplace tables have coarse parameters, so there is a bank of
all of them; those of power laws are computed from theirs, as `theory` has them, in float64 and rounded once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from thinwire import kernels
from thinwire.core import theory

STEPS = 16  # ratios of a Laplace bank in a binary order
ORDERS = 32  # binary orders: no element is further out than a tensor has elements
EXPONENTS = 128  # of power laws: 3 + 1/64 .. 5


def coarse(ratio: Tensor) -> Tensor:
    """`ratio` up to the next 16th of a binary order: few enough values for their tables to be kept."""
    return torch.exp2(torch.ceil(torch.log2(ratio.double()) * STEPS) / STEPS).to(ratio.dtype)


@lru_cache(maxsize=1024)
def laplace(bits: int, ratio: float) -> kernels.Levels:
    """The levels for a Laplace tensor whose range is `ratio` of its scales."""
    if not 0 < ratio < math.inf:
        raise ValueError(f"a range of {ratio} scales in a payload")
    return kernels.Levels.of(theory.laplace_unit_levels(bits, ratio))


@lru_cache(maxsize=1024)
def power_law(bits: int, shape: str, ratio: float, exponent: float, tail: float) -> kernels.Levels:
    if not (1 <= ratio < math.inf and 3 < exponent <= 5 and 0 < tail < 0.5):
        raise ValueError(f"tnq: a power law with {ratio=}, {exponent=}, {tail=} in a payload")
    return kernels.Levels.of(theory.power_law_unit_levels(exponent, tail, bits, shape, ratio))  # type: ignore[arg-type]


@dataclass(frozen=True)
class Laplace:
    """One parameter: the range in scales, which is coarse or the threshold of truncation."""

    bits: int
    threshold: float = 1.0

    def levels(self, row: tuple[float, ...]) -> kernels.Levels:
        return laplace(self.bits, row[0])

    def bank(self, shapes: Tensor) -> tuple[Tensor, Tensor]:
        """A bank of tables and every tensor's row in it, both where the parameters are; -1: there is no such table."""
        bank, ratio = _laplace_bank(self.bits, self.threshold, shapes.device), shapes[:, 0]
        known = (ratio > 0.5) & (ratio < 2.0**ORDERS)
        steps = torch.log2(torch.where(known, ratio, 1.0).double()).mul(STEPS).round().clamp(0).to(torch.int64)
        own = torch.where(ratio == float(np.float32(self.threshold)), len(bank) - 1, steps)
        return bank, torch.where(known, own, -1)


@dataclass(frozen=True)
class PowerLaw(Laplace):
    """Three parameters: the range in knees, exponent and tail. An exponent of 0 is Laplace's."""

    shape: str = "nonuniform"

    def levels(self, row: tuple[float, ...]) -> kernels.Levels:
        return super().levels(row) if row[1] == 0 else power_law(self.bits, self.shape, *row)

    def bank(self, shapes: Tensor) -> tuple[Tensor, Tensor]:
        bank, row = super().bank(shapes)
        ratio, exponent, tail = shapes.double().unbind(1)
        known = (ratio >= 1) & (ratio < math.inf) & (exponent > 3) & (exponent <= 5) & (tail > 0) & (tail < 0.5)
        law = (torch.where(known, each, fine)[:, None] for each, fine in ((ratio, 2.0), (exponent, 4.0), (tail, 0.05)))
        own = _with_gaps(_levels_of(self.bits, self.shape, *law).to(shapes.dtype))
        plain = (exponent == 0)[:, None, None]
        number = torch.arange(len(shapes), dtype=torch.int64, device=shapes.device)
        there = torch.where(exponent == 0, row >= 0, known)
        return torch.where(plain, bank[row.clamp(min=0)], own), torch.where(there, number, -1)


@lru_cache(maxsize=64)
def _laplace_bank(bits: int, threshold: float, device: torch.device) -> Tensor:
    """The tables of all coarse ratios from 1 on, then that of the threshold."""
    steps = torch.arange(STEPS * ORDERS + 1, dtype=torch.float64, device="cpu")
    ratios = [*torch.exp2(steps / STEPS).float().tolist(), float(np.float32(threshold))]
    tables = np.stack([theory.laplace_unit_levels(bits, ratio) for ratio in ratios])
    return _with_gaps(torch.from_numpy(tables).float()).to(device)


def _with_gaps(tables: Tensor) -> Tensor:
    """Each level, and 1 / the gap above it."""
    return torch.stack([tables, torch.nn.functional.pad(1.0 / tables.diff(dim=1), (0, 1))], dim=2)


def _levels_of(bits: int, shape: str, ratio: Tensor, exponent: Tensor, tail: Tensor) -> Tensor:
    """`theory.power_law_unit_levels`, a row for each law."""
    s = theory.intervals(bits)
    index = torch.arange(1, s + 1, 2, dtype=torch.float64, device=ratio.device)[None]
    if shape == "uniform" or bits == 1:
        positive = (index / s).expand(len(ratio), -1)
    elif shape == "nonuniform":
        positive = _dense_inside(index / s, ratio, exponent, tail)
    else:
        positive = _of_two_spacings(index, s, ratio, exponent, tail)
    positive = torch.cat([positive[:, :-1], torch.ones_like(ratio)], dim=1)
    return torch.cat([-positive.flip(1), positive], dim=1)


def _dense_inside(share: Tensor, ratio: Tensor, exponent: Tensor, tail: Tensor) -> Tensor:
    power, root = 1 - exponent / 3, (tail * (exponent - 1)) ** (1 / 3)
    knee = ((1 - 2 * tail) / 2) ** (1 / 3)
    wanted = share * (knee + root * (ratio**power - 1) / power)
    outer = (1 + (wanted - knee).clamp(min=0) * power / root) ** (1 / power)
    return torch.where(wanted < knee, wanted / knee, outer) / ratio


def _of_two_spacings(index: Tensor, s: int, ratio: Tensor, exponent: Tensor, tail: Tensor) -> Tensor:
    def mass_inside(x: Tensor) -> Tensor:
        beyond = 1 - 2 * tail * x.clamp(min=1.0) ** (1 - exponent)
        return torch.where(x < 1, (1 - 2 * tail) * x, beyond)

    splits = _splits(ratio.device)
    inner = mass_inside(splits * ratio)
    outer = (mass_inside(ratio) - inner).clamp(min=0)
    share = 1 / (1 + (outer * (1 - splits) ** 2 / (inner * splits**2)) ** (1 / 3))
    odd = (2 * torch.round((s * share - 1) / 2) + 1).clamp(1, s - 2)
    error = inner * (splits / odd) ** 2 + outer * ((1 - splits) / (s - odd)) ** 2
    best = error.argmin(1, keepdim=True)
    split, gaps = splits.expand_as(odd).gather(1, best), odd.gather(1, best)
    beyond = split + (1 - split) * (index - gaps) / (s - gaps)
    return torch.where(index <= gaps, split * index / gaps, beyond)


@cache
def _splits(device: torch.device) -> Tensor:
    return torch.from_numpy(np.array(theory.SPLITS)).to(device)


@cache
def _thresholds(bits: int, shape: str, device: torch.device) -> Tensor:
    """[tails, exponents]: the best threshold in knees of every law that a fit may find."""
    exponents = [3 + number / 64 for number in range(1, EXPONENTS + 1)]
    laws = [[theory.PowerLaw(t, 1.0, tail) for t in exponents] for tail in theory.TAILS]
    best = [[law.threshold(bits, shape) for law in row] for row in laws]  # type: ignore[arg-type]
    return torch.tensor(best, dtype=torch.float64, device="cpu").to(device)


@lru_cache(maxsize=256)
def _counts(numels: tuple[int, ...], device: torch.device) -> Tensor:
    """[tensors, tails]: how many elements are beyond each knee."""
    counts = [[int(numel * 2 * tail) for tail in theory.TAILS] for numel in numels]
    return torch.tensor(counts, dtype=torch.int64, device="cpu").to(device)


class Fits(NamedTuple):
    """Of every tensor; an exponent of 0 where no power law fits."""

    threshold: Tensor
    knee: Tensor
    exponent: Tensor
    tail: Tensor


def fit_power_laws(magnitudes: list[Tensor], bits: int, shape: str) -> Fits:
    """`theory.PowerLaw.fit` of several tensors, where they are. None of them has fewer elements than a fit needs."""
    device, numels = magnitudes[0].device, tuple(each.numel() for each in magnitudes)
    most = [int(numel * 2 * theory.TAILS[-1]) + 1 for numel in numels]
    largest = torch.zeros(len(numels), max(most), dtype=torch.float64, device=device)
    for own, each, few in zip(largest, magnitudes, most, strict=True):
        own[:few] = each.topk(few).values
    logs, count = largest.log_(), _counts(numels, device)
    knees = logs.gather(1, count)
    spread = logs.cumsum(1).gather(1, count - 1) - count * knees  # NaN: the knee is 0, or an element is not finite
    exponent = torch.where(spread > 0, torch.round((1 + count / spread) * 64) / 64, math.inf)
    known = (exponent > 3) & (exponent <= 5)
    number = torch.where(known, (exponent - 3) * 64 - 1, 0).to(torch.int64)
    thresholds = _thresholds(bits, shape, device).gather(1, number.T).T
    known &= thresholds > 1.05
    first = known.to(torch.uint8).argmax(1, keepdim=True)  # the farthest knee that its threshold clears
    knee, found = knees.gather(1, first)[:, 0].exp(), known.any(1)
    tail = torch.where(first == 0, theory.TAILS[0], torch.where(first == 1, theory.TAILS[1], theory.TAILS[2]))[:, 0]
    return Fits(
        thresholds.gather(1, first)[:, 0] * knee, knee, torch.where(found, exponent.gather(1, first)[:, 0], 0.0), tail
    )
