"""A real GradScaler: what is owed follows the scale, and a step that it skips is not remembered."""

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from helpers.models import digest, mlp
from helpers.training import MANY_BUCKETS, assert_replicas_equal, loss_of
from helpers.world import run_world

OVERFLOWS = (3, 4, 9)  # steps in which one parameter of one rank is infinite


def _law(spec, known):
    """Law, scales, steps skipped, weights: over growth, backoff and skips, for every parameter.

    The exact gradients are those of a twin that never overflows, of the steps that were applied.
    """
    models = [DDP(mlp(), bucket_cap_mb=MANY_BUCKETS) for _ in range(2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.05) for model in models]
    # Growth by 3: not a power of two, so that rounding is in it.
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_factor=3.0, growth_interval=2)
    applied = [torch.zeros_like(p) for p in models[0].parameters()]
    exact = [torch.zeros_like(p) for p in models[0].parameters()]
    scales, skipped = [], []
    with tw.attach(models[0], spec) as wire:
        if known:
            wire.scale(scaler)
        for step in range(12):
            handle = None
            if step in OVERFLOWS and dist.get_rank() == 1:
                handle = models[0].module[4].bias.register_hook(lambda grad: grad * float("inf"))
            for optimizer in optimizers:
                optimizer.zero_grad()
            scaler.scale(loss_of(models[0], step)).backward()
            loss_of(models[1], step).backward()
            if handle:
                handle.remove()
            before, scale = digest(models[0]), scaler.get_scale()
            grads = [p.grad / scale for p in models[0].parameters()]
            scaler.step(optimizers[0])
            scaler.update()
            skipped.append(all(torch.equal(a, b) for a, b in zip(before, digest(models[0]), strict=True)))
            scales.append(scale)
            if not skipped[-1]:
                for total, grad in zip(applied, grads, strict=True):
                    total += grad
                for total, p in zip(exact, models[1].parameters(), strict=True):
                    total += p.grad
            with torch.no_grad():  # the twin goes where the model went: its gradients are the exact ones there
                for mine, theirs in zip(models[1].parameters(), models[0].parameters(), strict=True):
                    mine.copy_(theirs)
        laws = []
        for (name, _), came, due in zip(models[0].module.named_parameters(), applied, exact, strict=True):
            if (name, "residual") in wire.memory:
                owed = wire.memory[name, "residual"] / (wire.memory_scale or scales[-1])
                dist.all_reduce(owed)
                laws.append(float((came + owed / dist.get_world_size() - due).norm() / due.norm()))
    return max(laws), scales, skipped, digest(models[0])


SPECS = ["topk(density=0.05)", "signsgd", "powersgd", "regtopk(density=0.1, denominator='current')"]


@pytest.mark.parametrize("spec", SPECS)
def test_the_law_holds_over_growth_backoff_and_skips(spec):
    results = run_world(_law, 2, spec, True)
    for law, scales, skipped, _ in results:
        assert tuple(step for step, was in enumerate(skipped) if was) == OVERFLOWS
        assert min(scales) < scales[0] < max(scales)
        assert law < 1e-4, law
    assert_replicas_equal([weights for *_, weights in results])


def test_the_law_breaks_where_nobody_tells():
    """So the test above can fail."""
    assert run_world(_law, 2, "topk(density=0.05)", False)[0][0] > 0.05


def _refused():
    model = DDP(mlp())
    with tw.attach(model, "topk") as wire:
        for bad in (0, -1.0, "1", None):
            with pytest.raises(ValueError, match="GradScaler or a number above 0"):
                wire.scale(bad)
        wire.scale(1024)
        wire.scale(torch.amp.GradScaler("cpu", enabled=False))
        loss_of(model, 0).backward()
        return wire.memory_scale


def test_a_scale_is_a_scaler_or_a_number():
    assert run_world(_refused, 1) == [1.0]
