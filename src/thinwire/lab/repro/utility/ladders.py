"""What is compared: three ladders, every rung of which changes one thing about a scheme, and the baselines."""

from __future__ import annotations

from dataclasses import dataclass

from thinwire.lab.repro.claims import OURS, PAPER

TOPK, THC, POWERSGD, BASELINES = "Top-k", "THC", "PowerSGD", "baselines"


@dataclass(frozen=True)
class Rung:
    """A scheme, and what it changes about those above it."""

    ladder: str
    change: str
    spec: str
    compute: str = "fp32"
    quick: bool = False  # part of the small version, too

    @property
    def title(self) -> str:
        return f"{self.ladder}: {self.change}"

    @property
    def name(self) -> str:
        """As `RunPlan.name` has it."""
        return self.spec if self.compute == "fp32" else f"{self.spec}, computed in {self.compute}"


FP32 = Rung(BASELINES, "32 bits", "fp32", quick=True)
FP16 = Rung(BASELINES, "16 bits", "fp16", quick=True)
BF16 = Rung(BASELINES, "16 bits, computed in 16 bits", "fp16", compute="bf16")

# Half a bit per coordinate in what one worker sends: Top-k with 48 bits per element, with about 23, TopKC.
PLAIN = Rung(TOPK, "values of 16 bits, places of 32", "topk(density=0.0104, places='plain')", quick=True)
CODED = Rung(TOPK, "places coded in few bits", "topk(density=0.0215)")
CHUNKS = Rung(TOPK, "chunks chosen together: TopKC", "topkc(density=0.0234, chunk=128)", quick=True)
SHUFFLED = Rung(TOPK, "TopKC, elements shuffled first", "topkc(density=0.0234, chunk=128, shuffle=True)")

# 4-bit integers of each worker. The partial rotation has ten stages, as in THC's authors' code; our default twelve.
FULL = Rung(THC, "full width, full rotation", "thc(bits=4, rotate=30)")
PARTIAL = Rung(THC, "partial rotation", "thc(bits=4, rotate=10)", quick=True)
SATURATING = Rung(THC, "saturating sums, full rotation", "thc(bits=4, rotate=30, saturate=True)")
BOTH = Rung(THC, "partial rotation and saturating sums", "thc(bits=4, rotate=10, saturate=True)", quick=True)
TABLE = Rung(THC, "partial rotation, look-up table", "thc(bits=4, rotate=10, levels='table')")

RANKS = tuple(
    Rung(POWERSGD, f"rank {rank}", f"powersgd(factor_rank={rank})", quick=rank == 4) for rank in (1, 4, 16, 64)
)
ONE_SIDED = Rung(POWERSGD, "rank 4, one-sided", "powersgd(factor_rank=4, sided='one')")

RUNGS = (
    FP32, FP16, BF16, PLAIN, CODED, CHUNKS, SHUFFLED, FULL, PARTIAL, SATURATING, BOTH, TABLE, *RANKS, ONE_SIDED,
)  # fmt: skip


@dataclass(frozen=True)
class Change:
    """Two rungs, the second of which is said to be at the target sooner; `source`: who says so."""

    before: Rung
    after: Rung
    text: str
    source: str


CHANGES = (
    Change(PLAIN, CODED, "coding the places brings Top-k to the target sooner", OURS),
    Change(PLAIN, CHUNKS, "TopKC is at the target before Top-k with 16 + 32 bits", PAPER),
    Change(CODED, CHUNKS, "TopKC is at the target before Top-k with coded places", OURS),
    Change(SHUFFLED, CHUNKS, "TopKC lives on locality: it is at the target before TopKC with elements shuffled", OURS),
    Change(FULL, PARTIAL, "THC: a partial rotation is at the target before a full one", PAPER),
    Change(FULL, SATURATING, "THC: saturating sums are at the target before wide ones", PAPER),
    Change(FULL, BOTH, "THC: both together are at the target before neither", PAPER),
    Change(RANKS[2], RANKS[1], "PowerSGD: rank 4 is at the target before rank 16", PAPER),
    Change(RANKS[3], RANKS[2], "PowerSGD: rank 16 is at the target before rank 64", PAPER),
    Change(RANKS[1], ONE_SIDED, "PowerSGD: one-sided is at the target before two-sided", OURS),
)
