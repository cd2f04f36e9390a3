"""The report: one self-contained page per comparison (or several): the verdict first, curves, a table, phases."""

from __future__ import annotations

import base64
import gzip
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jinja2
from plotly.offline import get_plotlyjs

from thinwire.lab.report import figures, table
from thinwire.lab.report.headline import headline
from thinwire.lab.runs.record import Record, Run
from thinwire.lab.runs.tune import tuned


@dataclass(frozen=True)
class PageSection:
    """One task of one record, ready to be put on the page."""

    name: str  # task and network: what tells it from the others on the page
    headline: str
    heading: str
    caption: str
    rows: Sequence[table.SchemeRow]
    looks: dict[str, figures.Style]  # by label
    figures: dict[str, str]  # title: JSON; the first is the large one


def write_report(records: Sequence[Record], file: Path) -> None:
    """Put the comparisons on one page. It needs nothing but itself: no network, no other file."""
    sections = [_section(part, task) for record in records for part in record.by_network() for task in _tasks(part)]
    if not sections:
        raise ValueError("there is no run to report on")
    found = [row for record in records for row in tuned(record.trials)]
    values = {"sections": sections, "table": table, "tuned": found, "created": records[-1].created}
    render_template("report.html", file, values)


def render_template(template: str, file: Path, values: dict[str, Any]) -> None:
    """Write the page that a template makes of `values`, with plotly inside."""
    page = jinja2.Environment(
        loader=jinja2.PackageLoader("thinwire.lab.report", "templates"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
    ).get_template(template)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(page.render(values, plotly=packed_plotly()), encoding="utf-8")


def packed_plotly() -> str:
    """Plotly's own script in well under half its size; page.js unpacks it in the browser."""
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


def _tasks(record: Record) -> list[str]:
    return list(dict.fromkeys(run.plan.task for run in record.runs))


def _section(record: Record, task: str) -> PageSection:
    runs = [run for run in record.runs if run.plan.task == task]
    rows = [row for row in table.summarise(record) if row.task == task]
    looks = figures.styles([row.label for row in rows], [row.label for row in rows if row.baseline])
    curves: dict[str, list[Run]] = {}
    for run in runs:
        curves.setdefault(table.label(record, run), []).append(run)
    return PageSection(
        name=f"{task}, {record.config['network']}",
        headline=headline(rows),
        heading=f"{task}: {table.setting(record)}",
        caption=table.caption(record),
        rows=rows,
        looks=looks,
        figures=_figures(curves, rows, looks),
    )


def _figures(
    curves: dict[str, list[Run]], rows: Sequence[table.SchemeRow], looks: dict[str, figures.Style]
) -> dict[str, str]:
    metric = rows[0].metric.capitalize()
    made = {
        f"{metric} over {axis.name}": figures.spec(
            figures.scores(curves, looks, axis), len(rows), large=axis is figures.AXES[0]
        )
        for axis in figures.AXES
    }
    made["Milliseconds per step, by what they went into"] = figures.spec(figures.phases(rows), len(rows))
    steered = {label: group for label, group in curves.items() if group[0].plan.controller is not None}
    if steered:
        levels = figures.curve_figure(steered, looks, figures.AXES[0], lambda point: point.level)
        made["Level over seconds"] = figures.spec(levels, len(steered))
    return made
