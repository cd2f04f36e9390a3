"""Curves: rolling means, when they meet a target, and the target that the baseline sets."""

import math
from dataclasses import replace

import pytest

from helpers.runs import made_up
from thinwire.lab.runs import curves


def test_a_rolling_mean_is_of_three_evaluations():
    assert curves.rolling([1.0, 2.0, 3.0, 7.0]) == [2.0, 4.0]
    assert curves.rolling([1.0, 2.0]) == [1.5] and curves.rolling([]) == []


def test_a_lucky_evaluation_is_no_crossing():
    lucky = made_up("x", 1.0, [0.5, 0.9, 0.5, 0.5, 0.6], target=0.8)
    assert lucky.seconds_to_target is None
    held = made_up("x", 1.0, [0.5, 0.9, 0.5, 0.8, 0.8, 0.9], target=0.8)
    assert 5 < held.seconds_to_target <= 6  # means .633, .733, .7, .833


def test_a_crossing_lies_between_two_evaluations():
    rising = made_up("x", 1.0, [0.0, 0.0, 0.0, 0.6], target=0.1)
    falling = made_up("x", 1.0, [1.0, 1.0, 1.0, 0.4], target=0.9, rising=False)
    assert rising.seconds_to_target == pytest.approx(3.5) and falling.seconds_to_target == pytest.approx(3.5)


def test_what_has_diverged_crosses_nothing():
    assert made_up("x", 1.0, [0.9, math.nan, 0.9, 0.9], target=0.8).seconds_to_target is None


def test_the_target_is_what_the_baseline_holds_at_nine_tenths_of_its_steps_less_what_does_not_count():
    scores = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    runs = [made_up("fp16", 1.0, scores, seed=seed, target=None) for seed in (0, 1)]
    runs[1] = made_up("fp16", 1.0, [score / 2 for score in scores], seed=1, target=None)
    others = [made_up("quick", 0.5, scores, seed=seed, target=None) for seed in (0, 1, 2)]
    stated = made_up("quick", 0.5, scores, seed=0, target=0.33)
    curves.set_targets([*runs, *others, stated])
    right = [0.8 - 0.005, 0.4 - 0.005]  # of .7, .8 and .9, less half a point; each seed has its own
    assert [run.target for run in runs] == pytest.approx(right)
    assert [run.target for run in others[:2]] == pytest.approx(right) and others[2].target is None
    assert stated.target == 0.33
    assert runs[0].seconds_to_target == pytest.approx(9.0 - 0.05)


def test_of_what_falls_the_target_lies_above():
    falling = made_up("fp16", 1.0, [4.0, 3.0, 2.0, 2.0, 2.0], target=None, rising=False)
    found = replace(falling, metric="bits per byte")
    curves.set_targets([found])
    assert found.target == pytest.approx(1.01 * 7 / 3)  # of 3, 2 and 2: a hundredth counts as the same


def test_who_ends_level_is_at_the_target():
    """By luck the baseline ends a little higher; that decides nothing."""
    baseline = made_up("fp16", 1.0, [0.5, 0.7, 0.84, 0.854, 0.854, 0.854], target=None)
    level = made_up("quick", 0.5, [0.5, 0.7, 0.84, 0.851, 0.851, 0.851], target=None)
    lower = made_up("low", 0.5, [0.5, 0.7, 0.8, 0.81, 0.81, 0.81], target=None)
    curves.set_targets([baseline, level, lower])
    assert level.seconds_to_target < baseline.seconds_to_target and lower.seconds_to_target is None
