"""What `thinwire list` shows: everything that has a name, by family, and of one its options and what it sends."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable
from dataclasses import MISSING, fields
from typing import Any

import torch
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from thinwire import control, schemes
from thinwire.core.scheme import Scheme
from thinwire.core.spec import hint
from thinwire.exchange.simulation import Simulation
from thinwire.gossip import mixers
from thinwire.gossip.mixer import Mixer

FAMILIES = ("casts", "quantisers", "integers", "sparse", "low rank", "others", "mixers", "controllers")
NOTES = {"integers": "that add up on the way", "mixers": "of weights, for gossip", "controllers": "that turn knobs"}
SIDE = 1024  # of the matrix that sizes are told for
SIZES = f"bits: what each of two workers sends per element of a {SIDE:,} x {SIDE:,} matrix"
LINES: Any = {"box": None, "show_header": False, "pad_edge": False, "padding": (0, 2, 0, 0)}
_COMMENT = re.compile(r"\s+(\w+): .*?  # (.+)")


def everything() -> dict[str, type]:
    """All classes with a name that spec text can say, by that name."""
    return {**schemes.registry(), **mixers.registry(), **control.registry()}


def family(cls: type) -> str:
    if issubclass(cls, Scheme):
        return cls.family if cls.family in FAMILIES else "others"
    return "mixers" if issubclass(cls, Mixer) else "controllers"


def options(cls: type) -> list[dict[str, Any]]:
    """Name, default and direction of each option. The direction is the comment beside its field."""
    comments = _comments(cls)
    found = []
    for field in fields(cls):
        if field.init:
            needed = field.default is MISSING
            default = None if needed else _plain(field.default)
            direction = comments.get(field.name, "")
            found.append({"name": field.name, "default": default, "needed": needed, "direction": direction})
    return found


def _comments(cls: type) -> dict[str, str]:
    """What stands beside the fields of a class and of those it is made from."""
    found: dict[str, str] = {}
    for each in reversed(cls.__mro__):
        try:
            lines = inspect.getsource(each).splitlines()
        except (OSError, TypeError):  # there is no source of it
            continue
        found |= {match[1]: match[2] for match in map(_COMMENT.match, lines) if match}
    return found


def _plain(default: Any) -> Any:
    return list(default) if isinstance(default, tuple) else default


def bits_per_element(scheme: Scheme, level: float | None = None) -> float:
    """What each of two workers sends for a square matrix: that is one message, whether it is gathered or summed."""
    generator = torch.Generator().manual_seed(0)
    group = Simulation(scheme, workers=2, feedback=False)
    group.reduce([torch.randn(SIDE, SIDE, generator=generator) for _ in range(2)], level=level)
    return 8 * group.bytes_sent / SIDE**2


def describe(name: str) -> dict[str, Any]:
    """One row of the list."""
    cls: Any = everything()[name]
    row = {"name": name, "family": family(cls), "summary": cls.summary, "options": options(cls)}
    if issubclass(cls, Scheme):
        scheme = cls()
        row |= {"spec": scheme.spec, "unbiased": scheme.unbiased, "bits_per_element": bits_per_element(scheme)}
    return row


def show_all(rows: Iterable[dict[str, Any]], console: Console) -> None:
    """By family, a line or two each: nothing is cut, and only summaries are wrapped."""
    rows = list(rows)
    table = Table(**LINES)
    width = max(len(row["name"]) for row in rows)
    table.add_column(min_width=width + 2, no_wrap=True)
    table.add_column(justify="right", no_wrap=True)
    table.add_column(no_wrap=True)
    table.add_column()
    table.add_row("", "bits", "feedback")
    for name in FAMILIES:
        members = [row for row in rows if row["family"] == name]
        if members:
            table.add_row(f"[bold]{name}[/]", "", "", NOTES.get(name, ""), style="cyan")
        for row in members:
            size = f"{row['bits_per_element']:.3g}" if "spec" in row else ""
            feedback = ("no" if row["unbiased"] else "yes") if "spec" in row else ""
            table.add_row(f"  {row['name']}", size, feedback, row["summary"])
    console.print(table, highlight=False)
    console.print(
        f"\n{SIZES}.\nfeedback: whether it has error feedback, unless you say otherwise.\n"
        "`thinwire list NAME` shows one, with its options.",
        highlight=False,
    )


def one(text: str) -> dict[str, Any]:
    """What `thinwire list NAME` shows; a scheme may come with options, as in "qsgd(bits=2)"."""
    known, name = everything(), text.partition("(")[0].strip().lower()
    if name not in known:
        raise ValueError(f"unknown name {name!r}{hint(name, known)}; `thinwire list` has them all")
    if not issubclass(known[name], Scheme):
        return describe(name)
    scheme = schemes.parse(text)
    knob = scheme.knob
    return describe(name) | {
        "spec": scheme.spec, "unbiased": scheme.unbiased, "bits_per_element": bits_per_element(scheme),
        "knob": knob.name if knob else None,
        "bits_by_level": {f"{level:g}": bits_per_element(scheme, level) for level in knob.menu} if knob else {},
    }  # fmt: skip


def show_one(row: dict[str, Any], console: Console) -> None:
    console.print(f"[bold]{row['name']}[/] ({row['family']}): {row['summary']}\n", highlight=False)
    if row["options"]:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
        table.add_column("option", no_wrap=True)
        table.add_column("default", no_wrap=True)
        table.add_column("direction")
        for option in row["options"]:
            default = "needed" if option["needed"] else repr(option["default"])
            table.add_row(option["name"], escape(default), escape(option["direction"]))
        console.print(table, highlight=False)
        console.print()
    if "spec" not in row:
        return
    facts = Table(**LINES)
    facts.add_column(no_wrap=True)
    facts.add_column()
    facts.add_row("spec", escape(row["spec"]))
    facts.add_row("error feedback", "off: it is unbiased" if row["unbiased"] else "on, unless you say otherwise")
    facts.add_row("bits per element", f"{row['bits_per_element']:.3g}")
    if row["knob"]:
        levels = ", ".join(f"{level}: {bits:.3g}" for level, bits in row["bits_by_level"].items())
        facts.add_row(f"  by {row['knob']}", levels)
    console.print(facts, highlight=False)
    console.print(f"\n{SIZES}.", highlight=False)
