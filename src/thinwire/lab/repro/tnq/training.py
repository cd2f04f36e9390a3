"""Training where noise limits it: quantisers at their best constant rates, one scale a tensor, no error feedback."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean

from thinwire.lab.report import intervals
from thinwire.lab.report.intervals import Interval
from thinwire.lab.repro.claims import OURS, PAPER, Claim, Listing, Progress, Stoppable, told
from thinwire.lab.repro.tnq.problem import BATCH, FEATURES, OUTPUTS, WORKERS, Curve, Problem

RATES = (0.01, 0.02, 0.04, 0.08, 0.16)
SLOW = 0.004  # so far from the floor that speed limits training, not noise
STEPS, QUICK_STEPS = 160, 80
TUNING_SEED = 1000  # none of those that count
MARKS = (1, 2, 4, 8)  # Mbit that a worker has sent
UNCOMPRESSED, DEFAULTS = "uncompressed", "TNQ, thinwire's defaults"
SPECS = {
    "QSGD, 2-norm": "qsgd(bits={}, block=1073741824, range='norm')",
    "QSGD": "qsgd(bits={}, block=1073741824)",
    "NUQSGD": "nuqsgd(bits={}, group='tensor')",
    "NUQSGD, largest": "nuqsgd(bits={}, group='tensor', range='max')",
    "NQ": "nq(bits={}, group='tensor')",
    "TQ": "tq(bits={}, group='tensor', scale='mean')",
    "TNQ": "tnq(bits={}, group='tensor', scale='mean')",
    DEFAULTS: "tnq(bits={})",
}
RIVALS = {"QSGD": PAPER, "NQ": PAPER, "TQ": PAPER, "QSGD, 2-norm": PAPER, "NUQSGD": OURS, "NUQSGD, largest": OURS}
EVEN = "TQ truncates more, which is a smaller rate in disguise: slower, and at equal rates a lower end"

Row = tuple[str, str]  # features' tails, spec
Plan = tuple[Row, float, int]  # row, rate, seed


def tables(quick: bool, seeds: int, claims: list[Claim], progress: Progress, stop: Stoppable) -> list[Listing]:
    """`quick`: 2 bits, half the steps."""
    steps, widths = (QUICK_STEPS, (2,)) if quick else (STEPS, (2, 3))
    tuned: list[Listing] = []
    spent: list[Sequence[object]] = []
    for tails in ("normal", "laplace"):
        specs = {UNCOMPRESSED: "fp32"} | {_title(n, b): SPECS[n].format(b) for b in widths for n in SPECS}
        tries = [((tails, spec), rate, TUNING_SEED) for spec in specs.values() for rate in RATES]
        first = _trained(tries, steps, progress, stop)
        best = {title: _best_rate(first, (tails, spec)) for title, spec in specs.items()}
        plans = {title: ((tails, specs[title]), rate or RATES[0]) for title, rate in best.items()}
        runs = _trained([(*plan, seed) for seed in range(seeds) for plan in plans.values()], steps, progress, stop)
        whole = range(len(runs) // len(plans))  # the seeds that all rows have, where somebody stopped it
        if len(first) < len(tries) or not whole:
            break
        curves = {title: [runs[(*plan, seed)] for seed in whole] for title, plan in plans.items()}
        tuned.append(
            _floor_table(tails, steps, best, curves, {t: _largest_rate(first, p[0]) for t, p in plans.items()})
        )
        spent += [[tails, *row] for row in _spent(curves)]
        for bits in widths:
            claims += _floor_claims(f"{tails} features, {bits} bits", bits, best, curves)
        claims += _bound_claims(tails, widths, best, curves)
    claims += _slow_claims(widths, seeds, steps, progress, stop)
    columns = ["features", "scheme", *(f"{mark} Mbit" for mark in MARKS)]
    return [*tuned, Listing("Error against bits that a worker has sent, rates as above", columns, spent)]


def _title(name: str, bits: int) -> str:
    return f"{name}, {bits} bits"


def _trained(plans: list[Plan], steps: int, progress: Progress, stop: Stoppable) -> dict[Plan, Curve]:
    def run(plan: Plan) -> Curve:
        (tails, spec), rate, seed = plan
        progress(f"regression, {tails} features: {spec}, rate {rate}, seed {seed}")
        return Problem.draw(tails, seed).train(spec, rate, steps)

    return stop.all(plans, run)


def _best_rate(first: dict[Plan, Curve], row: Row) -> float | None:
    """The rate with the least error at the end; None where all diverge."""
    floors = {rate: curve.floor for (own, rate, _), curve in first.items() if own == row}
    return min(floors, key=lambda rate: floors[rate]) if min(floors.values(), default=math.inf) < math.inf else None


def _largest_rate(first: dict[Plan, Curve], row: Row) -> float | None:
    """The largest at which training ends nearer than it began."""
    stable = [rate for (own, rate, _), curve in first.items() if own == row and curve.floor < curve.errors[0]]
    return max(stable, default=None)


def _floor_table(
    tails: str,
    steps: int,
    best: dict[str, float | None],
    curves: dict[str, list[Curve]],
    largest: dict[str, float | None],
) -> Listing:
    rows = []
    for title, found in curves.items():
        floors = [curve.floor for curve in found]
        error = intervals.interval(floors).text(".5f") if max(floors) < math.inf else "diverges"
        squares, bound = fmean(fmean(c.squares) for c in found), fmean(c.bound for c in found)
        rows.append([
            title, best[title] or "none", largest[title] or "none", error,
            "" if error == "diverges" else f"{squares:.3f}", "" if math.isnan(bound) else f"{bound:.3f}",
        ])  # fmt: skip
    columns = ["scheme", "best rate", "largest stable rate", "error, last quarter", "mean |grad|^2", "bound"]
    title = (
        f"Regression, {tails} features, {FEATURES} x {OUTPUTS}, {WORKERS} workers x {BATCH}, {steps} steps, one scale, "
        f"no error feedback, {len(next(iter(curves.values())))} seeds; rates by another seed"
    )
    return Listing(title, columns, rows)


def _spent(curves: dict[str, list[Curve]]) -> list[list[object]]:
    """Rows of the error once so many bits were sent; "" where the run was over before."""
    rows: list[list[object]] = []
    for title, found in curves.items():
        cells: list[object] = []
        for mark in MARKS:
            step = int(mark * 1e6 / found[0].bits)
            over = any(step >= len(curve.errors) for curve in found)
            cells.append("" if over else f"{fmean(curve.errors[step] for curve in found):.4f}")
        rows.append([title, *cells])
    return rows


# -- claims ----------------------------------------------------------------------------------------------------------


def _floor_claims(
    setting: str, bits: int, best: dict[str, float | None], curves: dict[str, list[Curve]]
) -> list[Claim]:
    own = [curve.floor for curve in curves[_title("TNQ", bits)]]
    claims = []
    for name, source in RIVALS.items():
        theirs = [curve.floor for curve in curves[_title(name, bits)]]
        reason = EVEN if name == "TQ" else None
        claims.append(below(f"{setting}: TNQ ends below {name}, each at its best rate", own, theirs, source, reason))
    rates = {name: best[_title(name, bits)] or 0.0 for name in ("QSGD", "NQ", "TNQ")}
    claims.append(
        Claim(
            claim=f"{setting}: TNQ's best rate is no smaller than QSGD's and NQ's",
            measured=", ".join(f"{name} {rate or 'none'}" for name, rate in rates.items()),
            expected="less noise bears a larger rate",
            verdict=told(rates["TNQ"] >= max(rates.values())),
            source=OURS,
        )
    )
    return claims


def below(text: str, ours: Sequence[float], theirs: Sequence[float], source: str, reason: str | None = None) -> Claim:
    """Whether ours is the smaller, by the ratio seed by seed."""
    if max(theirs) == math.inf:
        measured, verdict = "the other diverges at every rate", told(max(ours) < math.inf)
    elif max(ours) == math.inf:
        measured, verdict = "it diverges", "fails"
    else:
        ratio = intervals.ratio(ours, theirs)
        ends = [math.exp(end) for end in (ratio.mean, ratio.low, ratio.high)]
        measured = f"{ends[0]:.3f} of it, 95% interval {ends[1]:.3f} to {ends[2]:.3f}"
        verdict = intervals.verdict(Interval(-ratio.mean, ratio.half))
    return Claim(text, measured, "below 1", verdict, source, reason)


def _bound_claims(
    tails: str, widths: Sequence[int], best: dict[str, float | None], curves: dict[str, list[Curve]]
) -> list[Claim]:
    claims = []
    for bits in widths:
        found = curves[_title("TNQ", bits)]
        shares = [fmean(curve.squares) / curve.bound for curve in found]
        claims.append(
            Claim(
                claim=f"{tails} features, {bits} bits, rate {best[_title('TNQ', bits)]}: the mean of |grad|^2 stays "
                "under distributed SGD's terms and TNQ's error bound",
                measured=f"{max(shares):.3f} of it at most",
                expected="below 1",
                verdict=told(max(shares) < 1),
                source=PAPER,
            )
        )
    return claims


def _slow_claims(
    widths: Sequence[int], seeds: int, steps: int, progress: Progress, stop: Stoppable
) -> list[Claim]:  # fmt: skip
    """The other half: what truncation cuts from every gradient makes steps shorter."""
    claims = []
    for bits in widths:
        specs = {name: SPECS[name].format(bits) for name in ("TNQ", "NQ")}
        plans = {name: [(("normal", spec), SLOW, seed) for seed in range(seeds)] for name, spec in specs.items()}
        runs = _trained([plan for pair in zip(*plans.values(), strict=True) for plan in pair], steps, progress, stop)
        ends = {name: [runs[plan].errors[-1] for plan in own if plan in runs] for name, own in plans.items()}
        least = min(map(len, ends.values()))
        if least:
            where = f"normal features, {bits} bits, rate {SLOW}, far from the floor"
            text = f"{where}: NQ, which truncates nothing, is ahead of TNQ"
            claims.append(below(text, ends["NQ"][:least], ends["TNQ"][:least], OURS))
    return claims
