"""Lanes by themselves, with collectives that are made up: order, depth, failure, closing, and what they let go of."""

import gc
import threading
import time
import weakref
from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from thinwire.core.bucket import Bucket
from thinwire.core.memory import Memory
from thinwire.exchange.lane import DEPTH, Threaded
from thinwire.exchange.transport import Transport
from thinwire.schemes.powersgd import PowerSGD


@dataclass(frozen=True)
class Logged:
    """A collective that takes note when it is started and when it is waited for; `fails` says when it breaks."""

    name: tuple[str, int]
    log: list
    fails: str = ""

    def amounts(self):
        return {"bytes_sent": 1}

    def start(self):
        self.log.append(("start", self.name))
        if self.fails == "start":
            raise RuntimeError(f"{self.name} did not start")
        return self

    def wait(self):
        self.log.append(("wait", self.name))
        if self.fails == "wait":
            raise RuntimeError(f"{self.name} broke")


def asking(name, rounds, log, fails, scratch):
    """A conversation of so many rounds, one collective each. `fails`: {(name, round): when}."""
    for number in range(rounds):
        yield [Logged((name, number), log, fails.get((name, number), ""))]
    return name


@pytest.fixture
def lane():
    lane = Threaded(Transport(), "test-lane")
    yield lane
    lane.close()


def submit(lane, names, rounds, log, fails=None, told=None):
    """One step of jobs, all of them handed over before the first may begin."""
    go_on = threading.Event()

    def first(scratch):
        go_on.wait(60)
        return asking(names[0], rounds, log, fails or {}, scratch)

    begins = [first, *(partial(asking, name, rounds, log, fails or {}) for name in names[1:])]
    jobs = [
        lane.submit(
            begin,
            last=name == names[-1],
            done=lambda error, name=name: told is not None and told.append((name, error and str(error))),
        )
        for name, begin in zip(names, begins, strict=True)
    ]
    go_on.set()
    return jobs


def finished(jobs):
    assert all(job.wait(60) for job in jobs)
    return [job.error for job in jobs]


@pytest.mark.parametrize("rounds", [1, 2, 3])
def test_the_order_is_a_function_of_the_jobs_alone(rounds):
    """Whatever each worker's timing: two lanes that got the same jobs start the same collectives in the same order."""
    logs = []
    for pause in (0.0, 0.002):
        lane, log = Threaded(Transport(), "test-lane"), []
        for _ in range(2):
            jobs = []
            for name in "abcd":
                time.sleep(pause)
                jobs.append(
                    lane.submit(partial(asking, name, rounds, log, {}), last=name == "d", done=lambda error: None)
                )
            assert finished(jobs) == [None] * 4
        lane.close()
        logs.append([name for what, name in log if what == "start"])
    assert logs[0] == logs[1]
    assert [name for name in logs[0][: 4 * rounds] if name[1] == 0] == [(name, 0) for name in "abcd"]


def test_results_and_counts_come_back(lane):
    log, told = [], []
    jobs = submit(lane, "abc", 2, log, told=told)
    assert finished(jobs) == [None] * 3 and [job.result for job in jobs] == ["a", "b", "c"]
    assert sorted(told) == [("a", None), ("b", None), ("c", None)]
    totals = lane.transport.ledger.totals()
    assert totals["messages"] == totals["bytes_sent"] == 6


def test_at_most_so_many_jobs_are_under_way(lane):
    log = []
    assert finished(submit(lane, "abcdef", 3, log)) == [None] * 6
    under_way, most = set(), 0
    for what, (name, number) in log:
        if what == "start":
            under_way.add(name)
        elif number == 2:
            under_way.discard(name)
        most = max(most, len(under_way))
    assert most == DEPTH


def test_nothing_of_a_step_is_left_when_the_next_begins(lane):
    log = []
    for _ in range(3):
        assert finished(submit(lane, "ab", 2, log)) == [None] * 2
        assert len(log) == 8 and {name for what, name in log if what == "wait"} == {name for what, name in log}
        log.clear()


def test_who_would_only_wait_holds_the_conversation_where_the_thread_has_nothing_to_do(lane):
    threads, log = [], []

    def noting(name, scratch):
        threads.append((name, threading.current_thread() is threading.main_thread()))
        return asking(name, 2, log, {}, scratch)

    alone = lane.submit(partial(noting, "a"), last=True, done=lambda error: None, here=True)
    assert alone.ended and alone.result == "a" and threads == [("a", True)]
    assert finished([lane.submit(partial(noting, "b"), last=True, done=lambda error: None)]) == [None]
    assert threads[-1] == ("b", False)  # who goes on meanwhile


def test_who_would_only_wait_does_so_behind_what_was_queued_before(lane):
    log, go_on = [], threading.Event()

    def slow(scratch):
        go_on.wait(60)
        return asking("a", 1, log, {}, scratch)

    before = lane.submit(slow, last=False, done=lambda error: None)
    threading.Timer(0.05, go_on.set).start()
    job = lane.submit(partial(asking, "b", 1, log, {}), last=True, done=lambda error: None, here=True)
    assert finished([before, job]) == [None, None]
    assert [name for what, (name, _) in log if what == "start"] == ["a", "b"]


def test_the_order_is_the_same_on_either_thread(lane):
    """With older buckets still under way, which whoever has the next slot takes on."""
    logs = []
    for here in (False, True):
        log = []
        jobs = [lane.submit(partial(asking, name, 2, log, {}), last=False, done=lambda error: None) for name in "ab"]
        while here and lane._inbox._before:  # until the thread has had its slots
            time.sleep(0.001)
        jobs.append(lane.submit(partial(asking, "c", 2, log, {}), last=True, done=lambda error: None, here=here))
        assert finished(jobs) == [None] * 3
        logs.append(log)
    assert logs[0] == logs[1]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_an_interrupt_or_exit_while_holding_a_conversation_is_the_callers(kind):
    lane = Threaded(Transport(), "test-lane")

    def interrupted(scratch):
        raise kind
        yield

    with pytest.raises(kind):
        lane.submit(interrupted, last=True, done=lambda error: None, here=True)
    lane.close()
    assert "test-lane" not in [thread.name for thread in threading.enumerate()]


def test_closing_in_the_middle_of_a_conversation_held_here_does_not_wait_for_itself():
    """As a signal's handler does."""
    lane, log = Threaded(Transport(), "test-lane"), []

    def closing(scratch):
        lane.close()
        return asking("a", 1, log, {}, scratch)

    job = lane.submit(closing, last=True, done=lambda error: None, here=True)
    assert job.ended and job.result == "a"
    lane.close()
    assert "test-lane" not in [thread.name for thread in threading.enumerate()]


@pytest.mark.parametrize("when", ["start", "wait"])
def test_after_a_failure_every_job_fails_with_the_first_error(lane, when):
    """The workers' orders may differ from then on, so nothing more is started."""
    log, told = [], []
    errors = finished(submit(lane, "abc", 2, log, {("b", 1): when}, told))
    assert errors[1] is not None and "('b', 1)" in str(errors[1])
    assert {str(error) for error in errors if error} == {str(errors[1])} and len(told) == 3
    before = len(log)
    later = finished(submit(lane, "de", 1, log))
    assert [str(error) for error in later] == [str(errors[1])] * 2 and len(log) == before


def test_a_conversation_that_raises_is_a_failure(lane):
    def broken(scratch):
        raise ValueError("no such level")
        yield

    job = lane.submit(broken, last=True, done=lambda error: None)
    assert "no such level" in str(finished([job])[0])


def test_closing_ends_what_is_under_way_and_refuses_what_comes():
    lane, log = Threaded(Transport(), "test-lane"), []
    job = lane.submit(partial(asking, "a", 1, log, {}), last=False, done=lambda error: None)  # its step never ends
    lane.close()
    lane.close()
    assert job.wait(60) and "closed in the middle of a step" in str(job.error)
    assert "closed" in str(finished(submit(lane, "bc", 1, log))[0])
    assert "test-lane" not in [thread.name for thread in threading.enumerate()]


def test_both_rounds_of_a_bucket_are_in_flight_beside_another_buckets(lane):
    log = []

    def rounds_of(name, scratch):
        scheme, bucket = PowerSGD(), Bucket.of(torch.randn(64, 64), name)
        memory = Memory()
        memory.add(name, scheme.init(name, torch.zeros(64, 64), 0))
        conversation, number = scheme.converse(replace(bucket, scratch=scratch), memory, 4), 0
        request = next(conversation)
        while True:
            yield [Logged((name, number), log)]
            number += 1
            try:
                request = conversation.send(request.tensor)
            except StopIteration as stop:
                return stop.value

    names = "abcd"
    jobs = [lane.submit(partial(rounds_of, name), last=name == "d", done=lambda error: None) for name in names]
    assert finished(jobs) == [None] * 4
    rounds = [(name, number) for name in names for number in (0, 1)]
    spans = {name: (log.index(("start", name)), log.index(("wait", name))) for name in rounds}
    for (bucket, number), (start, wait) in spans.items():
        beside = [
            other for (other, _), (begun, ended) in spans.items() if other != bucket and begun < wait and start < ended
        ]
        # The last bucket's second round has nobody left to hide behind.
        assert beside or (bucket, number) == ("d", 1)


def test_closing_from_another_thread_leaves_no_job_that_never_ends():
    for _ in range(200):
        lane, jobs = Threaded(Transport(), "test-lane"), []
        closing = threading.Thread(target=lane.close)
        for number in range(20):
            jobs.append(lane.submit(partial(asking, number, 1, [], {}), last=number % 4 == 3, done=lambda error: None))
            if number == 10:
                closing.start()
        closing.join(60)
        assert all(job.wait(60) for job in jobs)


def test_a_lane_that_nobody_holds_ends_its_thread():
    lane = Threaded(Transport(), "test-dropped-lane")
    assert finished(submit(lane, "ab", 2, [])) == [None, None]
    thread = lane._thread
    del lane
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


class Buffer:
    """Stands for memory of DDP's that a conversation works on."""


def _waiting(buffer, go_on, scratch):
    go_on.wait(60)
    return torch.zeros(1)
    yield  # a conversation that asks for nothing


def test_an_idle_lane_holds_no_buffer(lane):
    """DDP makes its buckets anew after the first step: were the old ones held, there would be two of each."""
    buffer, go_on = Buffer(), threading.Event()
    alive = weakref.ref(buffer)
    job = lane.submit(partial(_waiting, buffer, go_on), last=True, done=lambda error: None)
    assert not job.wait(0.01) and not job.ended
    go_on.set()
    assert job.wait(60) and job.ended and job.error is None
    del buffer, job
    deadline = time.monotonic() + 60
    while alive() is not None and time.monotonic() < deadline:
        time.sleep(0.001)
    assert alive() is None
