"""A controller in a training loop: one decides, all turn, before the step it applies to."""

import math
import os
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

import thinwire as tw
from helpers.models import batch, digest, mlp
from helpers.training import loss_of
from helpers.world import run_world
from thinwire import steering
from thinwire.reducer import Reducer


def levels_and_bytes(model, wire, worker, steps):
    """The level and the number of bytes sent, after each step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    levels, sent = [], []
    for step in range(steps):
        x, y = batch(worker, step)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()
        wire.observe(loss)
        levels.append(wire.stats()["level"])
        sent.append(wire.stats()["bytes_sent"])
    return levels, sent


def _reduced(controller, steps, folder=None):
    model = DDP(mlp())
    with tw.attach(model, "qsgd(bits=4, block=64)", controller=controller) as wire:
        levels, sent = levels_and_bytes(model, wire, dist.get_rank(), steps)
        if folder:
            wire.save_controller(f"{folder}/policy")
        return levels, sent, digest(model)


def _served(controller, steps, folder=None):
    role = tw.join(servers=1, timeout_seconds=30)
    if role.serves:
        return role.serve()
    model = DDP(mlp(), process_group=role.workers)
    with tw.attach(model, "qsgd(bits=4, block=64)", exchange=role.exchange, controller=controller) as wire:
        levels, sent = levels_and_bytes(model, wire, role.exchange.worker, steps)
        if folder:
            wire.save_controller(f"{folder}/policy")
        return levels, sent, digest(model)


SCHEDULE = "schedule(levels_at=((0, 2), (4, 8)), interval=2)"


@pytest.mark.parametrize(("function", "servers"), [(_reduced, 0), (_served, 1)])
def test_all_workers_change_level_at_the_same_step(function, servers):
    results = run_world(function, servers + 3, SCHEDULE, 8)[servers:]
    first = results[0]
    for levels, sent, weights in results:
        steps = [after - before for before, after in pairwise(sent[4:])]
        early = [after - before for before, after in pairwise(sent[:4])]
        assert max(early) < min(steps)  # eight bits cost more than two
        assert levels[0] == 2 and levels[-1] == 8
        assert all(torch.equal(a, b) for a, b in zip(weights, first[2], strict=True))


@pytest.mark.parametrize(("function", "servers"), [(_reduced, 0), (_served, 1)])
def test_a_learner_learns_where_it_runs_and_can_be_saved(function, servers, tmp_path):
    spec = "mqgrad(interval=2, levels_from=(2, 4))"
    run_world(function, servers + 2, spec, 12, str(tmp_path))
    saved = torch.load(tmp_path / "policy", weights_only=True)
    assert saved["decisions"] == 6
    fresh = tw.control.MQGrad(levels_from=(2, 4))
    fresh.start((2, 4))
    assert saved["learnt"] != fresh.state_dict()["learnt"]
    assert all(math.isfinite(each) for each in saved["noise"]) and len(saved["errors"]) == 2


def _policies(folder):
    """What attach says where the policy file is on the first rank only, then where the ranks' files differ."""
    rank, heard = dist.get_rank(), []
    os.makedirs(f"{folder}/{rank}")
    os.chdir(f"{folder}/{rank}")
    for held in (rank == 0, True):
        if held:
            learner = tw.control.MQGrad()
            learner.start(tw.scheme("qsgd").knob.menu)
            torch.save(learner.state_dict() | {"learnt": [float(rank), -3.0]}, "p")
        with pytest.raises(ValueError) as caught:
            tw.attach(DDP(mlp()), "qsgd", controller="mqgrad(policy='p')")
        heard.append(str(caught.value))
    return heard


def test_a_policy_that_only_some_ranks_have_is_refused_by_all(tmp_path):
    first, second = run_world(_policies, 2, str(tmp_path))
    assert first[0] == "ranks [1] refused their arguments; see their own errors"
    assert second[0].startswith("mqgrad: the policy 'p' cannot be read: [Errno 2] No such file")
    assert first[1] == second[1] and "the state of the controller differs between ranks: ranks [0]" in first[1]


def _any_knob(specs):
    found = {}
    for spec in specs:
        model = DDP(mlp())
        with tw.attach(model, spec, controller="uniform(interval=1, seed=2)") as wire:
            assert wire.steering.controller.knob == tw.scheme(spec).knob.name
            levels, _ = levels_and_bytes(model, wire, dist.get_rank(), 6)
        found[spec] = levels, digest(model)
    return found


def test_the_knob_may_be_bits_density_or_rank():
    specs = ["qsgd(bits=4)", "topk(density=0.1)", "powersgd(factor_rank=2)"]
    first, second = run_world(_any_knob, 2, specs)
    for spec in specs:
        (levels, weights), (_, other_weights) = first[spec], second[spec]
        assert set(levels) <= set(tw.scheme(spec).knob.menu) and len(set(levels)) > 1, spec
        # Workers that used different levels in any step would not have the same weights.
        assert all(torch.equal(a, b) for a, b in zip(weights, other_weights, strict=True)), spec


def _owing():
    """What the learner is told of feedback, and the noise and the delay it makes of it."""
    found = []
    for feedback in (True, False):
        model = DDP(mlp())
        controller = "mqgrad(interval=2, levels_from=(2, 4))"
        with tw.attach(model, "qsgd(bits=4)", controller=controller, feedback=feedback) as wire:
            levels_and_bytes(model, wire, dist.get_rank(), 6)
            wire.steering.settle()
            learner = wire.steering.controller
            found.append((learner._owed, learner._noise(2, 2)[1], learner._delay(2)))
    return found


def test_a_learner_knows_whether_what_is_lost_comes_later():
    first, second = run_world(_owing, 2)
    assert first == second
    (owed, made, late), (lost, noise, never) = first
    assert (owed, made) == (1, 0) and 0 < late < 99
    assert (lost, never) == (0, 0) and noise > 0


def _owing_each_other():
    """The errors that the learner knows of, where the mean is of rank one and all else cancels in it."""
    rank = dist.get_rank()
    about = {"controller": "mqgrad(interval=10, rate=0, levels_from=(2, 4))", "feedback": True, "exempt": ()}
    always = torch.outer(*torch.randn(2, 64, generator=torch.Generator().manual_seed(7)))
    with Reducer({"x": always}, "powersgd", dist.group.WORLD, **about) as reducer:
        shared = torch.Generator().manual_seed(8)
        for _ in range(40):
            apart = 3 * torch.randn(64, 64, generator=shared)
            reducer.reduce({"x": always + (apart if rank else -apart)})
            reducer.observe(1.0)
        reducer.steering.settle()
        return reducer.steering.controller._errors


def test_what_workers_owe_each_other_is_no_delay():
    """Every worker keeps all in which it ever differed from the mean, which itself lacks nothing."""
    errors, others = run_world(_owing_each_other, 2)
    assert errors == others and errors and max(errors.values()) < 1e-6


def _signal(feedback, scheme):
    """What the learner takes for the signal, where it is known: |x|^2 = 4096, in noise four times as large."""
    rank, elements = dist.get_rank(), 4096
    always = torch.randn(elements, generator=torch.Generator().manual_seed(7))
    always *= math.sqrt(elements) / always.norm()
    menu = (0.01, 0.1) if "topk" in scheme else (2, 4)
    about = {"controller": f"mqgrad(interval=20, rate=0, levels_from={menu})", "feedback": feedback, "exempt": ()}
    with Reducer({"x": always}, scheme, dist.group.WORLD, **about) as reducer:
        own = torch.Generator().manual_seed(100 + rank)
        for _ in range(60):
            reducer.reduce({"x": always + 2 * torch.randn(elements, generator=own)})
            reducer.observe(1.0)
        reducer.steering.settle()
        return reducer.steering.controller._signal / elements


@pytest.mark.parametrize(("feedback", "scheme"), [(False, "qsgd(bits=2, block=1024)"), (True, "topk(density=0.1)")])
def test_the_signal_is_found_whatever_messages_lose(feedback, scheme):
    first, second = run_world(_signal, 2, feedback, scheme)
    assert first == second == pytest.approx(1.0, abs=0.25)


def _evaluating():
    """The seconds of a step by a clock on which steps take a tenth, and evaluations between them half a minute."""
    clock = [0.0]
    steering.time = SimpleNamespace(perf_counter=lambda: clock[0])
    model = DDP(mlp())
    with tw.attach(model, "qsgd", controller="mqgrad(levels_from=(2, 4), rate=0, growth=0)") as wire:
        for step in range(40):
            clock[0] += 0.1 + 30 * (step % 5 == 4)
            levels_and_bytes(model, wire, dist.get_rank(), 1)
        wire.steering.settle()
        return wire.steering.controller._seconds.of(wire.steering.controller.levels[0])


def test_a_step_is_as_long_as_it_takes_without_evaluation_and_checkpoints():
    assert run_world(_evaluating, 2) == pytest.approx([0.1, 0.1], rel=0.01)


def _silent():
    model = DDP(mlp())
    with tw.attach(model, "qsgd", controller="mqgrad"):
        loss_of(model, 0).backward()  # the loss may be told after it
        with pytest.raises(ValueError, match="observe"):
            loss_of(model, 1).backward()
    with pytest.raises(ValueError, match="has no knob"):
        tw.attach(DDP(mlp()), "fp16", controller="mqgrad")
    return True


def test_a_learner_that_is_told_nothing_says_so():
    assert run_world(_silent, 2) == [True, True]


def _uneven(steps):
    """One rank runs out of data first, or never had any; the others go on under the controller."""
    model = DDP(mlp())
    with tw.attach(model, "qsgd(bits=4, block=64)", controller="mqgrad(interval=2, levels_from=(2, 4, 8))") as wire:
        with model.join():
            levels_and_bytes(model, wire, dist.get_rank(), steps[dist.get_rank()])
        wire.steering.settle()
        learnt = wire.steering.state_dict()["learnt"]
        return wire.stats()["steps"], wire.level, learnt["decisions"], learnt["learnt"], digest(model)


@pytest.mark.parametrize("steps", [(3, 8), (8, 0)])
def test_a_controller_goes_on_when_a_rank_runs_out_of_data(steps):
    (counted, level, decisions, weights, model), other = run_world(_uneven, 2, steps)
    assert (counted, level, decisions) == other[:3] and counted == 8
    assert decisions >= 3 and all(map(math.isfinite, weights)) and weights == other[3]
    assert all(torch.equal(a, b) for a, b in zip(model, other[4], strict=True))
