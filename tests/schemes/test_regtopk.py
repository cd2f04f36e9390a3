"""RegTop-k: the authors' regression and toy, by hand and by the reproduction, and the guards."""

import pytest
import torch

import thinwire as tw
from thinwire.lab.repro.regtopk.regression import Regression
from thinwire.lab.repro.regtopk.toy import TOY_LOSSES, toy_losses


def by_the_book(gradients, k, mu, denominator, weights=None, resent=None):
    """The authors' equations, literally: lists of what was kept, for one bucket and all workers."""
    workers, size = gradients[0].shape
    w = torch.full((workers, 1), 1 / workers, dtype=torch.float64) if weights is None else weights[:, None]
    residual = torch.zeros(workers, size, dtype=torch.float64)
    sent = torch.zeros(workers, size, dtype=torch.bool)
    had, last = torch.zeros_like(residual), torch.zeros(size, dtype=torch.float64)
    for g in gradients:
        a = residual + g
        below = w * (had if denominator == "previous" else a)
        distortion = torch.where(sent, (last - w * had) / below, torch.inf)
        score = a.abs() * torch.tanh((1 + distortion).abs() / mu)
        places = score.topk(k).indices
        before, sent = sent, torch.zeros_like(sent).scatter(1, places, True)
        if resent is not None:
            resent += (before & sent).sum(1)
        message = torch.where(sent, a, 0)
        residual, had, last = a - message, a, (w * message).sum(0)
        yield last


@pytest.mark.parametrize("denominator", ["previous", "current"])
def test_it_is_the_authors_algorithm(denominator):
    generator = torch.Generator().manual_seed(0)
    gradients = [torch.randn(5, 40, generator=generator, dtype=torch.float64) for _ in range(30)]
    spec = f"regtopk(density=0.2, mu=2, denominator='{denominator}', values='fp64')"
    simulation, plain = (
        tw.Simulation(spec, workers=5),
        tw.Simulation("topk(density=0.2, values='fp64')", workers=5),
    )
    differs = False
    for g, expected in zip(gradients, by_the_book(gradients, 8, 2, denominator), strict=True):
        mean = simulation.reduce(list(g))
        torch.testing.assert_close(mean, expected, rtol=1e-12, atol=1e-12)
        differs |= not torch.allclose(mean, plain.reduce(list(g)))
    assert differs


@pytest.mark.parametrize("denominator", ["previous", "current"])
def test_workers_may_count_for_more_than_others(denominator):
    """And what is told of entries that were sent twice running is what the authors' masks say."""
    generator = torch.Generator().manual_seed(1)
    gradients = [torch.randn(3, 40, generator=generator, dtype=torch.float64) for _ in range(20)]
    spec = f"regtopk(density=0.3, mu=2, denominator='{denominator}', values='fp64', weights=(1, 2.5, 0.5))"
    simulation, resent = tw.Simulation(spec, workers=3), torch.zeros(3, dtype=torch.int64)
    weights = torch.tensor([1, 2.5, 0.5], dtype=torch.float64) / 4
    for g, expected in zip(gradients, by_the_book(gradients, 12, 2, denominator, weights, resent), strict=True):
        torch.testing.assert_close(simulation.reduce(list(g)), expected, rtol=1e-12, atol=1e-12)
    told = [simulation.scheme.report(memory)["resent"] for memory in simulation.memories]
    assert told == pytest.approx((resent / (20 * 12)).tolist()) and min(told) > 0


@pytest.mark.parametrize("values", ["fp64", "qsgd(bits=4)"])
def test_weighted_workers_owe_what_they_did_not_say(values):
    """Sum of G + weighted residuals = weighted sum of gradients, whatever the values' rounding."""
    generator = torch.Generator().manual_seed(2)
    simulation = tw.Simulation(f"regtopk(density=0.2, values={values!r}, weights=(3, 1))", workers=2)
    dtype = torch.float64 if values == "fp64" else torch.float32
    came, exact = torch.zeros(50, dtype=dtype), torch.zeros(50, dtype=dtype)
    for _ in range(10):
        g = torch.randn(2, 50, generator=generator, dtype=dtype)
        came += simulation.reduce(list(g))
        exact += 0.75 * g[0] + 0.25 * g[1]
    owed = [memory["tensor", "residual"] for memory in simulation.memories]
    torch.testing.assert_close(came + 0.75 * owed[0] + 0.25 * owed[1], exact, rtol=1e-4, atol=1e-5)


def test_a_step_too_long_is_rejected_and_all_else_goes_on():
    """The authors' rule, literally: not taken if its squared length is 100 times the last accepted one's, or more."""
    generator = torch.Generator().manual_seed(3)
    lengths = (1.0, 0.5, 4.0, 30.0, 30.0, 0.01, 2.0, 0.05, 0.01)
    gradients = [length * torch.randn(4, 30, generator=generator, dtype=torch.float64) for length in lengths]
    options = "density=0.3, mu=2, values='fp64'"
    guarded, free = tw.Simulation(f"regtopk({options}, guard=100)", workers=4), by_the_book(gradients, 9, 2, "previous")
    threshold, rejected = torch.inf, []
    for g, unguarded in zip(gradients, free, strict=True):
        length = unguarded.square().sum()
        rejected.append(bool(length >= threshold))
        threshold = threshold if rejected[-1] else 100 * length
        expected = torch.zeros_like(unguarded) if rejected[-1] else unguarded
        torch.testing.assert_close(guarded.reduce(list(g)), expected, rtol=1e-12, atol=1e-12)
    assert 0 < sum(rejected) < len(rejected) and not rejected[-1]


def test_a_guard_lets_non_finite_means_through_and_learns_nothing_of_them():
    simulation = tw.Simulation("regtopk(density=0.5, guard=100)", workers=2)
    simulation.reduce([torch.tensor([1.0, 2.0])] * 2)
    assert not torch.isfinite(simulation.reduce([torch.tensor([1.0, torch.nan])] * 2)).all()
    assert simulation.memories[0]["tensor", "accepted"] == 4
    assert simulation.reduce([torch.tensor([0.0, 1e3])] * 2).tolist() == [0, 0]


def test_weights_must_be_those_of_all_workers():
    with pytest.raises(ValueError, match="weights of 2 workers were given to 3"):
        tw.Simulation("regtopk(weights=(1, 2))", workers=3).reduce([torch.ones(5)] * 3)


@pytest.mark.parametrize("mu", [1e-30, 1.0])
def test_the_first_round_and_a_vanishing_mu_are_topk(mu):
    torch.manual_seed(0)  # once in 500 times workers cancel each other exactly, and tanh(0 / mu) is 0 for any mu
    regularised, plain = (
        tw.Simulation(f"regtopk(density=0.1, mu={mu})", workers=3),
        tw.Simulation("topk(density=0.1)", workers=3),
    )
    for _ in range(1 if mu == 1 else 5):
        tensors = list(torch.randn(3, 100))
        assert torch.equal(regularised.reduce(tensors), plain.reduce(tensors))


def test_what_others_cancel_waits():
    """Two workers cancel each other's largest entry: in the second round both send the other one."""
    tensors = [torch.tensor([100.0, 1.0]), torch.tensor([-100.0, 1.0])]
    simulation = tw.Simulation("regtopk(density=0.5, mu=1)", workers=2, feedback=False)
    assert simulation.reduce(tensors).tolist() == [0, 0]
    assert simulation.reduce(tensors).tolist() == [0, 1]


@pytest.mark.parametrize("denominator", ["previous", "current"])
def test_zero_over_zero_counts_as_not_cancelled(denominator):
    """An all-zero round sends zeros; their ratio is 0/0 and must not hold them back, or worse, become NaN."""
    spec = f"regtopk(density=0.5, mu=1, denominator='{denominator}')"
    simulation = tw.Simulation(spec, workers=2)
    simulation.reduce([torch.zeros(4)] * 2)
    assert simulation.reduce([torch.tensor([3.0, 4.0, 1.0, 2.0])] * 2).tolist() == [3, 4, 0, 0]
    assert all(torch.isfinite(t).all() for memory in simulation.memories for _, t in memory.items())


def test_it_costs_what_topk_costs():
    simulations = [tw.Simulation(f"{name}(density=0.01)", workers=4) for name in ("topk", "regtopk")]
    for simulation in simulations:
        for _ in range(3):
            simulation.reduce([torch.randn(5000) for _ in range(4)])
    assert simulations[0].bytes_sent == simulations[1].bytes_sent


@pytest.mark.parametrize(
    "name, spec",
    [
        ("uncompressed", "topk(density=1, values='fp64')"),
        ("RegTop-k", "regtopk(density=0.5, mu=1, values='fp64')"),
    ],
)
def test_toy_losses_are_those_of_the_authors_script_run_again(name, spec):
    assert toy_losses(spec) == pytest.approx(TOY_LOSSES[name], abs=5e-4)


def test_toy_top_1_does_not_move():
    assert toy_losses("topk(density=0.5, values='fp64')")[:8] == pytest.approx([0.3133] * 8, abs=5e-4)


def test_regression_small():
    """The regression, smaller: RegTop-k follows uncompressed descent, Top-k and the other form stall."""
    problem = Regression.draw(0, workers=6, points=300, size=30)

    def end(scheme):
        return list(problem.distances(scheme, 60, rate=0.1))[-1]

    exact = end(None)
    assert exact < -8
    assert end("regtopk(density=0.6, mu=4, values='fp64')") == pytest.approx(exact, abs=0.5)
    assert end("topk(density=0.6, values='fp64')") > -2
    assert end("regtopk(density=0.6, mu=4, denominator='current', values='fp64')") > -2


@pytest.mark.full
@pytest.mark.parametrize("seed", range(5))
def test_regression(seed):
    problem = Regression.draw(seed)
    *_, regularised = problem.distances("regtopk(density=0.6, mu=4, values='fp64')", 1000)
    *_, plain = problem.distances("topk(density=0.6, values='fp64')", 1000)
    assert regularised < -14 and plain > -3.5


@pytest.mark.parametrize(
    "spec, message",
    [
        ("regtopk(mu=0)", "mu must be above 0"),
        ("regtopk(denominator='next')", "got 'next'"),
        ("regtopk(weights=(1, 0))", "got .1, 0."),
        ("regtopk(weights=3)", "got 3"),
        ("regtopk(guard=1)", "above 1"),
    ],
)
def test_mistakes_are_named(spec, message):
    with pytest.raises(ValueError, match=message):
        tw.scheme(spec)
