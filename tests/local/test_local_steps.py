"""LocalSteps: what its equations say, on every scheme, in parts, under way, and in unusual training loops."""

from functools import cache
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
from torch import nn

import thinwire as tw
from helpers.loops import sgd, steps
from helpers.models import digest, mlp
from helpers.specs import by_scheme
from helpers.training import assert_equal, assert_replicas_equal
from helpers.world import run_world

SCHEMES = by_scheme()


def _alone(outer):
    plain, net = mlp(), mlp()
    steps(plain, sgd(plain), 0, 7)
    optimizer = sgd(net)
    with tw.LocalSteps(net, optimizer, every=3, outer=outer, scheme="fp32"):
        steps(net, optimizer, 0, 7)
    assert_equal(digest(plain), digest(net))


@pytest.mark.parametrize("outer", ["sgd(lr=1)", "average"])
def test_one_worker_is_plain_training_to_the_bit(outer):
    run_world(_alone, 1, outer)


def _averaged():
    net = mlp(seed=dist.get_rank())  # all take the first worker's
    optimizer = sgd(net, momentum=0.0)
    with tw.LocalSteps(net, optimizer, every=1, outer="average", scheme="fp32"):
        steps(net, optimizer, 0, 5)
    return digest(net)


def test_averaging_in_every_step_is_the_mean_of_the_weights():
    nets = [mlp(), mlp(), mlp()]
    optimizers = [sgd(net, momentum=0.0) for net in nets]
    for step in range(5):
        for worker, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            steps(net, optimizer, step, 1, worker=worker)
        with torch.no_grad():
            for replicas in zip(*(net.parameters() for net in nets), strict=True):
                mean = sum(p.double() for p in replicas) / len(replicas)
                for p in replicas:
                    p.copy_(mean)
    for weights in run_world(_averaged, 3):
        for mine, right in zip(weights, digest(nets[0]), strict=True):
            torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)


def _diloco():
    net = mlp()
    optimizer = sgd(net)
    with tw.LocalSteps(net, optimizer, every=2, scheme="fp32", outer="nesterov(lr=0.7, momentum=0.9)"):
        steps(net, optimizer, 0, 6)
    return digest(net)


def test_diloco_by_hand():
    """m = .9 m + D; t = t - .7 (D + .9 m), D the mean of anchor - local; inner momentum stays with its worker."""
    nets = [mlp(), mlp()]
    optimizers = [sgd(net) for net in nets]
    anchor, momentum = digest(nets[0]), [torch.zeros_like(p) for p in nets[0].parameters()]
    for round in range(3):
        for worker, (net, optimizer) in enumerate(zip(nets, optimizers, strict=True)):
            steps(net, optimizer, 2 * round, 2, worker=worker)
        with torch.no_grad():
            for i, replicas in enumerate(zip(*(net.parameters() for net in nets), strict=True)):
                change = sum(anchor[i] - p for p in replicas) / 2
                momentum[i] = 0.9 * momentum[i] + change
                anchor[i] = anchor[i] - 0.7 * (change + 0.9 * momentum[i])
                for p in replicas:
                    p.copy_(anchor[i])
    for mine, right in zip(run_world(_diloco, 2)[0], anchor, strict=True):
        torch.testing.assert_close(mine, right, rtol=1e-5, atol=1e-6)


def _every_spec(specs):
    found = {}
    for spec in specs:
        net = mlp(seed=dist.get_rank())
        optimizer = sgd(net)
        with tw.LocalSteps(net, optimizer, every=2, scheme=spec, exempt=("*bias",)) as local:
            steps(net, optimizer, 0, 4)
            synced = digest(net)
            with local.synchronised():
                assert_equal(synced, digest(net))
        found[spec] = synced
    return found


@cache
def over_every_spec():
    return run_world(_every_spec, 2, [spec for specs in SCHEMES.values() for spec in specs])


@pytest.mark.parametrize("name", SCHEMES)
def test_replicas_are_equal_after_a_sync(name):
    for spec in SCHEMES[name]:
        mine, theirs = (rank[spec] for rank in over_every_spec())
        assert_equal(mine, theirs)
        assert not all(torch.equal(a, b) for a, b in zip(mine, digest(mlp()), strict=True)), spec


def _peak(parts):
    net = mlp()
    optimizer, sent = sgd(net), [0.0]
    with tw.LocalSteps(net, optimizer, every=4, scheme="fp32", parts=parts) as local:
        steps(net, optimizer, 0, 8, after=lambda: sent.append(local.stats()["bytes_sent"]))
        sizes = [part.layout.numel for part in local.anchor.parts]
        names = sorted(name for part in local.anchor.parts for name in part.layout.names)
    return max(b - a for a, b in pairwise(sent)), sent[-1], sizes, names


def test_a_sync_of_parts_sends_as_much_in_smaller_portions():
    (whole, total, _, names), (portion, same, sizes, again) = run_world(_peak, 2, 1)[0], run_world(_peak, 2, 2)[0]
    assert again == names == sorted(name for name, _ in mlp().named_parameters())
    assert same == pytest.approx(total, rel=0.02)  # a few words more
    assert portion == pytest.approx(whole * max(sizes) / sum(sizes), rel=0.03) and max(sizes) < 0.7 * sum(sizes)


def _streamed(delay, mix):
    """Each part's anchor moves only when it lands, and then local weights are a mixture."""
    net = mlp()
    optimizer, seen = sgd(net), []
    with tw.LocalSteps(net, optimizer, every=4, scheme="fp32", outer="average", parts=2, delay=delay, mix=mix) as local:
        anchors = {name: p.clone() for name, p in net.named_parameters()}
        for step in range(8):
            steps(net, optimizer, step, 1)
            moved = {n for n, view in local.anchor.weights.items() if not torch.equal(view, anchors[n])}
            for number, part in enumerate(local.anchor.parts):
                assert moved.isdisjoint(part.layout.names) or moved == set(part.layout.names)
                if moved == set(part.layout.names):
                    seen.append((step + 1, number))
            anchors = {name: view.clone() for name, view in local.anchor.weights.items()}
        local.sync()
        return seen, digest(net)


@pytest.mark.parametrize("delay, mix", [(0, 0.0), (1, 0.0), (2, 0.5)])
def test_every_part_lands_once_a_round_as_late_as_was_said(delay, mix):
    results = run_world(_streamed, 2, delay, mix)
    left = [(2, 0), (4, 1), (6, 0), (8, 1)]
    assert results[0][0] == [(at + delay, part) for at, part in left if at + delay <= 8]
    assert_replicas_equal([weights for _, weights in results])


def _mixed():
    net = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.SGD(net.parameters(), lr=1.0)
    with tw.LocalSteps(net, optimizer, every=2, scheme="fp32", outer="average", delay=1, mix=0.25, exempt=()):
        begun = net.weight.detach().clone()
        for _ in range(3):  # each step adds rank + 1; the change of two leaves, and lands after a third
            net.weight.grad = torch.full_like(net.weight, -1.0 - dist.get_rank())
            optimizer.step()
        return net.weight.detach() - begun


def test_what_lands_is_mixed_with_what_was_done_meanwhile():
    for rank, weights in enumerate(run_world(_mixed, 2)):
        local, anchor = 3.0 * (rank + 1), 3.0  # the mean of 2 and 4
        torch.testing.assert_close(weights, torch.full((2, 3), 0.25 * local + 0.75 * anchor))


def _not_finite(scheme):
    net = mlp()
    optimizer = sgd(net)
    with tw.LocalSteps(net, optimizer, every=2, scheme=scheme, feedback=True, exempt=()) as local:
        steps(net, optimizer, 0, 2)
        anchor = {name: p.detach().clone() for name, p in local.anchor.weights.items()}
        residuals = {key: tensor.clone() for key, tensor in local.memory.items()}
        steps(net, optimizer, 2, 1)
        if dist.get_rank() == 1:
            with torch.no_grad():
                net[0].weight[3, 3] = float("nan")
            with pytest.warns(UserWarning, match="not finite"):
                steps(net, optimizer, 3, 1)
        else:
            steps(net, optimizer, 3, 1)
        for name, p in local.anchor.weights.items():
            assert torch.equal(p, anchor[name]) and torch.equal(p, dict(net.named_parameters())[name])
        assert all(torch.equal(tensor, residuals[key]) for key, tensor in local.memory.items())
        assert local.stats()["void_rounds"] == 1
        steps(net, optimizer, 4, 2)
        assert all(p.isfinite().all() for p in net.parameters())
        assert not torch.equal(net[0].weight, anchor["0.weight"])
    return digest(net)


@pytest.mark.parametrize("scheme", ["fp32", "qsgd(bits=4)", "topk(density=0.1)", "powersgd"])
def test_a_worker_that_is_not_finite_makes_the_round_void_and_nothing_else(scheme):
    assert_replicas_equal(run_world(_not_finite, 2, scheme))


def _memory():
    net = mlp()
    with tw.LocalSteps(net, sgd(net), scheme="topk(density=0.1)", residual="bf16", parts=2, exempt=()) as local:
        return local.stats()


def test_what_it_keeps_is_what_it_says():
    weights = sum(p.numel() for p in mlp().parameters())
    stats = run_world(_memory, 1)[0]
    assert stats["anchor_bytes"] == stats["outer_bytes"] == 4 * weights
    assert stats["memory_bytes"] == 2 * weights  # residuals in bfloat16
    assert 2 * weights <= stats["change_bytes"] < 3 * weights  # the larger of two parts


def test_the_function_every_plans_the_rounds():
    plan = tw.local.schedule.Schedule(lambda round: 2 + round, 2, 1)
    assert [plan.attempt() for _ in range(9)] == [[0], [1], [0], [], [1], [], [0], [], [1]]
    assert plan.made == [9, 9] and plan.leave(0) == 9 and plan.made == [0, 9]


def _refused():
    net = mlp()
    optimizer = sgd(net)
    for options, message in [
        ({"every": 0}, "every must be"), ({"every": 3, "parts": 4}, "at least parts, 4"), ({"parts": 99}, "1 to 6"),
        ({"every": 8, "parts": 2, "delay": 5}, r"delay must be 0 \.\. 4"), ({"mix": 1.0}, "mix must be"),
        ({"outer": "adam"}, "known: average, nesterov, sgd"), ({"decay": 0.9}, "feedback=True"),
        ({"decay": 1.5, "feedback": True}, "decay must be 0"), ({"residual": "fp8"}, "'fp32' or 'bf16'"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            tw.LocalSteps(net, optimizer, **options)


def test_what_cannot_be_is_refused():
    run_world(_refused, 1)


def _disagree():
    net = mlp()
    with pytest.raises(ValueError, match="plan of local steps differs between ranks"):
        tw.LocalSteps(net, sgd(net), every=4 + dist.get_rank())


def test_workers_that_were_given_different_plans_hear_so():
    run_world(_disagree, 2)


@pytest.mark.parametrize("recipe", [tw.local.diloco(), tw.local.streaming(every=20), tw.local.sparseloco()], ids=repr)
def test_recipes_are_what_local_steps_takes(recipe):
    run_world(_recipe, 1, recipe)


def _recipe(recipe):
    net = mlp()
    optimizer = sgd(net)
    with tw.LocalSteps(net, optimizer, **recipe) as local:
        steps(net, optimizer, 0, 10)
    assert local.stats()["steps"] == 10
