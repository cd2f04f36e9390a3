"""What a reproduction comes to: claims, each with what was measured and what was expected, and tables behind them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from rich import box
from rich.console import Console
from rich.table import Column, Table

from thinwire.lab.runs.record import Record

Progress = Callable[[str], None]  # called with what is being measured, in words
Plan = TypeVar("Plan", bound=Hashable)
Outcome = TypeVar("Outcome")

# Where an expectation comes from. The papers' numbers are not ours to quote from memory: what is a paper's is the
# sentence. Numbers are what the authors' published code gave when we ran it, or what we derived ourselves.
PAPER, RERUN, OURS = "paper", "authors' code, rerun", "ours"
COLOURS = {"holds": "green", "level": "yellow", "fails": "red"}
NARROW = 12  # characters: a column of such cells is one of numbers or single words
STYLE: Any = {
    "title_justify": "left", "title_style": "bold", "box": box.SIMPLE_HEAD, "show_edge": False, "pad_edge": False,
    "padding": 0,
}  # fmt: skip


@dataclass(frozen=True)
class Claim:
    """A sentence that was put to the test."""

    claim: str
    measured: str | float
    expected: str
    verdict: str  # "holds", "fails", or "level": so few runs cannot tell
    source: str  # who says what is expected: PAPER, RERUN or OURS
    reason: str | None = None  # why it would not hold, as far as what was measured tells; told where it does not

    @property
    def holds(self) -> bool:
        return self.verdict == "holds"

    @property
    def why_not(self) -> str | None:
        return None if self.holds else self.reason

    def as_json(self) -> dict[str, Any]:
        return {name: value for name, value in (asdict(self) | {"reason": self.why_not}).items() if value is not None}


def told(holds: bool) -> str:
    """The verdict on what does not vary from run to run."""
    return "holds" if holds else "fails"


@dataclass(frozen=True)
class Listing:
    """Rows of what was measured, under a title."""

    title: str
    columns: Sequence[object]
    rows: Sequence[Sequence[Any]]

    @property
    def table(self) -> Table:
        """Numbers keep their columns whole, and texts are folded into what is left of the terminal: nothing is cut."""
        table = Table(title=self.title, **STYLE)
        for number, (name, *cells) in enumerate(zip(map(str, self.columns), *self.rows, strict=True)):
            if number and max((len(str(cell)) for cell in cells), default=0) <= NARROW:
                table.add_column("\n".join(name.split()), justify="right", no_wrap=True, vertical="bottom")
            else:
                table.add_column(name, overflow="fold", vertical="bottom")
        for row in self.rows:
            table.add_row(*map(str, row))
        return table


class Stoppable:
    """Ctrl-C inside `with` ends that block and no more: what was measured until then is still told."""

    stopped = False

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> bool:
        self.stopped = self.stopped or kind is KeyboardInterrupt
        return kind is KeyboardInterrupt

    def all(self, plans: Iterable[Plan], run: Callable[[Plan], Outcome]) -> dict[Plan, Outcome]:
        """What each plan came to, in their order; of those that a stop came before, nothing."""
        found: dict[Plan, Outcome] = {}
        with self:
            for plan in () if self.stopped else plans:
                found[plan] = run(plan)
        return found


@dataclass
class Findings:
    """What the parts of a study have found so far, and what they are told: seeds, whom to tell, when to stop."""

    seeds: int
    progress: Progress
    claims: list[Claim] = field(default_factory=list)
    tables: list[Listing] = field(default_factory=list)
    stop: Stoppable = field(default_factory=Stoppable)
    records: dict[str, Record] = field(default_factory=dict)  # of the parts that compare: every run with its curve

    @property
    def reproduction(self) -> Reproduction:
        return Reproduction(self.claims, self.tables, self.stop.stopped, self.records)


Part = Callable[[Findings], None]  # adds to what was found


def carried_out(parts: Mapping[str, Part], seeds: int, progress: Progress) -> Iterable[tuple[str, Reproduction]]:
    """One part after the other, each with all that was found until then; none after a stop."""
    findings = Findings(seeds, progress)
    for name, part in parts.items():
        part(findings)
        yield name, findings.reproduction
        if findings.stop.stopped:
            return


@dataclass(frozen=True)
class Reproduction:
    """Everything that was measured of one paper."""

    claims: Sequence[Claim]
    tables: Sequence[Listing]
    stopped: bool = False  # by Ctrl-C: only what was finished is here
    records: Mapping[str, Record] = field(default_factory=dict)

    def show(self, name: str, console: Console) -> None:
        for listing in self.tables:
            console.print(listing.table)
            console.print()
        columns = (Column(each, overflow="fold") for each in ("claim", "measured", "expected", "source", "verdict"))
        table = Table(*columns, title=f"{name}: what holds", **STYLE)
        for claim in self.claims:
            verdict = f"[{COLOURS[claim.verdict]}]{claim.verdict}[/]"
            table.add_row(claim.claim, str(claim.measured), claim.expected, claim.source, verdict)
        console.print(table)
        for claim in self.claims:
            if claim.why_not:
                console.print(f"{claim.verdict}: {claim.claim}: {claim.why_not}", highlight=False, markup=False)
        if self.stopped:
            console.print("stopped: only what was finished is shown")

    def as_json(self) -> dict[str, Any]:
        return {
            "claims": [claim.as_json() for claim in self.claims],
            "tables": [asdict(listing) for listing in self.tables],
            "stopped": self.stopped,
            "records": {part: record.as_json() for part, record in self.records.items()},
        }
