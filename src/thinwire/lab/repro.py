"""`thinwire repro`: each paper's claims on its own set-up, measured, beside what was expected."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

# Seeds of the quick and of the full version, unless told.
SEEDS = {"tnq": (2, 5), "regtopk": (2, 5), "utility": (1, 3), "powergossip": (2, 5), "mqgrad": (2, 5)}
NAMES = tuple(SEEDS)


def run(name: str, *, quick: bool, seeds: int | None, data: Path | None, console: Console) -> dict[str, Any]:
    """Run one reproduction, or all; print its tables and claims; return {name: {claims, tables}}."""
    if name not in (*NAMES, "all"):
        raise ValueError(f"unknown reproduction {name!r}; known: {', '.join(NAMES)}, all")
    if seeds is not None and seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    results = {}
    for each in NAMES if name == "all" else (name,):
        module = importlib.import_module(f"thinwire.lab.repro_{each}")
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task(each)
            results[each] = module.run(
                quick,
                data,
                seeds or SEEDS[each][not quick],
                lambda text, bar=bar: progress.update(bar, description=text),
            )
        show(each, results[each], console)
    return results


def show(name: str, result: dict[str, Any], console: Console) -> None:
    for given in result["tables"]:
        table = Table(*map(str, given["columns"]), title=given["title"])
        for row in given["rows"]:
            table.add_row(*map(str, row))
        console.print(table)
    table = Table("claim", "measured", "expected", "holds", title=f"{name}: what holds")
    for claim in result["claims"]:
        holds = "[green]yes[/]" if claim["holds"] else "[red]no[/]"
        table.add_row(claim["claim"], str(claim["measured"]), str(claim["expected"]), holds)
    console.print(table)
