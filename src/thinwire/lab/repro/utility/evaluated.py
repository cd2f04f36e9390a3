"""What can be claimed of the runs: who is at the target sooner, what pays, who leads early, what proxies predict."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from statistics import mean, stdev

from thinwire.lab.report import intervals
from thinwire.lab.report.table import WORTH, SchemeRow, times
from thinwire.lab.repro.claims import OURS, PAPER, Claim, told
from thinwire.lab.repro.utility import reasons
from thinwire.lab.repro.utility.ladders import (
    BASELINES,
    BF16,
    CHANGES,
    CHUNKS,
    CODED,
    FP16,
    FP32,
    FULL,
    PARTIAL,
    RANKS,
    SHUFFLED,
    TABLE,
    Rung,
)
from thinwire.lab.runs.curves import rolling
from thinwire.lab.runs.record import Record, Run

EARLY = 0.25  # of fp16's seconds: who is ahead then leads early
CLOSE = 1.25  # "about the same" vNMSE: at most this many times


@dataclass(frozen=True)
class RungResult:
    """What became of a rung on one link. One that failed, or never gets to the target, is the last."""

    rung: Rung
    row: SchemeRow
    vnmse: tuple[float, float] | None  # of one step's mean, without error feedback: early and late; None: not measured
    runs: tuple[Run, ...]

    @property
    def seconds(self) -> float:
        """To the target; infinite unless every run reached it."""
        return math.inf if self.row.mean_seconds is None else self.row.mean_seconds

    @property
    def steps_per_second(self) -> float:
        return self.row.steps_per_second or 0.0

    @property
    def late_error(self) -> float:
        assert self.vnmse is not None
        return self.vnmse[1]


def where(record: Record) -> str:
    """The task and the link, for every claim of them."""
    plan = record.runs[0].plan
    return f"{plan.task.partition('(')[0]}, {_named(plan.network)}"


def _named(network: str) -> str:
    return "loopback" if network == "none" else network


def claims_of(results: Sequence[RungResult], record: Record) -> list[Claim]:
    """Those that these results can decide."""
    at, by_rung = where(record), {each.rung: each for each in results}
    claims = [
        _sooner(by_rung[change.before], by_rung[change.after], f"{at}: {change.text}", change.source)
        for change in CHANGES
        if change.before in by_rung and change.after in by_rung
    ]
    if compressed_of(results) and FP16 in by_rung:
        claims += _baseline_claims(results, by_rung, at)
        claims.append(_early_claim(results, by_rung[FP16], at))
        claims += _proxy_claims(compressed_of(results), at)
    return claims


def compressed_of(results: Sequence[RungResult]) -> list[RungResult]:
    return [each for each in results if each.rung.ladder != BASELINES]


def _sooner(before: RungResult, after: RungResult, text: str, source: str) -> Claim:
    if math.isfinite(before.seconds) and math.isfinite(after.seconds):
        first, second = _by_seed(before), _by_seed(after)
        both = [seed for seed in first if seed in second]
        verdict = intervals.verdict(intervals.ratio([first[seed] for seed in both], [second[seed] for seed in both]))
    else:
        verdict = "level" if before.seconds == after.seconds else told(after.seconds < before.seconds)
    return Claim(
        text, f"{seconds_text(after)} against {seconds_text(before)}", "sooner", verdict, source,
        reasons.of_two(before.row, after.row),
    )  # fmt: skip


def _by_seed(result: RungResult) -> dict[int, float]:
    """Seconds to the target."""
    found = ((run.plan.seed, run.seconds_to_target) for run in result.runs if run.reason is None)
    return {seed: seconds for seed, seconds in found if seconds is not None}


def seconds_text(result: RungResult) -> str:
    """To the target: the mean, and the deviation over the seeds."""
    reached = [seconds for seconds in result.row.seconds_to_target if seconds is not None]
    if not math.isfinite(result.seconds):
        return f"reached in {len(reached)} of {len(result.runs)} runs"
    return f"{result.seconds:.2f}" + (f" ±{stdev(reached):.2f}" if len(reached) > 1 else "") + " s"


# -- baselines -------------------------------------------------------------------------------------------------


def paying(results: Sequence[RungResult], against: str) -> list[str]:
    """The compressed rungs that are at the target sooner than fp16 or fp32, by a margin that pays."""
    ratios = {each.rung.spec: getattr(each.row, f"speedup_{against}") for each in compressed_of(results)}
    return [spec for spec, ratio in ratios.items() if ratio is not None and ratio >= WORTH]


def _baseline_claims(results: Sequence[RungResult], by_rung: dict[Rung, RungResult], at: str) -> list[Claim]:
    by_fp32, by_fp16 = len(paying(results, "fp32")), len(paying(results, "fp16"))
    fp16, count = by_rung[FP16], len(compressed_of(results))
    claims = [
        Claim(
            f"{at}: fp32 is a weak baseline, fp16 alone is at the target sooner",
            times(fp16.row.speedup_fp32) or "not reached",
            f"at least {WORTH:g}x",
            _worth(fp16, by_rung.get(FP32)),
            PAPER,
            reasons.of_wires({f"under {rung.spec}": by_rung[rung].row for rung in (FP32, FP16) if rung in by_rung}),
        ),
        Claim(
            f"{at}: some schemes pay against fp32 but not against fp16",
            f"{by_fp32} and {by_fp16} of {count}",
            "fewer against fp16",
            told(by_fp16 < by_fp32),
            PAPER,
            reasons.of_paying([each.row for each in results if each.rung.spec in paying(results, "fp16")], fp16.row),
        ),
    ]
    if BF16 in by_rung:
        claims.append(_sooner(fp16, by_rung[BF16], f"{at}: computing in 16 bits, too, is a stronger baseline", OURS))
    return claims


def _worth(ours: RungResult, theirs: RungResult | None) -> str:
    """Whether ours is at the target sooner, by what pays, seed by seed."""
    if theirs is None or not math.isfinite(ours.seconds) or not math.isfinite(theirs.seconds):
        return told((ours.row.speedup_fp32 or 0.0) >= WORTH)
    first, second = _by_seed(theirs), _by_seed(ours)
    both = [seed for seed in first if seed in second]
    gain = intervals.ratio([first[seed] for seed in both], [second[seed] for seed in both])
    return intervals.verdict(gain, -math.log(WORTH))


def between_links(by_link: dict[str, list[RungResult]], task: str) -> list[Claim]:
    """From the slowest link to the fastest fewer schemes pay."""
    counts = {link: len(paying(results, "fp16")) for link, results in by_link.items()}
    if len(counts) < 2:
        return []
    falling = list(counts.values())
    return [
        Claim(
            f"{task.partition('(')[0]}: the faster the link, the fewer schemes pay against fp16",
            ", ".join(f"{count} on {_named(link)}" for link, count in counts.items()),
            "fewer and fewer",
            told(falling == sorted(falling, reverse=True) and falling[-1] < falling[0]),
            PAPER,
            reasons.of_wires(
                {
                    f"on {_named(link)}": each.row
                    for link, results in by_link.items()
                    for each in results
                    if each.rung == FP16
                }
            ),
        )
    ]


# -- leads early, ends lower -------------------------------------------------------------------------------------


def leads(run: Run, baseline: Run) -> bool:
    """Whether, EARLY, a run's rolling mean is better than what the baseline has after as many seconds."""
    at = EARLY * baseline.curve[-1].seconds
    ours, theirs = _held_at(run, at), _held_at(baseline, at)
    if ours is None or theirs is None:
        return ours is not None
    return ours > theirs if run.rising else ours < theirs


def _held_at(run: Run, seconds: float) -> float | None:
    """The rolling mean after so many seconds; None: too early for one."""
    means = rolling([point.score for point in run.curve])
    points = run.curve[len(run.curve) - len(means) :]
    held = [value for value, point in zip(means, points, strict=True) if point.seconds <= seconds]
    return held[-1] if held else None


def ends_lower(result: RungResult) -> bool:
    return result.row.difference is not None and intervals.verdict(result.row.difference) == "fails"


def _early_claim(results: Sequence[RungResult], fp16: RungResult, at: str) -> Claim:
    """The paper's warning against short runs."""
    baselines = {run.plan.seed: run for run in fp16.runs if run.reason is None}
    leading = [
        each
        for each in compressed_of(results)
        if all(
            run.reason is None and run.plan.seed in baselines and leads(run, baselines[run.plan.seed])
            for run in each.runs
        )
    ]
    lower = [each.rung.spec for each in leading if ends_lower(each)]
    untold = bool(leading) and len(fp16.runs) < 2  # one run does not tell how another would end
    return Claim(
        f"{at}: some schemes lead early and end lower than fp16",
        f"{len(lower)} of {len(leading)} that lead" + (f": {', '.join(lower)}" if lower else ""),
        "at least one",
        "level" if untold else told(bool(lower)),
        PAPER,
        reasons.of_leading([each.row for each in leading]),
    )


# -- proxies -----------------------------------------------------------------------------------------------------


def error_claims(part: str, errors: dict[str, tuple[float, float]]) -> list[Claim]:
    """What each change does to vNMSE on this part's gradients, early and late; these do not vary from run to run."""

    def less(
        first: Rung, second: Rung, text: str, source: str, factor: float = 1.0, reason: str | None = None
    ) -> list[Claim]:
        if first.spec not in errors or second.spec not in errors:
            return []
        ours, theirs = errors[first.spec], errors[second.spec]
        measured = f"{ours[0]:.3g} and {theirs[0]:.3g} early, {ours[1]:.3g} and {theirs[1]:.3g} late"
        holds = all(a <= factor * b if factor > 1 else a < b for a, b in zip(ours, theirs, strict=True))
        return [
            Claim(
                f"vNMSE, {part}: {text}",
                measured,
                "less" if factor == 1 else f"{factor:g}x at most",
                told(holds),
                source,
                reason,
            )
        ]

    return [
        *less(CODED, CHUNKS, "Top-k with coded places errs less than TopKC", PAPER),
        *less(CHUNKS, SHUFFLED, "TopKC errs less than with elements shuffled: it lives on locality", OURS),
        *less(
            PARTIAL, FULL, "a partial rotation errs about as much as a full one", PAPER, CLOSE, reasons.ROTATED_TOGETHER
        ),
        *less(TABLE, PARTIAL, "THC's look-up table errs less than even levels", OURS),
        *(
            claim
            for low, high in pairwise(RANKS)
            for claim in less(high, low, f"PowerSGD, {high.change} errs less than {low.change}", PAPER)
        ),
    ]


def _proxy_claims(compressed: Sequence[RungResult], at: str) -> list[Claim]:
    claims = [_misled(compressed, at, "throughput", lambda each: -each.steps_per_second)]
    if all(each.vnmse is not None for each in compressed):
        claims.append(_misled(compressed, at, "vNMSE", lambda each: each.late_error))
    return claims


def _misled(compressed: Sequence[RungResult], at: str, proxy: str, order: Callable[[RungResult], float]) -> Claim:
    pairs = [(a, b) for a, b in combinations(compressed, 2) if a.seconds != b.seconds]
    wrong = sum((order(a) < order(b)) != (a.seconds < b.seconds) for a, b in pairs)
    return Claim(
        f"{at}: {proxy} puts pairs of schemes in another order than seconds to the target",
        f"{wrong} of {len(pairs)} pairs",
        "more than one in ten",
        told(wrong > 0.1 * len(pairs)),
        PAPER,
    )


def plateau(runs: Sequence[Run]) -> float:
    """How much the rolling mean still moves over the last tenth of the runs, as a share of its end; the mean."""
    moved = []
    for run in runs:
        means = rolling([point.score for point in run.curve])
        moved.append(abs(means[-1] - means[-1 - max(1, len(means) // 10)]) / abs(means[-1]) if len(means) > 1 else 1.0)
    return mean(moved) if moved else math.nan
