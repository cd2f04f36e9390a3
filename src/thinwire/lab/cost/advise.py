"""`thinwire advise`: what every scheme would cost on this machine and this network, and which to use.

Nothing is trained to find out. Every scheme is rehearsed on the model's own buckets (see `rehearsal`), the group's link
is measured (see `link`), and a step is predicted from the two (see `model`). How much accuracy a scheme keeps is not
predicted: `thinwire compare` finds that out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, cached_property, partial
from typing import Any

import torch
import torch.distributed as dist
from rich import box
from rich.console import Console, Group
from rich.table import Table
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from thinwire.lab.cost.model import FLOATS, Prediction
from thinwire.lab.cost.replay import break_even
from thinwire.lab.cost.survey import Survey, survey
from thinwire.lab.report.table import BASELINE, WORTH
from thinwire.lab.runs.record import Record
from thinwire.plug import detached
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
    loss: of the model's output; unless given, its `loss` if it has one, else the mean of its entries. Which scalar
        backward starts from hardly changes how long it takes.
    schemes: spec text; unless given, all schemes at their default levels. Each is rehearsed for a few steps.

    Forward and backward are run, the optimizer is not: add its time to every row. Weights, gradients, buffers, random
    state and an attached wire are afterwards as they were before.
    """
    if not isinstance(model, DistributedDataParallel):
        raise ValueError(f"advise() takes a DistributedDataParallel model, got {type(model).__name__}")
    parameters = [p for p in model.parameters() if p.requires_grad]
    if any(p.device.type != "cpu" for p in parameters):
        raise ValueError(f"advise() times models on the CPU, this one is on {parameters[0].device}")
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
        with detached(model), torch.random.fork_rng(devices=[]):
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
    """One scheme's prediction. `speedup`: over fp16. `break_even`: bits per second below which it beats fp16."""

    scheme: str
    prediction: Prediction
    speedup: float
    break_even: float | None  # None: never; infinity: always; nan: the baseline itself


@dataclass(frozen=True)
class Advice:
    """Predictions for a model on a network, and what follows. Printing it shows the table."""

    survey: Survey
    model: str
    network: str

    @cached_property
    def rows(self) -> list[AdviceRow]:
        """A row per scheme, fastest first."""
        baseline = self.survey.predict(BASELINE).seconds
        found = []
        for scheme in self.survey.steps:
            prediction = self.survey.predict(scheme)
            found.append(AdviceRow(scheme, prediction, baseline / prediction.seconds, self._break_even(scheme)))
        return sorted(found, key=lambda row: row.prediction.seconds)

    def _break_even(self, scheme: str) -> float | None:
        if scheme == BASELINE:
            return math.nan
        return break_even(partial(self._seconds, scheme), partial(self._seconds, BASELINE))

    @cached_property
    def _seconds(self) -> Callable[[str, float], float]:
        return cache(lambda scheme, bandwidth: self.survey.predict(scheme, bandwidth).seconds)

    @cached_property
    def best(self) -> AdviceRow:
        """What to use, exchanging in every step."""
        chosen = _choice({row.scheme: row.prediction for row in self.rows})
        return next(row for row in self.rows if row.scheme == chosen)

    @cached_property
    def rounds(self) -> dict[int, tuple[str, Prediction]]:
        """How often, and how few bits: by steps between two exchanges, the scheme to use then and a step of it."""
        found = {}
        for every in EVERY:
            predictions = {scheme: self.survey.predict(scheme, every=every) for scheme in self.survey.steps}
            scheme = _choice(predictions)
            found[every] = (scheme, predictions[scheme])
        return found

    @cached_property
    def seldom(self) -> int:
        """The fewest steps between two exchanges at which nearly all of a step is its own computation."""
        for every in EVERY:
            fastest = min(self.survey.predict(scheme, every=every).seconds for scheme in self.survey.steps)
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
            return min(self._seconds(scheme, bandwidth) for scheme in self.survey.steps)

        return break_even(lambda bandwidth: self._alone * WORTH, best)

    @property
    def how_often(self) -> str:
        """The same in a sentence."""
        scheme, each = self.rounds[self.seldom]
        above = self.every_step_from
        if above is None:
            enough = "on any link, every step is enough"
        elif math.isinf(above):
            enough = "on no link is every step enough, encoding takes too long"
        else:
            enough = f"from {bits(above)} on, every step is enough"
        if self.seldom == 1:
            return f"How often: in every step; {enough}."
        return (
            f"How often: every {self.seldom} steps by {scheme}, {each.seconds * 1e3:.0f} ms a step, "
            f"{each.compute_seconds / each.seconds:.0%} of it computing (thinwire.LocalSteps); {enough}."
        )

    @property
    def recommendation(self) -> str:
        best = self.best
        step = f"{best.prediction.seconds * 1e3:.0f} ms a step, most of it {best.prediction.bound}"
        if best.scheme == BASELINE:
            return f"Use {BASELINE}: {step}; nothing is predicted to be {WORTH - 1:.0%} faster."
        limit = f", and it pays on links below {bits(best.break_even)}" if _finite(best.break_even) else ""
        return (
            f"Use {best.scheme}: {step}, {best.speedup:.1f}x as fast as {BASELINE}{limit}; "
            f"see whether it keeps accuracy: thinwire compare."
        )

    @property
    def table(self) -> Table:
        found = self.survey
        table = Table(
            title=f"{self.model}: {found.parameters / 1e6:.3g} M weights, {found.workers} workers, {self.network}",
            title_justify="left", title_style="bold", caption=self._caption, caption_justify="left",
            box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False,
        )  # fmt: skip
        table.add_column("scheme", vertical="bottom", no_wrap=True)
        for name in ("ms\na step", "compute\n+encode\n+wire", "bound\nby", "MB\nsent", "vs\nfp16", "pays\nbelow"):
            table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
        for row in self.rows:
            each = row.prediction
            phases = (each.compute_seconds, each.encode_seconds, each.wire_seconds)
            table.add_row(
                row.scheme,
                f"{each.seconds * 1e3:.0f}",
                "+".join(f"{seconds * 1e3:.0f}" for seconds in phases),
                each.bound,
                f"{each.bytes_sent / 1e6:.3g}",
                f"{row.speedup:.2f}x",
                bits(row.break_even),
                style="bold" if row is self.best else "",
            )
        return table

    @property
    def rounds_table(self) -> Table:
        table = Table(
            title="steps between two exchanges, and the scheme to use then", title_justify="left", title_style="bold",
            box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False,
        )  # fmt: skip
        table.add_column("every", justify="right")
        table.add_column("scheme", no_wrap=True)
        for name in ("ms a step", "computing", "MB sent a step"):
            table.add_column(name, justify="right")
        for every, (scheme, each) in self.rounds.items():
            cells = (
                f"{each.seconds * 1e3:.0f}",
                f"{each.compute_seconds / each.seconds:.0%}",
                f"{each.bytes_sent / 1e6:.3g}",
            )
            table.add_row(str(every), scheme, *cells, style="bold" if every == self.seldom else "")
        return table

    @property
    def _caption(self) -> str:
        found = self.survey
        reduced, local = found.link.cost(FLOATS), found.link.local
        inside = f"; {local} workers share a machine's link" if local > 1 else ""
        return (
            f"predicted. Link, measured: {bits(found.link.bits_per_second)} and {reduced.latency_seconds * 1e3:.2g} ms "
            f"for an all-reduce{inside};\n{found.host.workers} workers on {found.host.cores} cores, "
            f"{found.straggling_seconds * 1e3:.0f} ms a step waiting for the slowest"
        )

    def __rich__(self) -> Group:
        return Group(self.table, "", self.recommendation, "", self.rounds_table, "", self.how_often)

    def __str__(self) -> str:
        console = Console(width=100, color_system=None)
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
            "rows": [
                {
                    "scheme": row.scheme,
                    "seconds": row.prediction.seconds,
                    **asdict(row.prediction),
                    "bound": row.prediction.bound,
                    "speedup_fp16": row.speedup,
                    "break_even_bits_per_second": row.break_even if _finite(row.break_even) else None,
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


def _choice(predictions: Mapping[str, Prediction]) -> str:
    """fp16, unless another is clearly faster; of those about as fast as the fastest, the one of most bytes."""
    fastest = min(each.seconds for each in predictions.values())
    alike = [scheme for scheme, each in predictions.items() if each.seconds <= fastest * WORTH]
    return BASELINE if BASELINE in alike else max(alike, key=lambda scheme: predictions[scheme].bytes_sent)


def bits(per_second: float | None) -> str:
    """A bandwidth in words."""
    if per_second is None:
        return "never"
    if math.isinf(per_second):
        return "always"
    if math.isnan(per_second):
        return ""
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if per_second >= size:
            return f"{per_second / size:.3g} {unit}"
    return f"{per_second / 1e3:.3g} kbit/s"


def _finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
