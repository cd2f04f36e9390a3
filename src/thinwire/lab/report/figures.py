"""The figures of a page: curves of the metric with bands over seeds, phases of a step, levels of a knob.

They are told apart by colour, dash and marker alike, so that no colour vision and no printer is needed. What is drawn
in the page's own ink (the baseline, axes) is coloured in the browser, which knows whether the page is dark.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import plotly.graph_objects as go

from thinwire.lab.report import table
from thinwire.lab.runs.record import CurvePoint, Run

# Okabe and Ito's colours: told apart with any colour vision. Used up, they come again with another dash and marker.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8A6D00", "#7F7F7F")
DASHES = ("solid", "dot", "dashdot")
MARKERS = {"circle": "●", "square": "■", "diamond": "◆", "triangle-up": "▲", "triangle-down": "▼"}
PHASE_LOOKS = {"compute": ("#56B4E9", ""), "encode": ("#E69F00", "/"), "wire": ("#D55E00", "x")}
INK = "ink"  # what a trace's `meta` says where it has the page's own colour
WIDE = 8  # seconds that differ by more than this factor between rows are easier to read on a log axis


@dataclass(frozen=True)
class Style:
    """How everything about one row is drawn."""

    colour: str | None  # None: the page's own ink, dashed, so that a line that it lies upon can still be seen
    dash: str
    marker: str

    @property
    def line(self) -> dict[str, str]:
        return {"dash": self.dash} | ({"color": self.colour} if self.colour else {})

    @property
    def sign(self) -> str:
        """The marker as text."""
        return MARKERS[self.marker]

    @property
    def shade(self) -> str:
        """The colour of a band, nearly transparent."""
        red, green, blue = (int(self.colour[at : at + 2], 16) for at in (1, 3, 5)) if self.colour else (128, 128, 128)
        return f"rgba({red},{green},{blue},0.18)"


def styles(labels: Sequence[str], baselines: Sequence[str]) -> dict[str, Style]:
    """A style for every label, ink for the baselines."""
    others = [label for label in labels if label not in baselines]
    colours, markers = itertools.cycle(COLOURS), itertools.cycle(MARKERS)
    dashes = (dash for dash in itertools.cycle(DASHES) for _ in COLOURS)
    made = {label: Style(next(colours), next(dashes), next(markers)) for label in others}
    return made | dict.fromkeys(baselines, Style(None, "dash", "circle"))


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


def scores(curves: Mapping[str, list[Run]], looks: Mapping[str, Style], axis: Axis) -> go.Figure:
    """The curves of the metric, and the target as a dotted line. They begin where the first row is a fifth through."""
    figure = curve_figure(curves, looks, axis, lambda point: point.score)
    first = next(iter(curves.values()))[0]
    targets = [run.target for runs in curves.values() for run in runs if run.target is not None]
    if targets:
        target = mean(targets)
        figure.add_hline(y=target, line={"dash": "dot", "width": 1, "color": "#888"}, name="target")
        figure.add_annotation(
            x=0, xref="paper", y=target, text=f"target {table.score_text(first.metric, target)}",
            showarrow=False, xanchor="left", yanchor="bottom", font={"size": 11},
        )  # fmt: skip
    if first.metric == "accuracy":
        figure.update_yaxes(tickformat=".0%")
    figure.update_yaxes(range=_worth_seeing(curves, rising=first.rising))
    if axis is AXES[0] and _spread(curves) > WIDE:
        figure.update_xaxes(type="log")
    return figure


def _worth_seeing(curves: Mapping[str, list[Run]], *, rising: bool) -> list[float] | None:
    """From a fifth of the way on: before that all curves are one steep line, which hides the end from view."""
    done = [run.curve for runs in curves.values() for run in runs if run.reason is None and len(run.curve) >= 10]
    seen = [point.score for curve in done for point in curve[len(curve) // 5 :] if point.score == point.score]
    if not seen:
        return None
    low, high = min(seen), max(seen)
    room = 0.05 * (high - low)
    return [low - room, high + room] if rising else [max(0.0, low - room), high + room]


def _spread(curves: Mapping[str, list[Run]]) -> float:
    """The longest run's seconds over the shortest's."""
    lengths = [run.curve[-1].seconds for runs in curves.values() for run in runs if run.reason is None and run.curve]
    return max(lengths) / max(min(lengths), 1e-9) if lengths else 1.0


def curve_figure(
    curves: Mapping[str, list[Run]], looks: Mapping[str, Style], axis: Axis, value: Callable[[CurvePoint], float]
) -> go.Figure:
    """A line per row, the mean over its seeds, in a band from the lowest of them to the highest."""
    figure = go.Figure()
    for label, runs in curves.items():
        done = [run for run in runs if run.reason is None]
        if done:
            _add_row(figure, label, looks[label], done, axis, value)
    figure.update_xaxes(title=axis.title)
    return figure


def _add_row(
    figure: go.Figure, label: str, look: Style, runs: list[Run], axis: Axis, value: Callable[[CurvePoint], float]
) -> None:
    together = list(zip(*(run.curve for run in runs), strict=True))
    x = [_short(mean(map(axis.value, points))) for points in together]
    values = [[value(point) for point in points] for points in together]
    if len(runs) > 1:
        figure.add_scatter(
            x=[*x, *x[::-1]], y=[*map(max, values), *map(min, reversed(values))], fill="toself", fillcolor=look.shade,
            line={"width": 0}, mode="lines", legendgroup=label, showlegend=False, hoverinfo="skip",
        )  # fmt: skip
    shown = [
        f"step {points[0].step}, {mean(p.seconds for p in points):.3g} s, "
        f"{mean(p.bytes_sent for p in points) / 1e6:.3g} MB per worker<br>{_seeds_text(runs[0].metric, points)}"
        for points in together
    ]
    figure.add_scatter(
        x=x, y=[mean(each) for each in values], mode="lines+markers", name=label, legendgroup=label,
        line=look.line | {"width": 2.5}, marker={"size": 7, "symbol": look.marker}, showlegend=True,
        text=shown, hovertemplate="<b>%{fullData.name}</b><br>%{text}<extra></extra>",
        meta=None if look.colour else INK,
    )  # fmt: skip


def _seeds_text(metric: str, points: Sequence[CurvePoint]) -> str:
    """The mean score and, of several seeds, the lowest and the highest."""
    found = [point.score for point in points]
    text = f"{metric} {table.score_text(metric, mean(found), short=True)}"
    if len(found) > 1:
        low, high = (table.score_text(metric, each, short=True) for each in (min(found), max(found)))
        text += f" ({low} to {high}, {len(found)} seeds)"
    return text + f", training loss {mean(point.loss for point in points):.3g}"


def _short(value: float) -> float:
    """Four digits are more than a screen shows, and a third of the page."""
    return float(f"{value:.4g}")


def phases(rows: Sequence[table.SchemeRow]) -> go.Figure:
    """A bar per row, stacked from compute, encoding and waiting for the wire."""
    figure = go.Figure()
    done = [row for row in rows if row.runs]
    for phase, (colour, shape) in PHASE_LOOKS.items():
        pattern = {"shape": shape, "fillmode": "overlay", "fgopacity": 0.35}
        seconds = [row.phases[phase] or 0.0 for row in done]
        figure.add_bar(
            y=[_folded(row.label) for row in done], x=[_short(1e3 * each) for each in seconds],
            name=phase, orientation="h", marker={"color": colour, "pattern": pattern},
            hovertemplate="<b>%{y}</b><br>%{fullData.name}: %{x:.3g} ms of a step<extra></extra>",
        )  # fmt: skip
    figure.update_layout(barmode="stack")
    figure.update_yaxes(autorange="reversed")
    figure.update_xaxes(title="milliseconds per step")
    return figure


def _folded(label: str) -> str:
    """Beside a bar there is little room."""
    return label.replace(" by ", "<br>by ").replace(" over ", "<br>over ").replace(" every ", "<br>every ")


def spec(figure: go.Figure, entries: int, *, large: bool = False) -> str:
    """The figure as JSON for a page. The more a legend names, or bars there are, the higher it is."""
    figure.update_layout(
        template="none", height=(420 if large else 280) + 20 * entries, hovermode="closest",
        font={"family": "system-ui, sans-serif", "size": 13}, paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)", margin={"l": 10, "r": 10, "t": 10, "b": 10},
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.0, "x": 0, "traceorder": "normal"},
    )  # fmt: skip
    figure.update_xaxes(automargin=True, zeroline=False)
    figure.update_yaxes(automargin=True, zeroline=False)
    text = figure.to_json()
    assert text is not None
    return text.replace("<", "\\u003c")  # it stands inside a script element
