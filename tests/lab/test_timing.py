"""Train once, time on many links: a run put together is the run as trained on that link."""

from dataclasses import replace

import pytest

from helpers.runs import made_up
from thinwire.lab.runs import compare as module
from thinwire.lab.runs import curves, timing
from thinwire.lab.runs.compare import compare
from thinwire.lab.runs.record import CurvePoint, Run, RunPlan
from thinwire.lab.runs.run import execute

TASK = "regression(steps=8, evaluate_every=1)"


@pytest.mark.parametrize(
    ("scheme", "every", "bits"), [("fp16", 1, 8e6), ("qsgd(bits=8)", 4, 1e6)], ids=["every step", "local steps"]
)
def test_both_ways_agree(scheme, every, bits):
    """Learnt to the bit, sent to the byte; a step takes at least what its bytes do, on both ways; and the target is met
    after equally many steps, each as long as those that were timed. (How long that is, no test can hold a machine to.)
    """
    plan = RunPlan(TASK, scheme, 3, network=f"paced:{bits / 1e3:.0f}kbit", workers=2, every=every, outer="average")
    whole = execute(plan, None)
    trained, timed = execute(timing.training(plan), None), execute(timing.timing(plan), None)
    assert timed.curve == [] and timed.final is None and timed.totals["steps"] == 8
    composed = timing.composed(trained, [timed])
    assert composed.plan == plan and composed.final == whole.final is not None
    for ours, theirs in zip(composed.curve, whole.curve, strict=True):
        assert (ours.step, ours.loss, ours.score) == (theirs.step, theirs.loss, theirs.score)
    for name in ("bytes_sent", "rounds", "steps", "vnmse"):
        assert composed.totals[name] == pytest.approx(whole.totals[name], rel=0.01, nan_ok=True)
    for run in (composed, whole):
        assert run.totals["seconds"] >= 0.9 * 8 * run.totals["bytes_sent"] / bits
    target = curves.rolling([point.score for point in whole.curve])[-2]
    steps = [
        curves.crossing([replace(point, seconds=point.step) for point in run.curve], target, rising=run.rising)
        for run in (composed, whole)
    ]
    assert steps[0] == steps[1] and 5 <= steps[0] <= 7
    step_seconds = timed.totals["seconds"] / timed.totals["steps"]
    assert replace(composed, target=target).seconds_to_target == pytest.approx(steps[0] * step_seconds)


def test_every_link_has_a_table_and_schemes_are_trained_once(monkeypatch):
    carried = []

    def fake(plan, links, on_point):
        carried.append(plan)
        slow = {"none": 1.0, "paced:1mbit": 4.0, "paced:10mbit": 2.0}[plan.network]
        return replace(made_up(plan.scheme, slow, [0.5, 0.7, 0.8, 0.9], seed=plan.seed, target=None), plan=plan)

    monkeypatch.setattr(module, "execute", fake)
    record = compare(
        ["regression"], ["fp16", "qsgd"], network=["paced:1mbit", "paced:10mbit", "none"], seeds=2, workers=2
    )
    assert sum(plan.timed is None for plan in carried) == 4 and all(
        plan.network == "none" for plan in carried if plan.timed is None
    )
    assert sum(plan.timed is not None for plan in carried) == 3 * 2 * 2  # the loopback's, too
    parts = record.by_network()
    assert [part.config["network"] for part in parts] == ["paced:1mbit", "paced:10mbit", "none"]
    ends = [part.runs[0].curve[-1].seconds for part in parts]
    assert ends == pytest.approx([16.0, 8.0, 4.0])
    assert all(run.target is not None for run in record.runs)


@pytest.mark.parametrize(("seeds", "turns"), [(1, timing.TURNS), (3, 1)])
def test_a_runs_seconds_are_its_own(seeds, turns, monkeypatch):
    """What the clock varies by from seed to seed is in the intervals; a lone seed is timed more than once."""
    timed = []

    def fake(plan, links, on_point):
        timed.extend([plan.seed] * (plan.timed is not None))
        seconds = 1.0 + plan.seed if plan.timed else 100.0
        return replace(made_up(plan.scheme, seconds, [0.5, 0.7, 0.8, 0.9], seed=plan.seed, target=None), plan=plan)

    monkeypatch.setattr(module, "execute", fake)
    record = compare(["regression"], ["fp16"], network="paced:1mbit", seeds=seeds, workers=2)
    assert timed == [seed for seed in range(seeds) for _ in range(turns)]
    assert [run.curve[-1].seconds for run in record.runs] == pytest.approx([4.0 * (1 + seed) for seed in range(seeds)])


def test_what_the_clock_decides_is_trained_on_every_link():
    plan = RunPlan("regression", "qsgd", 0)
    assert timing.timeless(plan) and timing.timeless(replace(plan, exchange="server", every=8))
    assert not timing.timeless(replace(plan, controller="mqgrad"))
    assert not timing.timeless(replace(plan, exchange="server(staleness=2)"))


def test_timed_steps_make_whole_rounds():
    plan = RunPlan("regression", "qsgd", 0)
    assert [timing.timing(replace(plan, every=every)).timed for every in (1, 3, 8, 30)] == [8, 9, 8, 30]
    assert [timing.warm_steps(replace(plan, every=every)) for every in (1, 8)] == [2, 8]


def test_a_failure_on_either_side_fails_the_run():
    trained, broken = made_up("fp16", 1.0, [0.9]), made_up("fp16", 1.0, [0.9], reason="worker 1 was killed")
    assert timing.composed(trained, [trained, broken]).reason == "worker 1 was killed"
    assert timing.composed(broken, [trained]).reason == "worker 1 was killed"


def test_bytes_are_those_of_training_unless_only_a_link_counts_them():
    """A few steps of streaming may end with a part under way, and so count one too few."""
    totals = {
        "steps": 10.0,
        "rounds": 5.0,
        "seconds": 1.0,
        "bytes_sent": 1000.0,
        "bytes_dense": 4000.0,
        "messages": 20.0,
    }
    point = CurvePoint(step=10, seconds=1.0, bytes_sent=1000.0, loss=0.5, score=0.5)
    trained = Run(RunPlan(TASK, "fp16", 0), "loss", False, None, 10, [point], totals)
    few = {"steps": 2.0, "rounds": 1.0, "seconds": 4.0, "bytes_sent": 150.0, "bytes_dense": 800.0, "messages": 3.0}
    link = replace(trained.plan, network="shaped:1mbit")
    timed = replace(trained, plan=link, totals=few | {"interface_bytes": 170.0, "ledger_bytes": 150.0})
    found = timing.composed(trained, [timed])
    assert found.totals["seconds"] == found.curve[0].seconds == 20.0
    assert found.totals["bytes_sent"] == found.curve[0].bytes_sent == 1000.0 and found.totals["messages"] == 20.0
    metered = replace(timed, totals=few | {"interface_bytes": 170.0})
    found = timing.composed(trained, [metered])
    assert found.totals["bytes_sent"] == found.curve[0].bytes_sent == 750.0
