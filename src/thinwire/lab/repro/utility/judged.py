"""What `repro utility` compares, and what can be claimed of the result."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from statistics import stdev

from thinwire.lab.report import intervals, table
from thinwire.lab.report.table import SchemeRow, times
from thinwire.lab.repro.claims import OURS, PAPER, Claim, told

CLOSE = 1.25  # "about the same" vNMSE: at most this many times


@dataclass(frozen=True)
class Candidate:
    """A scheme, and the bits per coordinate in what one worker sends (in the sum, where sums are wider)."""

    name: str
    bits: float
    spec: str
    quick: bool = False  # part of the small version, too

    @property
    def title(self) -> str:
        return f"{self.name}, {self.bits:g} bit{'s' * (self.bits != 1)}"


FP32, FP16 = Candidate("fp32", 32, "fp32", quick=True), Candidate("fp16", 16, "fp16", quick=True)
TOPK, TOPKC, POWERSGD, TNQ = "Top-k", "TopKC", "PowerSGD", "TNQ"
THC, FULL, SATURATING = "THC", "THC, full rotation", "THC, saturating"


@dataclass(frozen=True)
class CandidateResult:
    """What became of a candidate: its runs, and its error on gradients of the same task. A failed one is the worst."""

    candidate: Candidate
    row: SchemeRow
    vnmse: float  # of one step's mean, without error memory

    @property
    def title(self) -> str:
        return self.candidate.title

    @property
    def seconds(self) -> float:
        """To the target; infinite unless every run reached it."""
        return math.inf if self.row.mean_seconds is None else self.row.mean_seconds

    @property
    def steps_per_second(self) -> float:
        return self.row.steps_per_second or 0.0

    @property
    def encode_seconds(self) -> float:
        """Per step, as far as training waited for it."""
        return math.inf if self.row.encode_seconds is None else self.row.encode_seconds

    @property
    def bytes_per_step(self) -> float:
        return self.row.bytes_per_step or math.inf


def claims_of(results: Sequence[CandidateResult]) -> list[Claim]:
    """The claims that these results can decide."""
    return [
        *_chunk_claims(results),
        *_rotation_claims(results),
        *_saturation_claims(results),
        *_low_rank_claims(results),
        *_baseline_claims(results),
        *_proxy_claims(results),
    ]


def _pairs(
    results: Sequence[CandidateResult], first: str, second: str
) -> list[tuple[CandidateResult, CandidateResult]]:
    """Two kinds of candidates at equal bits."""
    seconds = {each.candidate.bits: each for each in results if each.candidate.name == second}
    firsts = (each for each in results if each.candidate.name == first)
    return [(each, seconds[each.candidate.bits]) for each in firsts if each.candidate.bits in seconds]


def _sooner(first: CandidateResult, second: CandidateResult, text: str) -> Claim:
    measured = f"{seconds_text(first)} and {seconds_text(second)}, in seconds"
    if math.isfinite(first.seconds) and math.isfinite(second.seconds):
        verdict = _more(_by_seed(second), _by_seed(first))
    else:
        verdict = "level" if first.seconds == second.seconds else told(first.seconds < second.seconds)
    return Claim(text, measured, "sooner", verdict, PAPER)


def _by_seed(result: CandidateResult) -> dict[int, float]:
    """Seconds to the target."""
    reached = zip(result.row.run_seconds, result.row.seconds_to_target, strict=True)
    return {seed: seconds for seed, seconds in reached if seconds is not None}


def _more(larger: dict[int, float], smaller: dict[int, float]) -> str:
    """Whether the one is larger than the other, seed by seed; of what failed there is nothing to tell."""
    seeds = [seed for seed in larger if seed in smaller]
    if not seeds:
        return "fails"
    return intervals.verdict(intervals.ratio([larger[seed] for seed in seeds], [smaller[seed] for seed in seeds]))


def seconds_text(result: CandidateResult) -> str:
    """To the target: the mean, and the deviation over the seeds."""
    reached = [seconds for seconds in result.row.seconds_to_target if seconds is not None]
    if not math.isfinite(result.seconds):
        return f"in {len(reached)} of {len(result.row.seconds_to_target)} runs"
    return f"{result.seconds:.2f}" + (f" ± {stdev(reached):.2f}" if len(reached) > 1 else "")


def _chunk_claims(results: Sequence[CandidateResult]) -> list[Claim]:
    claims = []
    for chunks, entries in _pairs(results, TOPKC, TOPK):
        at = f"{chunks.candidate.bits:g} bits: "
        claims += [
            Claim(
                at + "Top-k has less vNMSE than TopKC",
                f"{entries.vnmse:.3f} and {chunks.vnmse:.3f}",
                "less",
                told(entries.vnmse < chunks.vnmse),
                PAPER,
            ),
            Claim(
                at + "TopKC makes more steps a second than Top-k",
                f"{chunks.steps_per_second:.2f} and {entries.steps_per_second:.2f}",
                "more",
                _more(entries.row.run_seconds, chunks.row.run_seconds),
                PAPER,
            ),
            _sooner(chunks, entries, at + "TopKC reaches the target sooner than Top-k"),
        ]
    return claims


def _rotation_claims(results: Sequence[CandidateResult]) -> list[Claim]:
    claims = []
    for partial, full in _pairs(results, THC, FULL):
        claims += [
            Claim(
                "THC: the partial rotation spends less time on encoding than the full one",
                f"{1e3 * partial.encode_seconds:.1f} and {1e3 * full.encode_seconds:.1f} ms a step",
                "less",
                _more(full.row.encodes, partial.row.encodes),
                PAPER,
            ),
            Claim(
                "THC: the partial rotation has about the vNMSE of the full one",
                f"{partial.vnmse:.4f} and {full.vnmse:.4f}",
                f"at most {CLOSE:g} times",
                told(partial.vnmse <= CLOSE * full.vnmse),
                PAPER,
            ),
            _sooner(partial, full, "THC: the partial rotation reaches the target sooner than the full one"),
        ]
    return claims


def _saturation_claims(results: Sequence[CandidateResult]) -> list[Claim]:
    claims = []
    specs = {each.candidate.spec: each for each in results}
    wide, narrow = specs.get("thc(bits=4, rotate=10)"), specs.get("thc(bits=4, rotate=10, saturate=True)")
    if wide and narrow:
        claims += [
            Claim(
                "THC, 4-bit integers: saturation sends fewer bytes",
                f"{narrow.bytes_per_step / 1e6:.3f} and {wide.bytes_per_step / 1e6:.3f} MB a step",
                "two thirds, within 5%",
                told(abs(narrow.bytes_per_step / wide.bytes_per_step / (4 / 6) - 1) <= 0.05),
                OURS,
            ),
            _sooner(narrow, wide, "THC, 4-bit integers: saturation reaches the target sooner"),
        ]
    for narrow, wide in _pairs(results, SATURATING, THC):
        claims.append(
            Claim(
                f"THC, {narrow.candidate.bits:g} bits in the sum: saturating sums have less vNMSE than small integers",
                f"{narrow.vnmse:.2g} and {wide.vnmse:.2g}",
                "less",
                told(narrow.vnmse < wide.vnmse),
                OURS,
            )
        )
    return claims


def _low_rank_claims(results: Sequence[CandidateResult]) -> list[Claim]:
    ranks = [each for each in results if each.candidate.name == POWERSGD]
    if len(ranks) < 2:
        return []
    low, high = ranks[0], ranks[-1]
    return [
        Claim(
            "PowerSGD: the higher rank has less vNMSE",
            f"{high.vnmse:.3f} and {low.vnmse:.3f}",
            "less",
            told(high.vnmse < low.vnmse),
            PAPER,
        ),
        _sooner(low, high, "PowerSGD: the lower rank reaches the target sooner all the same"),
    ]


def _baseline_claims(results: Sequence[CandidateResult]) -> list[Claim]:
    compressed = compressed_of(results)

    def paying(ratios: list[float | None]) -> int:
        return sum(ratio is not None and ratio >= table.WORTH for ratio in ratios)

    by_fp32 = paying([each.row.speedup_fp32 for each in compressed])
    by_fp16 = paying([each.row.speedup_fp16 for each in compressed])
    [fp16] = (each for each in results if each.candidate == FP16)
    return [
        Claim(
            "fp32 is a weak baseline: fp16 alone reaches the target sooner",
            f"{times(fp16.row.speedup_fp32) or 'not reached'}",
            "at least 1.5x",
            told((fp16.row.speedup_fp32 or 0.0) >= 1.5),
            PAPER,
        ),
        Claim(
            "some schemes pay against fp32 but not against fp16",
            f"{by_fp32} and {by_fp16} of {len(compressed)}",
            "fewer against fp16",
            told(by_fp16 < by_fp32),
            PAPER,
        ),
    ]


def _proxy_claims(results: Sequence[CandidateResult]) -> list[Claim]:
    compressed = compressed_of(results)
    soonest = min(compressed, key=lambda each: each.seconds)
    exactest = min(compressed, key=lambda each: each.vnmse)
    fastest = max(compressed, key=lambda each: each.steps_per_second)
    return [
        Claim(
            "the scheme with the least vNMSE is not the first at the target",
            f"{exactest.title} has the least, {soonest.title} is first",
            "different",
            told(exactest is not soonest),
            PAPER,
        ),
        Claim(
            "the scheme with the most steps a second is not the first at the target",
            f"{fastest.title} has the most, {soonest.title} is first",
            "different",
            told(fastest is not soonest),
            PAPER,
        ),
        _misled(compressed, "vNMSE", lambda each: each.vnmse),
        _misled(compressed, "throughput", lambda each: -each.steps_per_second),
    ]


def _misled(compressed: Sequence[CandidateResult], proxy: str, order: Callable[[CandidateResult], float]) -> Claim:
    pairs = [(a, b) for a, b in combinations(compressed, 2) if a.seconds != b.seconds]
    wrong = sum((order(a) < order(b)) != (a.seconds < b.seconds) for a, b in pairs)
    return Claim(
        f"{proxy} puts pairs of schemes in another order than seconds to the target",
        f"{wrong} of {len(pairs)} pairs",
        "more than one in ten",
        told(wrong > 0.1 * len(pairs)),
        PAPER,
    )


def compressed_of(results: Sequence[CandidateResult]) -> list[CandidateResult]:
    return [each for each in results if each.candidate not in (FP32, FP16)]
