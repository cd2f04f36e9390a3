"""thinwire repro mqgrad: does a learner that sets the bits reach the target no later than the best fixed width?

The arithmetic is the parameter server's to the bit: `Simulation` on the two-shot route adds in rank order and encodes
the mean again with the draws that a server makes. Seconds are modelled, so that they are the same on every machine: a
step takes its computing plus what a worker pushes and pulls, at the link's rate. What the learner itself costs is
measured and shown. MQGrad's own reward, learner and results are not public: this checks the claims on our design.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, pstdev
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from thinwire import control
from thinwire.bucket import Bucket, Layout
from thinwire.control import Observation
from thinwire.control.controller import WINDOW
from thinwire.exchange import arithmetic
from thinwire.exchange.codecs import Floats
from thinwire.exchange.simulation import Simulation
from thinwire.lab import datasets, served_mqgrad
from thinwire.scheme import Codec, Knob
from thinwire.schemes.qsgd import QSGD

WORKERS, BATCH = 4, 16
MENU = (2, 4, 8, 16)
LINK_MBPS = 2.0
COMPUTE_SECONDS = 0.005
TARGET_LOSS = 0.38  # about where 16 bit comes to in 600 steps; two bits alone do not
STEPS = 700
WITHIN = 0.01  # of 16 bit's accuracy counts as the same

FIXED = {f"{bits} bit": f"fixed(level={bits})" for bits in MENU}
RIVALS = {
    "random": "random(seed={seed})",
    "schedule 2 then 4": "schedule(levels_at=((0, 2), (200, 4)))",
    "norm rule": "normrule(budget=4)",
}
LEARNER = {"mqgrad": "mqgrad(seed={seed})"}


@dataclass(frozen=True)
class Ladder(Codec):
    """QSGD at 2, 4 and 8 bits, half precision at 16: one knob over the whole range."""

    unbiased: ClassVar[bool] = True
    grain: ClassVar[int | None] = 128
    summary: ClassVar[str] = "qsgd and fp16 on one knob"

    @property
    def knob(self) -> Knob:
        return Knob("bits", MENU, 4)

    def nbytes(self, layout: Layout, level: float) -> int:
        return _rung(level).nbytes(layout, level)

    def encode(self, bucket: Bucket, level: float, out: Tensor) -> None:
        _rung(level).encode(bucket, level, out)

    def decode_add(self, data: Tensor, layout: Layout, level: float, out: Tensor, weight: float) -> None:
        _rung(level).decode_add(data, layout, level, out, weight)


def _rung(level: float) -> Codec:
    return Floats("float16") if level == 16 else QSGD(bits=int(level), block=128)


@dataclass(frozen=True)
class Outcome:
    curve: tuple[tuple[float, float], ...]  # after each step: modelled seconds, smoothed loss
    levels: tuple[float, ...]  # one per step
    accuracy: float
    learner_seconds: float  # measured: what the controller's own thinking took

    @property
    def seconds_to_target(self) -> float:
        """Infinite where the target was not reached."""
        return next((seconds for seconds, loss in self.curve if loss <= TARGET_LOSS), math.inf)

    @property
    def seconds(self) -> float:
        return self.curve[-1][0]


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(196, 64, bias=False), nn.ReLU(), nn.Linear(64, 10, bias=False))


def train(spec: str, seed: int, *, steps: int) -> Outcome:
    """One run: 196-64-10 on the embedded images, four workers, SGD with momentum."""
    controller = control.parse(spec.format(seed=seed))
    controller.start(controller.menu(MENU))
    level = controller.first(4, MENU)
    group = Simulation(Ladder(), workers=WORKERS, route="two-shot", seed=seed)
    torch.manual_seed(seed)
    net = network()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    images, labels, tests, answers = half_size_images()
    layout = Layout.of([(name, tuple(weight.shape)) for name, weight in net.named_parameters()])
    generator = torch.Generator().manual_seed(seed)
    order, at = torch.randperm(len(images), generator=generator), 0
    clock = asked_at = thinking = 0.0
    losses: list[float] = []
    history: deque[float] = deque([math.nan] * WINDOW, WINDOW)
    smooth = math.nan
    levels: list[float] = []
    curve: list[tuple[float, float]] = []
    for step in range(1, steps + 1):
        if at + WORKERS * BATCH > len(images):
            order, at = torch.randperm(len(images), generator=generator), 0
        gradients, total = [], 0.0
        for _ in range(WORKERS):
            rows = order[at : at + BATCH]
            at += BATCH
            loss = functional.cross_entropy(net(images[rows]), labels[rows])
            gradients.append(dict(zip(layout.names, torch.autograd.grad(loss, list(net.parameters())), strict=True)))
            total += loss.item() / WORKERS
        mean = group.reduce(gradients, level=level)
        for name, weight in net.named_parameters():
            weight.grad = mean[name]
        optimizer.step()

        nbytes = 2 * arithmetic.aligned(Ladder().nbytes(layout, level))  # up, and down by the same codec
        clock += COMPUTE_SECONDS + nbytes * 8 / (LINK_MBPS * 1e6)
        levels.append(level)
        losses.append(total)
        smooth = total if math.isnan(smooth) else 0.95 * smooth + 0.05 * total
        curve.append((clock, smooth))
        if step % controller.interval == 0:
            history.append(fmean(losses[-controller.interval :]))
            seen = Observation(
                step, level, (clock - asked_at) / controller.interval, nbytes / 2,
                math.sqrt(sum(float(each.square().sum()) for each in mean.values())),
                _error(gradients[0], layout, level, step), tuple(history),
            )  # fmt: skip
            began = time.perf_counter()
            level = controller.decide(seen)
            thinking += time.perf_counter() - began
            asked_at = clock
    with torch.no_grad():
        accuracy = float((net(tests).argmax(1) == answers).float().mean())
    return Outcome(tuple(curve), tuple(levels), accuracy, thinking)


def run(quick: bool, data: Path | None, seeds: int, progress: Callable[[str], None]) -> dict[str, Any]:
    """Every fixed width, the rivals and the learner, on the same seeds. Needs no `data`: the images are embedded.

    `quick` leaves out the real server.
    """
    outcomes: dict[str, list[Outcome]] = {}
    for name, spec in (FIXED | RIVALS | LEARNER).items():
        outcomes[name] = []
        for seed in range(seeds):
            progress(f"mqgrad: {name}, seed {seed}")
            outcomes[name].append(train(spec, seed, steps=STEPS))
    claims, tables = _claims(outcomes), [_table(outcomes, seeds)]
    if not quick:
        best = min(FIXED, key=lambda name: fmean(run.seconds_to_target for run in outcomes[name]))
        specs = {best: FIXED[best], **LEARNER}
        table, claim = served_mqgrad.compare(specs, seeds, progress)
        tables.append(table)
        claims.append(claim)
    return {"claims": claims, "tables": tables}


def _table(outcomes: dict[str, list[Outcome]], seeds: int) -> dict[str, Any]:
    rows = []
    for name, runs in outcomes.items():
        reached = [run.seconds_to_target for run in runs if math.isfinite(run.seconds_to_target)]
        accuracies = [run.accuracy for run in runs]
        rows.append(
            (
                name,
                f"{fmean(reached):.1f} ± {pstdev(reached):.1f}" if reached else "never",
                f"{len(reached)}/{len(runs)}",
                f"{fmean(accuracies):.3f} ± {pstdev(accuracies):.3f}",
                f"{fmean(run.seconds for run in runs):.0f}",
                f"{fmean(_bits(runs, first=True)):.1f} / {fmean(_bits(runs, first=False)):.1f}",
                f"{fmean(run.learner_seconds for run in runs):.3f}",
            )
        )
    return {
        "title": f"{WORKERS} workers, one server, {LINK_MBPS:g} Mbit/s (modelled seconds), loss {TARGET_LOSS}, "
        f"{STEPS} steps, {seeds} seeds",
        "columns": (
            "controller", "seconds to target", "reached", "final accuracy", "seconds in all",
            "bits first/last quarter", "controller's own seconds",
        ),
        "rows": rows,
    }  # fmt: skip


def _bits(runs: list[Outcome], *, first: bool) -> list[float]:
    quarter = len(runs[0].levels) // 4
    return [level for run in runs for level in (run.levels[:quarter] if first else run.levels[-quarter:])]


def _claims(outcomes: dict[str, list[Outcome]]) -> list[dict[str, Any]]:
    def to_target(name: str) -> float:
        return fmean(run.seconds_to_target for run in outcomes[name])

    def accuracy(name: str) -> float:
        return fmean(run.accuracy for run in outcomes[name])

    best = min(FIXED, key=to_target)
    early, late = (fmean(_bits(outcomes["mqgrad"], first=first)) for first in (True, False))
    return [
        {
            "claim": "mqgrad reaches the target no later than the best fixed width",
            "measured": f"{to_target('mqgrad'):.1f} s",
            "expected": f"at most {to_target(best):.1f} s ({best})",
            "holds": to_target("mqgrad") <= to_target(best),
        },
        {
            "claim": "mqgrad keeps the final accuracy of 16 bit",
            "measured": f"{accuracy('mqgrad'):.3f}",
            "expected": f"at least {accuracy('16 bit'):.3f} less {WITHIN}",
            "holds": accuracy("mqgrad") >= accuracy("16 bit") - WITHIN,
        },
        {
            "claim": "few bits early, more bits later",
            "measured": f"{early:.1f} bits in the first quarter, {late:.1f} in the last",
            "expected": "more in the last",
            "holds": late > early,
        },
    ]


@cache
def half_size_images() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The embedded images at half size: small enough that the link, not the computing, is what bits are saved for."""
    dataset = datasets.embedded_images()

    def halved(images: Tensor) -> Tensor:
        return functional.avg_pool2d(images.float().view(-1, 1, 28, 28) / 255 - 0.29, 2).flatten(1)

    return (
        halved(dataset.train.inputs), dataset.train.targets.long(),
        halved(dataset.test.inputs), dataset.test.targets.long(),
    )  # fmt: skip


def _error(gradient: dict[str, Tensor], layout: Layout, level: float, step: int) -> float:
    """|what the first worker's message lost|^2 / |its gradient|^2."""
    flat = torch.cat([gradient[name].reshape(-1) for name in layout.names])
    lost = torch.empty_like(flat)
    bucket = Bucket(flat, layout, WORKERS, 0, step, 0, lost)
    Ladder().encode(bucket, level, torch.empty(Ladder().nbytes(layout, level), dtype=torch.uint8))
    return float(lost.square().sum() / flat.square().sum().clamp_min(1e-30))
