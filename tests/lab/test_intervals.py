"""Intervals: paired, by Student's t, and what they can tell."""

import math

import pytest

from thinwire.lab.report import intervals
from thinwire.lab.report.intervals import Interval


def test_an_interval_is_students():
    found = intervals.interval([1.0, 2.0, 3.0])
    assert (found.mean, found.half) == (2.0, pytest.approx(4.303 / math.sqrt(3)))
    assert intervals.interval([5.0]).half == math.inf
    assert intervals.quantile(22) == intervals.quantile(20) and intervals.quantile(1000) == intervals.quantile(30)


def test_pairs_cancel_what_they_share():
    ours, theirs = [1.1, 5.1, 9.1], [1.0, 5.0, 9.0]
    found = intervals.paired(ours, theirs)
    assert found.mean == pytest.approx(0.1) and found.half < 1e-9
    assert math.exp(intervals.ratio([2.0, 4.0], [1.0, 2.0]).mean) == pytest.approx(2.0)


@pytest.mark.parametrize(
    ("interval", "margin", "said"),
    [
        (Interval(1.0, 0.5), 0.0, "holds"), (Interval(-1.0, 0.5), 0.0, "fails"), (Interval(0.3, 0.5), 0.0, "level"),
        (Interval(-0.1, 0.2), 0.5, "holds"), (Interval(0.2, math.inf), 0.0, "level"),
        (Interval(-0.2, math.inf), 0.0, "level"), (Interval(math.inf, math.nan), 0.0, "holds"),
        (Interval(-math.inf, math.inf), 0.5, "fails"), (Interval(math.nan, math.inf), 0.0, "fails"),
    ],
)  # fmt: skip
def test_verdicts(interval, margin, said):
    """One run alone cannot tell, unless one of the sides failed."""
    assert intervals.verdict(interval, margin) == said
    if interval.mean != -0.1:  # on par is also who is certainly worse by less than the margin, and no one else
        assert intervals.on_par(interval, margin) == said


def test_texts():
    assert Interval(0.012, 0.003).text("+.1f", 100) == "+1.2 ±0.3"
    assert Interval(0.012, math.inf).text("+.1f", 100) == "+1.2"
    assert Interval(-0.5, 0.1).text("+.2g", -1.0) == "+0.5 ±0.1"
