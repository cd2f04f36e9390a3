"""The authors' linear regression: Top-k stalls, RegTop-k follows uncompressed descent."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean

import torch
from torch import Tensor

from thinwire.exchange.simulation import Simulation
from thinwire.lab.repro.claims import OURS, RERUN, Claim, Listing, Progress, told

ROUNDS = (500, 1000, 1500)
LONG = 3000  # rounds: half of them after all has become rounding
MUS = (0.5, 1, 4, 10)


@dataclass(frozen=True)
class Regression:
    """Least squares, f_i(x) = mean of (A_i x - y_i)^2 with data of each worker's own, in float64."""

    hessians: Tensor  # A_i^T A_i / points
    rights: Tensor  # A_i^T y_i / points
    solution: Tensor

    @classmethod
    def draw(cls, seed: int, *, workers: int = 20, points: int = 500, size: int = 100) -> Regression:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        truths = math.sqrt(5) * normal(workers, 1) + normal(workers, size)
        inputs = normal(workers, points, size)
        outputs = torch.einsum("wps,ws->wp", inputs, truths) + math.sqrt(0.5) * normal(workers, points)
        hessians = inputs.mT @ inputs / points
        rights = torch.einsum("wps,wp->ws", inputs, outputs) / points
        return cls(hessians, rights, torch.linalg.solve(hessians.mean(0), rights.mean(0)))

    def distances(self, scheme: str | None, rounds: int, *, rate: float = 0.01) -> Iterator[float]:
        """log10 |x - x*|^2 after every round of gradient descent; None: uncompressed.

        Once all is rounding, about 1e-22, the regulariser is a ratio of two nothings, and x can be thrown back.
        """
        workers, size = self.rights.shape
        simulation = Simulation(scheme, workers=workers) if scheme else None
        x = torch.zeros(size, dtype=torch.float64)
        for _ in range(rounds):
            gradients = 2 * (self.hessians @ x - self.rights)
            x = x - rate * (simulation.reduce(list(gradients)) if simulation else gradients.mean(0))
            yield math.log10((x - self.solution).square().sum().item())


def regression_table(quick: bool, seeds: int, claims: list[Claim], progress: Progress) -> Listing:
    rounds = [r for r in ROUNDS if not quick or r <= 1000]
    rows = []
    for density in (0.6,) if quick else (0.4, 0.5, 0.55, 0.6, 0.9):
        for name, scheme in _schemes(density).items():
            ends = []
            for seed in range(seeds):
                progress(f"regression: density {density}, {name}, seed {seed}")
                curve = list(Regression.draw(seed).distances(scheme, rounds[-1]))
                ends.append([curve[r - 1] for r in rounds])
            rows.append([density, name, *(round(mean(at), 1) for at in zip(*ends, strict=True))])
            if density == 0.6 and name != "uncompressed":
                claims.append(_regression_claim(name, [end[1] for end in ends]))
    columns = ["density", "scheme", *(f"log10 |x - x*|^2 at {r}" for r in rounds)]
    return Listing(f"Linear regression, 20 workers, mean of {seeds} seeds", columns, rows)


def _schemes(density: float) -> dict[str, str | None]:
    return {
        "uncompressed": None,
        "Top-k": f"topk(density={density}, values='fp64')",
        "RegTop-k": f"regtopk(density={density}, mu=4, values='fp64')",
        "RegTop-k, other form": f"regtopk(density={density}, mu=4, denominator='current', values='fp64')",
    }


def _regression_claim(name: str, ends: list[float]) -> Claim:
    reaches = name == "RegTop-k"
    return Claim(
        claim=f"regression, density 0.6, round 1000, {len(ends)} seeds: {name} "
        + ("gets to the solution" if reaches else "does not get to the solution"),
        measured=f"{min(ends):.1f}..{max(ends):.1f}",
        expected="below -14" if reaches else "above -3.5",
        verdict=told(max(ends) < -14 if reaches else min(ends) > -3.5),
        source=RERUN,
    )


# -- what mu and the guard do ----------------------------------------------------------------------------------------


def option_tables(quick: bool, seeds: int, claims: list[Claim], progress: Progress) -> list[Listing]:
    """mu, and the authors' rejection of long steps, at density 0.6; nothing where it must be quick."""
    if quick:
        return []
    rows = []
    for mu in MUS:
        ends = []
        for seed in range(seeds):
            progress(f"regression: mu {mu}, seed {seed}")
            *_, end = Regression.draw(seed).distances(f"regtopk(density=0.6, mu={mu}, values='fp64')", ROUNDS[1])
            ends.append(end)
        rows.append([mu, round(max(ends), 1)])
    mus = Listing(f"Regression, density 0.6, round {ROUNDS[1]}: the worst of {seeds} seeds", ["mu", "log10"], rows)
    return [mus, _guard_table(seeds, claims, progress)]


def _guard_table(seeds: int, claims: list[Claim], progress: Progress) -> Listing:
    """The worst of the last thousand rounds: once all is rounding, x may be thrown back."""
    worst: dict[str, list[float]] = {}
    for name, guard in {"no guard": None, "guard = 100": 100}.items():
        for seed in range(seeds):
            progress(f"regression: {name}, seed {seed}")
            curve = list(Regression.draw(seed).distances(_guarded(guard), LONG))
            worst.setdefault(name, []).append(max(curve[-1000:]))
    free, held = worst.values()
    claims.append(
        Claim(
            claim=f"regression, density 0.6, rounds {LONG - 999} to {LONG}: the authors' guard keeps x where it was",
            measured=f"at worst {max(held):.1f}; without it {max(free):.1f}",
            expected="at most -14",
            verdict=told(max(held) < -14),
            source=OURS,
        )
    )
    rows = [[name, *(round(each, 1) for each in ends)] for name, ends in worst.items()]
    title = f"Regression, density 0.6: the largest log10 |x - x*|^2 of rounds {LONG - 999} to {LONG}, seed by seed"
    return Listing(title, ["", *range(seeds)], rows)


def _guarded(guard: float | None) -> str:
    return f"regtopk(density=0.6, mu=4, values='fp64', guard={guard})"
