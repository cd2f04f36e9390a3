"""The shortcut by itself, on a group that is made up."""

import pytest
import torch

from thinwire.exchange.shortcut import Shortcut
from thinwire.ledger import Ledger


class Sum:
    def __init__(self, log, number, fails):
        self.log, self.number, self.fails = log, number, fails

    def wait(self):
        self.log.append(f"wait {self.number}")
        if self.fails:
            raise RuntimeError(f"sum {self.number} was lost")


class Group:
    """Two equal workers. `lost`: the sum that fails when waited for; `refused`: the one that cannot even start."""

    def __init__(self, lost=None, refused=None):
        self.log, self.started, self.lost, self.refused = [], 0, lost, refused

    def allreduce(self, tensors, op):
        number, self.started = self.started, self.started + 1
        if number == self.refused:
            raise RuntimeError(f"sum {number} was refused")
        self.log.append(f"start {number}")
        tensors[0].mul_(2)
        return Sum(self.log, number, number == self.lost)


def step(shortcut, group, buckets=3):
    """What each bucket's `done` was told, in order, and the buckets."""
    told, tensors = [], [torch.full((4,), float(i + 1)) for i in range(buckets)]
    for number, tensor in enumerate(tensors):

        def done(error, number=number):
            told.append((number, error and str(error)))
            group.log.append(f"done {number}")

        shortcut.mean(tensor, last=number == buckets - 1, done=done)
    return told, tensors


def test_all_sums_are_on_the_wire_before_the_first_is_waited_for():
    group, ledger = Group(), Ledger()
    told, tensors = step(Shortcut(group, 2, ledger), group)
    assert group.log == [
        "start 0", "start 1", "start 2", "wait 0", "done 0", "wait 1", "done 1", "wait 2", "done 2",
    ]  # fmt: skip
    assert told == [(0, None), (1, None), (2, None)]
    assert all(torch.equal(tensor, torch.full((4,), float(i + 1))) for i, tensor in enumerate(tensors))
    totals = ledger.totals()
    assert (totals["messages"], totals["bytes_given"], totals["bytes_dense"], totals["bytes_sent"]) == (3, 48, 48, 48)
    assert totals["wire_seconds"] == totals["exposed_seconds"]


@pytest.mark.parametrize(
    ("group", "told", "held"),
    [
        (Group(lost=1), [(0, None), (1, "sum 1 was lost"), (2, "sum 1 was lost")], 3),
        (Group(refused=1), [(0, "sum 1 was refused"), (1, "sum 1 was refused"), (2, "sum 1 was refused")], 1),
    ],
    ids=["lost", "refused"],
)
def test_every_bucket_is_told_once_and_nothing_is_sent_after_a_failure(group, told, held):
    shortcut = Shortcut(group, 2, Ledger())
    assert step(shortcut, group)[0] == told
    assert len(shortcut._answered) == held, "the group's thread must not be the last to hold a work"
    started = group.started
    error = told[-1][1]
    assert step(shortcut, group)[0] == [(0, error), (1, error), (2, error)]
    assert group.started == started


def test_closing_fails_what_is_under_way():
    group = Group()
    shortcut, told = Shortcut(group, 2, Ledger()), []
    shortcut.mean(torch.ones(4), last=False, done=told.append)
    shortcut.close()
    shortcut.close()
    shortcut.mean(torch.ones(4), last=True, done=told.append)
    assert [str(error) for error in told] == ["this wire is closed"] * 2
    assert group.log == ["start 0"]
