"""Curves: rolling means, when they meet a target, and the target that the baseline sets."""

import math

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


def test_the_target_is_what_the_baseline_holds_at_nine_tenths_of_its_steps():
    scores = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0]
    runs = [made_up("fp16", 1.0, scores, seed=seed, target=None) for seed in (0, 1)]
    runs[1] = made_up("fp16", 1.0, [score / 2 for score in scores], seed=1, target=None)
    others = [made_up("quick", 0.5, scores, seed=seed, target=None) for seed in (0, 1, 2)]
    stated = made_up("quick", 0.5, scores, seed=0, target=0.33)
    curves.set_targets([*runs, *others, stated])
    assert [run.target for run in runs] == pytest.approx([0.8, 0.4])  # of .7, .8 and .9; each seed has its own
    assert [run.target for run in others[:2]] == pytest.approx([0.8, 0.4]) and others[2].target is None
    assert stated.target == 0.33
    assert runs[0].seconds_to_target == pytest.approx(9.0)
