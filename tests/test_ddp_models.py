"""Models of unusual shape under DDP: odd, unused, empty and missing parameters, and backward in parts."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import thinwire as tw
from helpers.models import digest, mlp
from helpers.training import MANY_BUCKETS, assert_equal, assert_replicas_equal, loss_of, train
from helpers.world import run_world


class Odd(nn.Module):
    """Frozen, 0-d, empty, one-element, unused and many-dimensional parameters, and 1-d ones of many sizes."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.frozen = nn.Parameter(torch.randn(20, 20) / 20, requires_grad=False)
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.empty = nn.Parameter(torch.empty(0, 5))
        self.one = nn.Parameter(torch.ones(1))
        self.unused = nn.Parameter(torch.randn(50, 50))
        self.conv = nn.Parameter(torch.randn(7, 20, 3, 3) / 100)
        self.long = nn.Parameter(torch.randn(2000) / 1000)

    def forward(self, x):
        hidden = (x @ self.frozen) * self.scale + self.one + self.empty.sum() + self.long.mean()
        return torch.einsum("bi,oijk->bo", hidden, self.conv)


def _odd(spec, exempt):
    model = DDP(Odd(), bucket_cap_mb=MANY_BUCKETS, find_unused_parameters=True)
    before = digest(model)
    with tw.attach(model, spec, exempt=exempt):
        after = train(model, 3)
    return before, after


@pytest.mark.parametrize("exempt", ["auto", (), ("conv", "l*")], ids=repr)
@pytest.mark.parametrize("spec", ["fp32", "fp16", "qsgd(block=64)"])
def test_odd_parameters_and_unused_ones(spec, exempt):
    results = run_world(_odd, 2, spec, exempt)
    assert_replicas_equal([after for _, after in results])
    before, after = results[0]
    changed = [not torch.equal(a, b) for a, b in zip(before, after, strict=True)]
    assert changed == [False, True, False, True, False, True, True]


def _unused_matches_plain():
    outcomes = []
    for attached in (True, False):
        model = DDP(Odd(), bucket_cap_mb=MANY_BUCKETS, find_unused_parameters=True)
        if attached:
            tw.attach(model, "fp32")
        outcomes.append(train(model, 5))
    return outcomes


def test_unused_parameters_as_in_plain_ddp():
    for attached, plain in run_world(_unused_matches_plain, 2):
        assert_equal(attached, plain)


class Checkpointed(nn.Module):
    """Two parts that are computed anew in backward, each in a backward of its own."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([mlp(0)[:2], mlp(0)[2:]])

    def forward(self, x):
        for part in self.parts:
            x = checkpoint(part, x.requires_grad_() if x.is_leaf else x, use_reentrant=True)
        return x


def _checkpointed():
    outcomes = []
    for spec in (None, "fp32", "fp16", "qsgd"):
        model = DDP(Checkpointed(), bucket_cap_mb=MANY_BUCKETS)
        wire = tw.attach(model, spec) if spec else None
        outcomes.append(train(model, 4))
        if wire is not None:
            assert wire.stats()["steps"] == 4
            wire.close()
    return outcomes


def test_reentrant_checkpointing():
    results = run_world(_checkpointed, 2)
    for number in range(4):
        assert_replicas_equal([outcomes[number] for outcomes in results])
    assert_equal(results[0][0], results[0][1])


class Skipping(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(20, 20), nn.Linear(20, 7)
        self.skip = False

    def forward(self, x):
        return self.second(x if self.skip else self.first(x))


def _skipping(spec):
    """The last bucket never comes."""
    model = DDP(Skipping(), bucket_cap_mb=MANY_BUCKETS)
    with tw.attach(model, spec) as wire:
        train(model, 2)
        model.module.skip = True
        train(model, 1)
        assert wire.step == 2
        with pytest.raises(RuntimeError, match="Expected to have finished reduction in the prior iteration"):
            train(model, 1)
    return True


@pytest.mark.parametrize("spec", ["fp32", "fp16", "qsgd"])
def test_a_backward_without_all_gradients_is_told_by_ddp_and_hangs_nowhere(spec):
    assert all(run_world(_skipping, 2, spec))


class Hollow(nn.Module):
    """A bucket without elements: the one parameter of its dtype is empty."""

    def __init__(self):
        super().__init__()
        self.empty = nn.Parameter(torch.empty(0, dtype=torch.float64))
        self.layer = nn.Linear(20, 7)

    def forward(self, x):
        return self.layer(x) + self.empty.sum().float()


def _hollow(spec):
    model = DDP(Hollow())
    with tw.attach(model, spec):
        return train(model, 3)


@pytest.mark.parametrize("spec", ["fp16", "qsgd"])
def test_a_bucket_without_elements(spec):
    assert_replicas_equal(run_world(_hollow, 2, spec))


class Complex(nn.Module):
    """Complex parameters, large and small, beside real ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.wave = nn.Parameter(torch.randn(20, 60, dtype=torch.complex64) / 20)
        self.phase = nn.Parameter(torch.randn(60, dtype=torch.complex64))
        self.point = nn.Parameter(torch.tensor(1 + 1j))
        self.out = nn.Linear(60, 7)

    def forward(self, x):
        return self.out(((x.to(torch.complex64) @ self.wave + self.phase) * self.point).abs())


def _gradients(model, spec, **options):
    """Of this rank's first batches, as exchanged under a scheme, or plain."""
    ddp = DDP(model, bucket_cap_mb=MANY_BUCKETS)
    wire = tw.attach(ddp, spec, **options) if spec else None
    for step in range(2):  # DDP regroups its buckets after the first
        ddp.zero_grad()
        loss_of(ddp, step).backward()
    if wire is not None:
        wire.close()
    return [p.grad.to_dense() if p.grad.is_sparse else p.grad for p in model.parameters()]


def _complex():
    specs = ("fp32", "fp16", "qsgd(bits=8)", "nq(bits=8)", "topk(density=1, values='fp32')", "powersgd(factor_rank=64)")
    return _gradients(Complex(), None), {spec: _gradients(Complex(), spec) for spec in specs}


def test_complex_parameters_are_exchanged_whole():
    results = run_world(_complex, 2)
    plain, compressed = results[0]
    for spec, grads in compressed.items():
        assert_equal(grads, results[1][1][spec])
        for mine, exact in zip(grads, plain, strict=True):
            error = (mine - exact).abs().pow(2).sum() / exact.abs().pow(2).sum()
            assert error <= (0 if spec == "fp32" else 1e-3), (spec, error)


class Sparse(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.table = nn.Embedding(50, 40, sparse=True)
        self.bag = nn.EmbeddingBag(50, 40, sparse=True, mode="sum")
        self.out = nn.Linear(40, 7)

    def forward(self, x):
        places = (x[:, :5].abs() * 10).long()
        return self.out(self.table(places).sum(1) + self.bag(places))


def _sparse():
    specs = ("fp32", "fp16", "qsgd(bits=8)", "topk", "powersgd")
    return _gradients(Sparse(), None), {spec: _gradients(Sparse(), spec, exempt=()) for spec in specs}


def test_sparse_embeddings_travel_as_in_plain_ddp():
    results = run_world(_sparse, 2)
    plain, compressed = results[0]
    for spec, grads in compressed.items():
        assert_equal(grads, results[1][1][spec])
        assert_equal(grads[:2], plain[:2])
    assert_equal(compressed["fp32"], plain)


class Alternating(nn.Module):
    """A head that no rank uses in some steps."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk, self.head = nn.Linear(20, 64, bias=False), nn.Linear(64, 70, bias=False)
        self.used = True

    def forward(self, x):
        hidden = self.trunk(x).tanh()
        return (self.head(hidden) if self.used else hidden)[:, :7]


def _unused_law(spec, view):
    """|sum of applied means + mean residual - sum of exact means| / |sum of exact means|, of the head."""
    models = [
        DDP(Alternating(), find_unused_parameters=True, gradient_as_bucket_view=view, bucket_cap_mb=MANY_BUCKETS)
        for _ in range(2)
    ]
    applied, exact = torch.zeros(70, 64), torch.zeros(70, 64)
    with tw.attach(models[0], spec) as wire:
        for step, used in enumerate((True, True, False, False, True, False)):
            for model, total in zip(models, (applied, exact), strict=True):
                model.module.used = used
                model.zero_grad()
                loss_of(model, step).backward()
                assert (model.module.head.weight.grad is not None) is used
                if used:
                    total += model.module.head.weight.grad
        owed = wire.memory["head.weight", "residual"].clone()
        dist.all_reduce(owed)
    return float((applied + owed / dist.get_world_size() - exact).norm() / exact.norm())


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("spec", ["topk(density=0.05)", "signsgd", "powersgd"])
def test_what_is_owed_to_a_parameter_that_nobody_used_is_owed_still(spec, view):
    assert max(run_world(_unused_law, 2, spec, view)) < 1e-5
