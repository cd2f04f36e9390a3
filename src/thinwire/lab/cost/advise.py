"""`thinwire advise`: what every scheme would cost on this machine and this network, and which to use.

Nothing is trained to find out. Every scheme is rehearsed on the model's own buckets (see `rehearsal`), the group's link
is measured (see `link`), and a step is predicted from the two (see `model`). What a scheme's error costs in steps is
predicted from the gradients, where there are some (see `noise`); `thinwire compare` finds out what it really costs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from rich.console import Console, Group
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.lab.cost import advice_text, noise
from thinwire.lab.cost.advice_text import bits, finite
from thinwire.lab.cost.model import Prediction
from thinwire.lab.cost.replay import break_even
from thinwire.lab.cost.survey import ON_LEVELS, Survey, survey
from thinwire.lab.report.verdicts import WORTH
from thinwire.lab.runs.curves import BASELINE
from thinwire.lab.runs.record import Record
from thinwire.plug import detached
from thinwire.reducer import device_of
from thinwire.schemes import parse, registry

EVERY = (1, 2, 4, 8, 16, 32, 64)  # steps between two exchanges that are tried


def default_schemes() -> list[str]:
    """Every scheme there is, at its knob's default level."""
    found = []
    for name, cls in registry().items():
        knob = cls().knob
        found.append(f"{name}({knob.name}={knob.default:g})" if knob else name)
    return found


def checked(schemes: Sequence[str]) -> list[str]:
    """The schemes to advise on: those given (fp16 added) or all; ValueError for one that is none."""
    for scheme in schemes:
        parse(scheme)
    chosen = list(dict.fromkeys(schemes)) or default_schemes()
    return chosen if BASELINE in chosen else [BASELINE, *chosen]


def advise(
    model: DistributedDataParallel,
    batch: Any,
    *,
    loss: Callable[[Any], Tensor] | None = None,
    schemes: Sequence[str] = (),
) -> Advice:
    """Advice on a model that is being trained, over the group that trains it. Every rank calls it, before a step.

    batch: what the model is called with: a tensor, a tuple of arguments, or a dict of named ones.
    loss: of the model's output; unless given, its `loss` if it has one, else the mean of its elements. Which scalar
        backward starts from hardly changes how long it takes.
    schemes: spec text; unless given, all schemes at their default levels. Each is rehearsed for a few steps.

    On a CUDA device every part of a step is timed by itself, from start to end: what would overlap there is predicted,
    not seen. Forward and backward are run, the optimizer is not: add its time to every row. Weights, gradients,
    buffers, random state and an attached wire are afterwards as they were before.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(f"advise() takes a DistributedDataParallel model, got {type(model).__name__}")
    parameters = [p for p in model.parameters() if p.requires_grad]
    device = device_of(dict(model.named_parameters()))
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"advise() times models on a CPU or a CUDA device, this one is on {device}")
    chosen = checked(schemes)

    def train() -> None:
        for parameter in parameters:
            parameter.grad = None
        arguments, named = ((), batch) if isinstance(batch, dict) else (batch, {})
        output = model(*(arguments if isinstance(arguments, tuple) else (arguments,)), **named)
        (loss or _some_scalar)(output).backward()

    gradients = [p.grad for p in parameters]
    buffers = {name: buffer.clone() for name, buffer in model.module.named_buffers()}
    try:
        with detached(model), torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
            found = survey(model, train, chosen)
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            for name, buffer in model.module.named_buffers():
                buffer.copy_(buffers[name])
    return Advice(found, "this model", f"the group's own link ({dist.get_backend(model.process_group)})")


def _some_scalar(output: Any) -> Tensor:
    found = getattr(output, "loss", None)
    if found is None:
        found = output[0] if isinstance(output, tuple | list) else output
    if not isinstance(found, Tensor):
        raise ValueError(f"advise() needs loss=, a function of the model's output: it gave a {type(output).__name__}")
    return found.float().mean()


@dataclass(frozen=True)
class AdviceRow:
    """One scheme's prediction. `break_even`: bits per second below which it beats fp16, to the same accuracy."""

    scheme: str
    prediction: Prediction
    error: float  # of one worker's message, relative
    steps: float  # to the same accuracy, against fp16's; 1 where there are no gradients to tell from
    speedup: float  # over fp16, by seconds x steps
    recommended: bool  # its error is bearable, see `noise.bearable`
    break_even: float | None  # None: never; infinity: always; nan: the baseline itself


@dataclass(frozen=True)
class Given:
    """What the link and the computation were said to be, where they were."""

    bits_per_second: float | None = None
    compute_seconds: float | None = None


@dataclass(frozen=True)
class Advice:
    """Predictions for a model on a network, and what follows. Printing it shows the table."""

    survey: Survey
    model: str
    network: str
    given: Given = Given()

    @cached_property
    def rows(self) -> list[AdviceRow]:
        """A row per scheme, the one that is first at the same accuracy first."""
        found = []
        for scheme in self.survey.steps:
            prediction = self.survey.predict(scheme)
            speedup = self._cost(BASELINE, None) / self._cost(scheme, None)
            error = self.survey.errors.get(scheme, 0.0)
            found.append(
                AdviceRow(
                    scheme, prediction, error, self.more_steps(scheme), speedup, self._bearable(scheme),
                    self._break_even(scheme, speedup),
                )
            )  # fmt: skip
        return sorted(found, key=lambda row: -row.speedup)

    def more_steps(self, scheme: str) -> float:
        """Steps to the same accuracy, against fp16's, by the noise rule; 1 where it cannot tell."""
        gradients = self.survey.gradients
        if gradients is None or not self.told(scheme):
            return 1.0

        def steps(name: str) -> float:
            back = noise.comes_back_compressed(name.removesuffix(ON_LEVELS), self.survey.workers)
            return gradients.steps(self.survey.errors.get(name, 0.0), back=back)

        return steps(scheme) / steps(BASELINE)

    def told(self, scheme: str) -> bool:
        """Whether the noise rule can tell what a scheme's error costs."""
        error = self.survey.errors.get(scheme, 0.0)
        return self.survey.gradients is not None and noise.covered(scheme.removesuffix(ON_LEVELS), error)

    def _bearable(self, scheme: str) -> bool:
        error = self.survey.errors.get(scheme, 0.0)
        return noise.bearable(scheme.removesuffix(ON_LEVELS), error, self.survey.gradients)

    def _break_even(self, scheme: str, speedup: float) -> float | None:
        """Where the two cross on links of any bandwidth; and never against what is predicted for this very link."""
        if scheme == BASELINE:
            return math.nan
        found, here = break_even(partial(self._cost, scheme), partial(self._cost, BASELINE)), self.survey.link
        if speedup > 1:
            return here.bits_per_second if found is None else max(found, here.bits_per_second)
        return None if found is None else min(found, here.bits_per_second)

    @cached_property
    def _cost(self) -> Callable[[str, float | None], float]:
        """Seconds a step, at a bandwidth (None: the link's own), times the steps that are needed."""
        return cache(lambda scheme, bandwidth: self._seconds(scheme, bandwidth) * self.more_steps(scheme))

    @cached_property
    def _seconds(self) -> Callable[[str, float | None], float]:
        return cache(lambda scheme, bandwidth: self.survey.predict(scheme, bandwidth).seconds)

    @cached_property
    def best(self) -> AdviceRow:
        """What to use, exchanging in every step."""
        chosen = self._choice({row.scheme: row.prediction for row in self.rows})
        return next(row for row in self.rows if row.scheme == chosen)

    def _choice(self, predictions: Mapping[str, Prediction]) -> str:
        """fp16, unless a bearable one is clearly sooner; of those about as soon as the soonest, the least error's."""
        costs = {scheme: predictions[scheme].seconds * self.more_steps(scheme) for scheme in self._candidates}
        alike = [scheme for scheme, cost in costs.items() if cost <= min(costs.values()) * WORTH]
        return BASELINE if BASELINE in alike else min(alike, key=lambda scheme: self.survey.errors.get(scheme, 0.0))

    @cached_property
    def _candidates(self) -> list[str]:
        return [scheme for scheme in self.survey.steps if self._bearable(scheme)]

    @cached_property
    def rounds(self) -> dict[int, tuple[str, Prediction]]:
        """How often, and how few bits: by steps between two exchanges, the scheme to use then and a step of it."""
        found = {}
        for every in EVERY:
            predictions = {scheme: self.survey.predict(scheme, every=every) for scheme in self.survey.steps}
            scheme = self._choice(predictions)
            found[every] = (scheme, predictions[scheme])
        return found

    @cached_property
    def seldom(self) -> int:
        """The fewest steps between two exchanges at which nearly all of a step is its own computation."""
        for every in EVERY:
            fastest = min(self.survey.predict(scheme, every=every).seconds for scheme in self._candidates)
            if fastest <= self._alone * WORTH:
                return every
        return EVERY[-1]

    @cached_property
    def _alone(self) -> float:
        """Seconds of a step that exchanges nothing."""
        return min(prediction.compute_seconds for _, prediction in self.rounds.values())

    @cached_property
    def every_step_from(self) -> float | None:
        """Bits per second from which on an exchange in every step is enough; None: at any; infinity: at none."""

        def best(bandwidth: float) -> float:
            return min(self._seconds(scheme, bandwidth) for scheme in self._candidates)

        return break_even(lambda bandwidth: self._alone * WORTH, best)

    @property
    def how_often(self) -> str:
        return advice_text.how_often(self)

    @property
    def recommendation(self) -> str:
        return advice_text.recommendation(self)

    def __rich__(self) -> Group:
        tables = advice_text.table(self), advice_text.rounds_table(self)
        return Group(tables[0], "", self.recommendation, "", tables[1], "", self.how_often)

    def __str__(self) -> str:
        console = Console(width=80, color_system=None)
        with console.capture() as captured:
            console.print(self, highlight=False)
        return captured.get()

    def as_json(self) -> dict[str, Any]:
        """Everything, as plain values; null where a break-even is no number (see `pays`)."""
        found, about = self.survey, Record({})
        return {
            "model": self.model,
            "network": self.network,
            "parameters": found.parameters,
            "workers": found.workers,
            "host": asdict(found.host),
            "link": asdict(found.link),
            "straggling_seconds": found.straggling_seconds,
            "gradients": asdict(found.gradients) if found.gradients else None,
            "rows": [
                {
                    "scheme": row.scheme,
                    "seconds": row.prediction.seconds,
                    **asdict(row.prediction),
                    "bound": row.prediction.bound,
                    "error": row.error,
                    "steps": row.steps,
                    "recommended": row.recommended,
                    "speedup_fp16": row.speedup,
                    "break_even_bits_per_second": row.break_even if finite(row.break_even) else None,
                    "pays": bits(row.break_even),
                    **({"measured_seconds": found.performed[row.scheme]} if row.scheme in found.performed else {}),
                }
                for row in self.rows
            ],
            "best": self.best.scheme,
            "recommendation": self.recommendation,
            "rounds": [
                {"every": every, "scheme": scheme, "seconds": each.seconds, **asdict(each)}
                for every, (scheme, each) in self.rounds.items()
            ],
            "how_often": self.how_often,
            "machine": about.machine,
            "versions": about.versions,
            "created": about.created,
        }
