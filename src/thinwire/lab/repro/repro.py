"""`thinwire repro`: each paper's claims on its own set-up, measured, beside what was expected."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from thinwire.lab.runs.record import Record

# Seeds of the quick and of the full version, unless told.
SEEDS = {"tnq": (2, 5), "regtopk": (2, 5), "utility": (1, 3), "powergossip": (2, 5), "mqgrad": (2, 5)}
NAMES = tuple(SEEDS)
NARROW = 12  # characters: a column of such cells is one of numbers or single words
STYLE: Any = {
    "title_justify": "left", "title_style": "bold", "box": box.SIMPLE_HEAD, "show_edge": False, "pad_edge": False,
    "padding": 0,
}  # fmt: skip


def run(
    name: str, *, quick: bool, seeds: int | None, data: Path | None, console: Console
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run one reproduction, or all; print the tables and claims of each and yield them, by its name."""
    if name not in (*NAMES, "all"):
        raise ValueError(f"unknown reproduction {name!r}; known: {', '.join(NAMES)}, all")
    if seeds is not None and seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    for each in NAMES if name == "all" else (name,):
        module = importlib.import_module(f"thinwire.lab.repro.{each}")
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task(each)
            count = seeds or SEEDS[each][not quick]
            result = module.run(quick, data, count, lambda text, bar=bar: progress.update(bar, description=text))
        show(each, result, console)
        about = Record({})
        yield each, {
            **result, "quick": quick, "seeds": count, "data": str(data) if data else None,
            "machine": about.machine, "versions": about.versions, "created": about.created,
        }  # fmt: skip


def show(name: str, result: dict[str, Any], console: Console) -> None:
    for given in result["tables"]:
        console.print(_table(given["title"], list(map(str, given["columns"])), given["rows"]))
        console.print()
    table = Table("claim", "measured", "expected", "holds", title=f"{name}: what holds", **STYLE)
    for claim in result["claims"]:
        holds = "[green]yes[/]" if claim["holds"] else "[red]no[/]"
        table.add_row(claim["claim"], str(claim["measured"]), str(claim["expected"]), holds)
    console.print(table)


def _table(title: str, names: list[str], rows: list[list[Any]]) -> Table:
    """Numbers keep their columns whole, and texts are folded into what is left of the terminal: nothing is cut."""
    table = Table(title=title, **STYLE)
    for number, (name, *cells) in enumerate(zip(names, *rows, strict=True)):
        if number and max((len(str(cell)) for cell in cells), default=0) <= NARROW:
            table.add_column("\n".join(name.split()), justify="right", no_wrap=True, vertical="bottom")
        else:
            table.add_column(name, overflow="fold", vertical="bottom")
    for row in rows:
        table.add_row(*map(str, row))
    return table
