"""The authors' toy: two workers, two weights, one element sent."""

from __future__ import annotations

import torch
from torch.nn import functional

from thinwire.exchange.simulation import Simulation
from thinwire.lab.repro.claims import RERUN, Claim, Listing, told

TOY_STEPS = (0, 1, 2, 5, 10, 20, 50, 100, 150)
TOY_LOSSES = {
    "uncompressed": (0.3133, 0.2537, 0.2119, 0.1399, 0.0880, 0.0499, 0.0215, 0.0110, 0.0074),
    "RegTop-k": (0.3133, 0.3133, 0.2043, 0.1506, 0.0837, 0.0479, 0.0209, 0.0108, 0.0073),
}


def toy_losses(scheme: str) -> list[float]:
    """Logistic loss of two workers with x = (+-100, 1), y = 1, from w = (0, 1): the first elements cancel."""
    x = torch.tensor([[100.0, 1.0], [-100.0, 1.0]], dtype=torch.float64)
    w = torch.tensor([0.0, 1.0], dtype=torch.float64)
    simulation = Simulation(scheme, workers=2)
    losses = []
    for _ in range(max(TOY_STEPS) + 1):
        margins = x @ w
        losses.append(functional.softplus(-margins).mean().item())
        w = w - 0.9 * simulation.reduce(list(-torch.sigmoid(-margins)[:, None] * x))
    return [losses[step] for step in TOY_STEPS]


def toy_table(claims: list[Claim]) -> Listing:
    schemes = {
        "uncompressed": "topk(density=1, values='fp64')",
        "RegTop-k": "regtopk(density=0.5, mu=1, values='fp64')",
        "Top-k": "topk(density=0.5, values='fp64')",
    }
    losses = {name: toy_losses(scheme) for name, scheme in schemes.items()}
    for name, expected in TOY_LOSSES.items():
        error = max(abs(a - b) for a, b in zip(losses[name], expected, strict=True))
        claims.append(
            Claim(
                claim=f"toy: the losses of {name} are those of our rerun of the authors' script",
                measured=f"largest difference {error:.5f}",
                expected="below 0.0005",
                verdict=told(error < 0.0005),
                source=RERUN,
            )
        )
    stuck = losses["Top-k"][: TOY_STEPS.index(100) + 1]
    claims.append(
        Claim(
            claim="toy: Top-1 stays where it began up to step 100",
            measured=f"{min(stuck):.4f}..{max(stuck):.4f}",
            expected="0.3133",
            verdict=told(all(abs(loss - 0.3133) < 0.0005 for loss in stuck)),
            source=RERUN,
        )
    )
    rows = [[step, *(round(losses[name][i], 4) for name in schemes)] for i, step in enumerate(TOY_STEPS)]
    return Listing("Toy: loss by step", ["step", *schemes], rows)
