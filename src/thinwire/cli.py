"""The command `thinwire`."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from thinwire.lab import doctor as doctor_
from thinwire.schemes import registry

app = typer.Typer(
    help="Train PyTorch models over thin wires, and find out whether compression pays.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
)
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Also write the result to FILE as JSON.")]


@app.command("list")
def list_(json_file: Json = None) -> None:
    """The schemes: what each is for, what can be turned, and whether it needs error memory."""
    rows = [_describe(name) for name in registry()]
    table = Table("scheme", "options and defaults", "knob (fewest bytes first)", "error memory", "what it is for")
    for row in rows:
        memory = "not needed" if row["unbiased"] else "on by default"
        table.add_row(row["name"], row["spec"], row["knob"], memory, row["summary"])
    Console().print(table)
    _write(json_file, rows)


@app.command()
def doctor(json_file: Json = None) -> None:
    """Versions, which kernels loaded and why not, and what this machine can do."""
    rows = doctor_.examine()
    table = Table("what", "found", "what follows")
    for row in rows:
        table.add_row(row.what, f"[{'green' if row.fine else 'yellow'}]{row.found}[/]", row.follows)
    Console().print(table)
    _write(json_file, [vars(row) for row in rows])


def _describe(name: str) -> dict[str, Any]:
    cls = registry()[name]
    scheme = cls()
    knob = scheme.knob
    return {
        "name": name,
        "spec": scheme.spec,
        "knob": f"{knob.name}: {', '.join(f'{level:g}' for level in knob.menu)}" if knob else "-",
        "unbiased": scheme.unbiased,
        "summary": cls.summary,
    }


def _write(file: Path | None, result: Any) -> None:
    if file is not None:
        file.write_text(json.dumps(result, indent=2) + "\n")


def main() -> None:
    """Run the command; a mistake of the user's is one line and exit code 2."""
    try:
        app()
    except (ValueError, OSError) as mistake:
        print(f"thinwire: {mistake}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
