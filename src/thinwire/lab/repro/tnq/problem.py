"""A regression whose true gradient is known, so that what noise does to training can be told exactly."""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor

from thinwire.core import theory
from thinwire.core.layout import Layout
from thinwire.core.scheme import Codec
from thinwire.exchange.simulation import Simulation
from thinwire.schemes import parse

WORKERS, BATCH, FEATURES, OUTPUTS, NOISE = 8, 16, 512, 64, 0.1
LOST = 10.0  # times the error at the start: it has diverged


@dataclass(frozen=True)
class Curve:
    """One run, step by step: element t is after t steps."""

    errors: list[float]  # E |x A - x W|^2, above that of the noise, which nobody can learn
    squares: list[float]  # |grad F|^2
    bits: float  # that a worker says in a step
    bound: float = math.nan  # on the mean of `squares`, where it was asked for

    @property
    def diverged(self) -> bool:
        return not self.errors[-1] < LOST * self.errors[0]

    @property
    def floor(self) -> float:
        """The mean error of the last quarter; where it diverged, infinite."""
        return math.inf if self.diverged else fmean(self.errors[-max(1, len(self.errors) // 4) :])


@dataclass(frozen=True)
class Problem:
    """y = x A + noise, with |y|^2 = 1 before the noise: the lab's `regression`, with new examples in every step.

    x = z * scale, z normal. "normal": all scales 1. "laplace": scale^2 is exponential, so that an element of x, and so
    of a gradient, picked at random has the tail of a Laplace distribution.
    """

    truth: Tensor
    scale: Tensor
    seed: int

    @classmethod
    def draw(cls, tails: str, seed: int) -> Problem:
        generator = torch.Generator().manual_seed(seed)
        truth = torch.randn(FEATURES, OUTPUTS, generator=generator) / (FEATURES * OUTPUTS) ** 0.5
        uniform = torch.rand(FEATURES, generator=generator).clamp(min=1e-6)
        return cls(truth, torch.ones(FEATURES) if tails == "normal" else uniform.log().neg().sqrt(), seed)

    @property
    def smoothness(self) -> float:
        """L: twice the largest eigenvalue of E x x^T."""
        return 2 * self.scale.square().max().item()

    def train(self, spec: str, rate: float, steps: int) -> Curve:
        """Plain SGD at a constant rate from W = 0; no error feedback, one message per worker and step."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        simulation = Simulation(spec, workers=WORKERS, feedback=False, route="gather", seed=self.seed)
        weights, errors, squares, noise, terms = torch.zeros(FEATURES, OUTPUTS), [], [], [], []
        for step in range(steps + 1):
            off = self.scale[:, None] * (weights - self.truth)
            errors.append(off.square().sum().item())
            if step == steps or not errors[-1] < LOST * errors[0]:
                break
            exact = 2 * self.scale[:, None] * off
            gradients = self._gradients(weights, generator)
            squares.append(exact.square().sum().item())
            noise.append((gradients - exact).square().sum((1, 2)).mean().item())
            terms.append(gradients.abs().mean().item())
            weights = weights - rate * simulation.reduce(list(gradients))
        bits = 8.0 * _said(spec)
        return Curve(errors, squares, bits, self._bound(spec, rate, errors, noise, terms))

    def _gradients(self, weights: Tensor, generator: torch.Generator) -> Tensor:
        """Of every worker's batch: [workers, features, outputs]."""
        x = self.scale * torch.randn(WORKERS, BATCH, FEATURES, generator=generator)
        noise = NOISE / OUTPUTS**0.5 * torch.randn(WORKERS, BATCH, OUTPUTS, generator=generator)
        return 2 / BATCH * x.mT @ (x @ (weights - self.truth) - noise)

    def _bound(self, spec: str, rate: float, errors: list[float], noise: list[float], scales: list[float]) -> float:
        """Distributed SGD's terms, 2 (F_0 - F_T)/(rate T) and L rate sigma^2/n, and the quantiser's error at most."""
        name, bits = spec.partition("(")[0], parse(spec).level
        if name != "tnq" or not scales:
            return math.nan
        numel = FEATURES * OUTPUTS
        quantiser = [theory.laplace_bound(int(bits), scale=c, numel=numel, workers=WORKERS) for c in scales]
        start = 2 * (errors[0] - errors[-1]) / (rate * len(scales))
        return start + self.smoothness * rate * fmean(noise) / WORKERS + fmean(quantiser)


def _said(spec: str) -> int:
    """Bytes of a worker's message."""
    codec = parse(spec)
    assert isinstance(codec, Codec)
    return codec.nbytes(Layout.of([("tensor", (FEATURES, OUTPUTS))]), codec.level)
