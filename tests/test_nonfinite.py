"""One Inf or NaN on one rank: the optimizer sees it on all ranks, and nothing remembers it."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from helpers.models import digest, mlp
from helpers.specs import every_spec, sum_rounding, telescopes
from helpers.training import MANY_BUCKETS, assert_replicas_equal, loss_of
from helpers.world import run_world


def gradients(model, step, poison=None):
    """This step's gradients as the optimizer sees them; `poison` is put into rank 1's first weight's gradient."""
    model.zero_grad()
    handle = None
    if poison is not None and dist.get_rank() == 1:
        handle = model.module[0].weight.register_hook(lambda grad: grad.index_fill(1, torch.tensor([3]), poison))
    loss_of(model, step).backward()
    if handle:
        handle.remove()
    return [p.grad.clone() for p in model.parameters()]


def _poisoned(specs, feedback, poison):
    """For each spec: poisoned gradients, residuals around them, three clean steps, and the memory after those."""
    outcome = {}
    for spec in specs:
        model = DDP(mlp(), bucket_cap_mb=MANY_BUCKETS)
        with tw.attach(model, spec, feedback=feedback) as wire:
            gradients(model, 0)
            before = residual_of(wire)
            seen = gradients(model, 1, poison)
            after = residual_of(wire)
            clean = [gradients(model, step) for step in (2, 3, 4)]
            memory = [tensor.clone() for _, tensor in wire.memory.items()]
            outcome[spec] = (seen, before, after, clean, memory, residual_of(wire))
    exact = DDP(mlp(), bucket_cap_mb=MANY_BUCKETS)
    return outcome, [gradients(exact, step) for step in (2, 3, 4)]


def residual_of(wire):
    key = ("0.weight", "residual")
    return wire.memory[key].clone() if key in wire.memory else None


@pytest.mark.parametrize("feedback, poison", [
    ("auto", math.inf), ("auto", math.nan), (True, -math.inf), (True, math.nan),
    *(pytest.param(*both, marks=pytest.mark.full) for both in (("auto", -math.inf), (True, math.inf))),
])  # fmt: skip
def test_nonfinite_gradients_are_seen_and_forgotten(feedback, poison):
    results = run_world(_poisoned, 2, every_spec(), feedback, poison)
    for spec in every_spec():
        outcomes = [outcome[spec] for outcome, _ in results]
        for seen, before, after, clean, memory, _ in outcomes:
            assert not torch.isfinite(seen[0]).all(), spec
            assert before is None or torch.equal(before, after), spec
            assert all(torch.isfinite(grad).all() for step in clean for grad in step), spec
            assert all(torch.isfinite(tensor).all() for tensor in memory), spec
        for step in range(3):
            assert_replicas_equal([outcome[3][step] for outcome in outcomes])
        if feedback is True and telescopes(spec):
            # Correct, not just finite: what came and what is still owed make up the exact gradients.
            came = sum(outcomes[0][3][step][0] for step in range(3))
            owed = sum(outcome[5] - outcome[2] for outcome in outcomes) / 2
            exact = sum(results[0][1][step][0] for step in range(3))
            rounding = sum_rounding(spec, exact=1e-5)
            assert (came + owed - exact).abs().max() <= rounding * exact.abs().max(), spec


def _grad_scaler(spec):
    model = DDP(mlp(), bucket_cap_mb=MANY_BUCKETS)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
    scales = []
    with tw.attach(model, spec):
        for step in range(6):
            handle = None
            if step == 2 and dist.get_rank() == 1:
                handle = model.module[2].weight.register_hook(lambda grad: grad * float("inf"))
            optimizer.zero_grad()
            scaler.scale(loss_of(model, step)).backward()
            if handle:
                handle.remove()
            before = digest(model)
            scaler.step(optimizer)
            scaler.update()
            skipped = all(torch.equal(a, b) for a, b in zip(before, digest(model), strict=True))
            scales.append((scaler.get_scale(), skipped))
    return scales, digest(model)


@pytest.mark.parametrize("spec", ["fp16", "qsgd"])
def test_grad_scaler_skips_the_step_on_every_rank(spec):
    results = run_world(_grad_scaler, 2, spec)
    for scales, weights in results:
        assert [skipped for _, skipped in scales] == [False, False, True, False, False, False]
        assert scales[2][0] == scales[1][0] / 2
        assert all(torch.isfinite(w).all() for w in weights)
    assert_replicas_equal([weights for _, weights in results])


def _pytorch_powersgd():
    model = DDP(mlp(), bucket_cap_mb=25)  # one bucket: with more, the hook aborts on gloo
    state = powerSGD_hook.PowerSGDState(None, start_powerSGD_iter=2, min_compression_rate=0.1)
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    for step in range(3):
        gradients(model, step)
    gradients(model, 3, float("inf"))
    return [gradients(model, step)[0] for step in range(4, 7)]


def test_pytorchs_own_powersgd_stays_poisoned():
    """The comparison that the rule above exists for; if PyTorch mends this, the docs may say so."""
    for clean in run_world(_pytorch_powersgd, 2):
        assert not torch.isfinite(clean[-1]).all()
