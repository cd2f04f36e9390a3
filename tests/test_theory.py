"""The closed forms against numbers, and against a search that does not know them."""

import itertools
import math

import numpy as np
import pytest
import torch

from thinwire.core import theory


@pytest.mark.parametrize(
    ("bits", "levels"),
    [
        (2, [0.487, 1.791]),
        (3, [0.295, 0.990, 1.896, 3.199]),
        (4, [0.165, 0.525, 0.935, 1.409, 1.973, 2.668, 3.574, 4.877]),
    ],
)
def test_laplace_levels(bits, levels):
    got = theory.laplace_levels(bits)
    assert got[len(levels) :] == pytest.approx(levels, abs=1e-3)
    assert np.array_equal(got, -got[::-1])
    assert got[-1] == theory.laplace_threshold(bits)
    assert theory.laplace_levels(bits, scale=5.0) == pytest.approx(5.0 * got)


@pytest.mark.parametrize(
    ("bits", "tq", "tnq", "bound"), [(2, 0.548, 0.522, 0.606), (3, 0.221, 0.187, 0.237), (4, 0.083, 0.057, 0.077)]
)
def test_expected_errors(bits, tq, tnq, bound):
    a = theory.uniform_threshold(bits)
    assert theory.laplace_error(np.linspace(-a, a, 1 << bits)) == pytest.approx(tq, rel=0.01)
    assert theory.laplace_error(theory.laplace_levels(bits)) == pytest.approx(tnq, rel=0.01)
    assert theory.laplace_bound(bits) == pytest.approx(bound, rel=0.01)
    assert theory.laplace_bound(bits, scale=3.0, numel=10, workers=5) == pytest.approx(18 * theory.laplace_bound(bits))


def test_the_exact_error_is_what_numbers_say():
    levels = theory.laplace_levels(3)
    x = torch.from_numpy(np.random.default_rng(0).laplace(size=400_000))
    table = torch.from_numpy(levels.copy())
    clipped = x.clamp(table[0], table[-1])
    below = (torch.searchsorted(table, clipped) - 1).clamp(0, 6)
    variance = (clipped - table[below]) * (table[below + 1] - clipped)
    assert theory.laplace_error(levels) == pytest.approx(float((variance + (x - clipped) ** 2).mean()), rel=0.02)


@pytest.mark.parametrize("bits", [1, 2, 3, 4, 6, 8])
def test_the_bound_holds_for_the_exact_error(bits):
    assert theory.laplace_error(theory.laplace_levels(bits)) <= theory.laplace_bound(bits)
    for constant in ("worst", "average"):
        a = theory.laplace_threshold(bits, constant=constant)
        assert theory.laplace_error(theory.laplace_levels(bits, threshold=a)) <= theory.laplace_bound(bits)


def worst_case(levels):
    """What the bound bounds: step^2/4 in each interval and what truncation loses. Given: the positive levels."""
    p = levels
    edges = torch.cat([torch.zeros(1, dtype=p.dtype), p])
    mass = torch.exp(-edges[:-1]) - torch.exp(-edges[1:])  # both sides together
    gaps = torch.cat([2 * p[:1], torch.diff(p)])
    return (mass * gaps**2).sum() / 4 + 2 * torch.exp(-p[-1])


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("start", ["even", "random"])
def test_no_search_beats_the_bound(bits, start):
    """Every threshold and every level set there is, by gradient descent on the gaps; the closed form stays below."""
    half = 1 << (bits - 1)
    generator = torch.Generator().manual_seed(bits)
    gaps = (
        torch.full((half,), 0.5, dtype=torch.float64)
        if start == "even"
        else torch.rand(half, generator=generator).double() + 0.1
    )
    logs = gaps.log().requires_grad_()
    search = torch.optim.LBFGS([logs], max_iter=300, line_search_fn="strong_wolfe", tolerance_grad=1e-12)

    def closure():
        search.zero_grad()
        value = worst_case(logs.exp().cumsum(0))
        value.backward()
        return value

    search.step(closure)
    found = float(worst_case(logs.detach().exp().cumsum(0)))
    assert found >= theory.laplace_bound(bits)
    # The search worked: it is no worse than the closed form's own levels, up to what intervals make of a density.
    assert found <= float(worst_case(torch.from_numpy(theory.laplace_levels(bits)[half:].copy()))) + 1e-9


def test_lambert():
    for x in (0.0, 1e-6, 1.0, 225.0, 65025.0):
        w = theory.lambert_w(x)
        assert w * math.exp(w) == pytest.approx(x, rel=1e-12)


@pytest.mark.parametrize(("workers", "bits", "kappa", "error"), [
    (4, 4, 1.85, 0.064), (8, 4, 1.62, 0.105), (32, 4, 1.15, 0.25),
    (4, 8, 3.45, 0.0006), (8, 8, 3.28, 0.0010), (32, 8, 2.93, 0.0034),
])  # fmt: skip
def test_saturation(workers, bits, kappa, error):
    assert theory.saturation_kappa(bits, workers) == pytest.approx(kappa, abs=0.006)
    assert theory.saturation_error(kappa, bits, workers) == pytest.approx(error, rel=0.07)


def test_gaussian_centroids():
    known = {1: [0.798], 2: [0.453, 1.510], 3: [0.245, 0.756, 1.344, 2.152]}
    for bits, centroids in known.items():
        assert theory.gaussian_centroids(bits)[len(centroids) :] == pytest.approx(centroids, abs=1e-3)


def student(count, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_t(3, count)).float()


def test_tail_fit():
    exact = torch.from_numpy(np.random.default_rng(0).pareto(2.5, 50_000) + 1).float()  # t = 3.5
    law = theory.PowerLaw.fit(exact, 4, "nonuniform")
    assert law is not None and law.exponent == pytest.approx(3.5, abs=0.15)
    assert law.knee == pytest.approx(float(exact.quantile(1 - 2 * law.tail)), rel=0.01)
    gaussian = torch.from_numpy(np.random.default_rng(0).normal(size=50_000)).float().abs()
    for none in (gaussian[:100], torch.zeros(10_000), torch.ones(10_000), torch.full((10_000,), math.nan)):
        assert theory.PowerLaw.fit(none, 4, "nonuniform") is None
    assert theory.PowerLaw.fit(gaussian, 2, "nonuniform") is None


@pytest.mark.parametrize("shape", theory.SHAPES)
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_power_law_levels(bits, shape):
    """Sorted, symmetric, over the threshold; and no other threshold has a lower predicted error."""
    law = theory.PowerLaw(3.8, knee=2.0)
    levels = law.levels(bits, shape)
    a = law.threshold(bits, shape)
    assert np.all(np.diff(levels) > 0) and levels == pytest.approx(-levels[::-1]) and levels[-1] == pytest.approx(a)
    for other in np.geomspace(1.0, 200.0, 50):
        x = np.asarray(other)
        assert 4 * float(law.rounding(bits, shape, x).min() + law.truncation(x)) >= law.bound(bits, shape) * (1 - 1e-6)


def test_non_uniform_power_law_levels_have_the_lowest_bound():
    law = theory.PowerLaw(3.8)
    for bits in (3, 4, 6):
        uniform, biscaled, nonuniform = (law.bound(bits, shape) for shape in ("uniform", "biscaled", "nonuniform"))
        assert nonuniform < biscaled < uniform


def test_allocation_is_the_best_there_is():
    """Against every split of the same spending."""
    scales, numels, budget = [1.0, 0.05, 8.0], [100, 300, 50], 3.2
    chosen = theory.allocate(budget, scales, numels)

    def bound(bits):
        return sum(theory.laplace_bound(b, scale=c, numel=d) for b, c, d in zip(bits, scales, numels, strict=True))

    def spent(bits):
        return sum(b * d for b, d in zip(bits, numels, strict=True))

    assert spent(chosen) <= budget * sum(numels)
    assert chosen[2] > chosen[0] > chosen[1]
    splits = [bits for bits in itertools.product(range(1, 9), repeat=3) if spent(bits) <= spent(chosen)]
    assert bound(chosen) == pytest.approx(min(map(bound, splits)))


def test_allocation_edges():
    assert theory.allocate(4, [1.0, 1.0], [10, 10]) == (4, 4)
    assert theory.allocate(1, [1.0, 5.0], [10, 10]) == (1, 1)
    assert theory.allocate(8, [1.0, 0.0], [10, 10]) == (8, 8)
    assert theory.allocate(3, [math.nan, math.inf], [10, 10]) == theory.allocate(3, [0.0, 0.0], [10, 10])
    with pytest.raises(ValueError, match=r"1\.\.8 bits per coordinate, got 0\.5"):
        theory.allocate(0.5, [1.0], [10])
    with pytest.raises(ValueError, match=r"integer in 1\.\.16, got 0"):
        theory.laplace_threshold(0)
