"""Controllers by themselves: what they decide from what they see, and what they remember."""

import math

import pytest
import torch

import thinwire as tw
from thinwire import control
from thinwire.control import Observation

MENU = (2, 4, 8, 16)
SPECS = {
    "fixed": "fixed(level=4)",
    "schedule": "schedule(levels_at=((0, 2), (20, 8)))",
    "random": "random",
    "normrule": "normrule(budget=4)",
    "mqgrad": "mqgrad(seed=3)",
}


def seen(step=10, loss=1.0, level=4, seconds=0.1, norm=1.0, before=()):
    losses = (*before, loss)
    return Observation(step, level, seconds, 1000.0, norm, 0.1, (math.nan,) * (8 - len(losses)) + losses)


def started(spec):
    controller = control.parse(spec)
    controller.start(controller.menu(MENU))
    return controller


def test_every_controller_is_tried_here():
    assert set(SPECS) == set(control.registry())


@pytest.mark.parametrize("name", SPECS)
def test_specs_round_trip_and_decisions_come_from_the_menu(name):
    controller = started(SPECS[name])
    assert control.parse(controller.spec).spec == controller.spec
    for number in range(1, 30):
        assert controller.decide(seen(10 * number, loss=1 / number, norm=1 / number)) in MENU


@pytest.mark.parametrize("name", SPECS)
def test_a_resumed_controller_decides_alike(name, tmp_path):
    observations = [
        seen(10 * n, loss=1 + 1 / n + 0.1 * (n % 3), norm=2 / n, seconds=0.1 * (1 + n % 2)) for n in range(1, 40)
    ]
    whole = started(SPECS[name])
    expected = [whole.decide(each) for each in observations]
    first = started(SPECS[name])
    for each in observations[:17]:
        first.decide(each)
    torch.save(first.state_dict(), tmp_path / "state")
    second = started(SPECS[name])
    second.load_state_dict(torch.load(tmp_path / "state", weights_only=True))
    assert [second.decide(each) for each in observations[17:]] == expected[17:]


def test_observations_survive_being_numbers():
    observation = seen(before=(3.0, 2.0))
    again = Observation.of(observation.numbers())
    assert (again.step, again.level, again.loss, again.losses[-3:]) == (10, 4, 1.0, (3.0, 2.0, 1.0))


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("mqgrid", "did you mean 'mqgrad'"),
        ("mqgrad(speed=3)", "no option 'speed'"),
        ("mqgrad(interval=0)", "interval must be"),
        ("fixed(level=print)", "plain value"),
        ("schedule(levels_at=((5, 2),))", "begin with 0"),
        ("normrule(budget=1)", "above 1 bit"),
        ("4", "cannot read"),
    ],
)
def test_mistakes_raise(spec, match):
    with pytest.raises(ValueError, match=match):
        control.parse(spec)


def test_levels_outside_the_menu_raise():
    with pytest.raises(ValueError, match=r"levels must be among \(2, 4, 8, 16\), got \(3,\)"):
        started("fixed(level=3)")
    with pytest.raises(ValueError, match="has no knob"):
        tw.steering.Steering("mqgrad", tw.parse("fp16"))


def test_a_schedule_changes_at_its_steps():
    schedule = started(SPECS["schedule"])
    assert [schedule.decide(seen(step)) for step in (10, 19, 20, 300)] == [2, 2, 8, 8]
    assert schedule.first(4, MENU) == 2


def test_the_norm_rule_spends_its_budget_on_large_norms():
    rule = started("normrule(budget=5)")
    norms = [2.0 ** (-number / 4) for number in range(40)]
    bits = [rule.decide(seen(norm=norm)) for norm in norms]
    assert bits[0] >= bits[-1] and bits == sorted(bits, reverse=True)
    assert rule.decide(seen(norm=math.nan, level=8)) == 8


class Toy:
    """Training as the learner sees it: every level has its seconds per step and its drop of log(loss) per step.

    Above `turn`, two bits do as well as any; below it they stand still. So the best is few bits first, more later.
    """

    def __init__(self, turn=0.5):
        self.loss, self.turn, self.seconds = 2.3, turn, 0.0

    def interval(self, level):
        drop = 0.02 if level > 2 or self.loss > self.turn else 0.0
        self.loss *= math.exp(-10 * drop)
        self.seconds += 10 * (0.02 + 0.01 * level)
        return seen(loss=self.loss, level=level, seconds=0.02 + 0.01 * level)


def play(controller, turn, until=0.05, limit=400):
    toy, level, levels = Toy(turn), 8, []
    history = []
    while toy.loss > until and len(levels) < limit:
        observation = toy.interval(level)
        history.append(observation.loss)
        levels.append(level)
        level = controller.decide(
            Observation(10 * len(levels), level, observation.seconds_per_step, 0.0, 1.0, 0.1, tuple(history[-8:]))
        )
    return toy.seconds, levels


def learnt(tmp_path, turn, runs=12):
    path = None
    for run in range(runs):
        policy = f", policy={str(path)!r}" if path else ""
        controller = started(f"mqgrad(seed={run}{policy})")
        play(controller, turn)
        path = tmp_path / f"policy{run}"
        torch.save(controller.state_dict(), path)
    return path


def test_mqgrad_learns_the_cheapest_level_that_still_learns(tmp_path):
    """Two bits never learn here: carried over from run to run, the policy settles on four and beats chance clearly."""
    path = learnt(tmp_path, turn=100.0)
    seconds, levels = play(started(f"mqgrad(seed=99, policy={str(path)!r})"), turn=100.0)
    chance, _ = play(started("random"), turn=100.0)
    assert levels[1:].count(4) > 0.6 * len(levels)
    assert seconds < 0.7 * chance


def test_mqgrad_learns_few_bits_early_and_more_later(tmp_path):
    path = learnt(tmp_path, turn=0.5)
    _, levels = play(started(f"mqgrad(seed=99, policy={str(path)!r})"), turn=0.5)
    early, late = levels[1:7], levels[12:]
    assert sum(early) / len(early) < sum(late) / len(late)
    assert early.count(2) >= 4 and late.count(2) < 0.4 * len(late)


def test_a_policy_for_other_levels_raises(tmp_path):
    torch.save(started("mqgrad(levels_from=(2, 4))").state_dict(), tmp_path / "policy")
    with pytest.raises(ValueError, match=r"chooses among \[2, 4\], not \[2, 4, 8, 16\]"):
        started(f"mqgrad(policy={str(tmp_path / 'policy')!r})")
