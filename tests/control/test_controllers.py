"""Controllers by themselves: what they decide from what they see, and what they remember."""

import math
import random

import pytest
import torch

import thinwire as tw
from thinwire import control
from thinwire.control import Observation

MENU = (2, 4, 8, 16)
SPECS = {
    "fixed": "fixed(level=4)",
    "schedule": "schedule(levels_at=((0, 2), (20, 8)))",
    "uniform": "uniform",
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
        tw.steering.Steering("mqgrad", tw.scheme("fp16"))


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


def exact_norm_rule(norms, budget, levels):
    """The rule on every norm so far."""
    low, high = -60.0, 60.0
    for _ in range(60):
        middle = (low + high) / 2
        mean = sum(math.log2(2.0**middle * norm + 1) + 1 for norm in norms) / len(norms)
        low, high = (middle, high) if mean < budget else (low, middle)
    bits = math.log2(2.0**high * norms[-1] + 1) + 1
    return min(levels, key=lambda level: (abs(level - bits), level))


@pytest.mark.parametrize("budget", [3, 4.5, 7])
def test_the_norm_rule_decides_as_if_it_kept_every_norm(budget):
    rule, draw = started(f"normrule(budget={budget})"), random.Random(0)
    norms = [math.exp(draw.gauss(-number / 50, 1.5)) for number in range(150)]
    decided = [rule.decide(seen(norm=norm)) for norm in norms]
    assert decided == [exact_norm_rule(norms[: n + 1], budget, MENU) for n in range(len(norms))]
    assert len(set(decided)) > 1


def test_what_the_norm_rule_remembers_does_not_grow_with_the_steps():
    rule, draw = started("normrule"), random.Random(0)
    rule.load_state_dict({"norms": [2.0 ** draw.uniform(-5, 5) for _ in range(100_000)]})
    state = rule.state_dict()
    assert sum(state["counts"]) == 100_000
    assert len(state["bins"]) == len(state["counts"]) <= 10 * 256 + 1
    assert [rule.decide(seen(norm=norm)) for norm in (0.0, 5e-324, 1e308, 1.7e308)] == [2, 2, 16, 16]
    assert len(rule.state_dict()["bins"]) == len(state["bins"]) + 2  # the two ends


def test_a_norm_rule_goes_on_from_a_state_that_kept_every_norm():
    norms = [2.0 ** (-number / 4) for number in range(40)]
    whole, resumed = started("normrule(budget=5)"), started("normrule(budget=5)")
    for norm in norms[:20]:
        whole.decide(seen(norm=norm))
    resumed.load_state_dict({"norms": norms[:20]})
    assert [resumed.decide(seen(norm=norm)) for norm in norms[20:]] == [whole.decide(seen(norm=n)) for n in norms[20:]]


ERRORS = {2: 1.5, 4: 0.05, 8: 1e-4, 16: 1e-8}


def play(controller, turn, until=0.05, limit=400):
    """(seconds, levels) of a training that needs few bits while the loss is above `turn` and more below it.

    Every level but the first drops log(loss) by 0.1 per interval; two bits do so only above `turn`.
    """
    loss, seconds, level, levels, losses = 2.3, 0.0, controller.first(4, MENU), [], []
    while loss > until and len(levels) < limit:
        loss *= math.exp(-0.1 if level > 2 or loss > turn else 0.0)
        per_step = 0.002 + 0.01 * level
        seconds += 10 * per_step
        levels.append(level)
        losses.append(loss)
        step = 10 * len(levels)
        level = controller.decide(Observation(step, level, per_step, 0.0, 1.0, ERRORS[level], tuple(losses[-8:])))
    return seconds, levels


@pytest.mark.parametrize("seed", range(5))
def test_mqgrad_beats_every_fixed_level_and_chance_where_needs_change(seed):
    seconds, levels = play(started(f"mqgrad(seed={seed})"), turn=0.5)
    for rival in (*(f"fixed(level={level})" for level in MENU), f"uniform(seed={seed})"):
        assert seconds < play(started(rival), turn=0.5)[0], rival
    assert sum(levels[:8]) < 24  # few bits early
    assert levels[-1] > 2  # more later


def taught(drop_of, seconds_of, lessons=90):
    """(odds before, odds after) of the moves in one state, where move a drops log(loss) by drop_of(a, due)."""
    controller = started("mqgrad(rate=0.2)")
    controller.decide(seen(loss=2.0, seconds=0.1))
    state = [1.0, 0.0, 0.5, -1.0]
    before = controller.odds(state).tolist()
    for number in range(lessons):
        action, elapsed = number % 3, controller._seconds or 1.0
        seconds = seconds_of(action) * elapsed / 20
        controller._learn(state, action, drop_of(action, 0.3 * math.log(1 + 0.05)), seconds)
    return before, controller.odds(state).tolist()


def test_mqgrad_learns_which_moves_pay():
    """Where staying lets the loss rise and moves make it fall, the policy stays less and less."""
    before, after = taught(lambda action, due: -due if action == 1 else 2.5 * due, lambda action: 1.0)
    assert after[1] < 0.5 * before[1]


def test_mqgrad_learns_that_seconds_cost():
    """Equal drops, but going up takes four times as long: it is chosen less."""
    before, after = taught(lambda action, due: due, lambda action: 4.0 if action == 2 else 0.5)
    assert after[2] < 0.5 * before[2]


def test_mqgrad_credits_a_move_with_what_follows():
    """The loss falls in the interval after the one that the move up was for, in another state."""
    controller = started("mqgrad(rate=0.2)")
    controller.decide(seen(loss=2.0, seconds=0.1))
    for number in range(10):
        controller._learn([1.0, 0.0, 0.0, 0.0], 1, 0.02 + 0.01 * (number % 2), 1.0)
    here = [0.0, 0.0, 0.0, 1.0]
    controller._learn(here, 2, 0.02, 1.0)
    before = controller.odds(here)[2].item()
    controller._learn([1.0, 0.0, 0.0, 0.0], 1, 0.2, 1.0)
    assert controller.odds(here)[2].item() > before


def test_a_learnt_policy_is_where_the_next_run_starts(tmp_path):
    controller = started("mqgrad(rate=0.2)")
    play(controller, turn=0.5)
    torch.save(controller.state_dict(), tmp_path / "policy")
    again = started(f"mqgrad(policy={str(tmp_path / 'policy')!r})")
    state = [1.0, 0.1, 0.5, -1.0]
    assert torch.equal(again.odds(state), controller.odds(state))
    assert not torch.equal(again.odds(state), started("mqgrad").odds(state))


def test_a_policy_for_other_levels_raises(tmp_path):
    torch.save(started("mqgrad(levels_from=(2, 4))").state_dict(), tmp_path / "policy")
    with pytest.raises(ValueError, match=r"is for \[2, 4\], not \[2, 4, 8, 16\]"):
        started(f"mqgrad(policy={str(tmp_path / 'policy')!r})")


def test_what_is_no_policy_raises(tmp_path):
    file = tmp_path / "policy"
    for content, match in ((b"nonsense", "cannot be read"), (None, "holds no weights")):
        if content is None:
            torch.save(started("mqgrad").state_dict() | {"weights": torch.zeros(2)}, file)
        else:
            file.write_bytes(content)
        with pytest.raises(ValueError, match=match):
            started(f"mqgrad(policy={str(file)!r})")
