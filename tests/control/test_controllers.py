"""Controllers by themselves: what they decide from what they see, and what they remember."""

import math
import random
from statistics import fmean

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


def seen(step=10, loss=1.0, level=4, seconds=0.1, norm=1.0, before=(), noise=()):
    losses = (*before, loss)
    return Observation(step, level, seconds, 1000.0, norm, 0.1, (math.nan,) * (8 - len(losses)) + losses, *noise)


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
        ("mqgrad(growth=-1)", "growth must not be negative"),
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
WORKERS, KAPPA = 2, 0.3


def play(controller, per_bit=0.01, until=0.05, limit=1500):
    """(seconds, levels) of a training on paper: the signal falls with the loss, the gradients' own noise stays, and an
    interval drops log(loss) by 0.1 / (1 + KAPPA noise / signal), whatever the controller thinks KAPPA is."""
    loss, seconds, level, levels, losses = 2.3, 0.0, controller.first(4, MENU), [], []
    while loss > until and len(levels) < limit:
        signal, own = loss / 4, 0.05
        square = signal + own
        noise = own / WORKERS + ERRORS[level] * square / WORKERS
        loss *= math.exp(-0.1 / (1 + KAPPA * noise / signal))
        per_step = 0.02 + per_bit * level
        seconds += 10 * per_step
        levels.append(level)
        losses.append(loss)
        wondered = controller.wonders(level)
        beside = (math.nan, math.nan) if wondered is None else (wondered, ERRORS[wondered])
        found = Observation(
            10 * len(levels), level, per_step, 0.0, 1.0, ERRORS[level], tuple(losses[-8:]), square, signal + noise,
            *beside, WORKERS, product=signal + own / WORKERS,
        )  # fmt: skip
        level = controller.decide(found)
    return seconds, levels


@pytest.mark.parametrize("per_bit", [0.01, 0.001])
@pytest.mark.parametrize("seed", range(3))
def test_mqgrad_is_no_later_than_every_fixed_level_and_chance(seed, per_bit):
    """On a thin wire and on a thick one."""
    seconds, levels = play(started(f"mqgrad(seed={seed})"), per_bit)
    fixed = [play(started(f"fixed(level={level})"), per_bit)[0] for level in MENU]
    assert seconds < 1.1 * min(fixed) < play(started(f"uniform(seed={seed})"), per_bit)[0]
    assert seconds < sorted(fixed)[1]
    assert levels[0] == 2 and (fmean(levels[-20:]) > 3 or per_bit == 0.01)


def test_mqgrad_counts_what_the_way_back_loses():
    """The same gradients and errors; where means come back encoded, the signal is found all the same."""
    signal, own, workers, error = 1.0, 3.0, 2, 0.2
    square, there = signal + own, (own + error * (signal + own)) / workers
    noises = []
    for relayed in (0.0, 1.0):
        controller = started("mqgrad")
        mean = (signal + there) * (1 + relayed * error)
        about = (square, mean, math.nan, math.nan, workers, relayed)
        product = signal + own / workers  # whatever messages lose
        controller.decide(Observation(10, 4, 0.1, 0.0, 1.0, error, (1.0,), *about, product=product))
        assert controller._signal == pytest.approx(signal)
        noises.append(controller._noise(4, workers)[0])
    assert noises == pytest.approx([there / signal, there / signal + error * (signal + there) / signal])


@pytest.mark.parametrize(("growth", "expected"), [
    (0.25, [2, 4, 6, 8, 10, 12, 14, 16, 20, 24, 30, 36, 44, 54, 66, 82, 102]),
    (0.0, list(range(2, 103, 2))),
    (1.0, [2, 4, 8, 16, 32, 64]),
])  # fmt: skip
def test_mqgrad_decides_at_ever_longer_intervals(growth, expected):
    controller = started(f"mqgrad(interval=2, growth={growth})")
    assert [step for step in range(1, 103) if controller.next_decision(step) == step] == expected
    resumed = started(f"mqgrad(interval=2, growth={growth})")
    assert [step for step in range(40, 103) if resumed.next_decision(step) == step] == [
        step for step in expected if step >= 40
    ]
    assert resumed.next_decision(21) == next(step for step in expected if step >= 21)  # and back


def test_mqgrad_counts_the_steps_of_an_interval():
    """Twice as long an interval is twice the seconds of it."""
    spent = []
    for step in (20, 30):
        controller = started("mqgrad")
        controller.decide(seen(10, loss=2.0, seconds=0.1))
        controller.decide(seen(step, loss=1.9, seconds=0.1))
        spent.append(controller._spent[0])
    assert spent == pytest.approx([1.0, 2.0])


def test_under_feedback_what_is_lost_comes_later_and_is_no_noise():
    """Residuals as they settle, r = e (1 + r), and gradients of which little is signal."""
    error, workers = {2: 0.8, 4: 0.5, 8: 0.1}, 2
    about = (1.0, 0.505, 2, error[2], workers, 0.0)
    steps = {}
    for owed in (0.0, 1.0):
        controller = started("mqgrad")
        owes = error[4] / (1 - error[4]) if owed else error[4]
        product = 0.01 + (1 - owed * error[4]) * 0.99 / workers
        controller.decide(Observation(10, 4, 0.1, 0.0, 1.0, owes, (1.0,), *about, owed, product))
        assert controller._error(4) == pytest.approx(error[4]) and controller._error(2) == error[2]
        noise, made = controller._noise(2, workers)
        steps[owed] = controller.kappa * noise, controller._delay(2)
        assert (made == 0) == bool(owed)
        assert controller._signal == pytest.approx(0.01)
    assert (
        steps[1.0] == pytest.approx((0.15 * 0.99 / 2 / 0.01, 4.0))
        and steps[0.0][1] == 0 < steps[1.0][0] < steps[0.0][0]
    )
    controller._relayed = 1.0  # as late once more
    assert controller._delay(2) == pytest.approx(8.0)
    controller._errors[2] = 1.3  # by a line through others
    assert math.isfinite(controller._delay(2))


@pytest.mark.parametrize(
    "scheme, route, workers, relays",
    [
        ("qsgd", "auto", 2, False), ("qsgd", "auto", 3, True), ("qsgd", "two-shot", 2, True),
        ("qsgd", "gather", 3, False), ("topk", "auto", 3, False), ("powersgd", "auto", 3, False),
    ],
)  # fmt: skip
def test_who_encodes_a_mean_once_more(scheme, route, workers, relays):
    exchange = tw.AllReduce(route=route)
    exchange.workers = workers
    assert exchange.relays(tw.scheme(scheme)) is relays


def test_mqgrad_never_goes_where_noise_drowns_the_signal():
    controller, level = started("mqgrad(seed=1)"), 8
    for number in range(60):  # two bits, seen beside, would drown it
        wondered = controller.wonders(level)
        noise = (1.0, 0.55, wondered, {2: 50.0}.get(wondered, 0.001), 2, 0.0, 0.0, 0.55)
        level = controller.decide(seen(level=level, loss=2.0 - 0.01 * number, noise=noise))
        assert level > 2


def test_mqgrad_goes_up_when_the_loss_rises():
    controller, level = started("mqgrad(rate=0)"), 2
    for number in range(16):
        level = controller.decide(seen(level=level, loss=1.0 + 0.1 * number, seconds=0.01 * level))
    assert level > 2


def taught(drop_of, seconds_of=lambda more: 1.0):
    """kappa after lessons: decisions that more of it made likely, or less, by turns."""
    controller = started("mqgrad(rate=0.1)")
    for number in range(60):
        more = number % 2 == 1
        controller._trace = [0.0, 0.0]
        controller._learn([1.0 if more else -1.0, 0.0], drop_of(more), seconds_of(more))
    return controller.kappa


def test_mqgrad_learns_how_much_noise_costs():
    before = started("mqgrad").kappa
    assert taught(lambda more: 0.05 if more else -0.02) > 1.5 * before
    assert taught(lambda more: -0.02 if more else 0.05) < before / 1.5


def test_mqgrad_learns_that_seconds_cost():
    """Equal drops; decisions that more kappa made likely took eight times as long: less of it."""
    assert taught(lambda more: 0.02, lambda more: 4.0 if more else 0.5) < started("mqgrad").kappa


def test_mqgrad_credits_a_move_with_what_follows():
    """The loss falls in the interval after the one that the move was for."""
    controller = started("mqgrad(rate=0.2)")
    for number in range(10):
        controller._learn([0.0, 0.0], 0.02 + 0.01 * (number % 2), 1.0)
    controller._learn([1.0, 0.0], 0.02, 1.0)
    before = controller.kappa
    controller._learn([0.0, 0.0], 0.2, 1.0)
    assert controller.kappa > before


def test_slopes_are_those_of_the_policy():
    """By differences: what the policy gradient climbs is the log of what was drawn from."""
    for at in (0, 1):
        found = []
        for shift in (-1e-5, 0.0, 1e-5):
            controller = started("mqgrad")
            controller.decide(seen(level=4, loss=2.0, seconds=0.1, noise=(1.0, 0.6, 2, 0.7, 2, 0.0, 0.0, 0.6)))
            controller._learnt[at] += shift
            found.append(controller._policy((2, 4, 8), 2))
        for action in range(3):
            slope = (math.log(found[2][0][action]) - math.log(found[0][0][action])) / 2e-5
            assert found[1][1][action][at] == pytest.approx(slope, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(("knob", "expected"), [("bits", 0.1 / 256), ("factor_rank", 0.05)])
def test_errors_of_levels_that_nobody_measured_follow_from_the_knob(knob, expected):
    """A bit more is a quarter of the error; ranks and densities have no such law."""
    controller = started("mqgrad")
    controller.knob = knob
    controller.decide(seen(level=4))
    assert controller._error(8) == pytest.approx(expected) and controller._error(4) == 0.1
    controller._owed, controller._errors = 1.0, {4: 0.75, 16: 0.01}
    owed = {level: controller._error(level) / (1 - controller._error(level)) for level in (2, 4, 8)}
    factor = 16 if knob == "bits" else 2
    assert owed == pytest.approx({2: 3 * factor, 4: 3, 8: 3 / factor**2 if knob == "bits" else 3 / factor})


def test_a_rate_of_zero_learns_nothing():
    still, learnt = started("mqgrad(rate=0)"), started("mqgrad(rate=0.2)")
    play(still)
    play(learnt)
    assert (still.kappa, still.temperature) == (started("mqgrad").kappa, started("mqgrad").temperature)
    assert learnt.kappa != still.kappa


def test_a_learnt_policy_is_where_the_next_run_starts(tmp_path):
    controller = started("mqgrad(rate=0.2)")
    play(controller)
    torch.save(controller.state_dict(), tmp_path / "policy")
    again = started(f"mqgrad(policy={str(tmp_path / 'policy')!r})")
    assert (again.kappa, again.temperature) == (controller.kappa, controller.temperature)
    assert again.kappa != started("mqgrad").kappa


def test_a_policy_for_other_levels_raises(tmp_path):
    torch.save(started("mqgrad(levels_from=(2, 4))").state_dict(), tmp_path / "policy")
    with pytest.raises(ValueError, match=r"is for \[2, 4\], not \[2, 4, 8, 16\]"):
        started(f"mqgrad(policy={str(tmp_path / 'policy')!r})")


def test_what_is_no_policy_raises(tmp_path):
    file = tmp_path / "policy"
    for content, match in ((b"nonsense", "cannot be read"), (None, "holds no log kappa")):
        if content is None:
            torch.save(started("mqgrad").state_dict() | {"learnt": [0.0]}, file)
        else:
            file.write_bytes(content)
        with pytest.raises(ValueError, match=match):
            started(f"mqgrad(policy={str(file)!r})")
