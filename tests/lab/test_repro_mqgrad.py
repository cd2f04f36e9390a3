"""The reproduction's parts: the ladder of widths, a short run on a real server, targets and claims."""

import math

import pytest
import torch

from thinwire.core.bucket import Bucket
from thinwire.lab.network.network import parse_network
from thinwire.lab.repro import _mqgrad_runs as task
from thinwire.lab.repro import mqgrad as repro
from thinwire.lab.repro._mqgrad_runs import Order, ServedRun


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
    spec = repro.policies(40)[name].format(seed=0)
    order = Order(spec, 0, 40, "paced:1gbit", str(tmp_path / "learnt"))
    run = task.run_served(order, None)
    assert len(run.levels) == 40 and set(run.levels) <= set(task.MENU)
    assert len(run.curve) == 40 // task.EVALUATE_EVERY
    assert [seconds for seconds, _ in run.curve] == sorted(seconds for seconds, _ in run.curve)
    assert run.curve[-1][1] < 0.8 * run.curve[0][1] and run.accuracy > 0.5
    learnt = torch.load(tmp_path / "learnt", weights_only=True)
    if name == "mqgrad":
        assert learnt["decisions"] == 4 and run.controller_seconds > 0


def test_a_run_ends_on_all_workers_when_its_seconds_are_over():
    run = task.run_served(Order("fixed(level=2)", 0, 100_000, "paced:1gbit", seconds=0.2), None)
    assert 0.2 <= run.seconds < 100 and len(run.levels) % task.EVALUATE_EVERY == 0


def outcome(losses, accuracy=0.8, levels=(4,) * 8):
    return ServedRun(tuple((float(at), loss) for at, loss in enumerate(losses, 1)), levels, accuracy, 0.0)


def test_the_target_is_what_16_bit_has_reached_by_four_fifths_of_its_steps():
    runs = [outcome([1.0, 0.7, 0.5, 0.6, 0.2]), outcome([1.0, 0.9, 0.8, 0.7, 0.6])]
    assert repro.targets({"16 bit": runs}) == [0.5, 0.7]


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
    outcomes = {name: [outcome([0.9, 0.7, 0.5, 0.4, 0.3])] for name in repro.policies(8)}
    result = repro.summary(outcomes | {"mqgrad": [learner]}, parse_network("paced:1gbit"))
    told = {claim.claim: claim.holds for claim in result.claims}
    assert [holds for claim, holds in told.items() if claim.startswith("mqgrad: ")] == holds
    assert [holds for claim, holds in told.items() if claim.startswith(repro.CARRIED)] == [True, True]
    assert sum("learning helps" in claim for claim in told) == 1
    (table,) = result.tables
    assert [row[0] for row in table.rows] == list(repro.policies(8))
    assert all(len(row) == len(table.columns) for row in table.rows)
