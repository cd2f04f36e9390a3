"""thinwire repro local: what training with local steps loses, and what it saves, at equal numbers of examples.

DiLoCo, Streaming DiLoCo and SparseLoCo against DDP, in real processes, timed over thin links (shaped where the machine
allows it, else paced): a small transformer on text, and the perceptron on images. The papers train far larger models
for far more rounds; here are 0.2 M weights and tens of rounds. Claims are the papers', put to this size.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

from thinwire.lab.network import links
from thinwire.lab.network.network import Network
from thinwire.lab.report import intervals
from thinwire.lab.report.intervals import Interval
from thinwire.lab.repro.claims import OURS, PAPER, Claim, Findings, Listing, Part, Progress, told
from thinwire.lab.runs import timing
from thinwire.lab.runs.record import Run, RunPlan
from thinwire.lab.runs.run import execute
from thinwire.lab.tasks.tasks import load_task
from thinwire.local import recipes

WORKERS = 4
NETWORK = "auto:100mbit"
TEXT, QUICK_TEXT = "text(width=64, batch=8, steps=900)", "text(width=64, batch=8, steps=120)"
IMAGES = "mlp(width=256, batch=32, steps=300)"
TEXT_RATE = 0.25  # times the task's own, of every setting: 2e-3
IMAGES_RATE = 0.25  # times the task's own, of local steps: of five tried on seeds 10 and 11; with 1 they diverge
EVERY, QUICK_EVERY = (10, 30, 100), (10, 30)
H = 30  # of all that is compared at equal rounds
PARTS = 4
TWO_BITS = "eden(bits=2)"  # rounded the same way every time, as in the papers; tnq's rounding is random
FEW_BITS = ("tnq(bits=4)", "tnq(bits=2)", TWO_BITS)
WITHIN = 0.01  # of the score: as good as


@dataclass(frozen=True)
class Setting:
    """A way to train: `options` are those of `LocalSteps`; none: DDP, in every step."""

    title: str
    options: dict[str, Any] = field(default_factory=dict)

    def plan(self, task: str, seed: int, network: str, data: str | None) -> RunPlan:
        given = {"scheme": "fp32", "every": 1, "outer": "average"} | self.options
        more = {name: value for name, value in given.items() if name not in ("scheme", "every", "outer")}
        rate = TEXT_RATE if task.startswith("text") else IMAGES_RATE if task == IMAGES and self.options else 1.0
        return RunPlan(
            task, given["scheme"], seed, network=network, workers=WORKERS, data=data, every=given["every"],
            outer=given["outer"], options=more, rate=rate,
        )  # fmt: skip


DDP = Setting("DDP, fp32 every step")
STREAMING = Setting(f"streaming, {PARTS} parts, H = {H}", recipes.streaming(every=H, parts=PARTS, delay=2))
SPARSE = Setting(f"SparseLoCo, H = {H}", recipes.sparseloco(every=H))
OFTEN = Setting("SparseLoCo, H = 10", recipes.sparseloco(every=10, density=0.031))


def diloco(every: int) -> Setting:
    return Setting(f"DiLoCo, H = {every}", recipes.diloco(every=every))


def few_bits(scheme: str, feedback: bool) -> Setting:
    """DiLoCo whose changes travel in few bits, with and without error feedback."""
    remembered = "" if feedback else "no "
    options = recipes.diloco(every=H) | {"scheme": scheme, "feedback": feedback}
    return Setting(f"DiLoCo, H = {H}, {scheme}, {remembered}feedback", options)


def settings(quick: bool) -> list[Setting]:
    found = [DDP, *(diloco(every) for every in (QUICK_EVERY if quick else EVERY)), STREAMING, SPARSE, OFTEN]
    return found + [few_bits(scheme, feedback) for scheme in FEW_BITS for feedback in (True, False)]


@dataclass(frozen=True)
class Outcome:
    """A setting's runs of one task, one a seed."""

    setting: Setting
    runs: Sequence[Run]

    @property
    def failure(self) -> str | None:
        return next((run.reason for run in self.runs if run.reason is not None), None)

    @property
    def scores(self) -> list[float]:
        """At the end; what did not come to its end is as bad as can be."""
        worst = -math.inf if self.runs[0].rising else math.inf
        return [worst if run.reason is not None else run.score for run in self.runs]

    def total(self, name: str) -> float:
        return math.nan if self.failure else fmean(run.totals[name] for run in self.runs)

    @property
    def bytes_at_once(self) -> float:
        """Of one exchange, of which there are so many a round as there are parts."""
        return self.total("bytes_sent") / self.total("rounds") / self.setting.options.get("parts", 1)


def parts(quick: bool, data: Path | None) -> dict[str, Part]:
    """`data`: a text file, or a folder with train.txt; without it, the language reference that comes with Python.

    `quick`: fewer steps, the text alone.
    """
    net = links.resolved(NETWORK, WORKERS)

    def train_on(task: str, found: Findings) -> None:
        with found.stop:
            outcomes = train_all(task, settings(quick), net, found.seeds, data, found.progress)
            found.claims += claims_of(task, outcomes)
            found.tables.append(_table(task, outcomes, str(net)))

    every: dict[str, Part] = {"text": partial(train_on, QUICK_TEXT if quick else TEXT)}
    return every if quick else every | {"images": partial(train_on, IMAGES)}


def train_all(
    task: str, chosen: Sequence[Setting], net: Network, seeds: int, data: Path | None, progress: Progress
) -> dict[str, Outcome]:
    """Every setting is trained once a seed; then its rounds are timed on the link, all settings in turn."""
    where, name = str(data) if data and task.startswith("text") else None, task.partition("(")[0]
    plans = {setting.title: setting.plan(task, 0, str(net), where) for setting in chosen}
    trained: dict[str, list[Run]] = {title: [] for title in plans}
    timed: dict[str, list[Run]] = {title: [] for title in plans}
    for seed in range(seeds):
        for title, plan in plans.items():
            progress(f"{name}: {title}, seed {seed}")
            trained[title].append(execute(timing.training(replace(plan, seed=seed)), None))
    with links.opened(net, WORKERS) as opened:
        for turn in range(timing.TURNS):
            for title, plan in plans.items():
                progress(f"{name}: {title}, seconds on {net}, {turn + 1} of {timing.TURNS}")
                timed[title].append(execute(timing.timing(plan), opened))
    return {
        each.title: Outcome(each, [timing.composed(run, timed[each.title]) for run in trained[each.title]])
        for each in chosen
    }


# -- claims ----------------------------------------------------------------------------------------------------------


def claims_of(task: str, outcomes: dict[str, Outcome]) -> list[Claim]:
    name, plain = task.partition("(")[0], outcomes[diloco(H).title]
    ddp, streaming, sparse = (outcomes[each.title] for each in (DDP, STREAMING, SPARSE))
    two, bare = (outcomes[few_bits(TWO_BITS, feedback).title] for feedback in (True, False))
    at_once = streaming.bytes_at_once / plain.bytes_at_once
    return [
        as_good(f"{name}: DiLoCo ends as good as DDP", plain, ddp, "published, with 500 steps a round"),
        as_good(f"{name}: SparseLoCo is no worse than DiLoCo at equal H", sparse, plain, "published, H 15 to 250"),
        as_good(f"{name}: streaming loses nothing against DiLoCo", streaming, plain, "published"),
        Claim(
            f"{name}: streaming sends 1/{PARTS} at a time", f"{at_once:.2f}", f"{1 / PARTS:.2f}",
            told(abs(at_once * PARTS - 1) < 0.1), PAPER,
        ),
        as_good(f"{name}: 2 bits with feedback lose nothing against DiLoCo", two, plain, "published (MuLoCo)"),
        worse(f"{name}: 2 bits without feedback do", bare, plain, "from the above"),
    ]  # fmt: skip


def as_good(claim: str, one: Outcome, other: Outcome, expected: str) -> Claim:
    lost, text = difference(one, other)
    verdict = intervals.verdict(Interval(-lost.mean, lost.half), WITHIN)
    return Claim(claim, text, f"{expected}: at most {WITHIN:.0%} worse", verdict, PAPER, _for_less(one, other))


def worse(claim: str, one: Outcome, other: Outcome, expected: str) -> Claim:
    lost, text = difference(one, other)
    verdict = intervals.verdict(lost, -WITHIN)
    return Claim(claim, text, f"{expected}: more than {WITHIN:.0%} worse", verdict, OURS)


def _for_less(one: Outcome, other: Outcome) -> str:
    failure = one.failure or other.failure
    if failure:
        return f"failed: {failure}"
    share, rounds = one.total("bytes_sent") / other.total("bytes_sent"), one.total("rounds")
    return f"it sends {share:.2g} of the other's bytes, in {rounds:.0f} rounds"


def difference(one: Outcome, other: Outcome) -> tuple[Interval, str]:
    """How much worse one ends than another, as a share of the other's score, on the same seeds; and in words, with the
    95% interval of the mean.
    """
    sign = -1.0 if one.runs[0].rising else 1.0
    each = [sign * (a - b) / abs(b) for a, b in zip(one.scores, other.scores, strict=True)]
    if not math.isfinite(fmean(each)):
        worst = math.inf if one.failure else -math.inf
        return Interval(worst, math.inf), f"failed: {one.failure or other.failure}"
    lost = intervals.interval(each)
    return lost, lost.text("+.1%")


# -- tables ----------------------------------------------------------------------------------------------------------


def _table(task: str, outcomes: dict[str, Outcome], network: str) -> Listing:
    rows = []
    for title, each in outcomes.items():
        if each.failure:
            rows.append([title, f"failed: {each.failure}", *[""] * 5])
            continue
        ddp = outcomes[DDP.title]
        rows.append([
            title, f"{fmean(each.scores):.3f}", f"{each.total('rounds'):.0f}",
            f"{each.total('bytes_sent') / 1e6:.3g}", f"{each.bytes_at_once / 1e6:.3g}",
            f"{each.total('seconds'):.1f}", f"{ddp.total('seconds') / each.total('seconds'):.1f}x",
        ])  # fmt: skip
    loaded = load_task("text" if task.startswith("text") else task)
    columns = ["setting", "score", "rounds", "MB sent", "MB at once", "seconds", "sooner"]
    better = "more" if loaded.metric.rising else "less"
    title = (
        f"{task}, {WORKERS} workers, {network}: {loaded.metric.name} ({better} is better) after equally many examples"
    )
    return Listing(title, columns, rows)
