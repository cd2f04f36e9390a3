"""The report: one self-contained page per comparison (or several), with curves, phases and verdicts."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import jinja2
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from thinwire.lab.report import table
from thinwire.lab.runs.record import CurvePoint, Record, Run

# Okabe and Ito's colours: told apart with any colour vision. Used up, they come again with another dash. The baseline
# is black and dashed, so that a line that it lies upon can still be seen.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A6D00", "#7F7F7F")
DASHES = ("solid", "dot", "dashdot")
BASELINE_LINE = {"color": "#000000", "dash": "dash"}
PHASE_COLOURS = {"compute": "#56B4E9", "encode": "#E69F00", "wire": "#D55E00"}


@dataclass(frozen=True)
class Axis:
    """What a curve can run over."""

    name: str
    title: str
    value: Callable[[CurvePoint], float]


AXES = (
    Axis("seconds", "training seconds", lambda point: point.seconds),
    Axis("bytes", "MB on the wire per worker", lambda point: point.bytes_sent / 1e6),
    Axis("steps", "steps", lambda point: point.step),
)


@dataclass(frozen=True)
class PageSection:
    """One task of one record, ready to be put on the page."""

    heading: str
    caption: str
    rows: Sequence[table.SchemeRow]
    figures: dict[str, str]  # title: HTML
    lines: dict[str, dict[str, str]]  # label: how it is drawn


def write_report(records: Sequence[Record], file: Path) -> None:
    """Put the comparisons on one page. It needs nothing but itself: no network, no other file."""
    sections = [_section(part, task) for record in records for part in record.by_network() for task in _tasks(part)]
    if not sections:
        raise ValueError("there is no run to report on")
    render_template("report.html", file, {"sections": sections, "table": table, "created": records[-1].created})


def render_template(template: str, file: Path, values: dict[str, Any]) -> None:
    """Write the page that a template makes of `values`, with plotly inside."""
    page = jinja2.Environment(
        loader=jinja2.PackageLoader("thinwire.lab.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    ).get_template(template)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page.render(values, plotly=get_plotlyjs()), encoding="utf-8")


def _tasks(record: Record) -> list[str]:
    return list(dict.fromkeys(run.plan.task for run in record.runs))


def _section(record: Record, task: str) -> PageSection:
    runs = [run for run in record.runs if run.plan.task == task]
    rows = [row for row in table.summarise(record) if row.task == task]
    lines = styles([row.label for row in rows], [row.label for row in rows if row.baseline])
    curves: dict[str, list[Run]] = {}
    for run in runs:
        curves.setdefault(table.label(record, run), []).append(run)
    figures = {
        f"{runs[0].metric} over {axis.name}".capitalize(): html(_scores(curves, lines, axis), len(rows))
        for axis in AXES
    }
    figures["Seconds per step, by what they went into"] = html(_phases(rows), len(rows))
    steered = {label: group for label, group in curves.items() if group[0].plan.controller is not None}
    if steered:
        figures["Level over seconds"] = html(_curves(steered, lines, AXES[0], lambda point: point.level), len(steered))
    return PageSection(f"{task}: {table.setting(record)}", table.caption(record), rows, figures, lines)


def styles(labels: Sequence[str], baselines: Sequence[str]) -> dict[str, dict[str, str]]:
    """A line for every label, black for the baselines. Where there are more labels than colours, these come dashed."""
    others = [label for label in labels if label not in baselines]
    lines = itertools.cycle({"color": colour, "dash": dash} for dash in DASHES for colour in COLOURS)
    return dict(zip(others, lines, strict=False)) | dict.fromkeys(baselines, BASELINE_LINE)


def _scores(curves: dict[str, list[Run]], lines: dict[str, dict[str, str]], axis: Axis) -> go.Figure:
    """The curves of the metric, and the target as a dotted line."""
    figure = _curves(curves, lines, axis, lambda point: point.score)
    first = next(iter(curves.values()))[0]
    if first.target is not None:
        figure.add_hline(y=first.target, line={"dash": "dot", "width": 1, "color": "#666"})
    if first.metric == "accuracy":
        figure.update_yaxes(tickformat=".0%")
    return figure


def _curves(
    groups: dict[str, list[Run]], lines: dict[str, dict[str, str]], axis: Axis, value: Callable[[CurvePoint], float]
) -> go.Figure:
    """A bold line per scheme, the mean over its seeds, with the single runs faint behind it."""
    figure = go.Figure()
    for label, runs in groups.items():
        curves = [run.curve for run in runs if run.reason is None]
        line = lines[label]
        for curve in curves if len(curves) > 1 else []:
            figure.add_scatter(
                x=[axis.value(point) for point in curve], y=[value(point) for point in curve],
                mode="lines", opacity=0.3, line=line | {"width": 1}, legendgroup=label,
                showlegend=False, hoverinfo="skip",
            )  # fmt: skip
        if curves:
            together = list(zip(*curves, strict=True))
            figure.add_scatter(
                x=[mean(map(axis.value, points)) for points in together],
                y=[mean(map(value, points)) for points in together],
                mode="lines+markers", name=label, legendgroup=label, line=line | {"width": 2.5},
                marker={"size": 5}, showlegend=True,
            )  # fmt: skip
    figure.update_xaxes(title=axis.title, rangemode="tozero")
    return figure


def _phases(rows: Sequence[table.SchemeRow]) -> go.Figure:
    """A bar per scheme, stacked from compute, encoding and waiting for the wire."""
    figure = go.Figure()
    done = [row for row in rows if row.runs]
    for phase, colour in PHASE_COLOURS.items():
        figure.add_bar(
            y=[_folded(row.label) for row in done], x=[row.phases[phase] for row in done],
            name=phase, orientation="h", marker={"color": colour},
        )  # fmt: skip
    figure.update_layout(barmode="stack")
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title="seconds per step")
    return figure


def _folded(label: str) -> str:
    """Beside a bar there is little room."""
    return label.replace(" by ", "<br>by ").replace(" over ", "<br>over ")


def html(figure: go.Figure, entries: int) -> str:
    """The more curves a legend names, or bars there are, the higher the figure."""
    figure.update_layout(
        template="plotly_white", height=300 + 20 * entries, font={"family": "inherit"},
        margin={"l": 10, "r": 10, "t": 10, "b": 10},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0, "traceorder": "normal"},
    )  # fmt: skip
    figure.update_xaxes(automargin=True)
    figure.update_yaxes(automargin=True)
    return figure.to_html(full_html=False, include_plotlyjs=False, config={"displayModeBar": False, "responsive": True})
