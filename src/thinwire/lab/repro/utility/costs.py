"""What schemes cost beside their error: one worker's arithmetic by operation, and growth with the workers."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import mean

from torch import nn

from thinwire.lab.bench import schemes as bench
from thinwire.lab.bench.breakdown import OPERATIONS
from thinwire.lab.network import links
from thinwire.lab.report import intervals
from thinwire.lab.repro.claims import PAPER, Claim, Listing, Progress, told
from thinwire.lab.repro.utility.ladders import CHUNKS, FP16, FULL, PARTIAL, PLAIN, Rung
from thinwire.lab.runs import timing
from thinwire.lab.runs.record import Run, RunPlan
from thinwire.lab.runs.run import execute

REPEATS = 5
TIMES = 3  # that each rung of the rotation is measured, to know how far such figures vary
SCALED = (FP16, PLAIN, CHUNKS)
WITHIN = 0.05  # of what the bytes should be: tensors that travel exact are not told apart


def breakdown(
    rungs: Sequence[Rung], model: nn.Module, workers: int, claims: list[Claim], progress: Progress
) -> Listing:
    """Where one worker's seconds go, in copies of the gradient; the wire takes none."""
    rows = {}
    with bench.on_threads(1):
        for rung in rungs:
            progress(f"breakdown: {rung.title}")
            rows[rung] = bench.measure(model, rung.spec, workers, 1, REPEATS)
        if FULL in rows and PARTIAL in rows:
            pairs = [[_thinking(model, rung, workers) for rung in (FULL, PARTIAL)] for _ in range(TIMES)]
            claims.append(rotation_claim([full for full, _ in pairs], [partial for _, partial in pairs]))
    used = [name for name in OPERATIONS if any(row.operations[name] >= 0.05 for row in rows.values())]
    cells = [
        [rung.name, f"{row.least_memcpys:.1f}", *(_figure(row.operations[name]) for name in used)]
        for rung, row in rows.items()
    ]
    title = "One worker's arithmetic in a step, in copies of the gradient, on one thread (all, then by operation)"
    return Listing(title, ["scheme", "all", *used], cells)


def _thinking(model: nn.Module, rung: Rung, workers: int) -> float:
    return bench.measure(model, rung.spec, workers, 1, REPEATS).least_memcpys


def rotation_claim(full: Sequence[float], partial: Sequence[float]) -> Claim:
    return Claim(
        "THC: a partial rotation takes less arithmetic than a full one",
        f"{mean(partial):.1f} and {mean(full):.1f} copies of the gradient",
        "less",
        intervals.verdict(intervals.ratio(full, partial)),
        PAPER,
    )


def _figure(value: float) -> str:
    return f"{value:.1f}" if value >= 0.05 else ""


# -- measured growth -------------------------------------------------------------------------------------------


def scaling(
    task: str, network: str, counts: Sequence[int], turns: int, claims: list[Claim], progress: Progress
) -> Listing:
    """Real steps among so many workers: bytes that one of them sends, seconds of a step; measured `turns` times."""
    found: dict[tuple[Rung, int], list[Run]] = {}
    for count in counts:
        net = links.resolved(network, count)
        with links.opened(net, count) as opened:
            for turn in range(turns):
                for rung in SCALED:
                    progress(f"scaling: {rung.title}, {count} workers, turn {turn + 1} of {turns}")
                    plan = timing.timing(RunPlan(task, rung.spec, 0, network=str(net), workers=count))
                    found.setdefault((rung, count), []).append(execute(plan, opened))
    sent = {key: _per_step(runs, "bytes_sent") for key, runs in found.items()}
    seconds = {key: _per_step(runs, "seconds") for key, runs in found.items()}
    claims += scaling_claims(sent, seconds, counts)
    rows = [
        [rung.spec, *(f"{mean(sent[rung, count]) / 1e6:.3f}" for count in counts),
         *(f"{1e3 * mean(seconds[rung, count]):.0f}" for count in counts)]
        for rung in SCALED
    ]  # fmt: skip
    columns = ["scheme", *(f"MB, {count} workers" for count in counts), *(f"ms, {count} workers" for count in counts)]
    return Listing(f"A step among more workers, measured: {task}, {network}", columns, rows)


Measured = dict[tuple[Rung, int], list[float]]


def scaling_claims(sent: Measured, seconds: Measured, counts: Sequence[int]) -> list[Claim]:
    """What is gathered grows with the workers, what is summed hardly."""
    few, many = counts[0], counts[-1]
    claims = []
    for rung, law, grown in (
        (PLAIN, "(n - 1)", (many - 1) / (few - 1)),
        (CHUNKS, "2 (n - 1) / n", (1 - 1 / many) / (1 - 1 / few)),
    ):
        measured = mean(sent[rung, many]) / mean(sent[rung, few])
        claims.append(
            Claim(
                f"{rung.ladder}, {rung.change}: bytes per worker grow as {law}, {few} to {many} workers",
                f"{measured:.2f}x",
                f"{grown:.2f}x within {WITHIN:.0%}",
                told(abs(measured / grown - 1) <= WITHIN),
                PAPER,
            )
        )
    growth = {
        rung: [b / a for a, b in zip(seconds[rung, few], seconds[rung, many], strict=True)] for rung in (PLAIN, CHUNKS)
    }
    claims.append(
        Claim(
            f"from {few} to {many} workers a step of TopKC grows less than one of Top-k",
            f"{mean(growth[CHUNKS]):.2f}x and {mean(growth[PLAIN]):.2f}x in seconds",
            "less",
            intervals.verdict(intervals.ratio(growth[PLAIN], growth[CHUNKS])),
            PAPER,
        )
    )
    return claims


def _per_step(runs: Sequence[Run], name: str) -> list[float]:
    failed = next((run.reason for run in runs if run.reason is not None), None)
    if failed is not None:
        raise RuntimeError(f"scaling: {runs[0].plan.name} among {runs[0].plan.workers}: {failed}")
    return [run.totals[name] / run.totals["steps"] for run in runs]
