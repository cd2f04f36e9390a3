"""The reproduction's parts: the ladder of widths, a short run on a real server, targets and claims."""

import math

import pytest
import torch

from thinwire.core.bucket import Bucket
from thinwire.lab.network.network import parse_network
from thinwire.lab.repro.claims import OURS, Findings, Stoppable
from thinwire.lab.repro.mqgrad import evaluated
from thinwire.lab.repro.mqgrad import mqgrad as repro
from thinwire.lab.repro.mqgrad import runs as task
from thinwire.lab.repro.mqgrad.runs import Order, ServedRun

EVERY = repro.studies()["60mbit"]


def test_the_ladder_loses_less_on_every_rung():
    torch.manual_seed(0)
    flat, errors, sizes = torch.randn(2000), [], []
    for level in task.MENU:
        bucket = Bucket.of(flat.clone())
        payload = torch.empty(task.Ladder().nbytes(bucket.layout, level), dtype=torch.uint8)
        task.Ladder().encode(bucket, level, payload)
        out = torch.zeros_like(flat)
        task.Ladder().decode_add(payload, bucket.layout, level, out, 1.0)
        errors.append(float((out - flat).square().sum()))
        sizes.append(len(payload))
    assert errors == sorted(errors, reverse=True) and sizes == sorted(sizes)


@pytest.mark.parametrize("name", ["16 bit", "mqgrad", "a level per halving of mean/std"])
def test_a_short_run_on_a_real_server_learns_and_is_kept(name, tmp_path):
    spec = EVERY.policies[name].controller.format(seed=0)
    order = Order(spec, 0, 40, "paced:1gbit", str(tmp_path / "learnt"))
    run = task.run_served(order, None)
    assert len(run.levels) == 40 and set(run.levels) <= set(task.MENU)
    assert len(run.curve) == 40 // task.EVALUATE_EVERY
    assert [seconds for seconds, _ in run.curve] == sorted(seconds for seconds, _ in run.curve)
    assert run.curve[-1][1] < 0.8 * run.curve[0][1] and run.accuracy > 0.5
    learnt = torch.load(tmp_path / "learnt", weights_only=True)
    if name == "mqgrad":
        assert learnt["decisions"] == 4 and run.controller_seconds > 0


@pytest.mark.parametrize(("part", "name"), [("cnn", "4 bit"), ("density", "mqgrad"), ("rank", "mqgrad")])
def test_other_problems_and_knobs_learn_on_the_same_server(part, name):
    study = repro.studies()[part]
    policy = study.policies[name]
    order = Order(policy.controller.format(seed=0), 0, 40, "paced:1gbit", problem=study.problem, scheme=policy.scheme)
    run = task.run_served(order, None)
    assert run.curve[-1][1] < 0.8 * run.curve[0][1] and run.accuracy > 0.4
    if name == "mqgrad":  # not one level alone is tried
        assert len(set(run.levels)) > 1 and {f"{part} {level:g}" for level in run.levels} <= set(study.policies)


def test_both_problems_send_messages_of_about_the_same_size():
    small, large = sorted(
        sum(each.numel() for each in problem.network(0).parameters()) for problem in task.PROBLEMS.values()
    )
    assert large < 1.1 * small


def test_a_run_ends_on_all_workers_when_its_seconds_are_over():
    run = task.run_served(Order("fixed(level=2)", 0, 100_000, "paced:1gbit", seconds=0.2), None)
    assert 0.2 <= run.seconds < 100 and len(run.levels) % task.EVALUATE_EVERY == 0


def outcome(losses, accuracy=0.8, levels=(4,) * 8):
    return ServedRun(tuple((float(at), loss) for at, loss in enumerate(losses, 1)), levels, accuracy, 0.0)


def test_the_target_is_what_16_bit_has_reached_by_four_fifths_of_its_steps():
    runs = [outcome([1.0, 0.7, 0.5, 0.6, 0.2]), outcome([1.0, 0.9, 0.8, 0.7, 0.6])]
    assert evaluated.targets({"16 bit": runs}) == [0.5, 0.7]


def test_seconds_to_a_target_that_was_never_reached_are_infinite():
    assert outcome([3.0, 2.0, 1.0]).seconds_to(2.5) == 2.0
    assert outcome([3.0, 2.0, 1.0]).seconds_to(0.5) == math.inf


@pytest.mark.parametrize(
    ("learner", "holds"),
    [
        (outcome([0.5, 0.4, 0.3, 0.2, 0.1], 0.795, (2, 2, 2, 2, 4, 4, 4, 4)), [True, True, True]),
        (outcome([0.9, 0.9, 0.9, 0.9, 0.1], 0.7, (4, 4, 4, 4, 2, 2, 2, 2)), [False, False, False]),
        (outcome([0.9, 0.9, 0.9, 0.9, 0.9], 0.8, (2, 2, 2, 2, 4, 4, 4, 4)), [False, True, True]),
    ],
)
def test_claims_follow_from_the_runs(learner, holds):
    outcomes = {name: [outcome([0.9, 0.7, 0.5, 0.4, 0.3])] * 2 for name in EVERY.policies}
    outcomes |= {"mqgrad": [learner] * 2}
    told = {claim.claim: claim.holds for claim in evaluated.claims_of(outcomes, EVERY.fixed, "60mbit")}
    assert [holds for claim, holds in told.items() if claim.startswith("mqgrad: ")] == holds
    assert [holds for claim, holds in told.items() if claim.startswith(evaluated.CARRIED)] == [True, True]
    assert sum("learning helps" in claim for claim in told) == 1
    table = evaluated.table(outcomes, "anywhere")
    assert [row[0] for row in table.rows] == list(EVERY.policies)
    assert all(len(row) == len(table.columns) for row in table.rows)


def test_one_seed_decides_nothing_but_a_target_that_was_missed():
    outcomes = {name: [outcome([0.9, 0.7, 0.5, 0.4, 0.3])] for name in EVERY.policies}
    sooner, missed = outcome([0.5, 0.4, 0.3, 0.2, 0.1]), outcome([0.9] * 5)
    for learner, verdict in ((sooner, "level"), (missed, "fails")):
        claims = evaluated.claims_of(outcomes | {"mqgrad": [learner]}, EVERY.fixed, "60mbit")
        assert [claim.verdict for claim in claims if claim.claim.startswith("mqgrad: reaches")] == [verdict]


def test_a_run_that_is_late_or_never_there_is_seen():
    outcomes = {name: [outcome([0.9, 0.7, 0.5, 0.4, 0.3])] * 3 for name in EVERY.policies}
    outcomes |= {"mqgrad": [outcome([0.4] * 5), outcome([0.9, 0.9, 0.9, 0.9, 0.1]), outcome([0.9] * 5)]}
    listing = evaluated.by_seed(outcomes, "anywhere", 400)
    assert dict(listing.rows)["mqgrad"] == "1.00  5.00  never" and "seeds 400 to 402" in listing.title
    whys = {claim.claim: claim.why_not for claim in evaluated.claims_of(outcomes, EVERY.fixed, "60mbit")}
    late, closeness, learning, few = (why for claim, why in whys.items() if evaluated.CARRIED not in claim)
    assert late == "its seconds over those of the best, seed by seed: 0.25, 1.2, never there"
    assert closeness is few is None and learning == (
        "with learning and without the level is 4 and 4 in the first quarter, 4 and 4 in the last"
    )


def test_another_knob_is_judged_by_its_own_fixed_levels():
    study = repro.studies()["density"]
    outcomes = {name: [outcome([0.9, 0.7, 0.5, 0.4, 0.3])] for name in study.policies}
    outcomes |= {"16 bit": [outcome([0.6, 0.5, 0.4, 0.3, 0.2])]}  # sooner than all of them
    assert study.fixed == ["density 0.01", "density 0.03", "density 0.1", "density 0.3"]
    first, *_ = evaluated.claims_of(outcomes, study.fixed, study.title, study.source)
    assert "density 0.01" in first.expected and first.source == OURS


def test_what_is_stopped_tells_the_seeds_that_are_whole(monkeypatch):
    made = []

    def run_served(order, namespaces):
        if len(made) == len(EVERY.policies) + 3:
            raise KeyboardInterrupt
        made.append(order)
        return outcome([0.9, 0.7, 0.5, 0.4, 0.3])

    monkeypatch.setattr(task, "run_served", run_served)
    stop = Stoppable()
    net = parse_network("paced:1gbit")
    found = repro.run_policies(EVERY, range(5), "policy", net, lambda text: None, stop)
    assert stop.stopped and {len(runs) for runs in found.values()} == {1}
    first, *others = made[: len(EVERY.policies)]
    assert (first.controller, first.steps, first.seconds) == ("fixed(level=16)", repro.STEPS, math.inf)
    assert {(each.steps, each.seconds) for each in others} == {(repro.MOST * repro.STEPS, 5.0)}

    found = Findings(5, lambda text: None)
    repro.Study("60mbit", EVERY.policies, "paced:60mbit", earlier=0).add_to(found, None)
    assert found.stop.stopped and found.tables == [] and found.claims == []  # not one seed was whole


def test_a_quick_look_is_at_seeds_that_do_not_count(monkeypatch):
    seeds = []
    monkeypatch.setattr(task, "run_served", lambda order, namespaces: seeds.append(order.seed) or outcome([0.9, 0.5]))
    monkeypatch.setattr(repro, "learn_policy", lambda *arguments: None)
    for quick in (True, False):
        seeds.clear()
        repro.parts(quick, None)["60mbit"](Findings(2, lambda text: None))
        assert sorted(set(seeds)) == ([0, 1] if quick else [repro.FIRST_SEED, repro.FIRST_SEED + 1])
