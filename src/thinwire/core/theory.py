"""What the quantisers are built on, to call by hand: thresholds, levels, predicted errors, the split of a bit budget.

Pure mathematics on plain numbers; nothing here sees a gradient except `PowerLaw.fit`. Errors are mean squared errors
per coordinate of one worker's message; independent messages of n workers leave 1/n of it in their mean.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal, TypeAlias

import numpy as np
from torch import Tensor

Constant: TypeAlias = Literal["worst", "average"]
Shape: TypeAlias = Literal["uniform", "nonuniform", "biscaled"]
SHAPES = ("uniform", "nonuniform", "biscaled")
TAILS = (0.025, 0.05, 0.1)  # the mass beyond a knee on one side, for the knees that are tried
FEWEST = 320  # elements that a power law is fitted to: 16 beyond the farthest knee
SPLITS = np.linspace(0.001, 0.999, 999)  # where bi-scaled levels may change their spacing, in thresholds

# Rounding between levels a step apart has variance step^2/4 at worst and step^2/6 on average; each gives its own k.
CONSTANTS: dict[str, float] = {"worst": 3 * math.sqrt(6) / 2, "average": 3.0}


def intervals(bits: int) -> int:
    """s = 2^bits - 1: the number of gaps between 2^bits levels."""
    if not isinstance(bits, int) or not 1 <= bits <= 16:
        raise ValueError(f"bits must be an integer in 1..16, got {bits!r}")
    return (1 << bits) - 1


# Laplace: p(g) = exp(-|g|/c) / (2c), c = E|g|.


def laplace_threshold(bits: int, *, scale: float = 1.0, constant: Constant = "worst", workers: int = 1) -> float:
    """a = 3 c ln(1 + s/k): the truncation that makes the error bound least.

    `workers` > 1 is for workers that clip the same coordinates: averaging then thins out the rounding noise but not the
    truncation, and s sqrt(n) takes the place of s.
    """
    return 3 * scale * math.log1p(intervals(bits) * math.sqrt(workers) / CONSTANTS[constant])


@lru_cache(maxsize=4096)
def laplace_unit_levels(bits: int, ratio: float) -> np.ndarray:
    """`laplace_levels` over [-1, 1] for a threshold of `ratio` scales. Kept: read only."""
    s = intervals(bits)
    index = np.arange(s + 1)
    share = np.abs(2 * index - s) / s
    # expm1 and log1p, because a wide range (ratio to infinity) puts all levels but the outermost near 0.
    inside = -3.0 * np.log1p(share[1:-1] * math.expm1(-ratio / 3.0)) / ratio
    levels = np.sign(2 * index - s) * np.concatenate([[1.0], inside, [1.0]])
    levels.setflags(write=False)
    return levels


def laplace_levels(bits: int, *, scale: float = 1.0, threshold: float | None = None) -> np.ndarray:
    """The 2^bits levels over [-threshold, threshold] whose density follows p^(1/3), which makes the bound least.

    level_j = -3c sgn(2j - s) ln(1 - |2j - s|/s (1 - exp(-threshold/3c))); with the closed-form threshold (None) this is
    -3c sgn(2j - s) ln(1 - |2j - s|/(s + k)).
    """
    if threshold is None:
        threshold = laplace_threshold(bits, scale=scale)
    return threshold * laplace_unit_levels(bits, threshold / scale)


def laplace_bound(bits: int, *, scale: float = 1.0, numel: int = 1, workers: int = 1) -> float:
    """27 d c^2 / (n (s + k)^2): the squared error that TNQ does not exceed on Laplace gradients."""
    return 27 * numel * scale**2 / (workers * (intervals(bits) + CONSTANTS["worst"]) ** 2)


def laplace_error(levels: Sequence[float] | np.ndarray, *, scale: float = 1.0) -> float:
    """The exact mean squared error of unbiased rounding between sorted, symmetric `levels`, clipped at the ends."""
    edges = np.asarray(levels, dtype=np.float64) / scale
    low, high = edges[:-1], edges[1:]

    def moments(x: np.ndarray, a: np.ndarray, b: np.ndarray) -> np.ndarray:
        """The antiderivative of (x - a)(b - x) exp(-x) at x."""
        return -np.exp(-x) * ((x - a) * (b - x) + (a + b - 2 * x) - 2)

    def positive(a: np.ndarray, b: np.ndarray, begin: np.ndarray, end: np.ndarray) -> np.ndarray:
        return (moments(end, a, b) - moments(begin, a, b)) / 2

    right = positive(low, high, np.maximum(low, 0), np.maximum(high, 0))
    left = positive(-high, -low, np.maximum(-high, 0), np.maximum(-low, 0))
    truncated = math.exp(-edges[-1]) + math.exp(edges[0])
    return float(scale**2 * (right.sum() + left.sum() + truncated))


def uniform_threshold(bits: int, *, scale: float = 1.0) -> float:
    """a = c W(s^2), W Lambert's function: the best truncation for evenly spaced levels (TQ)."""
    return scale * lambert_w(intervals(bits) ** 2)


def lambert_w(x: float) -> float:
    """The w >= 0 with w exp(w) = x >= 0."""
    w = math.log1p(x)
    for _ in range(50):
        step = (w * math.exp(w) - x) / (math.exp(w) * (w + 1))
        w -= step
        if abs(step) <= 1e-15 * (1 + w):
            break
    return w


# Power law: p(g) = r (t - 1) m^(t-1) |g|^-t beyond the knee m on either side, and the rest evenly inside it.


@dataclass(frozen=True)
class PowerLaw:
    """A heavy-tailed gradient. `exponent` t in (3, 5]; `tail` r is the mass beyond the knee on one side."""

    exponent: float
    knee: float = 1.0
    tail: float = 0.05

    @classmethod
    def fit(cls, magnitudes: Tensor, bits: int, shape: Shape) -> PowerLaw | None:
        """The law of |g|, from Hill's estimate: t = 1 + N / sum ln(|g_j|/m) over the N elements beyond the quantile m.

        The farther out the knee, the purer the tail, but with few levels the best threshold lies not far out, and a
        threshold inside the knee means nothing: of TAILS, the farthest knee that the threshold clears is taken. None
        where there is none: too few elements, a knee of 0, or t outside (3, 5]. t is kept to 1/64, finer than a fit can
        tell and coarse enough for thresholds to be remembered.
        """
        numel = magnitudes.numel()
        if numel < FEWEST:
            return None
        logs = magnitudes.topk(int(numel * 2 * TAILS[-1]) + 1).values.double().log()
        for tail in TAILS:
            count = int(numel * 2 * tail)
            spread = float(
                logs[:count].sum() - count * logs[count]
            )  # NaN where the knee is 0 or an element is not finite
            exponent = round((1 + count / spread) * 64) / 64 if spread > 0 else math.inf
            if 3 < exponent <= 5 and _power_law_optimum(exponent, tail, bits, shape)[0] > 1.05:
                return cls(exponent, float(logs[count].exp()), tail)
        return None

    def mass_inside(self, x: np.ndarray) -> np.ndarray:
        """P(|g| < x), x in knees."""
        beyond = 1 - 2 * self.tail * np.maximum(x, 1.0) ** (1 - self.exponent)
        return np.where(x < 1, (1 - 2 * self.tail) * x, beyond)

    def _cube_root_integral(self, x: np.ndarray) -> np.ndarray:
        """The integral of p^(1/3) over [0, x], x >= 1 in knees."""
        power = 1 - self.exponent / 3
        outer = (self.tail * (self.exponent - 1)) ** (1 / 3) * (x**power - 1) / power
        return ((1 - 2 * self.tail) / 2) ** (1 / 3) + outer

    def truncation(self, threshold: np.ndarray) -> np.ndarray:
        """The squared error of clipping at `threshold` knees, in knee^2: 4 r a^(3-t) / ((t-2)(t-3))."""
        t = self.exponent
        return 4 * self.tail * threshold ** (3 - t) / ((t - 2) * (t - 3))

    def _split_masses(self, threshold: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """For each of SPLITS: the mass within that share of the threshold, and the mass from there to the threshold."""
        inner = self.mass_inside(SPLITS * threshold)
        return inner, np.maximum(self.mass_inside(threshold) - inner, 0)

    def rounding(self, bits: int, shape: Shape, threshold: np.ndarray) -> np.ndarray:
        """The worst rounding variance of `shape`'s levels over +-threshold, a^2 Q(a)/s^2, in knee^2.

        Bi-scaled levels give one variance for each of SPLITS, where their spacing may change.
        """
        if shape == "uniform":
            q = self.mass_inside(threshold)
        elif shape == "nonuniform":
            q = (2 * self._cube_root_integral(threshold)) ** 3 / (4 * threshold**2)
        else:
            inner, outer = self._split_masses(threshold)
            q = (np.cbrt(inner * SPLITS**2) + np.cbrt(outer * (1 - SPLITS) ** 2)) ** 3
        return threshold**2 * q / intervals(bits) ** 2

    def threshold(self, bits: int, shape: Shape) -> float:
        """The truncation with the least predicted error, by numeric minimisation."""
        return self.knee * _power_law_optimum(self.exponent, self.tail, bits, shape)[0]

    def bound(self, bits: int, shape: Shape) -> float:
        """The predicted error at `threshold`."""
        return self.knee**2 * _power_law_optimum(self.exponent, self.tail, bits, shape)[1]

    def levels(self, bits: int, shape: Shape) -> np.ndarray:
        """The 2^bits levels of `shape` over +-threshold."""
        ratio = self.threshold(bits, shape) / self.knee
        return ratio * self.knee * power_law_unit_levels(self.exponent, self.tail, bits, shape, ratio)


@cache
def _power_law_optimum(exponent: float, tail: float, bits: int, shape: Shape) -> tuple[float, float]:
    """(threshold in knees, error in knee^2) of the least predicted error."""
    law = PowerLaw(exponent, 1.0, tail)

    def error(log_threshold: float) -> float:
        a = np.asarray(math.exp(log_threshold))
        return float(law.rounding(bits, shape, a).min() + law.truncation(a))

    log_threshold = _minimise(error, 0.0, math.log(1e4))
    return math.exp(log_threshold), error(log_threshold)


@lru_cache(maxsize=4096)
def power_law_unit_levels(exponent: float, tail: float, bits: int, shape: Shape, ratio: float) -> np.ndarray:
    """The levels of a power law over [-1, 1] for a threshold of `ratio` >= 1 knees. Kept: read only."""
    s = intervals(bits)
    law = PowerLaw(exponent, 1.0, tail)
    a = np.asarray(ratio)
    index = np.arange(1, s + 1, 2)  # of the positive levels, s = 2^bits - 1 being the outermost; the others mirror them
    if shape == "uniform" or bits == 1:
        positive = index / s
    elif shape == "nonuniform":
        wanted = index / s * law._cube_root_integral(a)
        knee = law._cube_root_integral(np.asarray(1.0))
        power = 1 - exponent / 3
        root = np.cbrt(tail * (exponent - 1))
        outer = (1 + np.maximum(wanted - knee, 0) * power / root) ** (1 / power)
        positive = np.where(wanted < knee, wanted / knee, outer) / a
    else:
        # Whole gaps only, and an odd number inside, so that both sides get the same.
        inner, outer = law._split_masses(a)
        share = 1 / (1 + np.cbrt(outer * (1 - SPLITS) ** 2 / (inner * SPLITS**2)))
        odd = np.clip(2 * np.round((s * share - 1) / 2) + 1, 1, s - 2)
        best = (inner * (SPLITS / odd) ** 2 + outer * ((1 - SPLITS) / (s - odd)) ** 2).argmin()
        split, gaps = SPLITS[best], odd[best]
        beyond = split + (1 - split) * (index - gaps) / (s - gaps)
        positive = np.where(index <= gaps, split * index / gaps, beyond)
    positive[-1] = 1.0
    levels = np.concatenate([-positive[::-1], positive])
    levels.setflags(write=False)
    return levels


def _minimise(function: Callable[[float], float], low: float, high: float) -> float:
    """Where a function of one number is least: a coarse look, then golden section around the best point."""
    grid = np.linspace(low, high, 33)
    best = int(np.argmin([function(x) for x in grid]))
    a, b = grid[max(best - 1, 0)], grid[min(best + 1, 32)]
    ratio = (math.sqrt(5) - 1) / 2
    for _ in range(40):
        c, d = b - ratio * (b - a), a + ratio * (b - a)
        a, b = (a, d) if function(c) < function(d) else (c, b)
    return float((a + b) / 2)


# Gaussian: what a random rotation makes of any gradient (EDEN, THC).


@cache
def gaussian_centroids(bits: int) -> np.ndarray:
    """The 2^bits Lloyd-Max levels of N(0, 1): each the mean of what lies nearest to it. Kept: read only."""
    erf = np.vectorize(math.erf)
    levels = np.linspace(0.5, 2.5, 1 << (bits - 1))
    for _ in range(3000):
        edges = np.concatenate([[0.0], (levels[1:] + levels[:-1]) / 2, [40.0]])
        density = np.exp(-(edges**2) / 2) * math.sqrt(2 / math.pi)
        moved = -np.diff(density) / np.diff(erf(edges / math.sqrt(2)))
        settled = np.abs(moved - levels).max() < 1e-12
        levels = moved
        if settled:
            break
    both = np.concatenate([-levels[::-1], levels])
    both.setflags(write=False)
    return both


# Sums of integers that saturate (THC).


def saturation_error(kappa: float, bits: int, workers: int) -> float:
    """vNMSE of a sum whose range is kappa standard deviations of the sum: rounding n kappa^2/(6 m^2), and clipping.

    Rotated coordinates are Gaussian; m = 2^(bits-1) - 1 steps make the range.
    """
    beyond = math.erfc(kappa / math.sqrt(2)) / 2
    density = math.exp(-(kappa**2) / 2) / math.sqrt(2 * math.pi)
    clipping = 2 * ((1 + kappa**2) * beyond - kappa * density)
    return workers * kappa**2 / (6 * ((1 << (bits - 1)) - 1) ** 2) + clipping


@cache
def saturation_kappa(bits: int, workers: int) -> float:
    """The range, in standard deviations of the sum, with the least `saturation_error`."""
    if bits < 2:
        raise ValueError(f"a saturating sum needs at least 2 bits, got {bits}")
    return _minimise(lambda kappa: saturation_error(kappa, bits, workers), 1e-3, 10.0)


@cache
def saturated_cosine(bits: int, workers: int) -> float:
    """The cosine between a sum and what saturation makes of it at the best kappa."""
    kappa = saturation_kappa(bits, workers)
    beyond = math.erfc(kappa / math.sqrt(2)) / 2
    density = math.exp(-(kappa**2) / 2) / math.sqrt(2 * math.pi)
    clipped = 1 - 2 * beyond - 2 * kappa * density + 2 * kappa**2 * beyond
    energy = clipped + workers * kappa**2 / (6 * ((1 << (bits - 1)) - 1) ** 2)
    return (1 + energy - saturation_error(kappa, bits, workers)) / (2 * math.sqrt(energy))


# Bits for a budget.


def allocate(budget: float, scales: Sequence[float], numels: Sequence[int], *, most: int = 8) -> tuple[int, ...]:
    """How many bits (1..most) each tensor gets, so that the summed bound is least at `budget` bits per coordinate.

    Water-filling: all begin with 1 bit, and the next bit goes where it takes most off the bound per bit spent. The
    bound is convex in the bits, so no other split of the same spending does better. A bit that does not fit any more is
    offered to the next tensor; the average never exceeds the budget. Scales that are not finite count as 0.
    """
    if not 1 <= budget <= most:
        raise ValueError(f"a budget is 1..{most} bits per coordinate, got {budget!r}")
    bits = [1] * len(numels)
    left = (budget - 1) * sum(numels) * (1 + 1e-12)

    def gain(tensor: int) -> float:
        c = scales[tensor] if math.isfinite(scales[tensor]) else 0.0
        return laplace_bound(bits[tensor], scale=c) - laplace_bound(bits[tensor] + 1, scale=c)

    queue = [(-gain(tensor), tensor) for tensor in range(len(numels))] if most > 1 else []
    heapq.heapify(queue)
    while queue:
        _, tensor = heapq.heappop(queue)
        if numels[tensor] > left:
            continue
        left -= numels[tensor]
        bits[tensor] += 1
        if bits[tensor] < most:
            heapq.heappush(queue, (-gain(tensor), tensor))
    return tuple(bits)
