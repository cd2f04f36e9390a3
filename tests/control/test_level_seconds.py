"""Seconds by level: exact where steps do not vary, and cautious where they do."""

import math
import random
from statistics import fmean

import pytest

from thinwire.control.level_seconds import LevelSeconds

LEVELS = (2, 4, 8, 16)


def test_steps_that_do_not_vary_are_taken_as_they_are():
    """Off any line, too; and a level that was never in use is on it."""
    seconds = LevelSeconds(LEVELS)
    for level, found in ((2, 1.0), (4, 1.1), (8, 3.0)):
        seconds.note(level, 10, found, 0.0)
    assert [seconds.of(level) for level in (2, 4, 8)] == [1.0, 1.1, 3.0]
    assert seconds.of(16) > 3.0


def test_before_anything_is_known_the_highest_level_takes_a_step_more():
    seconds = LevelSeconds(LEVELS)
    seconds.note(2, 10, 1.0, math.nan)
    assert [seconds.of(level) for level in LEVELS] == pytest.approx([1 + (level - 2) / 14 for level in LEVELS])


def test_more_bytes_are_never_thought_to_be_faster():
    seconds = LevelSeconds(LEVELS)
    for level, found in ((2, 3.0), (4, 2.0), (8, 1.0)):
        seconds.note(level, 10, found, found / 3)
    assert seconds.of(16) >= seconds.of(8) > 1.0


def test_one_unlucky_interval_does_not_condemn_a_level():
    """As steps of milliseconds vary: 4 was slow when it was tried, 8 quick; steps say otherwise in the long run."""
    draw = random.Random(0)
    true = {2: 5.8, 4: 5.8, 8: 6.7, 16: 8.5}
    seconds = LevelSeconds(LEVELS)
    seconds.note(2, 10, 6.9, 2.3)
    seconds.note(4, 10, 8.4, 2.3)
    seconds.note(8, 10, 6.2, 2.3)
    assert seconds.of(4) < 1.1 * seconds.of(8)
    for _ in range(16):
        odds = [seconds.of(level) ** -20 for level in (4, 8)]  # MQGrad's temperature, without noise
        level = draw.choices((4, 8), odds)[0]
        seconds.note(level, 20, fmean(draw.gauss(true[level], 2.3) for _ in range(20)), 2.3)
    assert seconds.of(4) < seconds.of(8) < seconds.of(16)
    assert seconds.of(4) == pytest.approx(true[4], rel=0.1)


def test_what_changes_is_followed():
    seconds = LevelSeconds(LEVELS)
    for level in (2, 4):
        seconds.note(level, 10, 0.1 * level, 0.0)
    for _ in range(30):
        seconds.note(4, 10, 4.0, 0.1)
    assert seconds.of(4) == pytest.approx(4.0, rel=0.05)


@pytest.mark.parametrize("levels", [(4,), LEVELS])
def test_a_state_brings_all_back(levels):
    whole, resumed = LevelSeconds(levels), LevelSeconds(levels)
    for level in levels:
        whole.note(level, 10, 1.0 + level, 0.5)
    resumed.load(whole.state())
    for each in (whole, resumed):
        each.note(levels[0], 20, 2.0, 0.4)
    assert [whole.of(level) for level in LEVELS] == [resumed.of(level) for level in LEVELS]


def test_a_state_from_before_there_were_weights_is_taken():
    seconds = LevelSeconds(LEVELS)
    seconds.load([[2.0, 0.5], [4.0, 0.7]])
    assert (seconds.of(2), seconds.of(4)) == (0.5, 0.7)


@pytest.mark.parametrize(
    "state", [[[math.nan]], [[0.1], [2.0, 0.0, 1.0]], [[0.1], [2.0, 1.0, math.inf]], [["x"]], [[0.1], [2.0, -1.0]]]
)
def test_what_is_no_state_is_refused_and_nothing_is_lost(state):
    seconds = LevelSeconds(LEVELS)
    seconds.note(2, 10, 1.0, 0.1)
    with pytest.raises(ValueError):
        seconds.load(state)
    assert seconds.of(2) == 1.0
