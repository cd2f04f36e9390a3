"""A simulated study as a table for the terminal and as a page of its own, in the style of the report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import plotly.graph_objects as go
from rich import box
from rich.table import Table

from thinwire.lab.cost.advice_text import bits
from thinwire.lab.cost.simulate import ScalePoint, Study
from thinwire.lab.report import figures, report
from thinwire.lab.report.table import BASELINE
from thinwire.lab.runs.record import Record


@dataclass(frozen=True)
class Measure:
    """What a figure shows of every point."""

    title: str
    axis: str
    value: Callable[[ScalePoint], float | None]


MEASURES = (
    Measure("Seconds a step over workers", "seconds a step", lambda point: point.prediction.seconds),
    Measure("Bytes over workers", "MB sent per worker and step", lambda point: point.prediction.bytes_sent / 1e6),
    Measure("Error over workers", "vNMSE", lambda point: point.vnmse),
)


def study_setting(study: Study) -> str:
    """What the study is of, in words."""
    apart = f", an exchange every {study.every} steps" if study.every > 1 else ""
    return (
        f"{study.parameters / 1e6:.3g} M weights, {study.compute_seconds * 1e3:g} ms of computation, "
        f"{bits(study.bits_per_second)}, {study.latency_seconds * 1e6:g} us a hop{apart}"
    )


def study_table(study: Study) -> Table:
    """Milliseconds a step at every number of workers; bytes and errors at the fewest and the most."""
    table = Table(
        title=f"{study_setting(study)}: ms a step, MB sent per worker and step, vNMSE", title_justify="left",
        title_style="bold", box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0, caption_justify="left",
        caption="on paper. ~: seconds go on in a straight line; (n): vNMSE of so many workers, all that were simulated",
    )  # fmt: skip
    few, many = study.workers[0], study.workers[-1]
    table.add_column("scheme", overflow="fold", vertical="bottom")
    for name in (
        *(f"ms\n{n:,}" for n in study.workers),
        f"MB\n{few:,}",
        f"MB\n{many:,}",
        f"vNMSE\n{few:,}",
        "vNMSE\n(most)",
    ):
        table.add_column(name, justify="right", overflow="fold", vertical="bottom")
    for scheme in study.schemes:
        points = study.of(scheme)
        measured = [point for point in points if point.vnmse is not None]
        table.add_row(
            scheme,
            *(_milliseconds(point) for point in points),
            *(_megabytes(point) for point in (points[0], points[-1])),
            *([f"{measured[0].vnmse:.1e}", f"{measured[-1].vnmse:.1e} ({measured[-1].workers})"] if measured else []),
        )
    return table


def _milliseconds(point: ScalePoint) -> str:
    """With ~ where they are extrapolated; bytes never are."""
    return "~" * point.extrapolated + _number(point.prediction.seconds * 1e3)


def _megabytes(point: ScalePoint) -> str:
    return _number(point.prediction.bytes_sent / 1e6)


def _number(value: float) -> str:
    """Three digits, or all there are before the point."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def write_study(study: Study, file: Path) -> None:
    """The page: it needs nothing but itself."""
    about = Record({})
    looks = figures.styles(study.schemes, [scheme for scheme in study.schemes if scheme == BASELINE])
    caption = f"{about.machine['cores']} cores of {about.machine['cpu']}; torch {about.versions['torch']}"
    drawn = {measure.title: figures.spec(_figure(study, measure, looks), len(study.schemes)) for measure in MEASURES}
    rows = [study.of(scheme) for scheme in study.schemes]
    page = {
        "heading": study_setting(study),
        "caption": caption,
        "figures": drawn,
        "workers": study.workers,
        "rows": rows,
    }
    report.render_template(
        "simulate.html", file, page | {"created": about.created, "ms": _milliseconds, "mb": _megabytes}
    )


def _figure(study: Study, measure: Measure, looks: dict[str, figures.Style]) -> go.Figure:
    """A line per scheme; open circles where a point is extrapolated."""
    figure = go.Figure()
    for scheme in study.schemes:
        points = [point for point in study.of(scheme) if measure.value(point) is not None]
        figure.add_scatter(
            x=[point.workers for point in points], y=[measure.value(point) for point in points], name=scheme,
            mode="lines+markers",
            line=looks[scheme].line | {"width": 2},
            meta=None if looks[scheme].colour else figures.INK,
            marker={
                "size": 7,
                "symbol": ["circle-open" if _drawn_open(point, measure) else "circle" for point in points],
            },
        )  # fmt: skip
    figure.update_xaxes(title="workers", type="log", tickvals=study.workers, ticktext=[f"{n:,}" for n in study.workers])
    figure.update_yaxes(title=measure.axis, type="log", dtick=1, exponentformat="power")
    return figure


def _drawn_open(point: ScalePoint, measure: Measure) -> bool:
    return point.extrapolated and measure is MEASURES[0]
