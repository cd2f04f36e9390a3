"""`thinwire repro`: each paper's claims, as near to its set-up as two cores allow, measured beside expected."""

from __future__ import annotations

import importlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn

from thinwire.core.spec import hint
from thinwire.lab.repro.claims import Part, carried_out
from thinwire.lab.repro.papers import PAPERS
from thinwire.lab.runs.record import Record


def run(
    name: str, *, quick: bool, seeds: int | None, data: Path | None, parts: Sequence[str], console: Console
) -> Iterator[tuple[str, dict[str, Any]]]:
    """Run one reproduction, or all; print the tables and claims of each, and yield after each of its parts what was
    found, by its name. `parts`: these alone; none: all that can be had.
    """
    if name not in (*PAPERS, "all"):
        raise ValueError(f"unknown reproduction {name!r}{hint(name, PAPERS)}; known: {', '.join(PAPERS)}, all")
    if seeds is not None and seeds < 1:
        raise ValueError(f"seeds must be at least 1, got {seeds}")
    if name == "all" and parts:
        raise ValueError(f"part {parts[0]!r} of all reproductions: name the one it is of")
    for each in PAPERS if name == "all" else (name,):
        chosen = parts_of(each, parts, quick, data)
        paper = PAPERS[each]
        columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
        with Progress(*columns, console=console, transient=True) as progress:
            bar = progress.add_task(each)
            count = seeds or (paper.quick_seeds if quick else paper.full_seeds)

            def tell(text: str, bar: TaskID = bar, progress: Progress = progress) -> None:
                progress.update(bar, description=text)
                if not console.is_terminal:  # nothing is redrawn there: a line each
                    console.print(text, highlight=False, markup=False, soft_wrap=True)

            about, done, result = Record({}), [], None
            for part, result in carried_out(chosen, count, tell):
                done.append(part)
                yield each, {
                    **result.as_json(), "quick": quick, "parts": list(done), "seeds": count,
                    "data": str(data) if data else None, "machine": about.machine, "versions": about.versions,
                    "created": about.created,
                }  # fmt: skip
        assert result is not None
        result.show(each, console)
        if result.stopped:
            return


def parts_of(name: str, wanted: Sequence[str], quick: bool, data: Path | None) -> dict[str, Part]:
    """Of a reproduction: those wanted, in its own order, or all that can be had with this data."""
    known = PAPERS[name].parts
    if strange := [part for part in wanted if part not in known]:
        raise ValueError(f"{name} has no part {strange[0]!r}{hint(strange[0], known)}; known: {', '.join(known)}")
    found: dict[str, Part] = importlib.import_module(f"thinwire.lab.repro.{name}").parts(quick, data)
    if absent := [part for part in wanted if part not in found]:
        how = "with --quick" if quick else "with this --data" if data else "without --data"
        raise ValueError(f"{name}: no part {absent[0]!r} {how}; there are {', '.join(found)}")
    return {part: run for part, run in found.items() if part in (wanted or known)}
