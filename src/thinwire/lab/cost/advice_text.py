"""What advice says: the table, the recommendation, how often to exchange, and why figures are not those asked for."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

from thinwire.lab.cost import noise
from thinwire.lab.cost.model import FLOATS
from thinwire.lab.report.verdicts import WORTH
from thinwire.lab.runs.curves import BASELINE

if TYPE_CHECKING:
    from thinwire.lab.cost.advise import Advice


def recommendation(advice: Advice) -> str:
    """What to use, and what speaks for it."""
    best = advice.best
    step = f"{best.prediction.seconds * 1e3:.0f} ms a step, most of it {best.prediction.bound}"
    if best.scheme == BASELINE:
        said = f"Use {BASELINE}: {step}; nothing bearable is predicted to be {WORTH - 1:.0%} sooner."
    else:
        limit = f", and it pays on links below {bits(best.break_even)}" if finite(best.break_even) else ""
        how = "by the step"
        if advice.survey.gradients is not None:
            how = f"to the same accuracy ({best.steps - 1:+.0%} steps for its error)"
        said = (
            f"Use {best.scheme}: {step}, {best.speedup:.1f}x as fast as {BASELINE} {how}{limit}; "
            "see whether it is: thinwire compare."
        )
    return f"{said} {_left_out(advice)}".rstrip()


def _left_out(advice: Advice) -> str:
    """Who would be sooner by the step but is not recommended, and why."""
    soon = advice.best.prediction.seconds
    names = [row.scheme for row in advice.rows if not row.recommended and row.prediction.seconds < soon]
    if not names:
        return ""
    why = f"an error above {noise.BEARABLE:g}, and only a model and a batch can tell what that costs in steps"
    if advice.survey.gradients is not None:
        why = (
            f"an error of {noise.NOTHING:g} (as much as saying nothing) or more, or above {noise.BEARABLE:g} with "
            "error feedback, which the noise rule does not cover"
        )
    return f"Shorter, but not recommended, for {why}: {', '.join(names)}."


def how_often(advice: Advice) -> str:
    """How many steps apart, and on which links every step is enough."""
    scheme, each = advice.rounds[advice.seldom]
    above = advice.every_step_from
    if above is None:
        enough = "on any link, every step is enough"
    elif math.isinf(above):
        enough = "on no link is every step enough, encoding takes too long"
    else:
        enough = f"from {bits(above)} on, every step is enough"
    if advice.seldom == 1:
        return f"How often: in every step; {enough}."
    return (
        f"How often: every {advice.seldom} steps by {scheme}, {each.seconds * 1e3:.0f} ms a step, "
        f"{each.compute_seconds / each.seconds:.0%} of it computing (thinwire.LocalSteps); {enough}. "
        f"What that costs in accuracy is not predicted: thinwire compare --every {advice.seldom}."
    )


def table(advice: Advice) -> Table:
    """A row per scheme, for a terminal of 80 columns."""
    found = advice.survey
    table = Table(
        title=f"{advice.model}: {found.parameters / 1e6:.3g} M weights, {found.workers} workers, {advice.network}",
        title_justify="left", title_style="bold", caption=_caption(advice), caption_justify="left",
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, padding=0,
    )  # fmt: skip
    table.add_column("scheme", vertical="bottom", overflow="fold")
    for name in (
        "ms\na step",
        "compute\n+encode\n+wire",
        "MB\nsent",
        "error",
        "more\nsteps",
        "vs\nfp16",
        "pays\nbelow",
    ):
        table.add_column(name, justify="right", no_wrap=True, vertical="bottom")
    for row in advice.rows:
        each = row.prediction
        phases = (each.compute_seconds, each.encode_seconds, each.wire_seconds)
        table.add_row(
            row.scheme,
            f"{each.seconds * 1e3:.0f}",
            "+".join(f"{seconds * 1e3:.0f}" for seconds in phases),
            f"{each.bytes_sent / 1e6:.3g}",
            f"{row.error:.2g}",
            f"{abs(row.steps - 1):.0%}" if advice.told(row.scheme) else "?",
            f"{row.speedup:.2f}x",
            bits(row.break_even),
            style="bold" if row is advice.best else "" if row.recommended else "dim",
        )
    return table


def rounds_table(advice: Advice) -> Table:
    """How often, and how few bits."""
    table = Table(
        title="steps between two exchanges, and the scheme to use then", title_justify="left", title_style="bold",
        box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False,
    )  # fmt: skip
    table.add_column("every", justify="right")
    table.add_column("scheme", no_wrap=True)
    for name in ("ms a step", "computing", "MB sent a step"):
        table.add_column(name, justify="right")
    for every, (scheme, each) in advice.rounds.items():
        cells = (
            f"{each.seconds * 1e3:.0f}",
            f"{each.compute_seconds / each.seconds:.0%}",
            f"{each.bytes_sent / 1e6:.3g}",
        )
        table.add_row(str(every), scheme, *cells, style="bold" if every == advice.seldom else "")
    return table


def _caption(advice: Advice) -> str:
    found = advice.survey
    reduced, local = found.link.cost(FLOATS), found.link.local
    inside = f"; {local} workers share a machine's link" if local > 1 else ""
    lines = [
        f"predicted. Link, measured: {bits(found.link.bits_per_second)} and {reduced.latency_seconds * 1e3:.2g} ms "
        f"for an all-reduce{inside};",
        f"{found.host.workers} workers on {found.host.cores} cores, {found.straggling_seconds * 1e3:.0f} ms a step "
        "waiting for the slowest",
        *_why_another_link(advice),
        *_why_another_computation(advice),
        "error: of one worker's message; more steps: its cost by the noise rule,",
        "? where that cannot tell; vs fp16, pays below: by steps and seconds",
    ]
    return "\n".join(lines)


def _why_another_link(advice: Advice) -> list[str]:
    """Why what was measured is not what was asked for."""
    asked, found = advice.given.bits_per_second, advice.survey
    if asked is None or found.link.bits_per_second > 0.9 * asked:
        return []
    fastest = min(found.link.kinds.values(), key=lambda cost: cost.seconds_per_byte)
    moving = fastest.processor_seconds_per_byte / found.host.share / fastest.seconds_per_byte
    return [
        f"Asked for {bits(asked)}, which {found.workers} workers on this machine do not get:",
        f"moving bytes takes {min(moving, 1):.0%} of the time on its {found.host.cores} cores; the rest is",
        "workers that wait for each other, headers, and what else runs here",
    ]


def _why_another_computation(advice: Advice) -> list[str]:
    asked, shown = advice.given.compute_seconds, advice.survey.predict(BASELINE).compute_seconds
    if not asked or abs(shown / asked - 1) < 0.02:
        return []
    return [
        f"Asked for {asked * 1e3:.0f} ms of computing; {BASELINE}'s {shown * 1e3:.0f} ms have in them",
        "what encoding and moving bytes take from the same cores meanwhile",
    ]


def bits(per_second: float | None) -> str:
    """A bandwidth in words."""
    if per_second is None:
        return "never"
    if math.isinf(per_second):
        return "always"
    if math.isnan(per_second):
        return ""
    for unit, size in (("Tbit/s", 1e12), ("Gbit/s", 1e9), ("Mbit/s", 1e6)):
        if per_second >= size:
            return f"{per_second / size:.3g} {unit}"
    return f"{per_second / 1e3:.3g} kbit/s"


def finite(value: float | None) -> bool:
    return value is not None and math.isfinite(value)
