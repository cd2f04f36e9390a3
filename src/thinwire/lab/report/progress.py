"""The comparison as it happens: a line per run, with bar, loss, score and training seconds."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from thinwire.lab.report.table import score_text
from thinwire.lab.runs.record import CurvePoint, Run, RunPlan

ROWS = 20  # as many runs as a terminal shows at a time


class LiveTable:
    """Shows plans turning into runs. On a terminal it is redrawn in place; elsewhere it is a line per run."""

    def __init__(self, plans: Sequence[RunPlan], console: Console):
        self._plans = plans
        self._console = console
        self._finished: list[Run] = []
        self._point: CurvePoint | None = None
        self._steps = 1
        self._metric = ""
        self._live = Live(self, console=console, refresh_per_second=4, transient=True)

    def __enter__(self) -> LiveTable:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._live.stop()

    def started(self, steps: int, metric: str) -> None:
        self._steps, self._metric, self._point = steps, metric, None

    def advanced(self, point: CurvePoint) -> None:
        self._point = point

    def finished(self, run: Run) -> None:
        self._finished.append(run)
        self._point = None
        if not self._console.is_terminal:
            self._console.print(
                f"[{len(self._finished)}/{len(self._plans)}] {_summary(run)}",
                highlight=False,
                markup=False,
                soft_wrap=True,
            )

    def __rich__(self) -> Group:
        several = len({plan.task for plan in self._plans}) > 1
        over = len({plan.exchange for plan in self._plans}) > 1
        table = Table(box=None, pad_edge=False)
        for name in (*["task"] * several, "scheme", *["over"] * over):
            table.add_column(name, no_wrap=True)
        for name in ("seed", "", "step", "loss", "score", "seconds"):
            table.add_column(name, justify="right" if name else "left", no_wrap=True)
        first = max(0, min(len(self._finished) - ROWS // 2, len(self._plans) - ROWS))
        for number, plan in list(enumerate(self._plans))[first : first + ROWS]:
            head = (*[plan.task] * several, plan.name, *[plan.exchange] * over)
            table.add_row(*head, str(plan.seed), *self._cells(number))
        return Group(Text(f"run {min(len(self._finished) + 1, len(self._plans))} of {len(self._plans)}"), table)

    def _cells(self, number: int) -> list[Text | ProgressBar | str]:
        if number > len(self._finished):
            return ["waiting"]
        if number == len(self._finished):
            point, steps, metric = self._point, self._steps, self._metric
        else:
            run = self._finished[number]
            if run.reason is not None:
                return [Text("failed: " + run.reason, style="red", overflow="ellipsis")]
            if run.plan.timed:
                return [ProgressBar(1, 1, width=20), "timed", "", _milliseconds(run), ""]
            point, steps, metric = run.curve[-1], run.steps, run.metric
        bar = ProgressBar(steps, point.step if point else 0, width=20)
        if point is None:
            plan = self._plans[number]
            return [bar, "timing" if plan.timed else "starting" if plan.tested else f"at {plan.rate:g}x the rate"]
        return [
            bar,
            f"{point.step}/{steps}",
            f"{point.loss:.3f}",
            score_text(metric, point.score, short=True),
            f"{point.seconds:.1f}",
        ]


def _summary(run: Run) -> str:
    head = f"{run.plan.task} {run.plan.name} over {run.plan.exchange} seed {run.plan.seed}: "
    if run.reason is not None:
        return head + f"failed: {run.reason}"
    if run.plan.timed:
        return f"{head}{_milliseconds(run)} a step on {run.plan.network}"
    end = run.curve[-1]
    at = "" if run.plan.tested else f" at {run.plan.rate:g}x the rate"
    score = score_text(run.metric, run.score)
    return f"{head}{score} after {end.step} steps{at}, {end.seconds:.1f} s on {run.plan.network}"


def _milliseconds(run: Run) -> str:
    return f"{1e3 * run.totals['seconds'] / run.totals['steps']:.0f} ms"
