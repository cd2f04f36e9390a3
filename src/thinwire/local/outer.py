"""Outer optimizers: what the group does with the mean of its workers' weight changes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import nn

from thinwire.core import spec
from thinwire.core.spec import Specced

MakeOuter: TypeAlias = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


class Outer(Specced, ABC):
    """Makes the optimizer of the anchor weights. Its gradient is the mean change, anchor minus local."""

    @property
    def averages(self) -> bool:
        """Whether a step takes the anchor to the mean of the workers' weights."""
        return False

    @abstractmethod
    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer: ...


@dataclass(frozen=True)
class Nesterov(Outer):
    """m = momentum m + D; t = t - lr (D + momentum m): DiLoCo's."""

    lr: float = 0.7  # higher => larger outer steps; 1 without momentum is the mean itself
    momentum: float = 0.9

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr, momentum=self.momentum, nesterov=True)


@dataclass(frozen=True)
class SGD(Outer):
    """t = t - lr D: SparseLoCo's, where error feedback stands in for momentum."""

    lr: float = 1.0

    @property
    def averages(self) -> bool:
        return self.lr == 1

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=self.lr)


@dataclass(frozen=True)
class Average(Outer):
    """t = t - D, the mean of the workers' weights."""

    @property
    def averages(self) -> bool:
        return True

    def __call__(self, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=1.0)


_KNOWN: dict[str, type[Outer]] = {"average": Average, "nesterov": Nesterov, "sgd": SGD}


def parse_outer(outer: str | Outer | MakeOuter) -> Outer | MakeOuter:
    """The outer optimizer that spec text describes, or what was given if it makes one itself."""
    if callable(outer):
        return outer
    return spec.make(outer, Outer, _KNOWN, kind="outer optimizer", example="'nesterov(lr=0.7, momentum=0.9)'")


def describe(outer: Outer | MakeOuter) -> str:
    """What all workers must have given alike."""
    return outer.spec if isinstance(outer, Outer) else getattr(outer, "__qualname__", type(outer).__name__)
