"""LocalSteps whose controller turns `every`: when it takes effect, alike on all workers, and after a checkpoint."""

import pytest
import torch

import thinwire as tw
from helpers.loops import sgd, steps
from helpers.models import digest, mlp
from helpers.training import assert_equal, assert_replicas_equal
from helpers.world import run_world

PLANNED = "schedule(levels_at=((0, 4), (2, 2)), interval=1)"


def _planned(options):
    """After which steps something was exchanged, and what `stats` says of it."""
    net = mlp()
    optimizer, exchanged = sgd(net), [0]
    with tw.LocalSteps(net, optimizer, every=(4, 2), controller=PLANNED, scheme="fp16", **options) as local:
        for step in range(1, 17):
            steps(net, optimizer, step, 1)
            exchanged += [step] * (local.step - len(exchanged) + 1)
        return exchanged[1:], local.stats()["every"], local.level == local.scheme.level


@pytest.mark.parametrize(("options", "times"), [({}, [4, 8, 12, 14, 16]), ({"delay": 2}, [6, 10, 14, 16])], ids=str)
def test_a_decision_holds_from_the_round_on_that_begins_after_it(options, times):
    """The one after the second exchange: it lands when a round begins, or later, so that the next is the first."""
    for told in run_world(_planned, 2, options):
        assert told == (times, 2.0, True)


def _drawn(resumed_at):
    """The weights, and the lengths of rounds that a controller drew; with a checkpoint, the same in two halves."""
    net, lengths = mlp(), {}

    def begin():
        optimizer = sgd(net)
        plan = {"every": (3, 2, 5), "controller": "uniform(interval=1)", "scheme": "qsgd(bits=4)", "parts": 2}
        return optimizer, tw.LocalSteps(net, optimizer, **plan)

    optimizer, local = begin()
    for step in range(40):
        if step == resumed_at:
            saved = [each.state_dict() for each in (net, optimizer, local)]
            local.close()
            net = mlp(seed=1)
            optimizer, local = begin()
            for each, state in zip((net, optimizer, local), saved, strict=True):
                each.load_state_dict(state)
        steps(net, optimizer, step, 1)
        lengths[local.schedule.round] = local.schedule.length
    local.sync()
    local.close()
    return digest(net), lengths


def test_all_workers_follow_and_a_checkpoint_within_a_round_changes_nothing():
    whole = run_world(_drawn, 2, None)
    assert set(whole[0][1].values()) == {2, 3, 5}
    for resumed_at in (17, 22, 23):
        again = run_world(_drawn, 2, resumed_at)
        for (weights, lengths), (right, planned) in zip(again, whole, strict=True):
            assert_equal(weights, right)
            assert lengths == planned
    assert_replicas_equal([weights for weights, _ in whole])


def _refused():
    net = mlp()
    for options, message in [
        ({"every": (4, 2)}, "for a controller to choose from"),
        ({"every": (), "controller": "uniform"}, "for a controller to choose from"),
        ({"every": (4, 1), "controller": "uniform", "parts": 2}, "at least parts, 2"),
        ({"every": (4, 2), "controller": "fixed(level=3)"}, "levels must be among"),
    ]:  # fmt: skip
        with pytest.raises(ValueError, match=message):
            tw.LocalSteps(net, torch.optim.SGD(net.parameters(), lr=0.1), **options)


def test_what_cannot_be_chosen_is_refused():
    run_world(_refused, 1)
