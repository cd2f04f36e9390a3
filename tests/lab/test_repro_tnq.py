"""The reproduction's parts: its claims on Laplace data hold, its regression is what it says, its verdicts follow."""

import math

import pytest
import torch

from thinwire.lab.repro import tnq
from thinwire.lab.repro.claims import Stoppable, carried_out
from thinwire.lab.repro.tnq import errors, training
from thinwire.lab.repro.tnq.problem import FEATURES, OUTPUTS, WORKERS, Curve, Problem

TNQ = "tnq(bits=2, group='tensor', scale='mean')"


def test_the_claims_on_laplace_data_hold():
    claims = []
    table = errors.laplace_table(claims, lambda text: None)
    assert len(claims) == 15
    assert [claim.claim for claim in claims if not claim.holds] == []
    assert all(len(row) == len(table.columns) for row in table.rows)


@pytest.mark.parametrize("tails", ["normal", "laplace"])
def test_the_regressions_gradient_is_right_on_average(tails):
    """Workers' gradients against autograd of the error, which is known exactly."""
    problem = Problem.draw(tails, 3)
    weights = 2 * problem.truth.flip(0)
    generator = torch.Generator().manual_seed(0)
    mean = torch.stack([problem._gradients(weights, generator).mean(0) for _ in range(150)]).mean(0)
    leaf = weights.clone().requires_grad_()
    (problem.scale[:, None] * (leaf - problem.truth)).square().sum().backward()
    assert (mean - leaf.grad).norm() / leaf.grad.norm() < 0.25
    share = (mean * leaf.grad).sum() / leaf.grad.square().sum()
    assert share == pytest.approx(1, abs=0.03)


def test_laplace_features_have_laplaces_tail():
    """Fourth moment over the square of the second: 6, where a normal distribution has 3."""
    x = Problem.draw("laplace", 0).scale * torch.randn(4000, FEATURES, generator=torch.Generator().manual_seed(0))
    assert x.pow(4).mean() / x.square().mean() ** 2 == pytest.approx(6, rel=0.25)


def test_training_goes_down_and_noise_limits_it():
    problem = Problem.draw("normal", 0)
    exact, small, noisy = (
        problem.train(spec, rate, 60)
        for spec, rate in (("fp32", 0.04), ("fp32", 0.02), ("qsgd(bits=2, block=65536)", 0.04))
    )
    assert exact.errors[0] == pytest.approx(1, rel=0.05)
    assert exact.floor < 0.02 and noisy.floor > 2 * exact.floor and not noisy.diverged
    assert exact.bits == 32 * FEATURES * OUTPUTS and len(exact.errors) == 61 == len(small.errors)
    assert problem.train("qsgd(bits=2, block=65536, range='norm')", 0.04, 60).floor == math.inf


def test_the_bound_is_the_sum_of_its_three_terms():
    problem = Problem.draw("normal", 0)
    curve = problem.train(TNQ, 0.05, 1)
    gradients = problem._gradients(torch.zeros(FEATURES, OUTPUTS), torch.Generator().manual_seed(1))
    noise = (gradients + 2 * problem.truth).square().sum((1, 2)).mean().item()
    c, k, s = gradients.abs().mean().item(), 1.5 * math.sqrt(6), 3
    quantiser = 27 * FEATURES * OUTPUTS * c**2 / (WORKERS * (s + k) ** 2)
    descent = 2 * (curve.errors[0] - curve.errors[1]) / 0.05
    assert curve.bound == pytest.approx(descent + 2 * 0.05 * noise / WORKERS + quantiser, rel=1e-3)
    assert math.isnan(problem.train("fp32", 0.05, 1).bound)


def test_the_rates_are_chosen_by_the_end_and_by_divergence():
    def curve(*errors):
        return Curve(list(errors), [1.0], 1.0)

    row = ("normal", "x")
    first = {
        (row, 0.01, 0): curve(1, 0.5, 0.4, 0.3),
        (row, 0.02, 0): curve(1, 0.3, 0.2, 0.2),
        (row, 0.04, 0): curve(1, 0.9, 0.9, 0.9),
        (row, 0.08, 0): curve(1, 50.0),
    }
    assert training._best_rate(first, row) == 0.02 and training._largest_rate(first, row) == 0.04
    lost = {(row, 0.08, 0): curve(1, 50.0)}
    assert training._best_rate(lost, row) is None and training._largest_rate(lost, row) is None


@pytest.mark.parametrize(
    "ours, theirs, verdict",
    [
        ([1.0, 1.01, 0.99], [2.0, 2.1, 1.9], "holds"),
        ([1.0, 1.3, 0.8], [1.0, 1.1, 1.0], "level"),
        ([2.0, 2.1, 1.9], [1.0, 1.01, 0.99], "fails"),
        ([1.0, 1.0], [1.0, math.inf], "holds"),
        ([1.0, math.inf], [1.0, 1.0], "fails"),
    ],
)
def test_best_is_decided_by_the_seeds_agreement(ours, theirs, verdict):
    assert training.below("it", ours, theirs, "paper").verdict == verdict


ROWS = 1 + 2 * len(training.SPECS)


@pytest.mark.parametrize("stop, seeds, parts", [(0, 2, 2), (ROWS * len(training.RATES) + ROWS + 3, 1, 1)])
def test_the_tables_hold_every_scheme_and_what_was_there_when_somebody_stopped_it(stop, seeds, parts, monkeypatch):
    """Stopped in the second seed of the first part, nothing more is begun."""
    runs = []

    def train(problem, spec, rate, steps):
        runs.append(spec)
        if len(runs) == stop:
            raise KeyboardInterrupt
        return Curve([1.0, 0.5, 0.3], [1.0, 1.0], 1e6, 4.0 if spec.startswith("tnq") else math.nan)

    monkeypatch.setattr(Problem, "train", train)
    claims, stoppable = [], Stoppable()
    *floors, spent = training.tables(False, 2, claims, lambda text: None, stoppable)
    assert stoppable.stopped == bool(stop) and (not stop or len(runs) == stop)
    assert [len(table.rows) for table in floors] == [ROWS] * parts
    assert f"{seeds} seeds" in floors[0].title and len(spent.rows) == parts * ROWS
    assert all(len(row) == len(table.columns) for table in [*floors, spent] for row in table.rows)
    assert sum("far from the floor" in claim.claim for claim in claims) == (0 if stop else 2)
    assert sum("stays under" in claim.claim for claim in claims) == 2 * parts


@pytest.mark.full
def test_every_claim_is_made():
    *_, (_, said) = carried_out(tnq.parts(True, None), 2, lambda text: None)
    assert {table.title[:10] for table in said.tables} == {"Squared er", "Regression", "Error agai"}
    failed = [claim for claim in said.claims if claim.verdict == "fails" and claim.reason is None]
    assert failed == []
