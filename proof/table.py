"""Tables in markdown: what a command prints at its end, and what docs/guide/trust.md shows."""

from __future__ import annotations

from collections.abc import Sequence


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Columns as wide as what is in them, so that it reads well unrendered, too."""
    text = [[str(cell) for cell in row] for row in [head, *rows]]
    widths = [max(len(row[column]) for row in text) for column in range(len(head))]
    lines = [" | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in text]
    rule = "|".join("-" * (width + 2) for width in widths)
    return "\n".join([f"| {lines[0]} |", f"|{rule}|", *(f"| {line} |" for line in lines[1:])])
