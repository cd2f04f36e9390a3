"""PowerSGD: low-rank targets, batches without copies, bases that survive anything, many buckets on ranks."""

from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from helpers.models import batch, digest
from helpers.world import run_world
from thinwire.core.layout import Layout
from thinwire.schemes._products import gram_schmidt
from thinwire.schemes.powersgd import PowerSGD, _plan, orthonormal


def low_rank(rank, rows=60, cols=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    left = torch.randn(rows, rank, generator=generator, dtype=torch.float64)
    return left @ torch.randn(rank, cols, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("sided, steps", [("two", 1), ("one", 2)])
def test_a_target_of_its_rank_is_exact_at_once(sided, steps):
    """Two products find the span: one step of the two-sided form, two of the one-sided."""
    target = low_rank(3)
    simulation = tw.Simulation(f"powersgd(factor_rank=3, sided='{sided}')", workers=2, feedback=False)
    for _ in range(steps):
        mean = simulation.reduce([{"w": target}, {"w": 3 * target}])["w"]
    torch.testing.assert_close(mean, 2 * target)


@pytest.mark.parametrize("sided", ["two", "one"])
def test_the_warm_start_finds_the_best_approximation(sided):
    """On a fixed target the error falls step by step to that of the truncated singular values."""
    target = low_rank(10) * 0.2 + low_rank(2, seed=1)
    singular = torch.linalg.svdvals(target)
    simulation = tw.Simulation(f"powersgd(factor_rank=2, sided='{sided}')", workers=1, feedback=False)
    errors = [float((simulation.reduce([{"w": target}])["w"] - target).norm()) for _ in range(40)]
    assert errors[-1] == pytest.approx(float(singular[2:].norm()), rel=1e-6)
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(errors[1:]))
    assert errors[0] > 1.05 * errors[-1]


def by_the_book(target, q, p, sided):
    """What one worker hears step by step: the paper's form (two), that of the authors' package (one)."""
    owed, left = torch.zeros_like(target), True
    while True:
        matrix = target + owed
        if sided == "two":
            p = torch.linalg.qr(matrix @ q)[0]
            q = matrix.mT @ p
        elif left:
            q = torch.linalg.qr(q)[0]
            p = matrix @ q
        else:
            p = torch.linalg.qr(p)[0]
            q = matrix.mT @ p
        left = not left
        owed = matrix - p @ q.mT
        yield p @ q.mT


@pytest.mark.parametrize("sided", ["two", "one"])
def test_with_memory_it_says_what_the_authors_form_says(sided):
    """On a fixed target of rank 6, at rank 2: every step's answer, and so how the error of the sum falls."""
    target, scheme = low_rank(6), tw.scheme(f"powersgd(factor_rank=2, sided='{sided}')")
    simulation, first = tw.Simulation(scheme, workers=1), scheme.init("w", target, 0)
    q, p = first["q"][:2].mT, first.get("p", torch.zeros(2, 60))[:2].mT
    total, errors = torch.zeros_like(target), []
    for step, expected in zip(range(1, 31), by_the_book(target, q, p, sided), strict=False):
        mean = simulation.reduce([{"w": target}])["w"]
        torch.testing.assert_close(mean, expected, rtol=1e-8, atol=1e-8)
        total += mean
        errors.append(float((total / step - target).norm() / target.norm()))
    assert errors[-1] < 0.1 * errors[0]


@pytest.mark.parametrize("sided", ["two", "one"])
def test_feedback_sends_a_full_rank_target_in_the_end(sided):
    """With error memory the mean over steps tends to the gradient, although every message has rank 2."""
    simulation = tw.Simulation(f"powersgd(factor_rank=2, sided='{sided}')", workers=2)
    targets = [low_rank(30), low_rank(30, seed=1)]
    mean, total, errors = sum(targets) / 2, torch.zeros(60, 40, dtype=torch.float64), {}
    for step in range(1, 201):
        total += simulation.reduce([{"w": target} for target in targets])["w"]
        errors[step] = float((total / step - mean).norm() / mean.norm())
    assert errors[200] < 0.12 and errors[200] < 0.35 * errors[50]


def test_the_error_memories_are_those_of_the_paper_and_of_the_package():
    """Two-sided: what the group's answer lacks. One-sided: what the worker's own projection lacks."""
    tensors = [low_rank(20), low_rank(20, seed=1)]
    for sided in ("two", "one"):
        simulation = tw.Simulation(f"powersgd(factor_rank=2, sided='{sided}')", workers=2)
        mean = simulation.reduce([{"w": tensor} for tensor in tensors])["w"]
        for memory, tensor in zip(simulation.memories, tensors, strict=True):
            if sided == "two":
                said = mean
            else:
                q = orthonormal(tw.scheme("powersgd(factor_rank=2, sided='one')").init("w", tensor, 0)["q"][:2])
                said = tensor @ q.mT @ q
            torch.testing.assert_close(memory["w", "residual"], tensor - said)


def test_equal_shapes_at_equal_distances_are_one_batch():
    block = [("{}.w", (64, 64)), ("{}.b", (64,)), ("{}.v", (64, 128))]
    layout = Layout.of([(name.format(i), shape) for i in range(4) for name, shape in block] + [("end", (64, 64))])
    plan = _plan(layout, PowerSGD(), 4)
    assert [batch.names for batch in plan.batches] == [
        ("0.w", "1.w", "2.w", "3.w", "end"),
        ("0.v", "1.v", "2.v", "3.v"),
    ]
    flat = torch.arange(layout.numel, dtype=torch.float32)
    for each in plan.batches:
        view = each.of(flat[:])
        assert view.data_ptr() == flat.data_ptr() + 4 * each.start
        for name, matrix in zip(each.names, view, strict=True):
            segment = next(s for s in layout.segments if s.name == name)
            assert torch.equal(matrix, flat[segment.start : segment.stop].view(segment.shape))


def test_batching_does_not_change_the_answer():
    tensors = [{name: low_rank(10, seed=7 * worker + i) for i, name in enumerate("abcd")} for worker in range(2)]
    together = tw.Simulation("powersgd", workers=2).reduce(tensors)
    for name in "abcd":
        alone = tw.Simulation("powersgd", workers=2).reduce([{name: named[name]} for named in tensors])
        torch.testing.assert_close(together[name], alone[name], rtol=1e-12, atol=1e-12)


def test_only_what_gains_is_factored_and_the_rest_is_exact():
    shapes = {
        "tall": (1000, 2),
        "small": (8, 8),
        "vector": (4096,),
        "conv": (64, 32, 3, 3),
        "scalar": (),
        "none": (0, 5),
    }
    tensors = [{name: torch.randn(shape) for name, shape in shapes.items()} for _ in range(3)]
    simulation = tw.Simulation("powersgd(factor_rank=2)", workers=3, feedback=False)
    means = simulation.reduce(tensors)
    for name in shapes:
        exact = sum(named[name] for named in tensors) / 3
        assert torch.allclose(means[name], exact, atol=1e-6) is (name != "conv")
    sent = 2 * (64 + 32 * 9) + 2000 + 64 + 4096 + 1
    assert simulation.bytes_sent == pytest.approx(2 * 2 / 3 * 4 * sent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ["zero", "equal", "one zero", "tiny", "huge"])
def test_bases_are_orthonormal_whatever_the_columns(kind, dtype):
    wide = torch.randn(2, 4, 50, generator=torch.Generator().manual_seed(0), dtype=dtype)
    match kind:
        case "zero":
            wide.zero_()
        case "equal":
            wide[:] = wide[:, :1].clone()
        case "one zero":
            wide[:, 2] = 0
        case "tiny":
            wide *= 1e-30
        case "huge":
            wide *= 1e30
    for make in (orthonormal, lambda wide: gram_schmidt(wide, torch.full_like(wide, 7.0))):  # a device's way, too
        basis, kept = make(wide), wide.clone()
        torch.testing.assert_close(basis @ basis.mT, torch.eye(4, dtype=dtype).expand(2, 4, 4), rtol=0, atol=1e-6)
        assert torch.equal(basis, make(wide.clone())) and torch.equal(wide, kept)
        if kind in ("tiny", "huge"):
            scaled = wide / wide.abs().max()
            torch.testing.assert_close(scaled @ basis.mT @ basis, scaled)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_has_no_basis_on_a_device(bad):
    """Whoever looks at a basis that nobody waited for sees it; matrices beside that one are as they would be."""
    wide = torch.randn(2, 3, 50, generator=torch.Generator().manual_seed(0))
    alone = gram_schmidt(wide, torch.empty_like(wide))
    wide[1, 0, 7] = bad
    basis = gram_schmidt(wide, torch.empty_like(wide))
    assert basis[1].isnan().all() and torch.equal(basis[0], alone[0])


@pytest.mark.parametrize("sided", ["two", "one"])
def test_a_zero_gradient_does_not_cost_the_warm_start(sided):
    target = low_rank(2)
    simulation = tw.Simulation(f"powersgd(factor_rank=2, sided='{sided}')", workers=1, feedback=False)
    for tensor in (target, target, torch.zeros_like(target), torch.zeros_like(target)):
        simulation.reduce([{"w": tensor}])
    torch.testing.assert_close(simulation.reduce([{"w": target}])["w"], target)


def test_the_factors_are_shared_state():
    for sided in ("two", "one"):
        scheme = tw.scheme(f"powersgd(sided='{sided}')")
        simulation = tw.Simulation(scheme, workers=3)
        for step in range(3):
            simulation.reduce([{"w": low_rank(20, seed=10 * worker + step)} for worker in range(3)])
        first, *others = simulation.memories
        keys = [key for key, _ in first.items() if key[1] in scheme.shared_state]
        assert keys
        assert all(torch.equal(first[key], other[key]) for key in keys for other in others)


def _train(spec):
    torch.manual_seed(0)
    wide = nn.Sequential(
        nn.Linear(20, 128),
        nn.Tanh(),
        nn.Linear(128, 96),
        nn.Tanh(),
        nn.Linear(96, 96),
        nn.Tanh(),
        nn.Linear(96, 7),
    )
    model = DDP(wide, bucket_cap_mb=0.01)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    with tw.attach(model, spec) as wire:
        for step in range(40):
            optimizer.zero_grad()
            x, y = batch(dist.get_rank(), step)
            loss = nn.functional.mse_loss(model(x), y)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        stats = wire.stats()
    return digest(model), losses, stats


def test_many_buckets_on_four_gloo_ranks():
    """Where PyTorch's own hook aborts: it trains, and replicas stay equal to the bit."""
    for sided in ("two", "one"):
        results = run_world(_train, 4, f"powersgd(factor_rank=2, sided='{sided}')")
        for weights, _, _ in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(weights, results[0][0], strict=True))
        first, last = (sum(losses[step] for _, losses, _ in results) for step in (0, -1))
        assert last < 0.7 * first
        stats = results[0][2]
        assert stats["messages"] / stats["steps"] > 4  # several buckets


@pytest.mark.parametrize(
    "options, message",
    [
        ("factor_rank=0", "got 0"),
        ("sided='three'", "'one' or 'two', got 'three'"),
        ("min_gain=0.5", "got 0.5"),
    ],
)
def test_mistakes_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        tw.scheme(f"powersgd({options})")
