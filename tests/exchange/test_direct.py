"""The direct way by itself, on a group that is made up."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from thinwire.exchange.direct import Direct
from thinwire.exchange.transport import Transport
from thinwire.schemes import parse


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
        self.log, self.sums, self.started, self.lost, self.refused = [], [], 0, lost, refused

    def size(self):
        return 2

    def allreduce(self, tensors, op):
        number, self.started = self.started, self.started + 1
        if number == self.refused:
            raise RuntimeError(f"sum {number} was refused")
        self.log.append(f"start {number}")
        self.sums.append((tensors[0].data_ptr(), tensors[0].dtype, tensors[0].numel()))
        tensors[0].mul_(2)
        return Sum(self.log, number, number == self.lost)


def direct_on(group, spec="fp32"):
    return Direct(group, parse(spec), Transport())


def step(direct, group, buckets=3):
    """What each bucket's `done` was told, in order, and the buckets."""
    told, tensors = [], [torch.full((4,), float(i + 1)) for i in range(buckets)]
    for number, tensor in enumerate(tensors):

        def done(error, number=number):
            told.append((number, error and str(error)))
            group.log.append(f"done {number}")

        direct.mean(tensor, last=number == buckets - 1, done=done)
    return told, tensors


def test_all_sums_are_on_the_wire_before_the_first_is_waited_for():
    group = Group()
    direct = direct_on(group)
    told, tensors = step(direct, group)
    assert group.log == [
        "start 0", "start 1", "start 2", "wait 0", "done 0", "wait 1", "done 1", "wait 2", "done 2",
    ]  # fmt: skip
    assert told == [(0, None), (1, None), (2, None)]
    assert all(torch.equal(tensor, torch.full((4,), float(i + 1))) for i, tensor in enumerate(tensors))
    totals = direct._transport.ledger.totals()
    assert (totals["messages"], totals["bytes_given"], totals["bytes_dense"], totals["bytes_sent"]) == (3, 48, 48, 48)
    assert totals["exposed_seconds"] == pytest.approx(totals["encode_seconds"] + totals["wire_seconds"])


@pytest.mark.parametrize("given", [torch.float32, torch.float64, torch.bfloat16])
def test_what_is_cast_stays_in_the_buckets_own_memory(given):
    group = Group()
    direct = direct_on(group, "fp16")
    bucket = torch.randn(1001).to(given)
    expected = (bucket * 0.5).to(torch.float16) * 2
    direct.mean(bucket, last=True, done=lambda error: None)
    assert group.sums == [(bucket.data_ptr(), torch.float16, 1001)]
    assert torch.equal(bucket, expected.to(given))
    totals = direct._transport.ledger.totals()
    assert (totals["bytes_given"], totals["bytes_dense"]) == (2002, 1001 * given.itemsize)


@pytest.mark.parametrize(
    ("group", "told", "abandoned", "booked"),
    [
        (Group(lost=1), [(0, None), (1, "sum 1 was lost"), (2, "sum 1 was lost")], 2, 3),
        (Group(refused=1), [(0, "sum 1 was refused"), (1, "sum 1 was refused"), (2, "sum 1 was refused")], 1, 1),
    ],
    ids=["lost", "refused"],
)
def test_every_bucket_is_told_once_and_nothing_is_sent_after_a_failure(group, told, abandoned, booked):
    direct = direct_on(group)
    assert step(direct, group)[0] == told
    assert len(direct._abandoned) == abandoned, "the group's thread must not be the last to hold a work"
    started = group.started
    assert direct._transport.ledger.totals()["messages"] == booked, "what was started was sent, whatever became of it"
    error = told[-1][1]
    assert step(direct, group)[0] == [(0, error), (1, error), (2, error)]
    assert group.started == started


def test_works_of_casts_are_held_for_a_step_and_hold_no_bucket():
    """The first, or the group's thread may abort the process at exit; the second, or DDP's first buckets would be there
    beside its second ones: the whole model once more.
    """
    group = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timedelta(seconds=10))
    direct, before = Direct(group, parse("fp16"), Transport()), []
    for _ in range(2):
        buckets = [torch.ones(size) for size in (1, 2, 3)]
        for bucket in buckets:
            direct.mean(bucket, last=bucket is buckets[-1], done=lambda error: None)
        assert len(direct._answered) == 3 and not set(before) & set(direct._answered)
        assert {holders(bucket) for bucket in buckets} == {holders(torch.ones(1))}
        before = direct._answered


def holders(tensor):
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata)


def test_closing_fails_what_is_under_way():
    group = Group()
    direct, told = direct_on(group), []
    direct.mean(torch.ones(4), last=False, done=told.append)
    direct.close()
    direct.close()
    direct.mean(torch.ones(4), last=True, done=told.append)
    assert [str(error) for error in told] == ["this wire is closed"] * 2
    assert group.log == ["start 0"]
