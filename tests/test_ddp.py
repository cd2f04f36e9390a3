"""attach() under DistributedDataParallel on gloo ranks."""

from importlib import metadata

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from helpers.models import batch, digest, mlp
from helpers.specs import every_spec
from helpers.training import MANY_BUCKETS, assert_equal, assert_replicas_equal, loss_of, train
from helpers.world import run_world


def _every_scheme(specs, steps):
    weights = {}
    for spec in specs:
        model = DDP(mlp(), bucket_cap_mb=MANY_BUCKETS)
        with tw.attach(model, spec):
            weights[spec] = train(model, steps)
    plain = DDP(mlp(), bucket_cap_mb=MANY_BUCKETS)
    return weights, train(plain, steps)


@pytest.mark.parametrize("workers", [1, 2, 3, pytest.param(4, marks=pytest.mark.full)])
def test_replicas_stay_bit_identical_and_fp32_is_plain_ddp(workers):
    results = run_world(_every_scheme, workers, every_spec(), 20 if workers in (2, 4) else 8)
    for spec in every_spec():
        assert_replicas_equal([weights[spec] for weights, _ in results])
        assert all(torch.isfinite(tensor).all() for tensor in results[0][0][spec]), spec
    for weights, plain in results:
        assert_equal(weights["fp32"], plain)


def _learns(spec):
    model = DDP(mlp(), bucket_cap_mb=MANY_BUCKETS)
    with tw.attach(model, spec):
        train(model, 60)
        return float(loss_of(model, 999).detach())


@pytest.mark.parametrize("spec", ["bf16", "qsgd(bits=4)"])
def test_training_learns_as_uncompressed(spec):
    before = float(nn.functional.mse_loss(mlp()(batch(0, 999)[0]), batch(0, 999)[1]).detach())
    exact, compressed = (run_world(_learns, 2, each)[0] for each in ("fp32", spec))
    assert before - compressed > 0.9 * (before - exact) > 0.05


def _dtype(dtype):
    weights = []
    for spec in ("fp32", "fp16", "bf16", "qsgd"):
        for feedback in ("auto", True):
            model = DDP(mlp(dtype=dtype), bucket_cap_mb=MANY_BUCKETS)
            with tw.attach(model, spec, feedback=feedback):
                weights += train(model, 5, dtype=dtype)
    return weights


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64], ids=str)
def test_gradient_dtypes(dtype):
    results = run_world(_dtype, 2, dtype)
    assert_replicas_equal(results)
    assert all(tensor.dtype is dtype and torch.isfinite(tensor).all() for tensor in results[0])


def _convolutions(specs, order):
    """What a few steps change weights by, row by row, whatever the order in memory."""
    images = torch.randn(8, 3, 8, 8, generator=torch.Generator().manual_seed(dist.get_rank()))
    found = {}
    for spec in specs:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), nn.Conv2d(16, 8, 3), nn.Flatten(), nn.Linear(128, 4))
        started = torch.cat([parameter.detach().flatten() for parameter in net.parameters()])
        model = DDP(net.to(memory_format=order), bucket_cap_mb=MANY_BUCKETS)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with tw.attach(model, spec):
            for _ in range(5):
                optimizer.zero_grad()
                model(images.to(memory_format=order)).square().mean().backward()
                optimizer.step()
        assert net[0].weight.is_contiguous(memory_format=order)
        found[spec] = torch.cat([parameter.detach().contiguous().flatten() for parameter in net.parameters()])
        found[spec] -= started
    return found


def test_channels_last_is_another_order_and_nothing_else():
    """Every element goes where it came from. What depends on neighbours (blocks, matrices) may differ by its error."""
    specs = ["fp32", "topk(density=0.1)", "qsgd(bits=8)", "powersgd(factor_rank=4)"]
    rows, last = (run_world(_convolutions, 2, specs, order) for order in (torch.contiguous_format, torch.channels_last))
    assert_replicas_equal([list(each.values()) for each in last])
    for spec, within in zip(specs, (1e-6, 1e-6, 1e-2, 1e-1), strict=True):
        assert (last[0][spec] - rows[0][spec]).norm() < within * rows[0][spec].norm(), spec


def _both_ways(spec, dtype):
    found = []
    for lane in (False, True):
        model = DDP(mlp(dtype=dtype), bucket_cap_mb=MANY_BUCKETS)
        with tw.attach(model, spec) as wire:
            assert wire._direct is not None
            if lane:
                wire._direct = None
            weights, stats = train(model, 5, dtype=dtype), wire.stats()
        assert lane or stats["scratch_bytes"] == 0
        found.append((weights, {key: stats[key] for key in stats if not key.endswith(("seconds", "scratch_bytes"))}))
    return found


@pytest.mark.parametrize(
    ("spec", "dtype"),
    [
        ("fp32", torch.float32), ("fp32", torch.float16), ("fp32", torch.float64), ("fp16", torch.float32),
        ("fp16", torch.bfloat16), ("bf16", torch.float32), ("bf16", torch.bfloat16), ("bf16", torch.float64),
    ],
)  # fmt: skip
def test_the_shortcut_is_the_conversation_to_the_bit_and_the_byte(spec, dtype):
    for (short, booked_short), (lane, booked_lane) in run_world(_both_ways, 3, spec, dtype):
        assert_equal(short, lane)
        assert booked_short == booked_lane


def _directs():
    taken = {}
    for spec, options in [
        ("fp32", {"exempt": ("*",)}), ("fp16", {}), ("fp16", {"exempt": ()}), ("fp16", {"exempt": ("*bias",)}),
        ("fp16", {"feedback": True}), ("fp16", {"warmup_steps": 2}), ("qsgd", {}),
    ]:  # fmt: skip
        with tw.attach(DDP(mlp()), spec, **options) as wire:
            taken[spec, str(options)] = wire._direct is not None
    return taken


def test_only_what_is_merely_summed_takes_the_direct_way():
    """Not what is exempt from a cast, what is remembered, or what comes later."""
    taken = run_world(_directs, 1)[0]
    assert list(taken.values()) == [True, True, True, False, False, False, False]


def _ddp_options(options, accumulate):
    outcomes = []
    for spec in ("fp32", None, "qsgd", "fp16"):
        model = DDP(mlp(), **options)
        if spec:
            wire = tw.attach(model, spec)
        outcomes.append(train(model, 6, accumulate=accumulate))
        if spec:
            assert wire.stats()["steps"] == 6
            wire.close()
    return outcomes


@pytest.mark.parametrize("accumulate", [1, 3])
@pytest.mark.parametrize(
    "options",
    [
        {"static_graph": True, "bucket_cap_mb": MANY_BUCKETS},
        {"gradient_as_bucket_view": True, "bucket_cap_mb": MANY_BUCKETS},
        {"bucket_cap_mb": 0.001},
        {"bucket_cap_mb": 25},
    ],
    ids=lambda options: ",".join(f"{k}={v}" for k, v in options.items()),
)
def test_ddp_options_and_accumulation(options, accumulate):
    if options.get("static_graph") and accumulate > 1:
        options = options | {
            "static_graph": False,
            "find_unused_parameters": True,
        }  # PyTorch forbids the pair
    results = run_world(_ddp_options, 2, options, accumulate)
    for number in range(4):
        assert_replicas_equal([outcomes[number] for outcomes in results])
    assert_equal(results[0][0], results[0][1])
    for exact, cast in zip(results[0][0], results[0][3], strict=True):
        torch.testing.assert_close(cast, exact, rtol=1e-2, atol=1e-3)


def _memory(spec, feedback):
    """Scratch after 3 and after 10 steps, the largest bucket and the residual, in bytes."""
    model = DDP(nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 1)))
    found = []
    with tw.attach(model, spec, feedback=feedback) as wire:
        for steps in (3, 7):
            for _ in range(steps):
                model(torch.ones(4, 256)).sum().backward()
            found.append(wire.stats()["scratch_bytes"])
        largest = 4 * sum(p.numel() for p in model.parameters())  # in DDP's first step one bucket holds all
        return found, largest, wire.stats()["memory_bytes"]


@pytest.mark.parametrize(
    "spec, feedback", [("fp32", False), ("fp16", False), ("fp16", True), ("qsgd(bits=4)", False), ("tnq", True)]
)
def test_scratch_is_at_most_two_buckets_and_does_not_grow(spec, feedback):
    weights = 4 * 1024 * (256 + 1024 + 1)  # biases are exempt, but for casts
    for (early, late), largest, residual in run_world(_memory, 2, spec, feedback):
        assert early == late <= 2 * largest
        assert residual == (0 if not feedback else largest if spec == "fp16" else weights)


def _two_models():
    first, second = DDP(mlp(0), bucket_cap_mb=MANY_BUCKETS), DDP(mlp(1), bucket_cap_mb=MANY_BUCKETS)
    with tw.attach(first, "qsgd"), tw.attach(second, "fp32"):
        x, y = batch(dist.get_rank(), 0)
        for _ in range(5):
            # One backward through both models: their buckets interleave.
            (nn.functional.mse_loss(first(x), y) + nn.functional.mse_loss(second(x), y)).backward()
        together = [p.grad.clone() for p in [*first.parameters(), *second.parameters()]]
    return together


def test_two_attached_models_at_once():
    assert_replicas_equal(run_world(_two_models, 3))


def _join_uneven(spec):
    model = DDP(mlp(), bucket_cap_mb=MANY_BUCKETS)
    with tw.attach(model, spec), model.join():
        train(model, 4 + dist.get_rank())
    return digest(model)


@pytest.mark.parametrize("spec", ["fp16", "qsgd"])
def test_uneven_inputs_under_ddp_join(spec):
    assert_replicas_equal(run_world(_join_uneven, 2, spec))


def _attach_again():
    model = DDP(mlp(), bucket_cap_mb=MANY_BUCKETS)
    wire = tw.attach(model, "qsgd")
    with pytest.raises(ValueError, match="attached already"):
        tw.attach(model, "fp16")
    train(model, 2)
    wire.close()
    wire.close()
    train(model, 2)  # plain DDP again
    with tw.attach(model, "fp16"):
        return train(model, 2)


def test_close_gives_the_model_back_and_attach_takes_it_again():
    assert_replicas_equal(run_world(_attach_again, 2))


def _has_a_hook():
    model = DDP(mlp())
    model.register_comm_hook(None, default_hooks.allreduce_hook)
    with pytest.raises(ValueError, match="has a communication hook already"):
        tw.attach(model, "fp16")
    assert len(model._comm_hooks) == 1
    return train(model, 2)


def test_a_model_with_a_hook_of_its_own_is_refused_and_keeps_it():
    assert_replicas_equal(run_world(_has_a_hook, 2))


def _disagree():
    """What differs, and how: each would end in an abort or a time-out in the first backward."""
    differing = {
        "scheme": {"scheme": "qsgd(bits=3)"},
        "feedback and warm-up": {"warmup_steps": 3},
        "seed": {"seed": 1},
        "route": {"exchange": tw.AllReduce(route="gather")},
        "controller": {"controller": "fixed(level=4)"},
        "set of exempt tensors": {"exempt": ["0.weight"]},
    }
    for field, other in differing.items():
        arguments = {"scheme": "qsgd(bits=4)", "exempt": ["2.weight"]} | (other if dist.get_rank() == 1 else {})
        with pytest.raises(ValueError, match=rf"the {field} differs between ranks: ranks \[0\] .* ranks \[1\] "):
            tw.attach(DDP(mlp()), **arguments)
    if dist.get_rank() == 1:
        metadata.version = lambda name: "0.0.1"
    with pytest.raises(ValueError, match="the version of thinwire differs between ranks"):
        tw.attach(DDP(mlp()), "qsgd")
    return True


def test_ranks_that_disagree_are_named():
    assert run_world(_disagree, 2) == [True, True]


def test_attach_takes_only_models_of_ddp_and_fsdp2():
    with pytest.raises(ValueError, match=r"model or one that fully_shard.* sharded, got Linear"):
        tw.attach(nn.Linear(2, 2), "fp16")  # type: ignore[arg-type]


def _subgroup():
    everyone = dist.get_world_size()
    group = dist.new_group([0, 2]) if everyone == 3 else None
    if dist.get_rank() == 1:
        return None
    model = DDP(mlp(), process_group=group)
    with tw.attach(model, "qsgd") as wire:
        weights = train(model, 3)
        assert wire.stats()["workers"] == 2
    return weights


def test_a_model_on_part_of_the_ranks():
    zero, nothing, two = run_world(_subgroup, 3)
    assert nothing is None
    assert_equal(zero, two)
