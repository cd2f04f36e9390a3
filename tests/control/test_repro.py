"""The reproduction's parts: the ladder of widths, and a short run under every controller."""

import math

import pytest
import torch

from thinwire.bucket import Bucket
from thinwire.lab import repro_mqgrad as repro


def test_the_ladder_loses_less_on_every_rung():
    torch.manual_seed(0)
    flat, errors, sizes = torch.randn(2000), [], []
    for level in repro.MENU:
        bucket = Bucket.of(flat.clone())
        payload = torch.empty(repro.Ladder().nbytes(bucket.layout, level), dtype=torch.uint8)
        repro.Ladder().encode(bucket, level, payload)
        out = torch.zeros_like(flat)
        repro.Ladder().decode_add(payload, bucket.layout, level, out, 1.0)
        errors.append(float((out - flat).square().sum()))
        sizes.append(len(payload))
    assert errors == sorted(errors, reverse=True) and sizes == sorted(sizes)


@pytest.mark.parametrize("name", ["4 bit", "random", "norm rule", "mqgrad"])
def test_a_short_run_learns_and_counts(name):
    specs = repro.FIXED | repro.RIVALS | repro.LEARNER
    outcome = repro.train(specs[name], 0, steps=30)
    assert len(outcome.levels) == len(outcome.curve) == 30
    assert set(outcome.levels) <= set(repro.MENU)
    assert outcome.curve[-1][1] < outcome.curve[0][1] and outcome.accuracy > 0.3
    assert outcome.seconds_to_target == math.inf


def test_claims_follow_from_the_runs():
    def outcome(seconds, accuracy, levels):
        return repro.Outcome(((seconds, 0.1),), levels, accuracy, 0.0)

    fixed = {name: [outcome(10.0, 0.8, (4,) * 8)] for name in repro.FIXED}
    learner = [outcome(9.0, 0.795, (2, 2, 2, 2, 4, 4, 4, 4))]
    assert [claim["holds"] for claim in repro._claims(fixed | {"mqgrad": learner})] == [True, True, True]
    learner = [outcome(11.0, 0.7, (4, 4, 4, 4, 2, 2, 2, 2))]
    assert [claim["holds"] for claim in repro._claims(fixed | {"mqgrad": learner})] == [False, False, False]
