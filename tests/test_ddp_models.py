"""Models of unusual shape under DDP: odd, unused, empty and missing parameters, and backward in parts."""

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint

import thinwire as tw
from helpers.models import digest, mlp
from helpers.training import MANY_BUCKETS, assert_equal, assert_replicas_equal, train
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
