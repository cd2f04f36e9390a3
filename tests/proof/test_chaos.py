"""A little of `make chaos`, and that what it promises to see, it sees."""

import os
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from proof import chaos
from proof.chaos import End, judge
from proof.leftovers import nothing_stays

SEED, NUMBERS = 0, (0, 4, 5, 8, 10, 17)


def test_survivors_go_on_or_say_what_happened_and_nothing_stays():
    outcomes, left = chaos.run_all(SEED, NUMBERS)
    assert len({outcome.case.setting.door for outcome in outcomes}) == 4, "every door"
    assert len({outcome.case.how for outcome in outcomes}) > 1, "not only killed"
    told = [f"{chaos.describe(outcome.case)}: {outcome.failures}" for outcome in outcomes if outcome.failures]
    assert not told and not left
    went_on = [all(end.how == "goes on" for end in outcome.others) for outcome in outcomes]
    assert True in went_on and False in went_on


@pytest.mark.full
def test_more_of_it():
    outcomes, left = chaos.run_all(1, range(100))
    assert not [outcome for outcome in outcomes if outcome.failures] and not left


GOES_ON, STOPS = chaos.case(SEED, 0), chaos.case(SEED, 4)  # a worker of a server is killed
ERROR = "RuntimeError: the gradients of step 21 could not be exchanged: worker 2 is lost, and the job stops"


def ends_of(case, end):
    """The victim's own, and one for all others."""
    killed = End("killed by SIGKILL", 0.1)
    return {rank: killed if rank == case.victim else end for rank in range(case.ranks)}


def test_what_is_promised_is_no_failure():
    assert GOES_ON.setting.on_failure == "continue" and STOPS.setting.on_failure == "stop"
    assert judge(GOES_ON, ends_of(GOES_ON, End("goes on", 1.0, weights=b"a")), 25) == []
    assert judge(STOPS, ends_of(STOPS, End("error", 1.0, ERROR)), 25) == []


@pytest.mark.parametrize(
    ("case", "end", "failure"),
    [
        (GOES_ON, End("error", 1.0, ERROR), "error, allowed: goes on"),
        (STOPS, End("goes on", 1.0), "goes on, allowed: error"),
        (STOPS, End("hangs", 1.0), "hangs, allowed: error"),
        (STOPS, End("killed by SIGABRT", 1.0), "killed by SIGABRT, allowed: error"),
        (STOPS, End("error", 30.0, ERROR), "took 30.0 s to end, and has 25"),
        (STOPS, End("error", 1.0, "IndexError: list index out of range"), "does not say what happened"),
        (STOPS, End("error", 1.0, "RuntimeError: Connection closed by peer"), "does not say what happened"),
        (STOPS, End("error", 1.0, ERROR, threads=["thinwire-lane-1"]), "has threads left: thinwire-lane-1"),
    ],
)
def test_what_is_not_is_one(case, end, failure):
    found = judge(case, ends_of(case, end), 25)
    assert len(found) >= case.ranks - 1 and all(failure in each for each in found[: case.ranks - 1])


def test_those_who_went_on_must_have_equal_weights():
    ends = ends_of(GOES_ON, End("goes on", 1.0, weights=b"a"))
    other = next(rank for rank in ends if rank != GOES_ON.victim)
    ends[other] = replace(ends[other], weights=b"b")
    assert judge(GOES_ON, ends, 25) == ["those who went on have different weights"]


def test_what_stays_behind_is_found():
    """A file, a child, and a process that its parent left."""
    found, child = [], None
    leave = "import subprocess as s; print(s.Popen(['sleep', '60'], stdout=s.DEVNULL, stderr=s.DEVNULL).pid)"
    with nothing_stays(found):
        (Path(tempfile.gettempdir()) / "forgotten").write_text("")
        child = subprocess.Popen(["sleep", "60"])
        orphan = int(subprocess.run([sys.executable, "-c", leave], capture_output=True, text=True, check=True).stdout)
    for pid in (child.pid, orphan):
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    child.returncode = -9
    assert len(found) == 3 and "forgotten" in found[0]
    assert all(any(f"a process: {pid} (sleep)" in each for each in found) for pid in (child.pid, orphan))


def test_a_case_follows_from_seed_and_number():
    assert chaos.case(1, 2) == chaos.case(1, 2) != chaos.case(2, 2)
    cases = [chaos.case(5, number) for number in range(300)]
    assert {case.how for case in cases} == set(chaos.WORDS)
    assert {chaos.SETUP, chaos.CLOSING} < {case.moment for case in cases}
    assert any(case.serves for case in cases)
