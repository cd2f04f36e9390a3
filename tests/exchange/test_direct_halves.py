"""The direct way's own sum of halves, on gloo ranks: each bucket in two shots, whatever its size."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from helpers.models import mlp
from helpers.training import MANY_BUCKETS, assert_replicas_equal, train
from helpers.world import run_world
from thinwire.exchange import direct
from thinwire.exchange.collectives import AllReduced
from thinwire.exchange.transport import Transport
from thinwire.schemes import parse

SIZES = [1, 2, 5, 4096, 10_001, 70_003]


def every_bucket_in_two_shots():
    direct.LEAST, direct.OURS = 1, {torch.float16, torch.bfloat16}


def bucket_of(worker, number, dtype):
    generator = torch.Generator().manual_seed(100 * worker + number)
    return torch.randn(SIZES[number], generator=generator, dtype=torch.float64).mul_(100).to(dtype)


def _means(spec, dtype, steps):
    every_bucket_in_two_shots()
    group, back = dist.new_group(), dist.new_group()
    way = direct.Direct(group, parse(spec), Transport(), back)
    rank, told = dist.get_rank(), []
    for _ in range(steps):
        buckets = [bucket_of(rank, number, dtype) for number in range(len(SIZES))]
        for number, bucket in enumerate(buckets):
            way.mean(bucket, last=number == len(SIZES) - 1, done=told.append)
    totals = way._transport.ledger.totals()
    return buckets, told, {name: totals[name] for name in ("bytes_sent", "bytes_dense")}


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize(("spec", "dtype"), [("fp16", torch.float32), ("bf16", torch.float32), ("fp16", torch.float64)])
def test_halves_are_added_in_float32_in_rank_order(workers, spec, dtype):
    half = parse(spec).dtype
    results = run_world(_means, workers, spec, dtype, 2)
    for number, size in enumerate(SIZES):
        total = torch.zeros(size)
        for worker in range(workers):
            total += (bucket_of(worker, number, dtype) * (1.0 / workers)).to(half).float()
        ours = size // workers * workers  # the rest is the group's own sum, rounded as often as it likes
        for buckets, _, _ in results:
            assert torch.equal(buckets[number][:ours], total[:ours].to(half).to(dtype))
            assert torch.allclose(buckets[number].float(), total, rtol=0.02, atol=1.0)
            assert torch.equal(buckets[number], results[0][0][number])
    for _, told, counted in results:
        assert told == [None] * 2 * len(SIZES)
        group = type("Group", (), {"size": lambda self: workers})()
        summed = [AllReduced(torch.empty(size, dtype=half), group).amounts()["bytes_sent"] for size in SIZES]
        assert counted["bytes_sent"] == 2 * sum(summed), "as many bytes as an all-reduce"


def _trained(spec, poisoned):
    every_bucket_in_two_shots()
    model = DDP(mlp(), bucket_cap_mb=MANY_BUCKETS)
    with tw.attach(model, spec) as wire:
        weights = train(model, 8)
        assert wire._direct is not None and any(kind.part for kind in wire._direct._kinds.values())
    if not poisoned:
        return weights
    with tw.attach(model, spec):
        x = torch.full((4, next(model.parameters()).shape[1]), math.nan if dist.get_rank() == 1 else 1.0)
        model.zero_grad()
        model(x).sum().backward()
    return [parameter.grad.clone() for parameter in model.parameters()]


@pytest.mark.parametrize("spec", ["fp16", "bf16"])
def test_replicas_stay_bit_identical(spec):
    assert_replicas_equal(run_world(_trained, 3, spec, False))


def test_what_is_not_finite_reaches_everybody():
    for grads in run_world(_trained, 2, "fp16", True):
        assert any(not torch.isfinite(grad).all() for grad in grads)


def _dies(_):
    every_bucket_in_two_shots()
    model = DDP(mlp(), bucket_cap_mb=MANY_BUCKETS)
    wire = tw.attach(model, "fp16")
    train(model, 2)
    wire.close()
    wire.close()
    return train(model, 2)


def test_a_wire_that_was_closed_gives_the_model_back():
    assert_replicas_equal(run_world(_dies, 2, None))


class _Noted(Transport):
    """Notes what is started, in order."""

    def __init__(self):
        super().__init__()
        self.names = []

    def launch(self, collective):
        self.names.append(type(collective).__name__)
        return super().launch(collective)


def _in_order():
    every_bucket_in_two_shots()
    transport, told = _Noted(), []
    way = direct.Direct(dist.new_group(), parse("fp16"), transport, dist.new_group())
    for number in range(5):
        way.mean(torch.ones(64), last=number == 4, done=told.append)
    return transport.names


def test_buckets_are_on_their_way_back_before_the_last_has_come():
    there, back = "AllToAll", "AllGathered"
    for names in run_world(_in_order, 2):
        assert names == [there, there, there, back, there, back, there, back, back, back]
