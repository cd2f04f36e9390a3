"""`thinwire repro`: each paper's claims, as near to its set-up as two cores allow, measured beside expected."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from thinwire.core.spec import hint
from thinwire.lab.repro.claims import Reproduction
from thinwire.lab.repro.papers import PAPERS
from thinwire.lab.runs.record import Record


def run(
    name: str, *, quick: bool, seeds: int | None, data: Path | None, console: Console
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run one reproduction, or all; print the tables and claims of each and yield them, by its name."""
    if name not in (*PAPERS, "all"):
        raise ValueError(f"unknown reproduction {name!r}{hint(name, PAPERS)}; known: {', '.join(PAPERS)}, all")
    if seeds is not None and seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    for each in PAPERS if name == "all" else (name,):
        paper, module = PAPERS[each], importlib.import_module(f"thinwire.lab.repro.{each}")
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task(each)
            count = seeds or (paper.quick_seeds if quick else paper.full_seeds)

            def tell(text: str, bar: TaskID = bar, progress: Progress = progress) -> None:
                progress.update(bar, description=text)
                if not console.is_terminal:  # nothing is redrawn there: a line each
                    console.print(text, highlight=False, markup=False, soft_wrap=True)

            result: Reproduction = module.reproduce(quick, data, count, tell)
        result.show(each, console)
        about = Record({})
        yield each, {
            **result.as_json(), "quick": quick, "seeds": count, "data": str(data) if data else None,
            "machine": about.machine, "versions": about.versions, "created": about.created,
        }  # fmt: skip
        if result.stopped:
            return
